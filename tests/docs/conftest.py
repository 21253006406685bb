from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.agent import Agent, short_folder
from support.documents import machine_of


@pytest.fixture
def agent(request: pytest.FixtureRequest) -> Iterator[Agent]:
    """The agent that a document speaks to: that of the demo, or one with the GPUs that the page names."""
    callspec = getattr(request.node, "callspec", None)
    page = None if callspec is None else callspec.params.get("page")
    with short_folder() as folder, Agent(folder, machine_of(page)) as running:
        yield running


@pytest.fixture
def person(agent: Agent) -> dict[str, str]:
    """The environment of somebody at a terminal who has the agent's programs on the PATH."""
    programs = Path(sys.executable).parent
    return agent.person({"PATH": f"{programs}{os.pathsep}{os.environ['PATH']}", "COLUMNS": "80", "USER": "alice"})

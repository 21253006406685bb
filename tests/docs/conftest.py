from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.agent import Agent, short_folder


@pytest.fixture
def agent() -> Iterator[Agent]:
    """The agent that the documents speak to: that of the demo."""
    with short_folder() as folder, Agent(folder, "a100-40gb:1,h100-80gb:2") as running:
        yield running


@pytest.fixture
def person(agent: Agent) -> dict[str, str]:
    """The environment of somebody at a terminal who has the agent's programs on the PATH."""
    programs = Path(sys.executable).parent
    return agent.person({"PATH": f"{programs}{os.pathsep}{os.environ['PATH']}", "COLUMNS": "80", "USER": "alice"})

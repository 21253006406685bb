from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from support.agent import Agent, short_folder


@pytest.fixture
def folder() -> Iterator[Path]:
    with short_folder() as path:
        yield path


@pytest.fixture
def agent(folder: Path) -> Iterator[Agent]:
    """An agent of this test's own: one A100-40GB (GPU 0) and one H100-80GB (GPU 1)."""
    with Agent(folder) as running:
        yield running

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from support.agent import short_folder
from support.chromium import PACKAGE, Browser, binary


@pytest.fixture
def folder() -> Iterator[Path]:
    with short_folder() as path:
        yield path


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """One browser for all tests; each page has storage of its own."""
    if binary() is None:
        pytest.skip(f"there is no {PACKAGE} on this machine: hack/browser.sh installs it")
    running = Browser(tmp_path_factory.mktemp("chromium"))
    yield running
    running.close()

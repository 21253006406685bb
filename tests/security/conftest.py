from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from support.agent import short_folder


@pytest.fixture
def folder() -> Iterator[Path]:
    with short_folder() as path:
        yield path

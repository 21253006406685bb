from __future__ import annotations

from pathlib import Path

import pytest

from support.wheel import build, install


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="session")
def programs(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the programs of an environment that has the wheel and not the checkout."""
    return install(wheel, tmp_path_factory.mktemp("installed"))

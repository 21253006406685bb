from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def nothing_is_set(clean_environment: None) -> None:
    """Every test here reads settings."""

from __future__ import annotations

import os

import pytest


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of the machine that the tests run on reaches the settings."""
    for variable in os.environ:
        if variable.startswith("MIG_AGENT_") or variable == "CUDA_VISIBLE_DEVICES":
            monkeypatch.delenv(variable)

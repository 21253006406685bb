from __future__ import annotations

import os

import pytest


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """No lease, and no torchrun."""
    for name in os.environ:
        if name.startswith("MIG_AGENT_") or name in {"RANK", "WORLD_SIZE", "MASTER_ADDR", "CUDA_VISIBLE_DEVICES"}:
            monkeypatch.delenv(name)

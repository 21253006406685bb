"""Background tasks: those that must not end begin anew after what nobody expected."""

from __future__ import annotations

import asyncio

import pytest

from mig_agent.engine import tasks
from mig_agent.engine.tasks import Tasks


async def test_a_loop_that_fails_is_restarted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks, "AGAIN_SECONDS", 0.0)
    begun = 0

    async def loop() -> None:
        nonlocal begun
        begun += 1
        if begun < 3:
            raise OSError("no space left")

    await Tasks().keep("loop", loop)
    assert begun == 3


async def test_it_ends_when_it_is_cancelled() -> None:
    task = Tasks().keep("loop", asyncio.Event().wait)  # type: ignore[arg-type]  # what it waits for is of no matter
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task

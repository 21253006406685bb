"""Tasks on the event loop: long ones are created, named and guarded here, and long computations take turns."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import structlog

AGAIN_SECONDS = 5.0
"""Until a loop that failed begins anew."""

_Answer = TypeVar("_Answer")

_LOG = structlog.get_logger("mig_agent.engine")


class Tasks:
    """Keeps tasks alive as long as they run, and tells of those that fail."""

    def __init__(self) -> None:
        self._running: set[asyncio.Task[Any]] = set()

    def spawn(self, name: str, coroutine: Coroutine[object, object, _Answer]) -> asyncio.Task[_Answer]:
        """Runs it in the background. It ought to deal with its own errors; others are logged."""
        task = asyncio.get_running_loop().create_task(coroutine, name=name)
        self._running.add(task)
        task.add_done_callback(self._ended)
        return task

    def keep(self, name: str, loop: Callable[[], Coroutine[object, object, None]]) -> asyncio.Task[None]:
        """The same for a loop that must not end: what it did not expect is logged, and it begins anew."""

        async def again_and_again() -> None:
            while True:
                try:
                    return await loop()
                except Exception:  # noqa: BLE001 -- whatever it was, what the loop looks after goes on
                    _LOG.exception("a background task begins anew", task=name)
                    await asyncio.sleep(AGAIN_SECONDS)

        return self.spawn(name, again_and_again())

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._running.discard(task)
        if not task.cancelled() and task.exception() is not None:
            _LOG.error("a background task failed", task=task.get_name(), exc_info=task.exception())

    async def end(self, seconds: float) -> None:
        """Gives what runs so long to come to its end, then cancels it."""
        if self._running:
            await asyncio.wait(tuple(self._running), timeout=seconds)
        left = tuple(self._running)
        for task in left:
            task.cancel()
        if left:
            await asyncio.wait(left, timeout=1.0)


_ROUNDS = 8
"""Of the event loop, between two turns: a call that has come in gets through to its answer in about so many."""


class Fairness:
    """One turn at a time, first come first served. Belongs to the event loop."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()

    async def mine(self) -> None:
        """Returns when it is the caller's turn, which lasts until its next await."""
        async with self._lock:
            for _ in range(_ROUNDS):
                await asyncio.sleep(0)

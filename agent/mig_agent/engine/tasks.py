"""Tasks on the event loop: background tasks are started and supervised here, and long computations take turns."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import structlog

AGAIN_SECONDS = 5.0
"""The pause before a loop that failed is restarted, in seconds."""

_Answer = TypeVar("_Answer")

_LOG = structlog.get_logger("mig_agent.engine")


async def restarting(name: str, loop: Callable[[], Coroutine[object, object, None]]) -> None:
    """Run a loop that must not end: after an error, which is logged, it is restarted."""
    while True:
        try:
            return await loop()
        except Exception:  # noqa: BLE001 -- whatever it was, the loop's work goes on
            _LOG.exception("a background task begins anew", task=name)
            await asyncio.sleep(AGAIN_SECONDS)


class Tasks:
    """Supervises background tasks: holds a reference to each while it runs, and logs its failure."""

    def __init__(self) -> None:
        self._running: set[asyncio.Task[Any]] = set()

    def spawn(self, name: str, coroutine: Coroutine[object, object, _Answer]) -> asyncio.Task[_Answer]:
        """Run a coroutine in the background. An error that it does not handle is logged."""
        task = asyncio.get_running_loop().create_task(coroutine, name=name)
        self._running.add(task)
        task.add_done_callback(self._ended)
        return task

    def keep(self, name: str, loop: Callable[[], Coroutine[object, object, None]]) -> asyncio.Task[None]:
        """Run a loop in the background that must not end, as `restarting` does."""
        return self.spawn(name, restarting(name, loop))

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._running.discard(task)
        if not task.cancelled() and task.exception() is not None:
            _LOG.error("a background task failed", task=task.get_name(), exc_info=task.exception())

    async def end(self, seconds: float) -> None:
        """Wait for the running tasks, then cancel those that have not ended after some seconds."""
        if self._running:
            await asyncio.wait(tuple(self._running), timeout=seconds)
        unfinished = tuple(self._running)
        for task in unfinished:
            task.cancel()
        if unfinished:
            await asyncio.wait(unfinished, timeout=1.0)


_ROUNDS = 8
"""Iterations of the event loop between two turns: about as many as a call takes from its arrival to its answer."""


class Fairness:
    """Lets long computations take turns, first come first served, so that calls are answered in between.

    Not thread-safe; use from the event loop.
    """

    def __init__(self) -> None:
        self._lock = asyncio.Lock()

    async def yield_turn(self) -> None:
        """Wait until it is the caller's turn, which lasts until its next await."""
        async with self._lock:
            for _ in range(_ROUNDS):
                await asyncio.sleep(0)

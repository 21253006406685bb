"""The clock of the agent: wall time for records, timers on the event loop. Tests replace it with one they advance."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import time
from collections.abc import Callable
from typing import Protocol


class Timer(Protocol):
    """A pending callback."""

    def cancel(self) -> None:
        """Cancel the callback; harmless if it was called."""


class Clock(Protocol):
    """Clock of one event loop. Times are seconds since the epoch."""

    def now(self) -> float:
        """Return the wall-clock time."""

    def call_later(self, seconds: float, callback: Callable[[], None]) -> Timer:
        """Call back on the event loop after `seconds`."""

    async def sleep(self, seconds: float) -> None:
        """Return after `seconds`."""


class SystemClock:
    """The machine's own clock."""

    def now(self) -> float:
        """Return the wall-clock time."""
        return time.time()

    def call_later(self, seconds: float, callback: Callable[[], None]) -> Timer:
        """Call back on the running event loop after `seconds` of monotonic time."""
        return asyncio.get_running_loop().call_later(seconds, callback)

    async def sleep(self, seconds: float) -> None:
        """Return after `seconds`."""
        await asyncio.sleep(seconds)


class _VirtualTimer:
    def __init__(self, callback: Callable[[], None]) -> None:
        self.callback: Callable[[], None] | None = callback

    def cancel(self) -> None:
        self.callback = None


class VirtualClock:
    """Stands still until it is advanced. Not thread-safe: to be used on one event loop.

    Sleeps up to `patience` seconds pass at once and take the clock with them, so that short pauses between retries need
    no hand.
    """

    def __init__(self, now: float = 1_800_000_000.0, *, patience: float = 2.0) -> None:
        self._now = now
        self._patience = patience
        self._order = itertools.count()
        self._timers: list[tuple[float, int, _VirtualTimer]] = []

    def now(self) -> float:
        """The moment that the clock shows."""
        return self._now

    def call_later(self, seconds: float, callback: Callable[[], None]) -> Timer:
        """Calls back while the clock is advanced past the moment."""
        timer = _VirtualTimer(callback)
        heapq.heappush(self._timers, (self._now + max(seconds, 0.0), next(self._order), timer))
        return timer

    async def sleep(self, seconds: float) -> None:
        """Returns when the clock has been advanced that far; at once for a short time."""
        if seconds <= self._patience:
            self._now += max(seconds, 0.0)
            await asyncio.sleep(0)
            return
        over = asyncio.get_running_loop().create_future()
        self.call_later(seconds, lambda: None if over.done() else over.set_result(None))
        await over

    def advance(self, seconds: float) -> None:
        """Moves the clock and calls what falls due, in order; on the event loop's own thread."""
        until = self._now + seconds
        while self._timers and self._timers[0][0] <= until:
            due, _, timer = heapq.heappop(self._timers)
            self._now = max(self._now, due)
            if timer.callback is not None:
                timer.callback()
        self._now = max(self._now, until)

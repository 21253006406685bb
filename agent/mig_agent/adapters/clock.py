"""The clock of the agent: wall time for records, timers on the event loop. Tests replace it with one they advance."""

from __future__ import annotations

import asyncio
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

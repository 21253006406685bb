"""The one clock: wall time for what is recorded, timers on the event loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Protocol


class Timer(Protocol):
    """Something that will happen."""

    def cancel(self) -> None:
        """It will not; harmless when it has."""


class Clock(Protocol):
    """Belongs to one event loop. Moments are seconds since the epoch."""

    def now(self) -> float:
        """The moment on the wall clock."""

    def call_later(self, seconds: float, callback: Callable[[], None]) -> Timer:
        """Calls back on the event loop."""

    async def sleep(self, seconds: float) -> None:
        """Returns when the time is over."""


class SystemClock:
    """The machine's own clock."""

    def now(self) -> float:
        """The moment on the wall clock."""
        return time.time()

    def call_later(self, seconds: float, callback: Callable[[], None]) -> Timer:
        """Calls back on the running event loop, by monotonic time."""
        return asyncio.get_running_loop().call_later(seconds, callback)

    async def sleep(self, seconds: float) -> None:
        """Returns when the time is over."""
        await asyncio.sleep(seconds)

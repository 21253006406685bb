"""The way to one GPU's driver calls from the event loop: a worker for what changes it, a reader beside it, deadlines.

A call that does not come back in time fails for whoever waits, and its GPU is hung: further calls fail at once, and
when the driver answers after all, that is told. Other GPUs have lanes of their own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from mig_agent.adapters.clock import Clock, Timer
from mig_agent.adapters.threads import Call, CallThread
from mig_agent.core.errors import DriverError, DriverErrorKind
from mig_agent.core.model import GpuUuid

_Answer = TypeVar("_Answer")


class Track:
    """One thread's calls, with a watch over them."""

    def __init__(
        self,
        name: str,
        clock: Clock,
        deadline: float,
        on_overdue: Callable[[str], None],
        on_answered: Callable[[], None],
    ) -> None:
        self._thread = CallThread(name)
        self._clock = clock
        self._deadline = deadline
        self._on_overdue = on_overdue
        self._on_answered = on_answered
        self._waiting: dict[Call[object], str] = {}
        self._out = 0
        """Calls that have not come back, those that nobody waits for included."""
        self._last_progress = 0.0
        self._watch: Timer | None = None
        self.hung = ""
        """The call that has not come back, in words; empty when all is well."""

    def call(self, what: str, function: Callable[[], _Answer], gpu_index: int) -> asyncio.Future[_Answer]:
        """Has a call made; the future fails with DriverError TIMEOUT when it does not come back."""
        loop = asyncio.get_running_loop()
        call = Call(function, loop, self._returned)
        if self.hung:
            call.answer.set_exception(
                DriverError(
                    DriverErrorKind.TIMEOUT, what, detail=f"still waiting for: {self.hung}", gpu_index=gpu_index
                )
            )
            return call.answer
        self._waiting[call] = what  # type: ignore[index] # what a call answers concerns only who awaits it
        if not self._out:
            self._last_progress = self._clock.now()
        self._out += 1
        if self._watch is None:
            self._watch = self._clock.call_later(self._deadline, self._look)
        self._thread.submit(call)
        return call.answer

    def close(self) -> None:
        """Lets the thread end when its calls have come back; does not wait."""
        if self._watch is not None:
            self._watch.cancel()
        self._thread.close()

    def _returned(self, call: Call[object]) -> None:
        self._waiting.pop(call, None)
        self._out -= 1
        self._last_progress = self._clock.now()
        if self.hung and not self._out:
            self.hung = ""
            self._on_answered()

    def _look(self) -> None:
        self._watch = None
        if not self._out or self.hung:
            return
        left = self._last_progress + self._deadline - self._clock.now()
        if left > 0:
            self._watch = self._clock.call_later(left, self._look)
            return
        self.hung = next(iter(self._waiting.values()))
        overdue, self._waiting = self._waiting, {}
        for call, what in overdue.items():
            if not call.answer.done():
                call.answer.set_exception(
                    DriverError(DriverErrorKind.TIMEOUT, what, detail=f"no answer in {self._deadline:g} s")
                )
        self._on_overdue(self.hung)


class Lane:
    """One GPU's threads."""

    def __init__(
        self,
        gpu: GpuUuid,
        index: int,
        *,
        clock: Clock,
        deadline: float,
        on_hung: Callable[[GpuUuid, str], None],
        on_answered: Callable[[GpuUuid], None],
    ) -> None:
        self.gpu = gpu
        self.index = index
        self.lock = asyncio.Lock()
        """Held over everything that changes which instances are on the GPU, and over its comparison with the ledger."""

        def answered() -> None:
            if not self.hung:
                on_answered(gpu)

        def overdue(what: str) -> None:
            on_hung(gpu, what)

        self._worker = Track(f"gpu-{index}-worker", clock, deadline, overdue, answered)
        self._reader = Track(f"gpu-{index}-reader", clock, deadline, overdue, answered)

    @property
    def hung(self) -> str:
        """The call that has not come back, in words; empty when all is well."""
        return self._worker.hung or self._reader.hung

    def change(self, what: str, function: Callable[[], _Answer]) -> asyncio.Future[_Answer]:
        """A call that changes something; under the lock. `what` names it in messages: `create 1g.10gb on slice 0`."""
        return self._worker.call(what, function, self.index)

    def read(self, what: str, function: Callable[[], _Answer]) -> asyncio.Future[_Answer]:
        """A call that changes nothing."""
        return self._reader.call(what, function, self.index)

    def close(self) -> None:
        """Lets the threads end when their calls have come back; does not wait."""
        self._worker.close()
        self._reader.close()

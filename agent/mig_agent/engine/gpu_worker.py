"""GPU workers: the threads that make one GPU's driver calls, with deadlines, and how long its calls take.

A worker thread makes the calls that change the GPU, in order, and a reader thread beside it looks.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import TypeVar

from mig_agent.adapters.clock import Clock, Timer
from mig_agent.adapters.threads import Call, CallThread
from mig_agent.core.errors import DriverError, DriverErrorKind
from mig_agent.core.model import GpuUuid
from mig_agent.core.planning.plan import StepTimes

FIRST_GUESS = StepTimes(create=0.16, destroy=0.10)
"""Until something was measured; what simulated GPUs take unless they are told otherwise."""
MEASURED = 32
"""The mean is of so many, the latest."""

_Answer = TypeVar("_Answer")


class StepTimer:
    """Measures how long the steps of a plan take. Not thread-safe; use from the event loop."""

    def __init__(self) -> None:
        self._created: deque[float] = deque(maxlen=MEASURED)
        self._destroyed: deque[float] = deque(maxlen=MEASURED)

    def created(self, seconds: float) -> None:
        """The driver made an instance, in so much time."""
        self._created.append(seconds)

    def destroyed(self, seconds: float) -> None:
        """The driver destroyed one."""
        self._destroyed.append(seconds)

    @property
    def pace(self) -> StepTimes:
        """As things are now."""
        return StepTimes(
            create=_mean(self._created, FIRST_GUESS.create), destroy=_mean(self._destroyed, FIRST_GUESS.destroy)
        )


def timed(function: Callable[[], _Answer]) -> tuple[_Answer, float]:
    """What a function answers, and how many seconds it took; on the thread that makes the call."""
    began = time.perf_counter()
    answer = function()
    return answer, time.perf_counter() - began


def _mean(measured: deque[float], guess: float) -> float:
    return sum(measured) / len(measured) if measured else guess


class WatchedThread:
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


class GpuWorker:
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

        self._worker = WatchedThread(f"gpu-{index}-worker", clock, deadline, overdue, answered)
        self._reader = WatchedThread(f"gpu-{index}-reader", clock, deadline, overdue, answered)

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

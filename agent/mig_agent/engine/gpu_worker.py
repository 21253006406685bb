"""GPU workers: the threads that make one GPU's driver calls, with deadlines, and how long its calls take.

A worker thread makes the calls that change the GPU, in order; a reader thread beside it makes those that only read.
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
"""The step times until the first measurement, in seconds: those of a simulated GPU with its default latencies."""
MEASURED = 32
"""How many of the latest measurements the mean is of."""

_Answer = TypeVar("_Answer")


class StepTimer:
    """Averages how long the steps of plans take on this node. Not thread-safe; use from the event loop."""

    def __init__(self) -> None:
        self._created: deque[float] = deque(maxlen=MEASURED)
        self._destroyed: deque[float] = deque(maxlen=MEASURED)

    def created(self, seconds: float) -> None:
        """Count one creation of an instance, which took the driver this long."""
        self._created.append(seconds)

    def destroyed(self, seconds: float) -> None:
        """Count one destruction of an instance, which took the driver this long."""
        self._destroyed.append(seconds)

    @property
    def step_times(self) -> StepTimes:
        """The mean step times of the latest measurements, in seconds."""
        return StepTimes(
            create=_mean(self._created, FIRST_GUESS.create), destroy=_mean(self._destroyed, FIRST_GUESS.destroy)
        )


def timed(function: Callable[[], _Answer]) -> tuple[_Answer, float]:
    """Call a function; return its result and how many seconds it took."""
    began = time.perf_counter()
    answer = function()
    return answer, time.perf_counter() - began


def _mean(measured: deque[float], guess: float) -> float:
    return sum(measured) / len(measured) if measured else guess


class WatchedThread:
    """Makes calls on a thread of its own, one after the other, and reports when one does not return in time."""

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
        self._awaited: dict[Call[object], str] = {}
        self._in_flight = 0
        """How many calls have not returned, those that have timed out included."""
        self._last_progress = 0.0
        self._watchdog: Timer | None = None
        self.hung = ""
        """The call that has not returned in time, as a phrase; empty when there is none."""

    def call(self, what: str, function: Callable[[], _Answer], gpu_index: int) -> asyncio.Future[_Answer]:
        """Submit a call. The future fails with DriverError (TIMEOUT) when no call has returned within the deadline."""
        loop = asyncio.get_running_loop()
        call = Call(function, loop, self._returned)
        if self.hung:
            call.answer.set_exception(
                DriverError(
                    DriverErrorKind.TIMEOUT, what, detail=f"still waiting for: {self.hung}", gpu_index=gpu_index
                )
            )
            return call.answer
        self._awaited[call] = what  # type: ignore[index] # the type of a call's result concerns only its awaiter
        if not self._in_flight:
            self._last_progress = self._clock.now()
        self._in_flight += 1
        if self._watchdog is None:
            self._watchdog = self._clock.call_later(self._deadline, self._check_progress)
        self._thread.submit(call)
        return call.answer

    def close(self) -> None:
        """Let the thread end when its calls have returned; does not wait."""
        if self._watchdog is not None:
            self._watchdog.cancel()
        self._thread.close()

    def _returned(self, call: Call[object]) -> None:
        self._awaited.pop(call, None)
        self._in_flight -= 1
        self._last_progress = self._clock.now()
        if self.hung and not self._in_flight:
            self.hung = ""
            self._on_answered()

    def _check_progress(self) -> None:
        self._watchdog = None
        if not self._in_flight or self.hung:
            return
        left = self._last_progress + self._deadline - self._clock.now()
        if left > 0:
            self._watchdog = self._clock.call_later(left, self._check_progress)
            return
        self.hung = next(iter(self._awaited.values()))
        overdue, self._awaited = self._awaited, {}
        for call, what in overdue.items():
            if not call.answer.done():
                call.answer.set_exception(
                    DriverError(DriverErrorKind.TIMEOUT, what, detail=f"no answer in {self._deadline:g} s")
                )
        self._on_overdue(self.hung)


class GpuWorker:
    """Makes one GPU's driver calls, on one thread for changes and one for reading.

    Not thread-safe; use from the event loop.
    """

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
        """Held while anything changes which instances are on the GPU, and while it is compared with the ledger."""

        def answered() -> None:
            if not self.hung:
                on_answered(gpu)

        def overdue(what: str) -> None:
            on_hung(gpu, what)

        self._worker = WatchedThread(f"gpu-{index}-worker", clock, deadline, overdue, answered)
        self._reader = WatchedThread(f"gpu-{index}-reader", clock, deadline, overdue, answered)

    @property
    def hung(self) -> str:
        """The call that has not returned in time, as a phrase; empty when there is none."""
        return self._worker.hung or self._reader.hung

    def change(self, what: str, function: Callable[[], _Answer]) -> asyncio.Future[_Answer]:
        """Submit a call that changes something; the caller holds `lock`. Messages name it by `what`.

        `what` is a phrase such as `create 1g.10gb on slice 0`. The future fails with DriverError.
        """
        return self._worker.call(what, function, self.index)

    def read(self, what: str, function: Callable[[], _Answer]) -> asyncio.Future[_Answer]:
        """Submit a call that changes nothing, named as for `change`. The future fails with DriverError."""
        return self._reader.call(what, function, self.index)

    def close(self) -> None:
        """Let the threads end when their calls have returned; does not wait."""
        self._worker.close()
        self._reader.close()

"""How long creating and destroying takes on this node: a running mean of what was measured."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import TypeVar

from mig_agent.core.planning.plan import StepTimes

FIRST_GUESS = StepTimes(create=0.16, destroy=0.10)
"""Until something was measured; what simulated GPUs take unless they are told otherwise."""
MEASURED = 32
"""The mean is of so many, the latest."""

_Answer = TypeVar("_Answer")


class Timing:
    """Belongs to the event loop."""

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

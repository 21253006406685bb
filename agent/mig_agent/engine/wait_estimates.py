"""Keeps estimates of when waiting requests start: forecasts of the queue, in turns and within a share of the CPU."""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Callable, Mapping, Sequence

from mig_agent.core.backfill import WaitingRequest
from mig_agent.core.forecast import Forecast, Situation, StartEstimate
from mig_agent.core.model import NodeView
from mig_agent.engine.context import Context

FEWEST_RUNS = 9
"""With fewer runs there is no interval of 80 %."""
STALE_SECONDS = 10.0
"""After this time a forecast is repeated although neither the node nor the queue has changed."""
_LATE_SECONDS = 1.0
"""The delay past the estimated start after which another estimate is made."""
_TURN_SECONDS = 0.005
"""Longest time that a forecast may hold the event loop, in seconds."""
_MOST_SECONDS = 2.0
"""The processor time after which a forecast of the whole queue ends with the runs that it has made."""
_MOST_PLAN_SECONDS = 0.5
"""The same for the forecast of one request that does not wait."""
_CPU_SHARE = 0.05
"""The largest share of a core that forecasts of the queue take."""

_NOTHING: Mapping[int, StartEstimate] = {}


class WaitEstimates:
    """Keeps the last forecast of the queue. Not thread-safe; use from the event loop."""

    def __init__(
        self,
        context: Context,
        waiting: Callable[[], Sequence[WaitingRequest]],
        used: Callable[[], Mapping[str, float] | None],
    ) -> None:
        """Forecast the requests that `waiting` returns, in queue order; the others in the queue get no estimate.

        `used` returns what each tenant used (`Situation.used`).
        """
        self._context = context
        self._waiting = waiting
        self._used = used
        self._known = _NOTHING
        self._made_for: tuple[NodeView, tuple[int, ...]] | None = None
        """The view and the queue of the last forecast."""
        self._made_at = 0.0
        self._pause_from = self._pause_seconds = 0.0
        """The moment since which the CPU is left to others, and for how long."""
        self._running: asyncio.Task[None] | None = None

    def of(self, waiting: WaitingRequest) -> StartEstimate | None:
        """Return the last estimate for a waiting request; None if none is known, none yet, or it did not come true."""
        found = None if self._context.driver_use.paused else self._known.get(waiting.seq)
        return None if found is None or self._failed_at(found) <= self._context.clock.now() else found

    async def refresh(self) -> None:
        """Wait until the estimates are up to date; return at once while the share of the CPU is used up.

        Cancelling the call does not end the forecast.
        """
        if self._running is None or self._running.done():
            if not self._is_stale():
                return
            self._running = self._context.tasks.spawn("wait-estimates", self._forecast_queue())
        await asyncio.shield(self._running)

    @property
    def stale_in(self) -> float:
        """Return in how many seconds the forecast is to be made again; earlier where an estimate has not come true."""
        moments = (self._made_at + STALE_SECONDS, *map(self._failed_at, self._known.values()))
        return max(min(moments) - self._context.clock.now(), 0.0)

    async def of_request(self, seq: int, waiting: Sequence[WaitingRequest]) -> StartEstimate | None:
        """Return when the request with this arrival number would start if these waited."""
        found, _ = await self._run(self._situation(waiting), _MOST_PLAN_SECONDS)
        return found.get(seq)

    def _is_stale(self) -> bool:
        context = self._context
        if context.closing or context.driver_use.paused or self.pause_left:
            return False
        waiting = self._waiting()
        if not waiting:
            self._known, self._made_for = _NOTHING, None
            return False
        if self._made_for is None or not self.stale_in:
            return True
        view, queue = self._made_for
        return view is not context.state.working_view or queue != tuple(each.seq for each in waiting)

    async def _forecast_queue(self) -> None:
        waiting = self._waiting()
        situation = self._situation(waiting)
        self._known, seconds = await self._run(situation, _MOST_SECONDS)
        self._made_for, self._made_at = (situation.view, tuple(each.seq for each in waiting)), situation.now
        self._pause_from, self._pause_seconds = self._context.clock.now(), seconds / _CPU_SHARE

    @staticmethod
    def _failed_at(estimate: StartEstimate) -> float:
        """Return the moment at which an estimate is known to be wrong, as its request still waits then."""
        return math.inf if estimate.latest is None else estimate.latest + _LATE_SECONDS

    @property
    def pause_left(self) -> float:
        """Return for how many more seconds no forecast begins, since the share of the CPU is used up."""
        passed = self._context.clock.now() - self._pause_from
        return self._pause_seconds - passed if 0 <= passed < self._pause_seconds else 0.0

    def _situation(self, waiting: Sequence[WaitingRequest]) -> Situation:
        context, now = self._context, self._context.clock.now()
        return Situation(
            view=context.state.working_view,
            waiting=waiting,
            now=now,
            past=context.lease_times.past,
            reservation_delay=context.reservation_after_seconds,
            demand=context.recent_requests.demand(now),
            policy=context.policy,
            strict_fifo=context.settings.strict_fifo,
            used=self._used(),
        )

    async def _run(self, situation: Situation, most_seconds: float) -> tuple[Mapping[int, StartEstimate], float]:
        """Make a forecast in turns with other work; return it with the seconds that it took.

        After `most_seconds` it ends with the runs that were made.
        """
        # The same draws each time: an estimate changes because the node has, not by chance.
        forecast = Forecast(situation, random.Random(0).random)  # noqa: S311 -- no secret
        seconds, finished = 0.0, False
        while not finished and seconds < most_seconds and not self._context.closing:
            await self._context.fairness.yield_turn()
            began = time.perf_counter()
            finished = forecast.advance(_after(began + _TURN_SECONDS))
            seconds += time.perf_counter() - began
        known = finished or forecast.done >= FEWEST_RUNS
        return (forecast.estimates() if known else _NOTHING), seconds


def _after(moment: float) -> Callable[[], bool]:
    return lambda: time.perf_counter() > moment

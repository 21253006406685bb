"""The queue of waiting requests: that of `core.queue` with its timers, and reports of the place in it."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from mig_agent.adapters.clock import Timer
from mig_agent.core import backfill, queue
from mig_agent.core.errors import Reason, Refusal, RefusedError, refuse
from mig_agent.core.events import EventKind
from mig_agent.core.model import GpuUuid, Request, RequestKey, Slot
from mig_agent.core.planning.explain import explanation
from mig_agent.core.planning.plan import Outcome, Plan
from mig_agent.core.planning.planner import plan
from mig_agent.core.planning.search import NOTHING_RESERVED
from mig_agent.core.quantities import counted
from mig_agent.engine.context import Context
from mig_agent.engine.execution import Execution, Executor, LeaseRequest
from mig_agent.engine.results import QueueEntry

_PIECE_SECONDS = 0.02
"""Of looking through the queue, before others get their turn."""
_MOST_RESTARTS = 3
"""Of one look through the queue, for what was freed meanwhile."""
TELL_SECONDS = 1.0
"""Between two rounds of telling people their places."""
_MOST_TEXTS = 3
_EXPLAINED_LINES = 24
"""Of a refusal; it travels in a trailer, which has little room."""
_WORTH_WAITING = frozenset({Reason.NO_CAPACITY, Reason.GPU_UNAVAILABLE})


@dataclass(slots=True, eq=False)
class QueuedRequest:
    """One request in the queue."""

    order: LeaseRequest
    on_place: Callable[[int], None]
    started: asyncio.Future[Execution] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    deadline: Timer | None = None
    place: int = 0
    """As last told; 0 before."""


class RequestQueue:
    """Holds the requests that wait, and their timers. Not thread-safe; use from the event loop."""

    def __init__(self, context: Context, executor: Executor) -> None:
        self._context = context
        self._executor = executor
        self._queue = queue.Queue()
        self._stays: dict[RequestKey, QueuedRequest] = {}
        self._pump_is_due = False
        self._known = backfill.ReservationCache()
        self._seen: frozenset[int] = queue.NONE_SEEN
        """Those that the look through the queue, which goes on, has looked at."""
        self._restarts = 0
        """Of that look, since one has come to its end."""
        self._once_more = False
        """Whether something was freed that not all could be looked at for again."""
        self._telling: Timer | None = None
        context.state.capacity_freed.subscribe(self._look_again)

    def __len__(self) -> int:
        return len(self._queue)

    def position(self, request: RequestKey) -> int | None:
        """Return a request's place in the queue, 1 for the first; None when it does not wait."""
        return self._queue.position(request)

    @property
    def queued(self) -> tuple[QueueEntry, ...]:
        """Everybody who waits, the next first."""
        return tuple(
            QueueEntry(
                request=each.request.key,
                who=each.request.holder,
                priority=each.request.priority,
                position=place,
                since=each.since,
                wants=each.request.wants,
            )
            for place, each in enumerate(self._queue.waiting, 1)
        )

    async def next(
        self, order: LeaseRequest, on_place: Callable[[int], None], failed: Refusal | None, exclude: frozenset[Slot]
    ) -> Execution:
        """The request's turn, with what it needs taken for it; at once where it fits. Raises RefusedError.

        `failed` is why an earlier try came to nothing, and `exclude` are the slots that it failed on.
        """
        request = order.request
        gate = self._context.gate
        if gate.paused:
            if not request.wait_seconds:
                raise RefusedError(gate.refusal(f"serve {describe(request)}"))
            return await self._stay(order, on_place)
        outcome = self._plan(request, exclude=exclude)
        if isinstance(outcome, Plan) and (exclude or not len(self._queue)):
            return self._executor.begin(order, outcome)
        if isinstance(outcome, Refusal):
            if failed is not None and isinstance(self._plan(request), Plan):
                raise RefusedError(failed)  # only what has just failed would serve it
            if not len(self._queue) and not _waits(request, outcome):
                raise RefusedError(self._explained(request, outcome, exclude=exclude))
            if outcome.reason not in _WORTH_WAITING:
                raise RefusedError(outcome)
        return await self._stay(order, on_place)

    def _look_again(self) -> None:
        """Scan the queue, since something may fit now."""
        self._look_anew()
        self._go_on_looking()

    def _look_anew(self) -> None:
        """From the beginning, so that what there is goes to the first whom it serves."""
        if self._restarts < _MOST_RESTARTS:
            self._restarts += bool(self._seen)
            self._seen = queue.NONE_SEEN
        else:
            self._once_more = True  # after this look: those at the end of a long queue have their turn, too

    def _go_on_looking(self) -> None:
        if len(self._queue) and not self._pump_is_due:
            self._pump_is_due = True
            asyncio.get_running_loop().call_soon(self._pump)

    def leave(self, request: RequestKey, refusal: Refusal) -> None:
        """A request waits no more; harmless when it does not."""
        stay = self._stays.pop(request, None)
        if stay is None:
            return
        self._queue.remove(request)
        self._context.state.status_changed.emit()
        if stay.deadline is not None:
            stay.deadline.cancel()
        if not stay.started.done():
            stay.started.set_exception(RefusedError(refusal))
        if stay.place:
            self._mention(EventKind.REQUEST_DEQUEUED, stay.order.request, f"left the queue: {refusal.message}")
            # It may have been in somebody's way; one that only came to look was not.
            self._places_changed()
            self._context.state.capacity_freed.emit()

    def close(self) -> None:
        """Everybody who waits is told that the agent stops."""
        for request in tuple(self._stays):
            self.leave(
                request,
                Refusal(
                    reason=Reason.SHUTTING_DOWN,
                    message="cannot wait on: the agent is shutting down",
                    hint="ask again when it is back; leases stay",
                ),
            )
        if self._telling is not None:
            self._telling.cancel()

    @property
    def reserved(self) -> frozenset[GpuUuid]:
        """The GPUs that are kept from newcomers for the first that has waited past the limit."""
        context = self._context
        if not len(self._queue) or context.settings.strict_fifo:
            return NOTHING_RESERVED
        kept = backfill.reservation(
            context.state.working_view,
            self._queue.waiting,
            context.clock.now(),
            context.reservation_after_seconds,
            self._known,
        )
        return NOTHING_RESERVED if kept is None else kept.gpus

    # Inside

    def _plan(
        self,
        request: Request,
        *,
        exclude: frozenset[Slot] = frozenset(),
        reserved: frozenset[GpuUuid] = NOTHING_RESERVED,
    ) -> Outcome:
        context = self._context
        began = time.perf_counter()
        outcome = plan(
            context.state.working_view,
            request,
            context.policy,
            context.clock.now(),
            reserved=reserved,
            exclude=exclude,
        )
        context.telemetry.planned(time.perf_counter() - began)
        return context.with_changes(outcome, request)

    async def _stay(self, order: LeaseRequest, on_place: Callable[[int], None]) -> Execution:
        request = order.request
        context = self._context
        patient = bool(request.wait_seconds)
        if patient and len(self._queue) >= context.settings.max_waiting:
            raise refuse(
                Reason.QUEUE_FULL,
                f"cannot wait for {describe(request)}: {len(self._queue)} requests wait already, which is the limit",
                "try again later",
            )
        stay = QueuedRequest(order, on_place)
        waiting = self._queue.add(request, context.clock.now())
        context.state.status_changed.emit()
        self._stays[request.key] = stay
        # What was freed a moment ago may be for somebody before it.
        self._pump(None if self._pump_is_due else waiting)
        if stay.started.done():
            return stay.started.result()
        if not patient:
            refusal = self._refusal_behind(waiting)
            self.leave(request.key, refusal)
            stay.started.exception()  # seen
            raise RefusedError(refusal)
        if request.wait_seconds is not None and request.wait_seconds < math.inf:
            stay.deadline = context.clock.call_later(request.wait_seconds, lambda: self._waited_too_long(stay))
        stay.place = self._queue.position(request.key) or 1
        self._mention(EventKind.REQUEST_QUEUED, request, f"waits, at place {stay.place}")
        on_place(stay.place)
        return await stay.started

    def _pump(self, newcomer: backfill.WaitingRequest | None = None) -> None:
        """Starts what fits, in the order of the queue; where nothing was freed, only a newcomer can fit.

        Where many wait for several devices each that takes long, so it goes on in the next turn of the event loop.
        """
        if newcomer is None:
            self._pump_is_due = False
        context, settings = self._context, self._context.settings
        until = time.perf_counter() + _PIECE_SECONDS
        while len(self._queue) and not context.closing and not context.gate.paused:
            began = time.perf_counter()
            found = queue.search(
                context.state.working_view,
                self._queue.waiting,
                context.policy,
                context.clock.now(),
                limit_seconds=context.reservation_after_seconds,
                strict_fifo=settings.strict_fifo,
                only=newcomer,
                seen=self._seen,
                known=self._known,
                enough=lambda: time.perf_counter() > until,
            )
            context.telemetry.planned(time.perf_counter() - began)
            if found is None:
                if newcomer is None:
                    self._look_ended()
                return
            if isinstance(found, queue.PausedSearch):
                self._seen = found.seen
                self._go_on_looking()
                return
            self._look_anew()
            waiting, its_plan = found
            self._queue.remove(waiting.request.key)
            context.state.status_changed.emit()
            stay = self._stays.pop(waiting.request.key)
            if stay.deadline is not None:
                stay.deadline.cancel()
            stay.started.set_result(self._executor.begin(stay.order, its_plan))
            self._places_changed()

    def _look_ended(self) -> None:
        again, self._once_more = self._once_more, False
        self._restarts, self._seen = 0, queue.NONE_SEEN
        if again:
            self._go_on_looking()

    def _refusal_behind(self, waiting: backfill.WaitingRequest) -> Refusal:
        """Why somebody who does not wait is not served now."""
        context, settings = self._context, self._context.settings
        before = [each for each in self._queue.waiting if each.order < waiting.order]
        kept = None
        if not settings.strict_fifo:
            kept = backfill.reservation(
                context.state.working_view, before, context.clock.now(), context.reservation_after_seconds, self._known
            )
        reserved = kept.gpus if kept is not None else NOTHING_RESERVED
        outcome = self._plan(waiting.request, reserved=reserved)
        if isinstance(outcome, Refusal):
            return self._explained(waiting.request, outcome, reserved=reserved)
        return Refusal(
            reason=Reason.NO_CAPACITY,
            message=f"cannot serve {describe(waiting.request)} now: {counted(len(before), 'request')} came first",
            hint="wait for your turn with --wait 10m",
        )

    def _explained(
        self,
        request: Request,
        refusal: Refusal,
        *,
        exclude: frozenset[Slot] = frozenset(),
        reserved: frozenset[GpuUuid] = NOTHING_RESERVED,
    ) -> Refusal:
        """With what blocks each GPU. Only for an answer: a request that waits on is not explained at every try."""
        if refusal.reason not in _WORTH_WAITING:
            return refusal
        context = self._context
        lines = explanation(
            context.state.working_view,
            request,
            context.policy,
            reserved=reserved,
            exclude=exclude,
            most=_EXPLAINED_LINES,
        )
        return replace(refusal, explanation=lines)

    def _waited_too_long(self, stay: QueuedRequest) -> None:
        request = stay.order.request
        gate = self._context.gate
        outcome = gate.refusal(f"serve {describe(request)}") if gate.paused else self._plan(request)
        if isinstance(outcome, Refusal):
            outcome = self._explained(request, outcome)
        why = f": {outcome.message}" if isinstance(outcome, Refusal) else ""
        self.leave(
            request.key,
            Refusal(
                reason=Reason.WAITED_TOO_LONG,
                message=f"cannot serve {describe(request)} within {request.wait_seconds:g} s{why}",
                hint="wait longer, or ask for less",
                blockers=outcome.blockers if isinstance(outcome, Refusal) else (),
                explanation=outcome.explanation if isinstance(outcome, Refusal) else (),
            ),
        )

    def _places_changed(self) -> None:
        if self._stays and self._telling is None:
            self._telling = self._context.clock.call_later(TELL_SECONDS, self._tell_places)

    def _tell_places(self) -> None:
        self._telling = None
        for place, waiting in enumerate(self._queue.waiting, 1):
            stay = self._stays[waiting.request.key]
            if stay.place and stay.place != place:
                stay.place = place
                stay.on_place(place)

    def _mention(self, kind: EventKind, request: Request, words: str) -> None:
        journal = self._context.journal
        holder = request.holder
        event = journal.event(
            kind, f"request of {holder} for {describe(request)} {words}", holder=str(holder), tenant=holder.tenant
        )
        journal.mention(event)


def describe(request: Request) -> str:
    """What is asked for, in words: `2g.10gb`, `4G and 4G`."""
    texts = [want.text or want.profile or "a device" for want in request.wants]
    return " and ".join(texts) if len(texts) <= _MOST_TEXTS else f"{len(texts)} devices"


def _waits(request: Request, refusal: Refusal) -> bool:
    return bool(request.wait_seconds) and refusal.reason in _WORTH_WAITING

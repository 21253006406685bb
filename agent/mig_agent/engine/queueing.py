"""The queue of waiting requests: `core.queue` with wait timeouts, scans for requests that fit, and client reports."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from mig_agent.adapters.clock import Timer
from mig_agent.core import backfill, queue
from mig_agent.core.errors import Blocker, Reason, Refusal, RefusedError, refuse
from mig_agent.core.events import EventKind
from mig_agent.core.forecast import StartEstimate
from mig_agent.core.model import GpuUuid, Request, RequestKey, Slot
from mig_agent.core.planning.explain import explanation
from mig_agent.core.planning.plan import Outcome, Plan
from mig_agent.core.planning.planner import plan
from mig_agent.core.planning.search import NOTHING_RESERVED
from mig_agent.core.planning.wait_blockers import wait_blockers
from mig_agent.core.quantities import counted, format_duration
from mig_agent.core.requests import describe
from mig_agent.engine.callers import Caller
from mig_agent.engine.context import Context
from mig_agent.engine.execution import Execution, Executor, LeaseRequest
from mig_agent.engine.fair_share import FairShare
from mig_agent.engine.limits import HeldNow, LimitCheck
from mig_agent.engine.results import QueueEntry, QueuePlace
from mig_agent.engine.wait_estimates import WaitEstimates

_PIECE_SECONDS = 0.02
"""How long one scan of the queue may hold the event loop, in seconds."""
_MOST_RESTARTS = 3
"""How often one scan of the queue starts over because capacity was freed meanwhile."""
REPORT_SECONDS = 1.0
"""The pause between two reports of changed positions and estimates to clients, in seconds."""
_REPORTS_IN_TURN = 50
"""Number of waiting requests that are looked at for a report before other work has its turn."""
_NEWS_SECONDS = 2.0
_NEWS_SHARE = 0.1
"""An estimate is reported again when it has moved by more than these seconds, and this share of the time until then."""
_EXPLAINED_LINES = 24
"""The most lines that explain a refusal: they travel in a gRPC trailer, which is small."""
_WORTH_WAITING = frozenset({Reason.NO_CAPACITY, Reason.GPU_UNAVAILABLE})


@dataclass(slots=True, eq=False)
class QueuedRequest:
    """Holds one request of the queue: its wait timeout, its last reported place and the execution it waits for."""

    order: LeaseRequest
    on_place: Callable[[QueuePlace], None]
    started: asyncio.Future[Execution] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    deadline: Timer | None = None
    group: int = 0
    """The same for all requests that the limits treat alike (`LimitCheck.group_of`)."""
    place: QueuePlace | None = None
    """What was last reported; None before the first report."""


class RequestQueue:
    """Queues requests and starts each when it fits. Not thread-safe; use from the event loop."""

    def __init__(self, context: Context, executor: Executor, limits: LimitCheck, fair_share: FairShare) -> None:
        self._context = context
        self._executor = executor
        self._limits = limits
        self._fair_share = fair_share
        self._queue = queue.Queue()
        self._requests: dict[RequestKey, QueuedRequest] = {}
        self._scan_is_scheduled = False
        self._reservation_cache = backfill.ReservationCache()
        self._seen: frozenset[int] = queue.NONE_SEEN
        """Sequence numbers of the requests that the current scan has considered."""
        self._restarts = 0
        """How often the current scan has started over."""
        self._rescan_needed = False
        """Whether capacity was freed after the current scan had used up its restarts: then another one follows it."""
        self._report_timer: Timer | None = None
        self._report_at = math.inf
        self._reporting: asyncio.Task[None] | None = None
        self._estimates = WaitEstimates(context, self._limited_by_capacity, fair_share.used_if_on)
        context.state.capacity_freed.subscribe(self._rescan)

    def __len__(self) -> int:
        return len(self._queue)

    @property
    def oldest_since(self) -> float | None:
        """Time at which the longest waiting request arrived, in epoch seconds; None if no request waits."""
        return self._queue.oldest_since

    def position(self, request: RequestKey) -> int | None:
        """Return a request's place in the queue, 1 for the first; None when it does not wait."""
        places = (n for n, each in enumerate(self._ordered(), 1) if each.request.key == request)
        return next(places, None)

    @property
    def waiting(self) -> tuple[Request, ...]:
        """The requests that wait as they were made, in queue order."""
        return tuple(each.request for each in self._queue.waiting)

    @property
    def queued(self) -> tuple[QueueEntry, ...]:
        """The requests that wait, in queue order, with the estimates that `refresh_estimates` has made."""
        place_of = self._places()
        reservation = self._reservation()
        return tuple(
            QueueEntry(
                request=each.request.key,
                who=each.request.holder,
                priority=each.request.priority,
                since=each.since,
                wants=each.request.wants,
                place=place_of(each, position),
                reserved=self._indexes(reservation, each),
            )
            for position, each in enumerate(self._ordered(), 1)
        )

    async def admit(
        self,
        order: LeaseRequest,
        on_place: Callable[[QueuePlace], None],
        failed: Refusal | None,
        exclude: frozenset[Slot],
        waited: backfill.WaitingRequest | None,
    ) -> tuple[Execution, backfill.WaitingRequest | None]:
        """Return an execution with its slots reserved: at once if the request fits, else when it is admitted.

        `failed` is why an earlier execution of this request failed, `exclude` are the slots that it failed on, and
        `waited` is its place in the queue before that, which it keeps. The place is returned with the execution; None
        if it did not wait. Raises RefusedError.
        """
        request = order.request
        driver_use = self._context.driver_use
        over = self._limits.exceeded(request, order.caller, self._limits.held())
        if failed is None and not exclude and (over is None or request.wait_seconds):
            self._context.recent_requests.came(request, self._context.clock.now())
        if driver_use.paused and not (request.wait_seconds and self._context.state.gpus):
            raise RefusedError(driver_use.refusal(f"serve {describe(request)}"))
        outcome = self._plan(request, exclude=exclude)
        if driver_use.paused and (isinstance(outcome, Plan) or outcome.reason in _WORTH_WAITING):
            return await self._enqueue(order, on_place, waited)
        if over is not None and not request.wait_seconds and not _is_final(outcome):
            raise RefusedError(over)
        if isinstance(outcome, Plan) and over is None and (exclude or not len(self._queue)):
            return self._executor.begin(order, outcome), waited
        if isinstance(outcome, Refusal):
            if failed is not None and isinstance(self._plan(request), Plan):
                raise RefusedError(failed)  # only what has just failed would serve it
            if not len(self._queue) and not _may_wait_after(request, outcome):
                raise RefusedError(self._explained(request, outcome, exclude=exclude))
            if outcome.reason not in _WORTH_WAITING:
                raise RefusedError(outcome)
        return await self._enqueue(order, on_place, waited)

    def _rescan(self) -> None:
        """Scan the queue, since something may fit now."""
        self._restart_scan()
        self._schedule_scan()

    def _restart_scan(self) -> None:
        """Start the scan over, so that free capacity goes to the first request that it serves."""
        if self._restarts < _MOST_RESTARTS:
            self._restarts += bool(self._seen)
            self._seen = queue.NONE_SEEN
        else:
            self._rescan_needed = True  # after this scan: it has to reach the end of a long queue first

    def _schedule_scan(self) -> None:
        if len(self._queue) and not self._scan_is_scheduled:
            self._scan_is_scheduled = True
            asyncio.get_running_loop().call_soon(self._scan)

    def dequeue(self, request: RequestKey, refusal: Refusal) -> None:
        """Remove a request from the queue and refuse it; does nothing if it does not wait."""
        queued = self._requests.pop(request, None)
        if queued is None:
            return
        self._queue.remove(request)
        self._context.state.status_changed.emit()
        if queued.deadline is not None:
            queued.deadline.cancel()
        if not queued.started.done():
            queued.started.set_exception(RefusedError(refusal))
        if queued.place is not None:
            self._emit(EventKind.REQUEST_DEQUEUED, queued.order.request, f"left the queue: {refusal.message}")
            # Others may fit without it. One that was never reported never waited, and blocked no other.
            self._schedule_report()
            self._context.state.capacity_freed.emit()

    def close(self) -> None:
        """Refuse all waiting requests: the agent stops."""
        for request in tuple(self._requests):
            self.dequeue(
                request,
                Refusal(
                    reason=Reason.SHUTTING_DOWN,
                    message="cannot wait on: the agent is shutting down",
                    hint="ask again when it is back; leases stay",
                ),
            )
        if self._report_timer is not None:
            self._report_timer.cancel()

    def reserved_against(self, request: Request) -> frozenset[GpuUuid]:
        """Return the GPUs that a request may not use if it came now: reserved for one of those that go before it."""
        reservation = self._reservation()
        if reservation is None:
            return NOTHING_RESERVED
        newcomer = backfill.WaitingRequest(request=request, seq=self._queue.next_seq, since=self._context.clock.now())
        ranked = self._fair_share.ordered(self._queue, newcomer)
        return reservation.against(next((each for each in ranked if each.seq == newcomer.seq), newcomer))

    def refusal_in_turn(self, request: Request) -> Refusal | None:
        """Return why a request that fits would not be served if it came now: with `strict_fifo` others came first."""
        waiting = len(self._queue)
        return _others_first(request, waiting) if waiting and self._context.settings.strict_fifo else None

    @property
    def reserved(self) -> frozenset[GpuUuid]:
        """The GPUs that new requests may not use, since a request has waited past the reservation delay."""
        reservation = self._reservation()
        return NOTHING_RESERVED if reservation is None else reservation.gpus

    @property
    def reserved_for(self) -> str:
        """Return for whom these GPUs are reserved, as messages say it; empty where none are."""
        reservation = self._reservation()
        return "" if reservation is None else reservation.words

    async def refresh_estimates(self) -> None:
        """Wait until the estimates of all waiting requests are up to date, as far as they may take the CPU."""
        await self._estimates.refresh()

    async def estimate(self, request: Request, caller: Caller) -> StartEstimate | None:
        """Return when a request would be likely to start if it were queued now; None: not known.

        That is so, too, where its start depends on a limit of its caller or tenant.
        """
        if self._context.driver_use.paused:
            return None
        newcomer = backfill.WaitingRequest(request=request, seq=self._queue.next_seq, since=self._context.clock.now())
        waiting = self._limited_by_capacity(newcomer, caller)
        if all(each.seq != newcomer.seq for each in waiting):
            return None
        return await self._estimates.of_request(newcomer.seq, waiting)

    # Inside

    def _ordered(self) -> tuple[backfill.WaitingRequest, ...]:
        """Return the waiting requests in the order in which they are served."""
        return self._fair_share.ordered(self._queue)

    def _may_start(self) -> tuple[backfill.WaitingRequest, ...]:
        """Return those that their limits let start now, in order: the others block no request, and reserve no GPU."""
        held, ordered = self._limits.held(), self._ordered()
        if held is None:
            return ordered
        return tuple(each for each in ordered if self._exceeded(each.request, held) is None)

    def _limited_by_capacity(
        self, newcomer: backfill.WaitingRequest | None = None, caller: Caller | None = None
    ) -> tuple[backfill.WaitingRequest, ...]:
        """Return those whose starts capacity alone decides, in order; with a newcomer of `caller` as if it waited, too.

        The others would exceed a limit of their own if those before them had started.
        """
        ordered = self._fair_share.ordered(self._queue, newcomer)
        asked = []
        for each in ordered:
            queued = self._requests.get(each.request.key)
            asked.append((each.request, caller if each is newcomer or queued is None else queued.order.caller))
        return tuple(each for each, within in zip(ordered, self._limits.within(asked), strict=True) if within)

    def _reservation(self, among: Sequence[backfill.WaitingRequest] | None = None) -> backfill.Reservation | None:
        """Return the reservation, of all that may start or `among` these; None if there is none."""
        context = self._context
        if not len(self._queue) or context.settings.strict_fifo:
            return None
        return backfill.reservation(
            context.state.working_view,
            self._may_start() if among is None else among,
            context.clock.now(),
            context.reservation_after_seconds,
            self._reservation_cache,
        )

    def _indexes(self, reservation: backfill.Reservation | None, waiting: backfill.WaitingRequest) -> tuple[int, ...]:
        """Return the indexes of the GPUs that are reserved for a waiting request."""
        if reservation is None or reservation.waiting.seq != waiting.seq:
            return ()
        return tuple(each.index for each in self._context.state.working_view.gpus if each.uuid in reservation.gpus)

    def _exceeded(self, request: Request, held: HeldNow | None) -> Refusal | None:
        queued = self._requests.get(request.key)
        return None if queued is None else self._limits.exceeded(request, queued.order.caller, held, queued.group)

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

    async def _enqueue(
        self, order: LeaseRequest, on_place: Callable[[QueuePlace], None], waited: backfill.WaitingRequest | None
    ) -> tuple[Execution, backfill.WaitingRequest]:
        request = order.request
        context = self._context
        may_wait = bool(request.wait_seconds)
        if may_wait and len(self._queue) >= context.settings.max_waiting:
            raise refuse(
                Reason.QUEUE_FULL,
                f"cannot wait for {describe(request)}: {len(self._queue)} requests wait already, which is the limit",
                "try again later",
            )
        many = self._limits.too_many_waiting(order, (each.request for each in self._queue.waiting))
        if may_wait and many is not None:
            raise RefusedError(many)
        queued = QueuedRequest(order, on_place, group=self._limits.group_of(request, order.caller))
        waiting = self._queue.add(request, context.clock.now(), waited)
        context.state.status_changed.emit()
        self._requests[request.key] = queued
        # Capacity that was freed a moment ago may serve a request before it: then the whole queue is scanned.
        self._scan(None if self._scan_is_scheduled else waiting)
        if queued.started.done():
            return queued.started.result(), waiting
        if not may_wait:
            refusal = self._refusal_without_wait(waiting)
            self.dequeue(request.key, refusal)
            queued.started.exception()  # seen
            raise RefusedError(refusal)
        if request.wait_seconds is not None and request.wait_seconds < math.inf:
            left = waiting.since + request.wait_seconds - context.clock.now()
            queued.deadline = context.clock.call_later(max(left, 0.0), lambda: self._wait_timed_out(queued))
        places = ((each, n) for n, each in enumerate(self._ordered(), 1) if each.seq == waiting.seq)
        queued.place = self._places()(*next(places, (waiting, 1)))
        self._emit(EventKind.REQUEST_QUEUED, request, f"waits, at place {queued.place.position}")
        on_place(queued.place)
        self._schedule_report()
        return await queued.started, waiting

    def _scan(self, newcomer: backfill.WaitingRequest | None = None) -> None:
        """Start the requests that fit, in queue order; with a newcomer, consider only that: nothing was freed.

        A scan of many requests for several devices takes long, so it continues in the next turn of the event loop.
        """
        if newcomer is None:
            self._scan_is_scheduled = False
        context, settings = self._context, self._context.settings
        until = time.perf_counter() + _PIECE_SECONDS
        while len(self._queue) and not context.closing and not context.driver_use.paused:
            began = time.perf_counter()
            found = queue.search(
                context.state.working_view,
                self._may_start(),
                context.policy,
                context.clock.now(),
                limit_seconds=context.reservation_after_seconds,
                strict_fifo=settings.strict_fifo,
                only=newcomer,
                seen=self._seen,
                known=self._reservation_cache,
                enough=lambda: time.perf_counter() > until,
            )
            context.telemetry.planned(time.perf_counter() - began)
            if found is None:
                if newcomer is None:
                    self._end_scan()
                return
            if isinstance(found, queue.PausedSearch):
                self._seen = found.seen
                self._schedule_scan()
                return
            self._restart_scan()
            waiting, found_plan = found
            self._queue.remove(waiting.request.key)
            context.state.status_changed.emit()
            queued = self._requests.pop(waiting.request.key)
            if queued.deadline is not None:
                queued.deadline.cancel()
            queued.started.set_result(self._executor.begin(queued.order, found_plan))
            self._schedule_report()

    def _end_scan(self) -> None:
        again, self._rescan_needed = self._rescan_needed, False
        self._restarts, self._seen = 0, queue.NONE_SEEN
        if again:
            self._schedule_scan()

    def _refusal_without_wait(self, waiting: backfill.WaitingRequest) -> Refusal:
        """Return why a request that does not wait is not served now."""
        mine = next((each for each in self._ordered() if each.seq == waiting.seq), waiting)
        before = [each for each in self._may_start() if each.order < mine.order]
        reservation = self._reservation(before)
        reserved = reservation.gpus if reservation is not None else NOTHING_RESERVED
        outcome = self._plan(waiting.request, reserved=reserved)
        if isinstance(outcome, Refusal):
            words = "" if reservation is None else reservation.words
            return self._explained(waiting.request, outcome, reserved=reserved, reserved_for=words)
        return _others_first(waiting.request, len(before))

    def _explained(
        self,
        request: Request,
        refusal: Refusal,
        *,
        exclude: frozenset[Slot] = frozenset(),
        reserved: frozenset[GpuUuid] = NOTHING_RESERVED,
        reserved_for: str = "",
    ) -> Refusal:
        """Return the refusal with what blocks each GPU. For answers only: a request is not explained at each scan."""
        if refusal.reason not in _WORTH_WAITING:
            return refusal
        context = self._context
        lines = explanation(
            context.state.working_view,
            request,
            context.policy,
            reserved=reserved,
            reserved_for=reserved_for,
            exclude=exclude,
            most=_EXPLAINED_LINES,
        )
        return replace(refusal, explanation=lines)

    def _wait_timed_out(self, queued: QueuedRequest) -> None:
        request = queued.order.request
        driver_use = self._context.driver_use
        outcome: Outcome | None = self._exceeded(request, self._limits.held())
        if driver_use.paused:
            outcome = driver_use.refusal(f"serve {describe(request)}")
        elif outcome is None:
            outcome = self._plan(request)
        if isinstance(outcome, Refusal):
            outcome = self._explained(request, outcome)
        # Of "cannot place 4G on GPU 0: why" the beginning says what was asked for.
        message = outcome.message if isinstance(outcome, Refusal) else f"cannot serve {describe(request)}"
        asked, colon, why = message.partition(": ")
        waited = format_duration(math.ceil(request.wait_seconds or 0))
        self.dequeue(
            request.key,
            Refusal(
                reason=Reason.WAITED_TOO_LONG,
                message=f"{asked} within {waited}{colon}{why}",
                hint="wait longer, or ask for less",
                blockers=outcome.blockers if isinstance(outcome, Refusal) else (),
                explanation=outcome.explanation if isinstance(outcome, Refusal) else (),
            ),
        )

    def _schedule_report(self, seconds: float = REPORT_SECONDS) -> None:
        at = self._context.clock.now() + seconds
        if self._report_timer is not None:
            if self._report_at <= at:
                return
            self._report_timer.cancel()
        self._report_at, self._report_timer = at, self._context.clock.call_later(seconds, self._begin_report)

    def _begin_report(self) -> None:
        self._report_timer = None
        if self._requests and not self._context.closing and (self._reporting is None or self._reporting.done()):
            self._reporting = self._context.tasks.spawn("queue-report", self._report())

    async def _report(self) -> None:
        """Report positions that have changed at once, and estimates when they are made; then again after a while."""
        await self._report_places()
        pause = self._estimates.pause_left
        if not pause:
            await self._estimates.refresh()
            await self._report_places()
        if self._requests and not self._context.closing:
            self._schedule_report(max(pause or self._estimates.stale_in, REPORT_SECONDS))

    async def _report_places(self) -> None:
        place_of = self._places()
        for position, waiting in enumerate(self._ordered(), 1):
            if position % _REPORTS_IN_TURN == 0:
                await self._context.fairness.yield_turn()
            queued = self._requests.get(waiting.request.key)
            if queued is None or queued.place is None:
                continue
            place = place_of(waiting, position)
            if _is_news(queued.place, place):
                queued.place = place
                queued.on_place(place)

    def _places(self) -> Callable[[backfill.WaitingRequest, int], QueuePlace]:
        """Return a function that tells what is known of a request at a position; alike requests are looked at once.

        What waits for a limit of its own has neither an estimate nor blockers: when it starts is not up to the GPUs.
        """
        context, held = self._context, self._limits.held()
        paused = bool(context.driver_use.paused)
        view, reserved = context.state.working_view, None if paused else self._reservation()
        known: dict[tuple[object, ...], tuple[Blocker, ...]] = {}

        def blockers(waiting: backfill.WaitingRequest) -> tuple[Blocker, ...]:
            request = waiting.request
            against = NOTHING_RESERVED if reserved is None else reserved.against(waiting)
            key = (request.wants, request.gpus, against)
            if key not in known:
                known[key] = wait_blockers(view, request, against)
            return known[key]

        def place(waiting: backfill.WaitingRequest, position: int) -> QueuePlace:
            over = self._exceeded(waiting.request, held)
            return QueuePlace(
                position=position,
                at=context.clock.now(),
                estimate=None if over is not None else self._estimates.of(waiting),
                blockers=() if paused or over is not None else blockers(waiting),
                limit="" if over is None else over.message,
            )

        return place

    def _emit(self, kind: EventKind, request: Request, words: str) -> None:
        journal = self._context.journal
        holder = request.holder
        event = journal.event(
            kind, f"request of {holder} for {describe(request)} {words}", holder=str(holder), tenant=holder.tenant
        )
        journal.emit(event)


def _others_first(request: Request, count: int) -> Refusal:
    return Refusal(
        reason=Reason.NO_CAPACITY,
        message=f"cannot serve {describe(request)} now: {counted(count, 'request')} came first",
        hint="wait for your turn with --wait 10m",
    )


def _is_final(outcome: Outcome) -> bool:
    """Return whether this is a refusal that no lease's end can change: it says more than a limit that is exceeded."""
    return isinstance(outcome, Refusal) and outcome.reason not in _WORTH_WAITING


def _is_news(before: QueuePlace, after: QueuePlace) -> bool:
    """Return True if what is known of a wait differs enough from what was reported before to be reported."""
    if (before.position, before.limit) != (after.position, after.limit):
        return True
    return _has_moved(before.estimate, after.estimate, after.at)


def _has_moved(before: StartEstimate | None, after: StartEstimate | None, now: float) -> bool:
    if before is None or after is None or before.basis is not after.basis:
        return before is not after
    moments = ((before.earliest, after.earliest), (before.median, after.median), (before.latest, after.latest))
    for old, new in moments:
        if old is None or new is None:
            if old is not new:
                return True
        elif abs(new - old) > max(_NEWS_SECONDS, _NEWS_SHARE * abs(old - now)):
            return True
    return False


def _may_wait_after(request: Request, refusal: Refusal) -> bool:
    return bool(request.wait_seconds) and refusal.reason in _WORTH_WAITING

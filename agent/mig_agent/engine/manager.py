"""The public API of the engine, which is the single writer of hardware and ledger, on one event loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Generator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import ClassVar, TypeVar

from mig_agent.adapters.device_backends import DeviceAccess
from mig_agent.core.accounting import Account, By, Period, Reader
from mig_agent.core.advice import Advice, advise, cases
from mig_agent.core.errors import LedgerError, Reason, Refusal, UsageError, refuse
from mig_agent.core.events import Event, EventKind
from mig_agent.core.forecast import StartEstimate
from mig_agent.core.limits import UsageLimits
from mig_agent.core.model import (
    CallerId,
    Generation,
    Gpu,
    Instance,
    Lease,
    LeaseId,
    NodeView,
    Request,
    RequestKey,
    Slot,
    Want,
)
from mig_agent.core.observation import InstanceUsage
from mig_agent.core.owner import Owner, PodOwner, StreamOwner
from mig_agent.core.planning.capacity import Available, RemainingCapacity, available
from mig_agent.core.planning.explain import MOST_LINES, explanation
from mig_agent.core.planning.plan import Outcome, StepTimes
from mig_agent.core.planning.planner import plan
from mig_agent.core.planning.recording import RecordedPlan, Recording, record
from mig_agent.core.replay import ReplayedNode
from mig_agent.engine.accounting import read_account, read_runs
from mig_agent.engine.callers import Caller
from mig_agent.engine.context import FIXED_SETTINGS, EngineSettings
from mig_agent.engine.denial_audit import DENIED, DenialAudit
from mig_agent.engine.event_bus import Subscription
from mig_agent.engine.lifecycle import StreamEnd, leases_without_answering_devices
from mig_agent.engine.reconciler import read_usage
from mig_agent.engine.results import (
    Granted,
    ModeAnswer,
    PauseAnswer,
    Published,
    QueueEntry,
    QueuePlace,
    Recovered,
    Snapshot,
)
from mig_agent.engine.startup import Parts, policy_of, started_event
from mig_agent.engine.thread_check import LoopBound

MOST_EXPLAINED_LINES = 4096
"""The most lines that explain all requests of one dry run, so that the answer stays within gRPC's limit."""

MOST_WAITING_RECORDED = 256
"""The most waiting requests in one recording of plans."""
_CAPACITY_SECONDS = 0.1
"""How long a computed capacity is used while the view stays the same, in seconds: meanwhile reservations may change."""
_ESTIMATE_SECONDS = 0.5
"""Longest time that a status waits for estimates that are being made."""
MOST_RUNS = 1000
"""Number of the latest leased devices that advice rests on."""
MOST_CASES = 10
"""Number of names that one call gets advice on: each takes two replays of the history."""
_ADVICE_SECONDS = 20.0
"""Time limit of one call that replays the history; names that are not reached by then get no advice."""
_MOST_EVENT_QUERIES = 4
"""The most queries of recorded events that read the ledger at once; further ones wait."""
_ADMINISTRATION = frozenset({"Reclaim", "Cordon", "Drain", "SetMigMode", "Pause", "Resume", "Adopt"})

_Answer = TypeVar("_Answer")


@dataclass(slots=True)
class _Turn:
    """One user's analyses of the ledger: one at once."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    calls: int = 0
    """Number of calls that hold the lock or wait for it."""


class Manager:
    """Grants, changes and ends leases, and administers the GPUs of one node.

    Not thread-safe; use from the event loop, except for `view` and `published`, which any thread may read. A call that
    is refused raises RefusedError.
    """

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._context = parts.context
        self.observers = parts.context.events.observers
        """Called with each event when it is emitted, on the event loop."""
        self.on_view: list[Callable[[], None]] = []
        """Called soon after a new view was published or capacity was freed, on the event loop.

        Several changes within one iteration of the event loop cause one call."""
        self.on_outdated = parts.maintenance.on_outdated
        """Called when the driver was replaced while the agent was paused, but the library that this process finds was
        not. In a container it never will be."""
        self._notify_scheduled = False
        self._capacity: tuple[NodeView, tuple[tuple[Want, ...], float], RemainingCapacity] | None = None
        """The remaining capacity that was last computed, with the view, wants and moment that it is for."""
        self._socket_problems: tuple[str, ...] = ()
        self._problems: dict[str, str] = {}
        """What does not work though leases are granted, by the part of the agent that it is about."""
        self._boot_id = parts.context.host.kernel_boot_id()
        self._published = self._build_published()
        state = parts.context.state
        state.view_changed.subscribe(self._update_published)
        state.status_changed.subscribe(self._update_published)
        state.view_changed.subscribe(self._view_changed)
        state.capacity_freed.subscribe(self._view_changed)
        self._denials = DenialAudit(parts.context.journal, parts.context.clock)
        self._event_queries = asyncio.Semaphore(_MOST_EVENT_QUERIES)
        self._advising = asyncio.Lock()
        self._analyses: dict[CallerId, _Turn] = {}
        """The turns of the users whose calls of `account` or `advise` are in progress."""
        self._usage: asyncio.Task[Mapping[Generation, InstanceUsage]] | None = None

    # Leases

    async def acquire(
        self, request: Request, caller: Caller, on_queued: Callable[[QueuePlace], None] | None = None
    ) -> Granted:
        """Lease what is asked for. While the request waits, `on_queued` is called with its place in the queue.

        The same request id with the same request gets the same answer. Cancelling the call removes the request from the
        queue, or undoes what was begun; a lease that was committed by then survives for its grace period.
        """
        return await self._parts.acquirer.acquire(request, caller, on_queued)

    async def hold(
        self, request: Request, caller: Caller, on_queued: Callable[[QueuePlace], None] | None = None
    ) -> Granted:
        """Lease as `acquire` does, until its stream ends, which the caller reports to `hold_ended`.

        Raises UsageError for a pod's request, whose lease ends with the pod.
        """
        if isinstance(request.owner, PodOwner):
            raise UsageError(
                f"cannot hold a lease for {request.owner.label} by a stream: it is to outlive its scheduler",
                "call Acquire with ttl_seconds, and Renew once the pod is to come",
            )
        try:
            held = replace(request, owner=StreamOwner(process=request.owner.process))
            return await self._parts.acquirer.acquire(held, caller, on_queued)
        except asyncio.CancelledError:
            left = RequestKey(caller.caller_id, request.request_id)
            self._context.tasks.spawn(f"left-{left.id}", self._shorten_grace(left))
            raise

    async def _shorten_grace(self, request: RequestKey) -> None:
        """Shorten the grace period of a held lease whose client disconnected before it got its answer."""
        await self._parts.acquirer.wait_until_answered(request)
        for lease in tuple(self._context.state.leases.values()):
            if lease.request_key == request:
                self._parts.lifecycle.client_disconnected(lease.id)

    def delivered(self, lease: LeaseId) -> None:
        """Note that the client has the answer: it is this process, or a stream that stays open."""
        self._parts.lifecycle.delivered(lease)

    def left_unconfirmed(self, lease: LeaseId) -> None:
        """Note that a client disconnected without confirming its lease, which ends at its `Granted.confirm_by`."""
        self._parts.lifecycle.left_unconfirmed(lease)

    def cancel(self, request_id: str, reason: str, caller: Caller, *, mine: bool = False) -> tuple[QueueEntry, ...]:
        """Take a waiting request out of the queue, or with `mine` all of the caller's; return them as they waited.

        Its client is refused and told who cancelled it. A unique beginning of the id will do. Administrators may cancel
        any request. Raises RefusedError (UNKNOWN_REQUEST) where none waits.
        """
        return self._parts.cancellation.cancel(request_id, reason, caller, mine=mine)

    async def confirm(self, lease: LeaseId) -> None:
        """Confirm a lease: its client has the answer. Without this the lease ends at `Granted.confirm_by`.

        Raises RefusedError (LEASE_ENDED) where it has ended.
        """
        await self._parts.leases.confirm(lease)

    async def hold_ended(self, lease: LeaseId, how: StreamEnd, client: int | None = None) -> None:
        """Handle the end of a held lease's stream: `how` and the client's pid decide how long the lease survives it."""
        await self._parts.lifecycle.stream_ended(lease, how, client)

    async def release(self, lease: LeaseId, token: str, caller: Caller, *, force: bool = False) -> None:
        """End a lease; its instances stay, idle. Releasing one that has ended is no error with its token.

        `force` is for administrators: it also ends the lease of a bound pod, where the kubelet has allocated no device
        for it and no process is on its instances.
        """
        await self._parts.leases.release(lease, token, caller, force=force)

    async def renew(self, lease: LeaseId, token: str, ttl_seconds: float | None, caller: Caller) -> Lease:
        """Set a lease's deadline to `ttl_seconds` from now, or with None remove it; return the lease."""
        return await self._parts.leases.renew(lease, token, ttl_seconds, caller)

    async def recover(self, lease: LeaseId, token: str, caller: Caller) -> Recovered:
        """Recover a lease that was active when the ledger was lost, with its token and under the same id.

        Refused if it had ended, one of its devices is lost or belongs to another lease, or another user asks. A
        repeated call changes nothing.
        """
        self._context.refuse_when_closing()
        return await self._parts.lease_recovery.recover(lease, token, caller)

    async def owner_ended(self, lease: LeaseId, words: str) -> None:
        """End a lease because its owner has ended or will not come; `words` tell why: `its pod has ended`.

        One that has ended is no error. Raises RefusedError, and the lease goes on, where its end cannot be recorded.
        """
        await self._parts.leases.owner_ended(lease, words)

    async def bind(self, lease: LeaseId, owner: Owner) -> Lease:
        """Bind a reserved lease to its owner, which is on this node: from now on only the owner's end ends the lease.

        Removes the deadline, and records what was not known of the owner. Does nothing to a lease that is bound to this
        owner. Raises RefusedError where the lease has ended, is not reserved for this owner or has other devices, or
        the ledger cannot be written.
        """
        return await self._parts.leases.bind(lease, owner)

    async def wait_for_pending_commit(self, lease: LeaseId) -> None:
        """Wait until all pending writes for a lease (renewal, pod binding, end) have been committed or have failed."""
        await self._parts.lifecycle.wait_for_pending_commit(lease)

    async def wait_until_answered(self, request: RequestKey) -> None:
        """Wait until a request has been served or refused; returns at once for one that is not in progress."""
        await self._parts.acquirer.wait_until_answered(request)

    def report_refusal(self, method: str, caller: Caller, refusal: Refusal, about: str = "") -> None:
        """Report a refused call: to the audit if its caller lacks the rights, as an event if it is administration.

        `about` is the lease or GPU that it named. Other refusals are not reported.
        """
        if refusal.reason in DENIED:
            self._denials.record(method, caller, refusal, about)
        elif method in _ADMINISTRATION:
            words = f"{method} of {caller} was refused: {refusal.message}"
            journal, reason = self._context.journal, refusal.reason.value
            kind = EventKind.REQUEST_REFUSED
            journal.emit(journal.event(kind, words, holder=str(caller), caller=caller, method=method, reason=reason))

    def record_certificates(self, words: str, *, taken: bool) -> None:
        """Record that certificates were renewed (`taken`), or that their replacement cannot be used."""
        kind = EventKind.CERTIFICATES_RENEWED if taken else EventKind.CERTIFICATE_RELOAD_FAILED
        self._context.journal.record(self._context.journal.event(kind, words))

    def record_sockets(self, words: str, problems: tuple[str, ...], restored: bool) -> None:  # noqa: FBT001 -- as agreed
        """Record that a socket of the agent was lost or restored; `problems` are the sockets that are missing now."""
        self._socket_problems = problems
        kind = EventKind.SOCKET_RESTORED if restored else EventKind.SOCKET_LOST
        self._context.journal.record(self._context.journal.event(kind, f"the socket {words}"))
        self._update_published()

    async def announce(self) -> None:
        """Record that the agent serves, once nothing of its start can fail any more. Raises LedgerError."""
        await self._context.journal.commit((), (started_event(self._context),))

    @property
    def settings(self) -> EngineSettings:
        """The settings in use."""
        return self._context.settings

    def reconfigure(self, settings: EngineSettings) -> None:
        """Use other settings from now on, for what is planned, queued and reconciled next.

        Raises ValueError if one of FIXED_SETTINGS differs.
        """
        context = self._context
        for name in FIXED_SETTINGS:
            if getattr(settings, name) != getattr(context.settings, name):
                raise ValueError(f"cannot change {name} while the engine runs")
        context.settings = settings
        context.policy = policy_of(settings)
        self._capacity = None
        self._parts.reconciler.hint()  # an idle instance may be overdue now, a foreign one may be adopted
        context.state.capacity_freed.emit()  # the queue is scanned under the new policy
        self._update_published()

    def record_reload(self, words: str, changed: str, at_restart: str) -> None:
        """Record that the configuration was read again: which settings changed, and which only a restart changes."""
        event = self._context.journal.event(EventKind.CONFIG_RELOADED, words, changed=changed, at_restart=at_restart)
        self._context.journal.record(event)

    def record_failed_reload(self, words: str) -> None:
        """Record that the configuration was read again and cannot be used."""
        self._context.journal.record(self._context.journal.event(EventKind.CONFIG_RELOAD_FAILED, words))

    def report_problem(self, part: str, words: str) -> None:
        """Show in status that a part of the agent does not work, or with no words that it works again."""
        self._problems[part] = words
        self._update_published()

    # Reading

    def plan(self, requests: Sequence[Request]) -> tuple[Outcome, ...]:
        """Plan each request by itself as it would be served now; changes and reserves nothing."""
        view, now = self._context.state.working_view, self._context.clock.now()
        context = self._context
        return tuple(
            self._pause_refusal() or context.with_changes(plan(view, request, context.policy, now), request)
            for request in requests
        )

    async def plan_in_turns(
        self, requests: Sequence[Request], *, explain: bool = False, caller: Caller | None = None
    ) -> AsyncIterator[tuple[Outcome, tuple[str, ...]]]:
        """Plan as `plan` does, one request after the other, all on the node as it is now; other calls run in between.

        With `explain`, each outcome comes with lines that explain it to people; fewer of them for many requests. With
        a `caller`, what its limits do not allow now is refused.
        """
        context = self._context
        view, now, policy = context.state.working_view, context.clock.now(), context.policy
        most = min(max(MOST_EXPLAINED_LINES // max(len(requests), 1), 1), MOST_LINES)
        for request in requests:
            if len(requests) > 1 or len(request.wants) > 1:
                await context.fairness.yield_turn()
            refusal = self._pause_refusal() or self._limit_refusal(request, caller)
            outcome = refusal or context.with_changes(plan(view, request, policy, now), request)
            yield outcome, explanation(view, request, policy, most=most) if explain and not refusal else ()

    def _limit_refusal(self, request: Request, caller: Caller | None) -> Refusal | None:
        limits = self._parts.limits
        if caller is None:
            return None
        return limits.never(request, caller) or limits.exceeded(request, caller, limits.held())

    async def record_plans(self, requests: Sequence[Request], version: str) -> Recording:
        """Plan each request, and the first of those that wait, and return the plans with all that they depend on.

        As if each came alone: neither a reservation nor a pause counts. Other calls run in between.
        """
        context = self._context
        view, now, policy = context.state.working_view, context.clock.now(), context.policy
        waiting = self._parts.queue.waiting[:MOST_WAITING_RECORDED]
        plans = []
        for request, waits in (*((each, False) for each in requests), *((each, True) for each in waiting)):
            await context.fairness.yield_turn()
            bare = replace(request, if_revision=None)
            plans.append(RecordedPlan(request=bare, outcome=plan(view, bare, policy, now), waits=waits))
        return record(view, policy, now, tuple(plans), version)

    async def estimate(self, request: Request, caller: Caller) -> StartEstimate | None:
        """Return when a request that does not fit now would be likely to start if it waited; None: not known."""
        return await self._parts.queue.estimate(request, caller)

    async def refresh_estimates(self) -> None:
        """Bring the estimates in the next snapshot up to date, or wait a moment for that."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._parts.queue.refresh_estimates(), _ESTIMATE_SECONDS)

    @property
    def now(self) -> float:
        """The agent's clock, in seconds since the epoch."""
        return self._context.clock.now()

    @property
    def step_times(self) -> StepTimes:
        """The measured mean times of creating and destroying an instance, in seconds."""
        return self._context.step_timer.step_times

    def _pause_refusal(self) -> Refusal | None:
        driver_use = self._context.driver_use
        return driver_use.refusal("place anything") if driver_use.paused else None

    def count_creatable(self, want: Want, before: Sequence[Want] = ()) -> int:
        """Return how many devices for a want could be leased now one after the other, after the wants in `before`.

        0 while the agent is paused or stops. GPUs that are reserved for a waiting request do not count.
        """
        context = self._context
        if context.driver_use.paused or context.closing:
            return 0
        view, key = context.state.working_view, (tuple(before), context.clock.now() // _CAPACITY_SECONDS)
        known = self._capacity
        if known is None or known[0] is not view or known[1] != key:
            # Called for one resource after the other, and finding the reserved GPUs takes a scan of the queue.
            capacity = RemainingCapacity(view, context.policy, before, reserved=self._parts.queue.reserved)
            known = self._capacity = (view, key, capacity)
        return known[2].creatable(want)

    def has_slots(self, request: RequestKey) -> bool:
        """Return whether a request has an active lease, or a plan for it is being carried out; False while it waits.

        Then its slots count as busy in the view that plans are made on.
        """
        return self._parts.acquirer.has_slots(request)

    def reserving(self) -> tuple[tuple[Owner, tuple[Slot, ...]], ...]:
        """Return the plans in progress for owners that are not bound: each owner, and the slots that it will get."""
        return self._parts.acquirer.reserving()

    @property
    def view(self) -> NodeView:
        """The node as last published: a finished value, which any thread may read."""
        return self._published.view

    @property
    def published(self) -> Published:
        """The node as last published, with a few more facts: a finished value, which any thread may read."""
        return self._published

    @property
    def paused(self) -> tuple[str, ...]:
        """The reasons for which the agent is paused; empty while it serves."""
        return self._context.driver_use.paused

    def access(self, instance: Instance) -> DeviceAccess:
        """Return what a container needs to use an instance. Raises RefusedError where its GPU has no device node."""
        gpu = self.view.by_uuid[instance.slot.gpu]
        if gpu.minor is None:
            raise refuse(Reason.GPU_UNAVAILABLE, f"cannot give GPU {gpu.index} to a container: it has no device node")
        return self._context.backends[instance.kind].access(instance, gpu.minor)

    @property
    def driver_version(self) -> str:
        """The version of the driver, as of when it was last opened."""
        return self._context.driver.version

    @property
    def silent(self) -> frozenset[LeaseId]:
        """The leases with a device on a GPU that has not answered since the start, or is not managed now."""
        return leases_without_answering_devices(self._context.state)

    def position(self, request: RequestKey) -> int | None:
        """Return a request's position in the queue, 1 for the first; None when it does not wait."""
        return self._parts.queue.position(request)

    @property
    def snapshot(self) -> Snapshot:
        """All that a status shows, computed at once. It takes longer the more requests wait."""
        context, parts = self._context, self._parts
        return Snapshot(
            view=context.state.view,
            at=context.clock.now(),
            queue=parts.queue.queued,
            started_at=parts.started_at,
            driver_version=self.driver_version,
            strict_fifo=context.settings.strict_fifo,
            reservation_after_seconds=context.reservation_after_seconds,
            ledger_error=context.journal.error,
            doubt=context.state.doubt,
            socket_problems=self._socket_problems,
            problems=self._published.problem_lines,
            recoverable=sum(not each.void for each in context.state.former.values()),
            unused=parts.reconciler.unused_leases(),
            idle_since=parts.idle_leases.since(),
            warnings={**parts.idle_leases.warnings, **parts.draining.warnings},
            missing=dict(context.missing),
            paused=context.driver_use.paused,
            silent=self.silent,
            left=self._leases_without_process(),
            boot_id=self._boot_id,
            available=self._available(),
        )

    def _available(self) -> tuple[Available, ...]:
        """Return how many devices of each profile a new request could get now; empty while paused or stopping."""
        context, queue = self._context, self._parts.queue
        if context.driver_use.paused or context.closing:
            return ()
        view = context.state.working_view
        # With strict_fifo a new request waits whenever another does.
        nothing = len(queue) > 0 and context.settings.strict_fifo
        return available(view, context.policy, reserved=frozenset(view.by_uuid) if nothing else queue.reserved)

    def _leases_without_process(self) -> frozenset[LeaseId]:
        host = self._context.host
        return frozenset(
            each.id
            for each in self.view.leases.values()
            if each.holder.pid is not None and not host.client_lives_since(each.holder.pid, each.created_at)
        )

    def subscribe(self, after_revision: int | None = None) -> Subscription:
        """Subscribe to the events after a revision, or with None from now on; the caller closes the subscription.

        Raises RefusedError where the revision is too old, or there are too many subscribers.
        """
        return self._context.events.subscribe(after_revision, self._context.state.revision)

    async def events(
        self, since: float, gpu: str | None, limit: int, *, lease: str = "", before: int = 0
    ) -> tuple[Event, ...]:
        """Return the latest `limit` recorded events since a moment, oldest first.

        Of one GPU (index or UUID), of one lease, and before the event of a number in the ledger, where these are given.
        Raises RefusedError (LEDGER_FAILED).
        """
        ledger = self._parts.ledger
        return await self._query(lambda: ledger.events(since, gpu or "", limit, lease=lease, before=before))

    async def event_page(
        self, since: float, gpu: str | None, limit: int, *, lease: str = "", before: int = 0
    ) -> tuple[tuple[Event, ...], int]:
        """Return what `events` returns, and how many older events match. Raises RefusedError (LEDGER_FAILED)."""
        ledger = self._parts.ledger
        return await self._query(lambda: ledger.event_page(since, gpu or "", limit, lease=lease, before=before))

    async def usage(self) -> Mapping[Generation, InstanceUsage]:
        """Read the memory, utilization and processes of each instance. Calls during a reading share its result."""
        if self._usage is None or self._usage.done():
            self._usage = self._context.tasks.spawn("usage", read_usage(self._context))
        return await asyncio.shield(self._usage)

    async def account(self, since: float, until: float | None, by: By, caller: Caller) -> Account:
        """Return who leased what in a period, from the ledger; `until` is at most now, and None means now.

        Names of other users' leases are not shown, but counted under their users. Raises RefusedError (LEDGER_FAILED).
        """
        now = self._context.clock.now()
        period = Period(since, now if until is None else min(until, now))
        active, ledger, reader = self._context.accounting.active(now), self._parts.ledger, _reader(caller)
        async with self._analysing(caller):
            return await self._query(lambda: read_account(ledger, active, period, by, reader))

    async def advise(self, since: float, name: str, caller: Caller) -> tuple[Advice, ...]:
        """Return what leases asked for against what they used, and what asking for less would have meant.

        Only of the caller's own leases, or of all for those who act for others; with `name` of leases of that name.
        The history of the node is replayed with the smaller request, in turns with other calls. Raises RefusedError.
        """
        context, reader, ledger = self._context, _reader(caller), self._parts.ledger
        # Nothing is read before it is this call's turn: a thousand calls that wait hold nothing.
        async with self._analysing(caller), self._advising:
            active = context.accounting.active(context.clock.now())
            uses = await self._query(lambda: read_runs(ledger, active, since, MOST_RUNS))
            node = ReplayedNode(
                view=context.state.view,
                policy=context.policy,
                reservation_after_seconds=context.reservation_after_seconds,
                strict_fifo=context.settings.strict_fifo,
            )
            until, found = time.monotonic() + _ADVICE_SECONDS, []
            for case in cases(uses, reader, name)[:MOST_CASES]:
                advice = await self._in_turns(advise(case, uses, node), until)
                if advice is None:
                    break
                found.append(advice)
        return tuple(found)

    @asynccontextmanager
    async def _analysing(self, caller: Caller) -> AsyncIterator[None]:
        """Wait until no other analysis of the ledger is in progress for this user, so that one cannot delay others."""
        turn = self._analyses.setdefault(caller.caller_id, _Turn())
        turn.calls += 1
        try:
            async with turn.lock:
                yield
        finally:
            turn.calls -= 1
            if not turn.calls:
                self._analyses.pop(caller.caller_id, None)

    async def _query(self, read: Callable[[], _Answer]) -> _Answer:
        """Read the ledger in another thread. Raises RefusedError (LEDGER_FAILED)."""
        try:
            async with self._event_queries:
                return await self._context.blocking_calls.run(read)
        except LedgerError as error:
            raise refuse(Reason.LEDGER_FAILED, str(error)) from error

    async def _in_turns(self, steps: Generator[None, None, _Answer], until: float) -> _Answer | None:
        """Return what a computation returns, or None at the moment `until` of `time.monotonic`.

        Other calls run between its steps.
        """
        while time.monotonic() < until:
            try:
                next(steps)
            except StopIteration as end:
                answer: _Answer = end.value
                return answer
            await self._context.fairness.yield_turn()
        steps.close()
        return None

    # Administration: the transport decides which callers may do this

    async def reclaim(self, gpus: Sequence[str], caller: Caller) -> tuple[Instance, ...]:
        """Destroy the idle instances of these GPUs, or of all if none is named; return those that were destroyed."""
        self._context.refuse_when_closing()
        return await self._parts.admin.reclaim(gpus, caller)

    async def adopt(
        self, gpus: Sequence[str], uuids: Sequence[str], caller: Caller, *, everything: bool = False
    ) -> tuple[Instance, ...]:
        """Take over foreign instances as idle ones, on these GPUs or with these UUIDs; return them as they are then.

        With `everything` take over all of them, and end the doubt about what the ledger does not account for.
        """
        self._context.refuse_when_closing()
        return await self._parts.admin.adopt(gpus, uuids, caller, everything=everything)

    async def cordon(self, gpu: str, on: bool, reason: str, caller: Caller) -> Gpu:  # noqa: FBT001 -- as agreed
        """Cordon a GPU, so that it gets no new leases, or uncordon it; return it."""
        return await self._parts.admin.cordon(gpu, reason, caller, on=on)

    async def drain(
        self, gpus: Sequence[str], deadline_seconds: float | None, reason: str, caller: Caller
    ) -> tuple[tuple[Gpu, ...], tuple[Lease, ...]]:
        """Cordon GPUs, or all, so that they become empty: what is leased ends by itself, or after `deadline_seconds`.

        Return the GPUs, and the leases that are still there. Raises RefusedError.
        """
        self._context.refuse_when_closing()
        drained = await self._parts.draining.drain(gpus, deadline_seconds, reason, caller)
        return drained, self._parts.draining.leases_on(drained)

    async def undrain(self, gpus: Sequence[str], caller: Caller) -> tuple[Gpu, ...]:
        """End the draining of GPUs, or of all; return them. Raises RefusedError."""
        self._context.refuse_when_closing()
        return await self._parts.draining.undrain(gpus, caller)

    async def set_mig_mode(self, gpu: str, enable: bool, caller: Caller) -> ModeAnswer:  # noqa: FBT001 -- as agreed
        """Switch a GPU's MIG mode; refused while anything on the GPU runs or is leased."""
        self._context.refuse_when_closing()
        return await self._parts.admin.set_mig_mode(gpu, caller, enable=enable)

    def set_limits(self, limits: UsageLimits) -> None:
        """Replace the limits of users and tenants; what is held stays, and waiting requests are considered again."""
        self._context.settings = replace(self._context.settings, limits=limits)
        self._context.state.capacity_freed.emit()

    async def pause(self, reason: str, caller: Caller, *, lasting: bool = False) -> PauseAnswer:
        """Grant no more leases and release the driver, and wait until that is done or has failed; leases stay active.

        The agent is paused while it has any reason, a text that `resume` takes back. `lasting` is for the one reason of
        an administrator, which may be empty; it is recorded, so that the agent is still paused after a restart.
        """
        self._context.refuse_when_closing()
        return await self._parts.maintenance.pause(reason, caller, lasting=lasting)

    async def resume(self, reason: str, caller: Caller, *, lasting: bool = False) -> PauseAnswer:
        """Remove a reason for being paused; after the last one open the driver, read all GPUs and serve again.

        A reason that the agent does not have is no error. `lasting` removes the administrator's, whatever its text.
        """
        self._context.refuse_when_closing()
        return await self._parts.maintenance.resume(reason, caller, lasting=lasting)

    def _build_published(self) -> Published:
        context, parts = self._context, self._parts
        return Published(
            view=context.state.view,
            started_at=parts.started_at,
            queue_length=len(parts.queue),
            oldest_waiting_since=parts.queue.oldest_since,
            reservation_after_seconds=context.reservation_after_seconds,
            ledger_error=context.journal.error,
            # As of the last look: every commit publishes, and must not look at every lease.
            idle=frozenset() if context.driver_use.paused else parts.idle_leases.at_last_look,
            unused=parts.reconciler.unused_at_last_look,
            paused=context.driver_use.paused,
            in_doubt=context.state.doubt is not None,
            sockets_missing=len(self._socket_problems),
            tenants=context.accounting.totals,
            problems=dict(self._problems),
        )

    def _update_published(self) -> None:
        self._published = self._build_published()

    def _view_changed(self) -> None:
        self._capacity = None
        if self.on_view and not self._notify_scheduled:
            self._notify_scheduled = True
            asyncio.get_running_loop().call_soon(self._notify_of_view)

    def _notify_of_view(self) -> None:
        self._notify_scheduled = False
        for each in tuple(self.on_view):
            each()

    async def close(self) -> None:
        """Stop the engine: refuse waiting requests and let the steps in progress end; leases stay active."""
        context = self._context
        if context.closing:
            return
        context.closing = True
        context.journal.record(context.journal.event(EventKind.AGENT_STOPPING, "the agent stops; leases stay"))
        await self._parts.close()


def _reader(caller: Caller) -> Reader:
    """Return what a caller may see of accounting."""
    return Reader(uid=caller.uid, user=caller.name, everything=caller.acts_for_others)


class CheckedManager(LoopBound, Manager):
    """A Manager that raises AssertionError where it is used off the event loop."""

    ON_ANY_THREAD: ClassVar[frozenset[str]] = frozenset({"view", "published", "_published"})


def manager_over(parts: Parts) -> Manager:
    """Return the manager of a started engine, a CheckedManager if the settings ask for it."""
    return (CheckedManager if parts.context.settings.check_threads else Manager)(parts)

"""The public API of the engine, which is the single writer of hardware and ledger, on one event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import ClassVar

from mig_agent.adapters.device_backends import DeviceAccess
from mig_agent.core.errors import Reason, Refusal, UsageError, refuse
from mig_agent.core.events import EventKind
from mig_agent.core.forecast import StartEstimate
from mig_agent.core.model import (
    Generation,
    Gpu,
    GpuUuid,
    Instance,
    Isolation,
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
from mig_agent.core.planning.capacity import RemainingCapacity
from mig_agent.core.planning.explain import MOST_LINES, explanation
from mig_agent.core.planning.plan import Outcome, Plan, StepTimes
from mig_agent.core.planning.planner import plan
from mig_agent.core.planning.recording import RecordedPlan, Recording, record
from mig_agent.core.planning.shares import without_shares
from mig_agent.engine.callers import Caller
from mig_agent.engine.context import FIXED_SETTINGS, EngineSettings
from mig_agent.engine.denial_audit import DENIED, DenialAudit
from mig_agent.engine.event_bus import Subscription
from mig_agent.engine.lifecycle import StreamEnd, leases_without_answering_devices
from mig_agent.engine.publication import Publication
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
from mig_agent.engine.usage import read_usage

MOST_EXPLAINED_LINES = 4096
"""The most lines that explain all requests of one dry run, so that the answer stays within gRPC's limit."""

MOST_WAITING_RECORDED = 256
"""The most waiting requests in one recording of plans."""
_CAPACITY_SECONDS = 0.1
"""How long a computed capacity is used while the view stays the same, in seconds: meanwhile reservations may change."""
_ESTIMATE_SECONDS = 0.5
"""Longest time that a status waits for estimates that are being made."""
_ADMINISTRATION = frozenset({"Reclaim", "Cordon", "Drain", "SetMigMode", "Pause", "Resume", "Adopt"})


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
        self.on_outdated = parts.maintenance.on_outdated
        """Called when the driver was replaced while the agent was paused, but the library that this process finds was
        not. In a container it never will be."""
        self._capacity: tuple[NodeView, tuple[tuple[Want, ...], float], RemainingCapacity] | None = None
        """The remaining capacity that was last computed, with the view, wants and moment that it is for."""
        self._publication = Publication(parts)
        self.on_view = self._publication.on_view
        """Called soon after a new view was published or capacity was freed, on the event loop."""
        state = parts.context.state
        state.view_changed.subscribe(self._forget_capacity)
        state.capacity_freed.subscribe(self._forget_capacity)
        self._denials = DenialAudit(parts.context.journal, parts.context.clock)
        self.history = parts.history
        """Queries of the past: events, accounting, advice."""
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

    def cancel(
        self, request_id: str, reason: str, caller: Caller, *, mine: bool = False, of: str = ""
    ) -> tuple[QueueEntry, ...]:
        """Take a waiting request out of the queue, or with `mine` all of the caller's; return them as they waited.

        Its client is refused and told who cancelled it. A unique beginning of the id will do; `of` is the caller id
        whose request is meant. Administrators may cancel any request. Raises RefusedError (UNKNOWN_REQUEST) where none
        waits.
        """
        return self._parts.cancellation.cancel(request_id, reason, caller, mine=mine, of=of)

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
        kind = EventKind.SOCKET_RESTORED if restored else EventKind.SOCKET_LOST
        self._context.journal.record(self._context.journal.event(kind, f"the socket {words}"))
        self._publication.set_missing_sockets(problems)

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
        self._parts.reconciler.hint()  # an idle instance may be overdue now, a foreign one may be adopted
        context.state.capacity_freed.emit()  # the queue is scanned under the new policy
        context.state.status_changed.emit()

    def record_reload(self, words: str, changed: str, at_restart: str) -> None:
        """Record that the configuration was read again: which settings changed, and which only a restart changes."""
        event = self._context.journal.event(EventKind.CONFIG_RELOADED, words, changed=changed, at_restart=at_restart)
        self._context.journal.record(event)

    def record_failed_reload(self, words: str) -> None:
        """Record that the configuration was read again and cannot be used."""
        self._context.journal.record(self._context.journal.event(EventKind.CONFIG_RELOAD_FAILED, words))

    def report_problem(self, part: str, words: str) -> None:
        """Show in status that a part of the agent does not work, or with no words that it works again."""
        self._publication.set_problem(part, words)

    # Reading

    def plan(self, requests: Sequence[Request]) -> tuple[Outcome, ...]:
        """Plan each request by itself as it would be served now; changes and reserves nothing."""
        view, now = self._context.state.working_view, self._context.clock.now()
        reserved_against = self._parts.queue.reserved_against
        return tuple(
            self._pause_refusal() or self._planned(view, request, now, reserved_against(request))
            for request in map(self._context.as_configured, requests)
        )

    def _planned(self, view: NodeView, request: Request, now: float, reserved: frozenset[GpuUuid]) -> Outcome:
        outcome = plan(view, request, self._context.policy, now, reserved=reserved)
        in_turn = self._parts.queue.refusal_in_turn(request) if isinstance(outcome, Plan) else None
        return in_turn or self._context.with_changes(outcome, request)

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
        for request in map(context.as_configured, requests):
            if len(requests) > 1 or len(request.wants) > 1:
                await context.fairness.yield_turn()
            refusal = self._pause_refusal() or self._limit_refusal(request, caller)
            if refusal is not None:
                yield refusal, ()
                continue
            reserved = self._parts.queue.reserved_against(request)
            lines: tuple[str, ...] = ()
            if explain:
                whom = self._parts.queue.reserved_for
                lines = explanation(view, request, policy, reserved=reserved, reserved_for=whom, most=most)
            yield self._planned(view, request, now, reserved), lines

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
        asked = map(context.as_configured, requests)
        for request, waits in (*((each, False) for each in asked), *((each, True) for each in waiting)):
            await context.fairness.yield_turn()
            bare = replace(request, if_revision=None)
            plans.append(RecordedPlan(request=bare, outcome=plan(view, bare, policy, now), waits=waits))
        return record(view, policy, now, tuple(plans), version)

    async def estimate(self, request: Request, caller: Caller) -> StartEstimate | None:
        """Return when a request that does not fit now would be likely to start if it waited; None: not known."""
        return await self._parts.queue.estimate(self._context.as_configured(request), caller)

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
        """Return how many devices for a want of a pod could be leased now one after the other, after those in `before`.

        Shares do not count, since pods get none (`Context.as_configured`). 0 while the agent is paused or stops. GPUs
        that are reserved for a waiting request do not count.
        """
        context = self._context
        if context.driver_use.paused or context.closing:
            return 0
        want, before = replace(want, isolation=Isolation.MIG), without_shares(before)
        view, key = context.state.working_view, (tuple(before), context.clock.now() // _CAPACITY_SECONDS)
        known = self._capacity
        if known is None or known[0] is not view or known[1] != key:
            # Called for one resource after the other, and finding the reserved GPUs takes a scan of the queue.
            capacity = RemainingCapacity(view, context.policy, before, reserved=self._parts.queue.reserved)
            known = self._capacity = (view, key, capacity)
        return known[2].creatable(want)

    def _forget_capacity(self) -> None:
        self._capacity = None

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
        return self._publication.published.view

    @property
    def published(self) -> Published:
        """The node as last published, with a few more facts: a finished value, which any thread may read."""
        return self._publication.published

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
        return self._publication.snapshot()

    def subscribe(self, after_revision: int | None = None) -> Subscription:
        """Subscribe to the events after a revision, or with None from now on; the caller closes the subscription.

        Raises RefusedError where the revision is too old, or there are too many subscribers.
        """
        return self._context.events.subscribe(after_revision, self._context.state.revision)

    async def usage(self) -> Mapping[Generation, InstanceUsage]:
        """Read the memory, utilization and processes of each instance. Calls during a reading share its result."""
        if self._usage is None or self._usage.done():
            self._usage = self._context.tasks.spawn("usage", read_usage(self._context))
        return await asyncio.shield(self._usage)

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

    async def close(self) -> None:
        """Stop the engine: refuse waiting requests and let the steps in progress end; leases stay active."""
        context = self._context
        if context.closing:
            return
        context.closing = True
        context.journal.record(context.journal.event(EventKind.AGENT_STOPPING, "the agent stops; leases stay"))
        await self._parts.close()


class CheckedManager(LoopBound, Manager):
    """A Manager that raises AssertionError where it is used off the event loop."""

    ON_ANY_THREAD: ClassVar[frozenset[str]] = frozenset({"view", "published", "_publication"})


def manager_over(parts: Parts) -> Manager:
    """Return the manager of a started engine, a CheckedManager if the settings ask for it."""
    return (CheckedManager if parts.context.settings.check_threads else Manager)(parts)

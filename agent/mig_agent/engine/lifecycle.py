"""Lifecycle of leases: confirmation, deadlines, ends, and leases of pods that lose an instance.

When an instance is lost, a bound lease continues with its other instances; any other lease ends. A pod's container has
the device nodes of all its instances open until it ends. If its lease ended with the first lost instance, the others
would be idle, and another pod would get what that container still has open.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from enum import Enum, StrEnum
from functools import partial

from mig_agent.adapters.clock import Timer
from mig_agent.adapters.ledger.records import (
    AwaitConfirmation,
    Change,
    DropInstance,
    EndLease,
    ForgetConfirmation,
    RenewLease,
)
from mig_agent.adapters.processes import ProcessWatch
from mig_agent.core.errors import LedgerError
from mig_agent.core.events import Event, EventKind
from mig_agent.core.load_history import ended_lease
from mig_agent.core.model import Generation, GpuUuid, Instance, InstanceState, Lease, LeaseId
from mig_agent.core.quantities import format_duration
from mig_agent.engine.callers import Caller
from mig_agent.engine.context import Context
from mig_agent.engine.fair_share import gpus_of
from mig_agent.engine.idempotency import RequestLog
from mig_agent.engine.journal import Transaction
from mig_agent.engine.state import State


def leases_with_devices_elsewhere(context: Context, gpu: GpuUuid) -> frozenset[LeaseId]:
    """Return the bound leases that have a live instance on another GPU than this one, managed now or not."""
    state = context.state
    return frozenset(
        lease.id
        for lease in state.leases.values()
        if lease.owner.is_bound
        and any(_survives_elsewhere(context, lease.id, generation, gpu) for generation in lease.instances)
    )


def leases_without_answering_devices(state: State) -> frozenset[LeaseId]:
    """Return the leases with an instance on a GPU that has not answered since the start, or is not managed now."""
    gone = {generation for generation, gpu in state.unmanaged.items() if gpu not in state.gpus}
    if not gone:
        return frozenset()
    return frozenset(lease.id for lease in state.leases.values() if not gone.isdisjoint(lease.instances))


def _survives_elsewhere(context: Context, lease: LeaseId, generation: Generation, but_on: GpuUuid) -> bool:
    state = context.state
    instance = state.instance(generation)
    if instance is not None:
        on = instance.slot.gpu
        return instance.lease == lease and on != but_on and not state.gpus[on].lost
    recorded_on = state.unmanaged.get(generation)
    return recorded_on is not None and recorded_on != but_on and recorded_on not in state.gpus


def degraded_event(context: Context, instance: Instance, reason: str) -> Event | None:
    """Return the event that reports the loss of an instance by a lease that continues; None where no lease has it."""
    lease = context.state.leases.get(instance.lease) if instance.lease is not None else None
    if lease is None:
        return None
    number = lease.instances.index(instance.generation)
    text = lease.owner.device_text(number)
    device = f" ({text})" if text else ""
    return context.journal.event(
        EventKind.LEASE_DEGRADED,
        f"lease {lease.id} of {lease.holder} lost {context.place(instance)}{device}: "
        f"{END_MESSAGES.get(reason, reason)}; what is left of it stays its own",
        instance=instance,
        lease=lease.id,
        holder=str(lease.holder),
        reason=reason,
        tenant=lease.holder.tenant,
        device=number,
        owner=lease.owner,
    )


RECONNECT_GRACE_SECONDS = 5.0
"""How long a lease survives a client that disconnected before it got its answer, in seconds."""
NOTE_SECONDS = 0.5
"""How long after the grant it is recorded that a lease is unconfirmed, in seconds. Most are confirmed by then."""
RETRY_SECONDS = 5.0
"""The pause before committing the end of a lease is tried again, in seconds."""


class StreamEnd(Enum):
    """How the stream of a held lease ended."""

    CLOSED = "closed"
    """Its client, which is still connected, has closed it."""
    HUNG_UP = "hung up"
    """The client, or its kernel, has closed the whole connection."""
    DROPPED = "dropped"
    """The network or this agent has ended it: the client may not know yet, and still wants its lease."""


class EndReason(StrEnum):
    """The reasons for which this agent ends a lease. The values are in the ledger; never rename one.

    Recovery (`core.recovery`) has reasons of its own: `reboot`, `gpu-reset`, `instance-lost`.
    """

    RELEASED = "released"
    EXPIRED = "expired"
    PROCESS_ENDED = "process-ended"
    STREAM_ENDED = "stream-ended"
    UNDELIVERED = "undelivered"
    GPU_LOST = "gpu-lost"
    POD_ENDED = "pod-ended"
    FORCED = "forced"
    DRAINED = "drained"
    IDLE = "idle"


END_MESSAGES = {
    EndReason.EXPIRED: "its time is over",
    EndReason.PROCESS_ENDED: "its process has ended",
    EndReason.STREAM_ENDED: "nobody held it any more",
    EndReason.UNDELIVERED: "its client never confirmed that it had the answer",
    EndReason.GPU_LOST: "its GPU was lost",
    EndReason.POD_ENDED: "its pod has ended",
    "reboot": "the machine was rebooted",
    "instance-lost": "its instance is gone",
    "limit-lost": "its memory limit does not hold any more",
    "gpu-reset": "its GPU was reset, or somebody destroyed all that was on it",
}


def _leave(device: Instance) -> None:
    """Leave a device to the next reconciliation."""


@dataclass(slots=True)
class _Watches:
    """Holds the timers and process watches that may end one lease."""

    deadline: Timer | None = None
    grace: Timer | None = None
    confirm_by: float | None = None
    """When `grace` ends, in seconds since the epoch; None where no confirmation is awaited."""
    note: Timer | None = None
    """The timer until it is recorded that the lease is unconfirmed."""
    overdue: bool = False
    """Whether `confirm_by` has passed, with no repeated request since."""
    process: ProcessWatch | None = None
    client: ProcessWatch | None = None
    """The watch of the client's process after its connection was closed."""

    def close(self) -> None:
        if self.deadline is not None:
            self.deadline.cancel()
        if self.grace is not None:
            self.grace.cancel()
        if self.note is not None:
            self.note.cancel()
        for process in (self.process, self.client):
            if process is not None:
                process.close()


class LeaseLifecycle:
    """Confirms, ends and degrades leases, and runs their deadlines. Not thread-safe; use from the event loop."""

    def __init__(self, context: Context, request_log: RequestLog) -> None:
        self._context = context
        self._request_log = request_log
        self._watches: dict[LeaseId, _Watches] = {}
        self._ending: dict[LeaseId, asyncio.Future[None]] = {}
        self._settling: dict[LeaseId, asyncio.Future[None]] = {}
        """The pending write of each lease that is being renewed, confirmed or bound."""
        self._end_device: Callable[[Instance], None] = _leave
        self._noted: set[LeaseId] = set()
        """The leases that are, or may be, recorded as unconfirmed."""

    def end_devices_by(self, action: Callable[[Instance], None]) -> None:
        """Call `action` with each device whose lease has ended and that serves no other."""
        self._end_device = action

    def remember_unconfirmed(self, leases: Iterable[LeaseId]) -> None:
        """Take over which leases the ledger has as unconfirmed; called before `begin` at the start."""
        self._noted.update(leases)

    def begin(self, lease: Lease, *, delivered: bool) -> None:
        """Start the timers and watches of an active lease.

        One that is not known to be delivered to its client ends after the grace period, unless its owner is bound.
        """
        process = lease.owner.process
        delivered = delivered or lease.owner.is_bound
        if delivered and lease.expires_at is None and process is None:
            return
        watches = self._watches[lease.id] = _Watches()
        if not delivered and lease.owner.ends_with_stream:
            watches.grace = self._later(lease.id, self._context.settings.grace_seconds, EndReason.STREAM_ENDED)
        elif not delivered:
            self._await_confirmation(lease.id, watches)
        if lease.expires_at is not None:
            watches.deadline = self._deadline(lease.id, lease.expires_at)
        if process is not None:
            ended = partial(self._end_soon, lease.id, EndReason.PROCESS_ENDED)
            watches.process = self._context.host.watch_client(process.pid, process.started, ended)

    def resume(self, lease: Lease) -> None:
        """Start the timers and watches of an active lease after a restart of the agent, which no stream outlives.

        A held lease waits for its client to attach again while the client's process lives, if that is known to run on
        this machine, and otherwise for the grace period.
        """
        held = lease.owner.ends_with_stream
        # One without a mark in the ledger counts as confirmed, lest it be lost.
        self.begin(lease, delivered=not held and lease.id not in self._noted)
        host, pid = self._context.host, lease.holder.pid
        if not held or pid is None or not host.client_lives_since(pid, lease.created_at):
            return
        watches = self._watches[lease.id]
        if watches.grace is not None:
            watches.grace.cancel()
            watches.grace = None
        ended = partial(self._end_soon, lease.id, EndReason.STREAM_ENDED)
        watches.client = host.watch_client(pid, host.client_started(pid), ended)

    def delivered(self, lease: LeaseId) -> None:
        """Note that the client has the answer, or is connected again: cancels the grace period."""
        watches = self._watches.get(lease)
        if watches is None:
            return
        if watches.grace is not None:
            watches.grace.cancel()
            watches.grace = watches.confirm_by = None
            if watches.note is not None:
                watches.note.cancel()
                watches.note = None
        if watches.client is not None:
            watches.client.close()
            watches.client = None

    def confirm_by(self, lease: LeaseId) -> float | None:
        """Return until when the client has to confirm a lease, in seconds since the epoch; None if it need not."""
        watches = self._watches.get(lease)
        return None if watches is None else watches.confirm_by

    def restart_grace_period(self, lease: LeaseId) -> None:
        """Restart the grace period of an unconfirmed lease: its client has repeated the request."""
        watches = self._watches.get(lease)
        if watches is not None and watches.confirm_by is not None:
            if watches.grace is not None:
                watches.grace.cancel()
            self._await_confirmation(lease, watches)

    def _await_confirmation(self, lease: LeaseId, watches: _Watches) -> None:
        seconds = self._context.settings.grace_seconds

        def over() -> None:
            watches.overdue = True
            self._end_soon(lease, EndReason.UNDELIVERED)

        watches.overdue = False
        watches.confirm_by = self._context.clock.now() + seconds
        watches.grace = self._context.clock.call_later(seconds, over)
        if watches.note is None and lease not in self._noted:
            watches.note = self._context.clock.call_later(NOTE_SECONDS, partial(self._note, lease))

    def left_unconfirmed(self, lease: LeaseId) -> None:
        """Record now that a lease is unconfirmed, without the usual delay: its client has disconnected."""
        watches = self._watches.get(lease)
        if watches is not None and watches.note is not None:
            watches.note.cancel()
            watches.note = None
            self._note(lease)

    def _note(self, lease: LeaseId) -> None:
        """Record that a lease is unconfirmed, for the next start of the agent."""
        if lease in self._noted:
            return
        self._noted.add(lease)
        written = self._context.journal.commit((AwaitConfirmation(lease),))
        # Where it cannot be recorded the lease ends all the same, unless the agent does before.
        written.add_done_callback(lambda done: done.cancelled() or done.exception())

    def _forgotten(self, lease: LeaseId) -> tuple[Change, ...]:
        """Return the change that removes a lease's record of being unconfirmed, if there is one."""
        return (ForgetConfirmation(lease),) if lease in self._noted else ()

    async def confirm(self, lease: LeaseId) -> None:
        """Confirm a lease: its client has the answer. Raises LedgerError where that cannot be recorded."""
        if lease not in self._noted:
            self.delivered(lease)
            return

        def apply() -> None:
            self._noted.discard(lease)
            self.delivered(lease)

        written = self._context.journal.commit(self._forgotten(lease), (), apply)
        self.track_commit(lease, written)
        await asyncio.shield(written)

    def track_commit(self, lease: LeaseId, written: asyncio.Future[None]) -> None:
        """Track a pending write of a lease, for `wait_for_pending_commit` to wait for."""
        self._settling[lease] = written
        written.add_done_callback(lambda _: self._settling.pop(lease, None))

    async def wait_for_pending_commit(self, lease: LeaseId) -> None:
        """Wait until all pending writes of a lease (renewal, confirmation, binding, end) are committed or failed."""
        while (written := self._settling.get(lease) or self._ending.get(lease)) is not None:
            await asyncio.wait((written,))

    def bound(self, lease: LeaseId) -> None:
        """Stop the timers and watches of a lease that was bound: from now on only its owner's end ends it."""
        watches = self._watches.pop(lease, None)
        if watches is not None:
            watches.close()

    async def stream_ended(self, lease: LeaseId, how: StreamEnd, client: int | None) -> None:
        """Handle the end of a held lease's stream. `client` is the pid of its client, from the kernel."""
        if how is StreamEnd.CLOSED and not self._context.closing:
            try:
                await self.end(lease, EndReason.STREAM_ENDED, by="its client")
            except LedgerError:
                self._detached(lease)
        elif how is StreamEnd.HUNG_UP:
            self._hung_up(lease, client)
        else:
            self._detached(lease)

    def _detached(self, lease: LeaseId) -> None:
        """Start the grace period of a held lease, so that its client can reconnect."""
        self._to_be_attached(lease, self._context.settings.grace_seconds)

    def _hung_up(self, lease: LeaseId, pid: int | None) -> None:
        """Start a short grace period for a client to reconnect; the lease ends before that if its process has ended."""
        watches = self._to_be_attached(lease, min(RECONNECT_GRACE_SECONDS, self._context.settings.grace_seconds))
        if watches is not None and watches.client is None and pid is not None:
            ended = partial(self._end_soon, lease, EndReason.STREAM_ENDED)
            host = self._context.host
            watches.client = host.watch_client(pid, host.client_started(pid), ended)

    def _to_be_attached(self, lease: LeaseId, seconds: float) -> _Watches | None:
        if lease not in self._context.state.leases:
            return None
        watches = self._watches.setdefault(lease, _Watches())
        if watches.grace is None:
            watches.grace = self._later(lease, seconds, EndReason.STREAM_ENDED)
        return watches

    def client_disconnected(self, lease: LeaseId) -> None:
        """Shorten the grace period of a held lease whose client disconnected before it got its answer."""
        watches = self._watches.get(lease)
        if watches is not None and watches.grace is not None:
            watches.grace.cancel()
            seconds = min(RECONNECT_GRACE_SECONDS, self._context.settings.grace_seconds)
            watches.grace = self._later(lease, seconds, EndReason.STREAM_ENDED)

    async def renew(self, lease: Lease, expires_at: float | None, caller: Caller) -> Lease:
        """Set a lease's deadline, in seconds since the epoch, or remove it. Raises LedgerError."""
        state = self._context.state
        words = (
            "without a deadline"
            if expires_at is None
            else f"for {format_duration(expires_at - self._context.clock.now() + 0.5)}"
        )
        event = self._context.journal.event(
            EventKind.LEASE_RENEWED,
            f"lease {lease.id} of {lease.holder} goes on {words}",
            lease=lease.id,
            holder=str(lease.holder),
            caller=caller,
        )
        renewed = replace(lease, expires_at=expires_at)

        def apply() -> None:
            current = state.leases.get(lease.id)
            if current is None:
                return
            state.put_lease(replace(current, expires_at=expires_at))
            if not current.owner.ends_with_stream:
                self._noted.discard(lease.id)
                self.delivered(lease.id)  # a client that renews a lease has its answer
            watches = self._watches.setdefault(lease.id, _Watches())
            if watches.deadline is not None:
                watches.deadline.cancel()
            watches.deadline = None if expires_at is None else self._deadline(lease.id, expires_at)

        changes = (RenewLease(lease.id, expires_at), *self._forgotten(lease.id))
        written = self._context.journal.commit(changes, (event,), apply)
        # The former deadline may come meanwhile. The caller may be cancelled; what is recorded counts all the same.
        self.track_commit(lease.id, written)
        await asyncio.shield(written)
        return renewed

    async def end(
        self, lease: LeaseId, reason: str, *, by: str = "", why: str = "", caller: Caller | None = None
    ) -> None:
        """End a lease; does nothing to one that has ended. Raises LedgerError: then the lease is still active.

        Messages say who released it (`by`) or else why it ended (`why`); the event records the `caller`.
        """
        under_way = self._ending.get(lease)
        if under_way is None:
            transaction = Transaction(self._context.journal)
            self.add_lease_end(transaction, lease, reason, by=by, why=why, caller=caller)
            if not transaction:
                return
            under_way = self._ending[lease] = transaction.commit()
            under_way.add_done_callback(lambda _: self._ending.pop(lease, None))
        # The caller may be cancelled; the lease ends all the same.
        await asyncio.shield(under_way)

    def add_lease_end(
        self,
        transaction: Transaction,
        lease: LeaseId,
        reason: str,
        *,
        by: str = "",
        why: str = "",
        caller: Caller | None = None,
    ) -> None:
        """Add the end of a lease to a transaction; with its commit the lease's instances become idle."""
        context = self._context
        known = context.state.leases.get(lease)
        if known is None or lease in transaction.ended or lease in self._ending:
            return
        transaction.ended.add(lease)
        now = context.clock.now()
        why = f"released by {by}" if by else why or END_MESSAGES.get(reason, reason)
        accounted = context.accounting.end(lease, now)
        transaction.changes.extend((EndLease(lease, now, reason), *accounted, *self._forgotten(lease)))
        # An instance in a restored ledger may belong to another lease by now.
        transaction.changes += [DropInstance(each) for each in known.instances if context.state.is_doubtful(each)]
        transaction.events.append(
            context.journal.event(
                EventKind.LEASE_ENDED,
                f"lease {lease} of {known.holder} ended: {why}",
                gpu=next((each.slot.gpu for each in context.state.instances_of(lease)), None),
                lease=lease,
                holder=str(known.holder),
                reason=reason,
                tenant=known.holder.tenant,
                caller=caller,
                owner=known.owner,
                gpus=gpus_of(context, known),
                started=known.created_at,
            )
        )
        transaction.applied.append(partial(self._ended, lease, now, reason))

    def close(self) -> None:
        """Stop all timers and watches, and record which leases are unconfirmed, for the next start of the agent."""
        for lease, each in self._watches.items():
            if each.confirm_by is not None:
                self._note(lease)
        for watches in self._watches.values():
            watches.close()
        self._watches.clear()

    def _ended(self, lease: LeaseId, at: float, reason: str) -> None:
        state = self._context.state
        for instance in tuple(state.instances_of(lease)):
            if instance.lease == lease:
                left = InstanceState.FOREIGN if state.is_doubtful(instance.generation) else InstanceState.IDLE
                without = replace(instance, state=left, lease=None, since=at)
                state.put(without)
                if left is InstanceState.IDLE and not instance.kind.is_reusable:
                    self._end_device(without)
        known = state.leases.get(lease)
        if known is not None:
            self._context.lease_times.lease_ended(ended_lease(known, at))
        state.drop_lease(lease)
        self._context.accounting.ended(lease, at)
        self._noted.discard(lease)
        self._request_log.ended(lease, at, reason)
        watches = self._watches.pop(lease, None)
        if watches is not None:
            watches.close()
        self._context.state.capacity_freed.emit()

    def _deadline(self, lease: LeaseId, moment: float) -> Timer:
        return self._later(lease, max(moment - self._context.clock.now(), 0.0), EndReason.EXPIRED)

    def _later(self, lease: LeaseId, seconds: float, reason: EndReason) -> Timer:
        return self._context.clock.call_later(seconds, partial(self._end_soon, lease, reason))

    def _end_soon(self, lease: LeaseId, reason: EndReason) -> None:
        if not self._context.closing:
            self._context.tasks.spawn(f"end-{lease}", self._end_or_retry(lease, reason))

    async def _end_or_retry(self, lease: LeaseId, reason: EndReason) -> None:
        await self.wait_for_pending_commit(lease)
        known = self._context.state.leases.get(lease)
        watches = self._watches.get(lease)
        if reason is EndReason.UNDELIVERED and (watches is None or watches.grace is None or not watches.overdue):
            return  # it was bound, confirmed or requested again meanwhile
        if reason is EndReason.EXPIRED and known is not None:
            left = (known.expires_at or math.inf) - self._context.clock.now()
            if left > 0:
                return  # it was renewed meanwhile
        try:
            await self.end(lease, reason)
        except LedgerError:
            self._context.clock.call_later(RETRY_SECONDS, partial(self._end_soon, lease, reason))

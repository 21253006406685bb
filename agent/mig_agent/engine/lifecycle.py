"""Lifecycle of leases. When an instance is lost, a pod's lease goes on with what is left of it, any other ends.

A pod's container has the device nodes of all its instances until it ends. Were its lease to end with the first that is
lost, the others would be idle, and another pod would be given what that container has open.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterable
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
from mig_agent.core.model import Generation, GpuUuid, Instance, InstanceState, Lease, LeaseId
from mig_agent.engine.callers import Caller
from mig_agent.engine.context import Context
from mig_agent.engine.idempotency import RequestLog
from mig_agent.engine.journal import Transaction
from mig_agent.engine.state import State


def leases_with_devices_elsewhere(context: Context, gpu: GpuUuid) -> frozenset[LeaseId]:
    """The leases of pods that have something on other GPUs than this one, those that are not managed now included."""
    state = context.state
    return frozenset(
        lease.id
        for lease in state.leases.values()
        if lease.owner.is_bound
        and any(_survives_elsewhere(context, lease.id, generation, gpu) for generation in lease.instances)
    )


def leases_without_answering_devices(state: State) -> frozenset[LeaseId]:
    """The leases that have something on a GPU that has not answered since the start, or is not managed now."""
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
    """What is told when the lease of an instance goes on without it; None where it has none."""
    lease = context.state.leases.get(instance.lease) if instance.lease is not None else None
    if lease is None:
        return None
    number = lease.instances.index(instance.generation)
    text = lease.owner.device_text(number)
    device = f" ({text})" if text else ""
    return context.journal.event(
        EventKind.LEASE_REDUCED,
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
"""For a client whose connection broke while it was being served, to be back."""
NOTE_SECONDS = 0.5
"""After which it is recorded that a lease is not confirmed yet. Most are by then, and cost no record."""
RETRY_SECONDS = 5.0
"""Until an end that could not be recorded is tried again."""


class StreamEnd(Enum):
    """How the stream of a held lease ended."""

    CLOSED = "closed"
    """By its client, which is still there."""
    HUNG_UP = "hung up"
    """With its client's connection, which the client or its kernel has ended."""
    DROPPED = "dropped"
    """By the network, or by this agent: the client may not know yet, and wants its lease."""


class EndReason(StrEnum):
    """Why a lease ended by this agent's doing. The words are in the ledger; never rename one.

    What recovery finds (`core.recovery`) has its own: `reboot`, `gpu-reset`, `instance-lost`.
    """

    RELEASED = "released"
    EXPIRED = "expired"
    PROCESS_ENDED = "process-ended"
    STREAM_ENDED = "stream-ended"
    UNDELIVERED = "undelivered"
    GPU_LOST = "gpu-lost"
    POD_ENDED = "pod-ended"
    FORCED = "forced"


END_MESSAGES = {
    EndReason.EXPIRED: "its time is over",
    EndReason.PROCESS_ENDED: "its process has ended",
    EndReason.STREAM_ENDED: "nobody held it any more",
    EndReason.UNDELIVERED: "its client never confirmed that it had the answer",
    EndReason.GPU_LOST: "its GPU was lost",
    EndReason.POD_ENDED: "its pod has ended",
    "reboot": "the machine was rebooted",
    "instance-lost": "its instance is gone",
    "gpu-reset": "its GPU was reset, or somebody destroyed all that was on it",
}


@dataclass(slots=True)
class _Watches:
    """What may end one lease by itself."""

    deadline: Timer | None = None
    grace: Timer | None = None
    confirm_by: float | None = None
    """When `grace` ends, where the lease waits for its client to confirm it."""
    note: Timer | None = None
    """When it is recorded that the lease is not confirmed."""
    overdue: bool = False
    """Whether that time has passed, and nobody has asked again since."""
    process: ProcessWatch | None = None
    client: ProcessWatch | None = None
    """The one whose connection has ended."""

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

    def __init__(self, context: Context, memory: RequestLog) -> None:
        self._context = context
        self._memory = memory
        self._watches: dict[LeaseId, _Watches] = {}
        self._ending: dict[LeaseId, asyncio.Future[None]] = {}
        self._settling: dict[LeaseId, asyncio.Future[None]] = {}
        """Pending writes of leases that were renewed or bound."""
        self._noted: set[LeaseId] = set()
        """Leases of which the ledger says, or may say, that they are not confirmed."""

    def remember_unconfirmed(self, leases: Iterable[LeaseId]) -> None:
        """Take over what an agent before this one has recorded, before any of these leases begins."""
        self._noted.update(leases)

    def is_unconfirmed(self, lease: LeaseId) -> bool:
        """Whether the ledger says that a lease is not confirmed."""
        return lease in self._noted

    def begin(self, lease: Lease, *, delivered: bool) -> None:
        """Start the timers and watches of an active lease.

        A lease whose answer may not have reached the client ends after a grace period, unless its owner is bound.
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

    def delivered(self, lease: LeaseId) -> None:
        """Record in memory that the client has the answer, or is attached again: no time of grace runs any more."""
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
        """Return when the lease ends unless its client confirms it before; None where that is not awaited."""
        watches = self._watches.get(lease)
        return None if watches is None else watches.confirm_by

    def asked_again(self, lease: LeaseId) -> None:
        """Give the client of a lease that is not confirmed its whole time again: it is told the answer once more."""
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
        """Record at once, and not after a moment, that a lease is not confirmed: its client has gone away."""
        watches = self._watches.get(lease)
        if watches is not None and watches.note is not None:
            watches.note.cancel()
            watches.note = None
            self._note(lease)

    def _note(self, lease: LeaseId) -> None:
        """Record that a lease is not confirmed: who starts after this agent cannot know it otherwise."""
        if lease in self._noted:
            return
        self._noted.add(lease)
        written = self._context.journal.write((AwaitConfirmation(lease),))
        # Where it cannot be recorded the lease ends all the same, unless the agent does before.
        written.add_done_callback(lambda done: done.cancelled() or done.exception())

    def _forgotten(self, lease: LeaseId) -> tuple[Change, ...]:
        """What takes back that a lease is not confirmed, where that was recorded."""
        return (ForgetConfirmation(lease),) if lease in self._noted else ()

    async def confirm(self, lease: LeaseId) -> None:
        """Let a lease stay whose client has its answer. Raises LedgerError where that has to be recorded and is not."""
        if lease not in self._noted:
            self.delivered(lease)
            return

        def apply() -> None:
            self._noted.discard(lease)
            self.delivered(lease)

        written = self._context.journal.write(self._forgotten(lease), (), apply)
        self.settle(lease, written)
        await asyncio.shield(written)

    def settle(self, lease: LeaseId, written: asyncio.Future[None]) -> None:
        """Note that a renewal or the binding of a lease is being recorded."""
        self._settling[lease] = written
        written.add_done_callback(lambda _: self._settling.pop(lease, None))

    async def settled(self, lease: LeaseId) -> None:
        """Wait until pending writes of the lease (renewal, binding, end) have been committed or have failed."""
        while (written := self._settling.get(lease) or self._ending.get(lease)) is not None:
            await asyncio.wait((written,))

    def bound(self, lease: LeaseId) -> None:
        """Stop the timers and watches of a lease that was bound: from now on only its owner's end ends it."""
        watches = self._watches.pop(lease, None)
        if watches is not None:
            watches.close()

    async def stream_ended(self, lease: LeaseId, how: StreamEnd, client: int | None) -> None:
        """The stream of a held lease has ended. `client` is the client's process, as the kernel told it."""
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
        """It stays a while, to be attached again."""
        self._to_be_attached(lease, self._context.settings.grace_seconds)

    def _hung_up(self, lease: LeaseId, pid: int | None) -> None:
        """The client is back within moments, or never; never, if its process is gone."""
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

    def left(self, lease: LeaseId) -> None:
        """Its client went away before it had its answer: it is back on another connection within moments, or never."""
        watches = self._watches.get(lease)
        if watches is not None and watches.grace is not None:
            watches.grace.cancel()
            seconds = min(RECONNECT_GRACE_SECONDS, self._context.settings.grace_seconds)
            watches.grace = self._later(lease, seconds, EndReason.STREAM_ENDED)

    async def renew(self, lease: Lease, expires_at: float | None, caller: Caller) -> Lease:
        """Gives it another deadline. Raises LedgerError."""
        state = self._context.state
        words = "without a deadline" if expires_at is None else f"for {expires_at - self._context.clock.now():.0f} s"
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
                self.delivered(lease.id)  # whoever renews a lease has its answer
            watches = self._watches.setdefault(lease.id, _Watches())
            if watches.deadline is not None:
                watches.deadline.cancel()
            watches.deadline = None if expires_at is None else self._deadline(lease.id, expires_at)

        changes = (RenewLease(lease.id, expires_at), *self._forgotten(lease.id))
        written = self._context.journal.write(changes, (event,), apply)
        # The former deadline may come meanwhile. Whoever waits may go away; what is recorded counts all the same.
        self.settle(lease.id, written)
        await asyncio.shield(written)
        return renewed

    async def end(
        self, lease: LeaseId, reason: str, *, by: str = "", why: str = "", caller: Caller | None = None
    ) -> None:
        """Ends a lease; nothing happens to one that has ended. Raises LedgerError, and then it stands.

        `by` says who released it, or `why` what ended it, in words, and `caller` who called for it.
        """
        under_way = self._ending.get(lease)
        if under_way is None:
            draft = Transaction(self._context.journal)
            self.draft_end(draft, lease, reason, by=by, why=why, caller=caller)
            if not draft:
                return
            under_way = self._ending[lease] = draft.write()
            under_way.add_done_callback(lambda _: self._ending.pop(lease, None))
        # Whoever waits for it may go away; the end comes all the same.
        await asyncio.shield(under_way)

    def draft_end(
        self,
        draft: Transaction,
        lease: LeaseId,
        reason: str,
        *,
        by: str = "",
        why: str = "",
        caller: Caller | None = None,
    ) -> None:
        """Puts the end of a lease into a record: its instances are idle then."""
        context = self._context
        known = context.state.leases.get(lease)
        if known is None or lease in draft.ended or lease in self._ending:
            return
        draft.ended.add(lease)
        now = context.clock.now()
        why = f"released by {by}" if by else why or END_MESSAGES.get(reason, reason)
        draft.changes.extend((EndLease(lease, now, reason), *self._forgotten(lease)))
        # What a restored ledger tells of may be another's by now.
        draft.changes += [DropInstance(each) for each in known.instances if context.state.is_doubtful(each)]
        draft.events.append(
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
            )
        )
        draft.applied.append(partial(self._ended, lease, now, reason))

    def close(self) -> None:
        """No lease ends by itself any more. Which are not confirmed is recorded, for the agent that comes next."""
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
                state.put(replace(instance, state=left, lease=None, since=at))
        known = state.leases.get(lease)
        if known is not None:
            self._context.patience.lease_ended(at - known.created_at)
        state.drop_lease(lease)
        self._noted.discard(lease)
        self._memory.ended(lease, at, reason)
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
        await self.settled(lease)
        known = self._context.state.leases.get(lease)
        watches = self._watches.get(lease)
        if reason is EndReason.UNDELIVERED and (watches is None or watches.grace is None or not watches.overdue):
            return  # meanwhile it was bound, its client has confirmed it, or has asked again
        if reason is EndReason.EXPIRED and known is not None:
            left = (known.expires_at or math.inf) - self._context.clock.now()
            if left > 0:
                return  # it was renewed meanwhile
        try:
            await self.end(lease, reason)
        except LedgerError:
            self._context.clock.call_later(RETRY_SECONDS, partial(self._end_soon, lease, reason))

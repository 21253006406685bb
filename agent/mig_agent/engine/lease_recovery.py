"""Recovery of leases: a holder presents the token of its lease after the ledger was lost or restored from a backup.

The token proves that its bearer was given the lease. That it was active, and with which devices, is known only from the
evidence beside the lost ledger; without that no lease is recovered.
"""

from __future__ import annotations

from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial

from mig_agent.adapters.ledger.lease_evidence import EvidentDevice, EvidentLease
from mig_agent.adapters.ledger.reader import RecordedLease
from mig_agent.adapters.ledger.records import PutInstance, PutLease, VoidEvidence
from mig_agent.core.errors import LedgerError, Reason, RefusedError, refuse
from mig_agent.core.events import EventKind
from mig_agent.core.model import Generation, GpuUuid, Holder, Instance, InstanceState, Lease, LeaseId, RequestId
from mig_agent.core.owner import TOKEN_OWNER
from mig_agent.core.quantities import counted, shown
from mig_agent.engine.callers import Caller
from mig_agent.engine.context import Context
from mig_agent.engine.idempotency import RequestLog
from mig_agent.engine.journal import Transaction, ledger_refusal
from mig_agent.engine.lifecycle import LeaseLifecycle
from mig_agent.engine.reconciler import Reconciler
from mig_agent.engine.results import Recovered

_ASK_AN_ADMINISTRATOR = "ask an administrator: `migctl adopt` makes what nobody counts on idle"
_NOT_LEASED = "its devices are not leased by it any more: stop what runs on them, and ask for a new lease"
_REQUEST_ID = "recovered-"
"""The prefix of a recovered lease's request id; its former id may belong to another lease by now."""
_HELD = "it was held by a stream, which has ended: it stays until it is released, so release it or give it a deadline"


class LeaseRecovery:
    """Recovers leases by their tokens. Not thread-safe; use from the event loop."""

    def __init__(
        self, context: Context, request_log: RequestLog, lifecycle: LeaseLifecycle, reconciler: Reconciler
    ) -> None:
        self._context = context
        self._request_log = request_log
        self._lifecycle = lifecycle
        self._reconciler = reconciler

    async def recover(self, lease: LeaseId, token: str, caller: Caller) -> Recovered:
        """Recover a lease, as `Manager.recover` describes. Raises RefusedError."""
        context = self._context
        if not context.tokens.matches(lease, token):
            raise refuse(
                Reason.WRONG_TOKEN,
                f"cannot recover lease {shown(lease)}: the token is not its token",
                "give the token that came with the lease: --token. Where the agent's token.key was lost with its "
                "ledger, earlier tokens are void: ask an administrator",
            )
        await self._lifecycle.wait_for_pending_commit(lease)
        there = self._there(lease, caller)
        if there is not None:
            return there
        former = self._former(lease, caller)
        context.driver_use.refuse_when_paused(f"recover lease {lease}")
        gpus = sorted({each.gpu for each in former.devices if each is not None})
        for gpu in gpus:
            self._refuse_silent(lease, gpu)
        with context.driver_use.inside():
            async with AsyncExitStack() as locks:
                for gpu in gpus:  # sorted: two who want the same ones do not wait for each other
                    await locks.enter_async_context(context.gpu_workers[gpu].lock)
                return await self._recover_locked(lease, gpus, caller)

    async def void_missing(self) -> None:
        """Void the leases whose devices are gone: a device with the same UUID may be created later."""
        state, transaction = self._context.state, Transaction(self._context.journal)
        for device in {each for lease in state.former.values() if not lease.void for each in lease.devices if each}:
            record = state.gpus.get(device.gpu)
            if record is None or record.lost or record.unreadable or record.hung:
                continue
            if not any(device.is_same_as(each) for each in record.instances.values()):
                transaction.changes.append(VoidEvidence(device.uuid, "is gone"))
                transaction.applied.append(partial(state.void_former, device.uuid, "is gone"))
        if transaction:
            await transaction.commit()

    # Inside

    async def _recover_locked(self, lease: LeaseId, gpus: list[GpuUuid], caller: Caller) -> Recovered:
        context = self._context
        for gpu in gpus:
            await self._reconciler.check_locked(gpu)  # what is on it at this moment
        # Meanwhile another call may have done it, or an administrator has adopted one of the instances.
        there = self._there(lease, caller)
        if there is not None:
            return there
        former = self._former(lease, caller)
        leased = self._devices(former)
        now = context.clock.now()
        tenant = former.lease.holder.tenant
        # Another number: what a restored ledger said of the former one is over.
        instances = [
            None
            if each is None
            else replace(
                each,
                generation=context.state.next_generation(),
                state=InstanceState.LEASED,
                lease=lease,
                since=now,
                last_tenant=tenant,
            )
            for each in leased
        ]
        owner = former.lease.owner
        made = replace(
            former.lease,
            request_id=RequestId(f"{_REQUEST_ID}{lease}"),
            instances=tuple(
                number if each is None else each.generation
                for number, each in zip(former.lease.instances, instances, strict=True)
            ),
            owner=owner.process or TOKEN_OWNER if owner.ends_with_stream else owner,
        )
        before = [each.generation for each in leased if each is not None]
        transaction = self._transaction(former, made, before, [each for each in instances if each is not None], caller)
        try:
            await transaction.commit()
        except LedgerError as error:
            raise ledger_refusal(error, f"recover lease {lease}") from error
        return Recovered(lease=made, anew=True, notes=_notes(former))

    def _there(self, lease: LeaseId, caller: Caller) -> Recovered | None:
        there = self._context.state.leases.get(lease)
        if there is None:
            return None
        _refuse_other_user(lease, there.holder, caller)
        return Recovered(lease=there, anew=False)

    def _former(self, lease: LeaseId, caller: Caller) -> EvidentLease:
        """Return the evidence of a lease. Raises RefusedError where the lease cannot be recovered."""
        context, what = self._context, f"cannot recover lease {lease}"
        former = context.state.former.get(lease)
        if former is None:
            remembered = self._request_log.of_lease(lease)
            if remembered is not None or context.state.doubt is None:
                raise refuse(Reason.LEASE_ENDED, f"{what}: it has ended", "ask for a new one")
            raise refuse(
                Reason.UNKNOWN_LEASE,
                f"{what}: it had ended when the ledger was lost, or nothing readable tells what it had",
                _ASK_AN_ADMINISTRATOR,
            )
        _refuse_other_user(lease, former.lease.holder, caller)
        if former.void:
            raise refuse(Reason.LEASE_ENDED, f"{what}: {former.void}", _NOT_LEASED)
        if not former.boot_id or former.boot_id != self._reconciler.boot_id:
            raise refuse(
                Reason.LEASE_ENDED, f"{what}: the machine was rebooted since, and no lease outlives that", _NOT_LEASED
            )
        deadline = former.lease.expires_at
        if deadline is not None and deadline <= context.clock.now():
            raise refuse(Reason.LEASE_ENDED, f"{what}: its time is over", _NOT_LEASED)
        conflict = former.lease.owner.conflict(each.owner for each in context.state.leases.values())
        if conflict:
            raise refuse(Reason.IN_USE, f"{what}: {conflict}", _NOT_LEASED)
        return former

    def _refuse_silent(self, lease: LeaseId, gpu: GpuUuid) -> None:
        record = self._context.state.gpus.get(gpu)
        why = "is not managed or does not answer" if record is None else record.lost or record.hung or record.unreadable
        if why:
            raise refuse(
                Reason.GPU_UNAVAILABLE, f"cannot recover lease {lease}: GPU {gpu}: {why}", "try again when it answers"
            )

    def _devices(self, former: EvidentLease) -> list[Instance | None]:
        """Return the instance of each device, None for one that the lease had lost before. Raises RefusedError."""
        found = [None if each is None else self._foreign(former.lease.id, each) for each in former.devices]
        if not any(found):
            raise refuse(
                Reason.LEASE_ENDED, f"cannot recover lease {former.lease.id}: all its devices were lost", _NOT_LEASED
            )
        return found

    def _foreign(self, lease: LeaseId, device: EvidentDevice) -> Instance:
        context, what = self._context, f"cannot recover lease {lease}: its device {device.uuid}"
        self._refuse_silent(lease, device.gpu)
        record = context.state.gpus[device.gpu]
        for each in record.instances.values():
            if not device.is_same_as(each):
                continue
            if each.state is not InstanceState.FOREIGN:
                other = None if each.lease is None else context.state.leases.get(each.lease)
                by = f", by {other.holder}" if other is not None else ""
                raise refuse(Reason.IN_USE, f"{what} is {each.state.value} meanwhile{by}", _NOT_LEASED)
            if not each.is_complete:
                raise refuse(Reason.LEASE_ENDED, f"{what} was taken apart", _NOT_LEASED)
            return each
        raise refuse(Reason.LEASE_ENDED, f"{what} is gone", _NOT_LEASED)

    def _transaction(
        self, former: EvidentLease, lease: Lease, before: list[Generation], instances: list[Instance], caller: Caller
    ) -> Transaction:
        context = self._context
        transaction = Transaction(context.journal)
        transaction.changes += [PutInstance(each) for each in instances]
        account = context.accounting.recovered_account(
            next((each for each in instances if each.generation == generation), None) for generation in lease.instances
        )
        transaction.changes.append(PutLease(lease, former.digest, account))
        places = ", ".join(map(context.place, instances))
        transaction.events.append(
            context.journal.event(
                EventKind.LEASE_RECOVERED,
                f"{lease.holder} got lease {lease.id} again by its token: {places}",
                gpu=instances[0].slot.gpu,
                lease=lease.id,
                holder=str(lease.holder),
                tenant=lease.holder.tenant,
                caller=caller,
                owner=lease.owner,
            )
        )
        transaction.applied.append(partial(self._apply, former, lease, before, instances))
        transaction.applied.append(partial(context.accounting.granted, lease, account))
        return transaction

    def _apply(self, former: EvidentLease, lease: Lease, before: list[Generation], instances: list[Instance]) -> None:
        state = self._context.state
        state.former.pop(lease.id, None)
        for number in before:
            state.drop(number)
        for each in instances:
            state.put(each)
        state.put_lease(lease)
        recorded = RecordedLease(lease=lease, digest=former.digest)
        self._request_log.granted(recorded)
        self._lifecycle.begin(lease, delivered=True)


def _notes(former: EvidentLease) -> tuple[str, ...]:
    lost = sum(each is None for each in former.devices)
    return (
        *((_HELD,) if former.lease.owner.ends_with_stream else ()),
        *((f"{counted(lost, 'device')} of it had been lost before",) if lost else ()),
    )


def _refuse_other_user(lease: LeaseId, holder: Holder, caller: Caller) -> None:
    """Raise RefusedError for another user than the holder; where either is unknown, the token suffices."""
    if caller.admin or caller.uid is None or holder.uid is None or caller.uid == holder.uid:
        return
    raise _not_permitted(lease)


def _not_permitted(lease: LeaseId) -> RefusedError:
    return refuse(
        Reason.NOT_PERMITTED,
        f"cannot recover lease {lease}: it is another user's",
        "the user who asked for it recovers it, or an administrator who has its token",
    )

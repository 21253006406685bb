"""Execution of repairs: the repairs of one GPU are committed as one record, then half-made instances are destroyed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import partial

from mig_agent.adapters.ledger.records import DropInstance, PutInstance, PutLastGeneration, VoidEvidence
from mig_agent.core.events import EventKind
from mig_agent.core.model import (
    Generation,
    Instance,
    InstanceState,
    Placement,
    Profile,
    Slot,
)
from mig_agent.core.observation import ObservedGpu, ObservedInstance
from mig_agent.core.recovery import (
    LIMIT_LOST,
    AdoptForeign,
    EndLostLease,
    EndShare,
    FinishDestroy,
    ForgetForeign,
    ForgetInstance,
    LoseDevice,
    MarkIdle,
    MarkLeased,
    Repair,
    UpdateIds,
)
from mig_agent.engine.context import Context
from mig_agent.engine.instances import InstanceDestroyer, Quarantine, StepFailedError
from mig_agent.engine.journal import Transaction
from mig_agent.engine.lifecycle import LeaseLifecycle, degraded_event
from mig_agent.engine.shares import Shares
from mig_agent.engine.state import GpuRecord


class Repairs:
    """Carries out the repairs that recovery returned.

    Not thread-safe; use from the event loop. Its methods are called with the lock of the GPU's worker held.
    """

    def __init__(
        self,
        context: Context,
        lifecycle: LeaseLifecycle,
        quarantine: Quarantine,
        destroyer: InstanceDestroyer,
        shares: Shares,
    ) -> None:
        self._context = context
        self._lifecycle = lifecycle
        self._quarantine = quarantine
        self._destroyer = destroyer
        self._shares = shares

    async def carry_out(self, record: GpuRecord, repairs: Iterable[Repair]) -> None:
        """Commit the repairs, then destroy half-made instances. Raises LedgerError: then nothing was changed."""
        transaction = Transaction(self._context.journal)
        left_over: list[FinishDestroy] = []
        shares: list[EndShare] = []
        for repair in repairs:
            if isinstance(repair, FinishDestroy):
                left_over.append(repair)
            elif isinstance(repair, EndShare):
                shares.append(repair)
                self._tell_lost(transaction, repair)
            else:
                self._put_down(transaction, record, repair)
        if transaction:
            await transaction.commit()
        for share in shares:
            known = self._known(share.generation)
            if known is not None:
                self._shares.end_soon(known)  # beside this: what enforces its limit may hang
        for each in left_over:
            await self._finish(record, each)

    def _tell_lost(self, transaction: Transaction, share: EndShare) -> None:
        instance = self._known(share.generation)
        if instance is not None and share.lost:
            transaction.events.append(
                self._context.journal.event(
                    EventKind.INSTANCE_LOST,
                    f"the limit of the {self._context.place(instance)} does not hold any more: {share.lost}",
                    instance=instance,
                    lease=instance.lease,
                    reason=LIMIT_LOST,
                )
            )

    def _put_down(self, transaction: Transaction, record: GpuRecord, repair: Repair) -> None:
        match repair:
            case EndLostLease(lease, reason):
                self._lifecycle.add_lease_end(transaction, lease, reason)
            case LoseDevice(_, generation, reason):
                self._lose(transaction, generation, reason)
            case ForgetInstance(generation, reason):
                self._forget(transaction, generation, reason)
            case ForgetForeign(generation):
                self._forget(transaction, generation, "")
            case AdoptForeign(_, observed):
                self._found(transaction, record, observed)
            case MarkIdle(generation):
                self._change(transaction, generation, InstanceState.IDLE)
            case MarkLeased(generation, _):
                self._change(transaction, generation, InstanceState.LEASED)
            case UpdateIds():
                self._update(transaction, repair)

    async def have_permanent(self, record: GpuRecord) -> None:
        """Add the device that a GPU always has, if it is missing: the GPU itself, without MIG mode. Raises LedgerError.

        It is foreign while the ledger is in doubt, which does not know then whether it is leased.
        """
        profile = next((each for each in record.layout.profiles if not each.kind.is_created), None)
        if profile is None or profile.kind.needs_mig_mode is not record.mode.current:
            return
        if any(not each.kind.is_created for each in record.instances.values()):
            return
        whole = Instance(
            slot=Slot(record.uuid, profile, profile.placements[0]),
            generation=self._context.state.next_generation(),
            state=InstanceState.IDLE if self._context.state.doubt is None else InstanceState.FOREIGN,
            uuid=record.uuid,
            since=self._context.clock.now(),
        )
        ours = whole.state is InstanceState.IDLE
        # As with any foreign instance, only its number is recorded.
        change = PutInstance(whole) if ours else PutLastGeneration(whole.generation)
        await self._context.journal.commit((change,), (), partial(self._context.state.put, whole))

    def _lose(self, transaction: Transaction, generation: int, reason: str) -> None:
        instance = self._known(generation)
        told = None if instance is None else degraded_event(self._context, instance, reason)
        if told is not None:
            transaction.events.append(told)

    def _forget(self, transaction: Transaction, generation: int, reason: str) -> None:
        state, journal = self._context.state, self._context.journal
        instance = self._known(generation)
        if instance is None:
            return
        transaction.changes.append(DropInstance(instance.generation))
        if instance.state is InstanceState.FOREIGN and state.former:
            transaction.changes.append(VoidEvidence(instance.uuid, "is gone"))
        begun = instance.state in {InstanceState.CREATING, InstanceState.DESTROYING}
        # A whole GPU without a lease only makes way for a GPU that is partitioned.
        if not begun and (instance.lease is not None or instance.kind.is_created):
            why = f" ({reason})" if reason else ""
            transaction.events.append(
                journal.event(
                    EventKind.INSTANCE_LOST,
                    f"{self._context.place(instance)} is gone{why}",
                    instance=instance,
                    lease=instance.lease,
                    reason=reason,
                )
            )

        def apply() -> None:
            state.drop(instance.generation)
            self._quarantine.forget(instance.generation)

        transaction.applied.append(apply)

    def _found(self, transaction: Transaction, record: GpuRecord, observed: ObservedInstance) -> None:
        context = self._context
        profile = record.layout.by_id.get(observed.profile_id)
        ours = profile is not None and self._may_take_over(observed)
        instance = Instance(
            slot=Slot(record.uuid, profile or _unknown(observed), observed.placement),
            generation=context.state.next_generation(),
            state=InstanceState.IDLE if ours else InstanceState.FOREIGN,
            gpu_instance_id=observed.gpu_instance_id,
            compute_instance_id=observed.compute_instances[0] if observed.compute_instances else None,
            uuid=observed.uuid,
            since=context.clock.now(),
        )
        # A foreign instance is not recorded, but its number shall not be given again.
        transaction.changes.append(PutInstance(instance) if ours else PutLastGeneration(instance.generation))
        words = "taken over" if ours else "made by somebody else, and left alone"
        if context.state.doubt is not None:
            words = "the ledger does not account for it, and it is left alone"
        transaction.events.append(
            context.journal.event(
                EventKind.INSTANCE_FOUND,
                f"found {context.place(instance)}: {words}",
                instance=instance,
            )
        )
        transaction.applied.append(partial(context.state.put, instance))

    def _may_take_over(self, observed: ObservedInstance) -> bool:
        # The setting is about other people's instances. After the ledger was lost an administrator has to say so.
        wanted = self._context.settings.foreign == "adopt" and self._context.state.doubt is None
        complete = len(observed.compute_instances) == 1 and bool(observed.uuid)
        return wanted and complete and not observed.processes

    async def take_over_unused(self, record: GpuRecord, observed: ObservedGpu) -> None:
        """Take over foreign instances that were in use when they were found and are free now. Raises LedgerError."""
        unused = {each.gpu_instance_id for each in observed.instances if self._may_take_over(each)}
        transaction = Transaction(self._context.journal)
        for each in record.instances.values():
            known = each.slot.profile.id in record.layout.by_id
            if each.state is InstanceState.FOREIGN and each.gpu_instance_id in unused and known:
                self._change(transaction, each.generation, InstanceState.IDLE)
                words = f"nobody uses {self._context.place(each)} any more: taken over"
                transaction.events.append(self._context.journal.event(EventKind.INSTANCE_FOUND, words, instance=each))
        if transaction:
            await transaction.commit()

    def _change(self, transaction: Transaction, generation: int, to: InstanceState) -> None:
        def apply() -> None:
            # As it is then: the same record may have ended its lease before this.
            instance = self._known(generation)
            if instance is not None:
                self._context.state.put(replace(instance, state=to, since=now, reason=""))

        now = self._context.clock.now()
        instance = self._known(generation)
        if instance is not None:
            transaction.changes.append(PutInstance(replace(instance, state=to, since=now)))
            transaction.applied.append(apply)

    def _update(self, transaction: Transaction, update: UpdateIds) -> None:
        state = self._context.state

        def changed(instance: Instance) -> Instance:
            return replace(
                instance,
                gpu_instance_id=update.gpu_instance_id,
                compute_instance_id=update.compute_instance_id,
                uuid=update.uuid,
            )

        def apply() -> None:
            instance = self._known(update.generation)
            if instance is not None:
                self._context.state.put(changed(instance))

        instance = self._known(update.generation)
        if instance is None:
            return
        if instance.state is not InstanceState.FOREIGN:
            transaction.changes.append(PutInstance(changed(instance)))
        elif state.former and instance.uuid != update.uuid:
            transaction.changes.append(VoidEvidence(instance.uuid, "is gone"))
        transaction.applied.append(apply)

    async def _finish(self, record: GpuRecord, left: FinishDestroy) -> None:
        """Destroy an instance that a crash or a failure left half-made; block it if that fails."""
        context = self._context
        known = self._known(left.generation)
        profile = record.layout.by_id.get(left.profile_id)
        if profile is None:
            return
        instance = Instance(
            slot=Slot(record.uuid, profile, left.placement),
            generation=known.generation if known is not None else context.state.next_generation(),
            state=InstanceState.DESTROYING,
            gpu_instance_id=left.gpu_instance_id,
            since=context.clock.now(),
        )
        context.state.put(instance)
        try:
            await self._destroyer.destroy(instance)
        except StepFailedError as failed:
            current = self._known(instance.generation)
            if current is not None and current.state is not InstanceState.BLOCKED:
                self._quarantine.block(instance, f"what was left of it cannot be removed: {failed.error}")
            return
        event = context.journal.event(
            EventKind.INSTANCE_DESTROYED,
            f"removed {context.place(instance)}, which was only half made",
            instance=instance,
            reason="half-made",
        )
        await context.journal.commit(
            (DropInstance(instance.generation),), (event,), partial(context.state.drop, instance.generation)
        )

    def _known(self, generation: int) -> Instance | None:
        return self._context.state.instance(Generation(generation))


def _unknown(observed: ObservedInstance) -> Profile:
    """Return a stand-in for a profile that the layout does not list."""
    placement: Placement = observed.placement
    return Profile(
        id=observed.profile_id,
        name=f"profile {observed.profile_id}",
        compute_slices=0,
        memory_slices=placement.size,
        memory_mib=0,
        placements=(placement,),
    )

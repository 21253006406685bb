"""Adoption: an administrator declares that no lease has the instances that the ledger does not account for."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import partial

from mig_agent.adapters.ledger.records import DropDoubt, PutInstance
from mig_agent.core.errors import LedgerError, Reason, refuse
from mig_agent.core.events import EventKind
from mig_agent.core.model import Generation, Instance, InstanceState
from mig_agent.engine.callers import Caller
from mig_agent.engine.context import Context
from mig_agent.engine.journal import Transaction, ledger_refusal
from mig_agent.engine.reconciler import Reconciler
from mig_agent.engine.state import GpuRecord


class Adoption:
    """Turns foreign instances into idle ones of the agent. Not thread-safe; use from the event loop."""

    def __init__(self, context: Context, reconciler: Reconciler) -> None:
        self._context = context
        self._reconciler = reconciler

    async def adopt(
        self, gpus: Sequence[str], uuids: Sequence[str], caller: Caller, *, everything: bool
    ) -> tuple[Instance, ...]:
        """Adopt the foreign instances of some GPUs, those with these UUIDs, or all; the instances as they are then.

        One on which a process is found is blocked until the process ends. Raises RefusedError.
        """
        context = self._context
        context.driver_use.refuse_when_paused("adopt instances")
        records = {each.uuid: each for each in map(context.gpu_named, gpus)}
        found = {each.uuid for gpu in context.state.gpus.values() for each in gpu.instances.values() if _may_be(each)}
        for uuid in uuids:
            if uuid not in found:
                raise refuse(
                    Reason.INVALID_REQUEST,
                    f"cannot adopt {uuid}: no foreign instance has this UUID",
                    "see `migctl status`",
                )
        adopted: list[Instance] = []
        try:
            with context.driver_use.inside():
                for record in tuple(context.state.gpus.values()):
                    whole = everything or record.uuid in records
                    adopted += await self._adopt_on(record, None if whole else set(uuids), caller)
            if everything:
                await self._settle(caller)
        except LedgerError as error:
            raise ledger_refusal(error, "adopt instances") from error
        context.state.capacity_freed.emit()
        return tuple(adopted)

    async def _adopt_on(self, record: GpuRecord, uuids: Collection[str] | None, caller: Caller) -> list[Instance]:
        context, state = self._context, self._context.state
        adopted: list[Generation] = []
        worker = context.gpu_workers[record.uuid]
        if worker.hung or record.lost:
            return []
        async with worker.lock:
            transaction = Transaction(context.journal)
            for each in tuple(record.instances.values()):
                if not _may_be(each) or not _is_known(record, each) or (uuids is not None and each.uuid not in uuids):
                    continue
                ours = replace(
                    each,
                    # Another number: what a restored ledger said of the former one is over.
                    generation=state.next_generation(),
                    state=InstanceState.IDLE,
                    since=context.clock.now(),
                    last_tenant="",
                )
                transaction.changes.append(PutInstance(ours))
                words = f"{caller} adopted {context.place(ours)}"
                event = context.journal.event(EventKind.INSTANCE_FOUND, words, instance=ours, caller=caller)
                transaction.events.append(event)
                transaction.applied += [partial(state.put, ours), partial(state.drop, each.generation)]
                adopted.append(ours.generation)
            if transaction:
                await transaction.commit()
                await self._reconciler.check_locked(record.uuid)  # blocks those that are in use
        return [each for each in record.instances.values() if each.generation in adopted]

    async def _settle(self, caller: Caller) -> None:
        context, state = self._context, self._context.state
        if state.doubt is None:
            return

        words = f"{caller} settled what the ledger did not account for: it {state.doubt.why}"
        event = context.journal.event(EventKind.LEDGER_RECOVERED, words, caller=caller)
        await context.journal.commit((DropDoubt(),), (event,), state.settle_doubt)


def _may_be(instance: Instance) -> bool:
    """Return whether an instance is foreign and complete: an incomplete one is still being created by others."""
    return instance.state is InstanceState.FOREIGN and instance.is_complete and bool(instance.uuid)


def _is_known(record: GpuRecord, instance: Instance) -> bool:
    return instance.slot.profile.id in record.layout.by_id

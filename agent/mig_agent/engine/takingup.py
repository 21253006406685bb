"""The first reading of all GPUs: ledger and hardware are made to agree before anything is served.

Done when the agent starts, and again when it resumes. One that starts paused shows what it knew last.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress

from mig_agent.adapters.ledger.gpu_cache import gpu_of, text_of
from mig_agent.adapters.ledger.reader import Contents
from mig_agent.adapters.ledger.records import DropInstance, PutGpus
from mig_agent.adapters.nvml import Observation
from mig_agent.core.errors import ConfigError, DriverError, LedgerError
from mig_agent.core.events import EventKind
from mig_agent.core.observation import ObservedGpu
from mig_agent.core.recovery import REBOOT
from mig_agent.engine.context import Context
from mig_agent.engine.discovery import Discovery, selected
from mig_agent.engine.journal import Transaction
from mig_agent.engine.lease_recovery import LeaseRecovery
from mig_agent.engine.lifecycle import EndReason, LeaseLifecycle, degraded_event, leases_with_devices_elsewhere
from mig_agent.engine.reconciler import Reconciler
from mig_agent.engine.state import GpuRecord


class DriverStartup:
    """Reads all GPUs when the agent starts, and again when it resumes. Use from the event loop."""

    def __init__(
        self,
        context: Context,
        contents: Contents,
        *,
        lifetimes: LeaseLifecycle,
        reconciler: Reconciler,
        discovery: Discovery,
        recovery: LeaseRecovery,
    ) -> None:
        """`contents` is the ledger as it was opened."""
        self._context = context
        self._contents = contents
        self._lifetimes = lifetimes
        self._reconciler = reconciler
        self._discovery = discovery
        self._recovery = recovery
        self._read = False
        self._remembered = dict(contents.gpus)

    async def take_up(self) -> None:
        """Read all GPUs. Raises DriverError where the driver does not answer, and what `start` raises."""
        if self._read:
            await self._discovery.count()  # a driver that does not answer loses nobody a lease
            await self._reconciler.compare_all()
            await self._reconciler.run_followups()
        else:
            await self._take_up_first()
            self._read = True
        await self._recovery.void_missing()
        await self.remember()

    async def without_driver(self) -> None:
        """The node as it was last known, for an agent that starts paused. Raises LedgerError."""
        # Text that another version wrote in another way: then the GPU is not shown.
        known: list[ObservedGpu] = []
        for uuid, text in self._remembered.items():
            with suppress(ValueError, KeyError, TypeError):
                known.append(gpu_of(uuid, text))
        for each in selected(known, self._context.settings.gpus):
            self._discovery.add(each)
            self._discovery.load_instances(each.uuid)
        await self._end_leases_of_earlier_boot()

    async def remember(self) -> None:
        """Writes the GPUs down as they are now, where that is not what is written. What cannot be is no harm."""
        gpus = {record.uuid: text_of(_as_observed(record)) for record in self._context.state.gpus.values()}
        if gpus != self._remembered:
            with suppress(LedgerError):
                await self._context.journal.write((PutGpus(gpus),))
                self._remembered = gpus

    async def _take_up_first(self) -> None:
        context, discovery = self._context, self._discovery
        observation = await discovery.observe()
        managed = _selected(observation, context.settings.gpus)
        for observed in managed:
            discovery.lock(observed.index, observed.uuid)
        for uuid in context.state.gpus.keys() - {observed.uuid for observed in managed}:
            context.state.remove_gpu(uuid)
            context.lanes.pop(uuid).close()
        for observed in managed:
            record = context.state.gpus.get(observed.uuid)
            if record is None:
                discovery.add(observed)
                discovery.load_instances(observed.uuid)
            else:
                record.layout = self._reconciler.layout_of(observed)
                context.state.renumber(observed.uuid, observed.index)
        await self._recover(managed, everything=not observation.failed)
        discovery.note_missing(observation.failed)
        self._reconciler.follow_up(discovery.look)

    async def _recover(self, managed: list[ObservedGpu], *, everything: bool) -> None:
        context = self._context
        for observed in managed:
            try:
                await self._reconciler.compare(context.state.gpus[observed.uuid], observed)
            except DriverError as error:
                await self._reconciler.unread(observed.uuid, error)
        if everything and not context.settings.gpus:
            await self._end_leases_on_removed_gpus()
        await self._end_leases_of_earlier_boot()

    async def _end_leases_on_removed_gpus(self) -> None:
        """End leases on GPUs that are gone: all GPUs of the machine were read, and these are not among them."""
        context = self._context
        draft = Transaction(context.journal)
        for instance in self._contents.instances:
            gpu = instance.slot.gpu
            if gpu not in context.state.gpus:
                draft.changes.append(DropInstance(instance.generation))
                context.state.unmanaged.pop(instance.generation, None)
                if instance.lease is None:
                    continue
                told = degraded_event(context, instance, EndReason.GPU_LOST)
                if told is not None and instance.lease in leases_with_devices_elsewhere(context, gpu):
                    draft.events.append(told)
                else:
                    self._lifetimes.draft_end(draft, instance.lease, EndReason.GPU_LOST)
        for lease in context.state.leases.values():
            if not any(True for _ in context.state.instances_of(lease.id)):
                self._lifetimes.draft_end(draft, lease.id, "instance-lost")
        if draft:
            await draft.write()

    async def _end_leases_of_earlier_boot(self) -> None:
        reconciler = self._reconciler
        if self._contents.boot_id not in {"", reconciler.boot_id_now()}:
            await self._end_all_leases()
        await reconciler.adopt_boot_id(reconciler.boot_id_now())

    async def _end_all_leases(self) -> None:
        """End all leases, also on GPUs that are not managed now, or do not answer yet: no instance outlives a boot."""
        context = self._context
        draft = Transaction(context.journal)
        for lease in tuple(context.state.leases):
            self._lifetimes.draft_end(draft, lease, REBOOT)
        partitioned = set()
        for instance in self._contents.instances:
            if instance.slot.gpu not in context.state.gpus:
                draft.changes.append(DropInstance(instance.generation))
            elif not instance.slot.profile.is_whole_gpu:
                partitioned.add(instance.slot.gpu)
        for uuid in partitioned:
            record = context.state.gpus[uuid]
            if not record.mode.current:
                words = f"GPU {record.index} lost its MIG mode with the reboot; {record.reason}"
                draft.events.append(context.journal.event(EventKind.GPU_MODE_CHANGED, words, gpu=uuid))
        if draft:
            await draft.write()


def _as_observed(record: GpuRecord) -> ObservedGpu:
    layout = record.layout
    return ObservedGpu(
        index=record.index,
        uuid=record.uuid,
        minor=record.minor or 0,
        model=layout.model,
        memory_mib=layout.memory_mib,
        mode=record.mode,
        layout=layout if record.mode.current else None,
        instances=(),
    )


def _selected(observation: Observation, names: Iterable[str]) -> list[ObservedGpu]:
    wanted = tuple(names)
    for name in wanted:
        # Who does not answer may be any of those that are named.
        if not observation.failed and not selected(observation.gpus, (name,)):
            there = ", ".join(f"{gpu.index} ({gpu.uuid})" for gpu in observation.gpus) or "none"
            raise ConfigError(
                f"cannot manage GPU {name}: there is no such GPU", f"the GPUs of this machine are {there}"
            )
    return selected(observation.gpus, wanted)

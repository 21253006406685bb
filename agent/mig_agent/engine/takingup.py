"""Taking the GPUs up: what the ledger says and what the hardware shows, made to agree before anything is served.

At the start, and again when an agent goes on that was paused. One that starts paused shows what it knew last.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress

from mig_agent.adapters.ledger.gpu_cache import gpu_of, text_of
from mig_agent.adapters.ledger.records import DropInstance, PutGpus
from mig_agent.adapters.nvml import Observation
from mig_agent.core.errors import ConfigError, DriverError, LedgerError
from mig_agent.core.events import EventKind
from mig_agent.core.observation import ObservedGpu
from mig_agent.core.recovery import REBOOT
from mig_agent.engine.discovery import Discovery, add_gpu, load_instances, selected
from mig_agent.engine.journal import Transaction
from mig_agent.engine.lifecycle import EndReason, degraded_event, leases_with_devices_elsewhere
from mig_agent.engine.parts import Parts
from mig_agent.engine.state import GpuRecord


class DriverStartup:
    """Belongs to the event loop."""

    def __init__(self, parts: Parts, newcomers: Discovery) -> None:
        self._parts = parts
        self._newcomers = newcomers
        self._read = False
        self._remembered = dict(parts.ledger.contents.gpus)

    async def take_up(self) -> None:
        """Reads all of it. Raises DriverError where the driver does not answer, and what `start` raises."""
        parts = self._parts
        if self._read:
            await self._newcomers.count()  # a driver that does not answer loses nobody a lease
            await parts.observer.compare_all()
            for each in parts.observer.also:
                await each()
        else:
            await self._take_up_first()
            self._read = True
        await self._parts.recovering.void_missing()
        await self.remember()

    async def without_driver(self) -> None:
        """The node as it was last known, for an agent that starts paused. Raises LedgerError."""
        parts = self._parts
        # Text that another version wrote in another way: then the GPU is not shown.
        known: list[ObservedGpu] = []
        for uuid, text in self._remembered.items():
            with suppress(ValueError, KeyError, TypeError):
                known.append(gpu_of(uuid, text))
        for each in selected(known, parts.context.settings.gpus):
            add_gpu(parts, each)
            load_instances(parts, each.uuid)
        await _end_what_a_reboot_took(parts)

    async def remember(self) -> None:
        """Writes the GPUs down as they are now, where that is not what is written. What cannot be is no harm."""
        gpus = {record.uuid: text_of(_as_observed(record)) for record in self._parts.context.state.gpus.values()}
        if gpus != self._remembered:
            with suppress(LedgerError):
                await self._parts.context.journal.write((PutGpus(gpus),))
                self._remembered = gpus

    async def _take_up_first(self) -> None:
        parts = self._parts
        state = parts.context.state
        observation = await self._newcomers.observe()
        managed = _selected(observation, parts.context.settings.gpus)
        for observed in managed:
            self._newcomers.claim(observed.index, observed.uuid)
        for uuid in state.gpus.keys() - {observed.uuid for observed in managed}:
            state.remove_gpu(uuid)
            parts.context.lanes.pop(uuid).close()
        for observed in managed:
            record = state.gpus.get(observed.uuid)
            if record is None:
                add_gpu(parts, observed)
                load_instances(parts, observed.uuid)
            else:
                record.layout = parts.observer.layout_of(observed)
                state.renumber(observed.uuid, observed.index)
        await _recover(parts, managed, everything=not observation.failed)
        self._newcomers.note_missing(observation.failed)
        parts.observer.also.append(self._newcomers.look)


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


async def _recover(parts: Parts, managed: list[ObservedGpu], *, everything: bool) -> None:
    context, observer = parts.context, parts.observer
    for observed in managed:
        try:
            await observer.compare(context.state.gpus[observed.uuid], observed)
        except DriverError as error:
            await observer.unread(observed.uuid, error)
    if everything and not context.settings.gpus:
        await _end_what_is_nowhere(parts)
    await _end_what_a_reboot_took(parts)


async def _end_what_is_nowhere(parts: Parts) -> None:
    """All GPUs of the machine were read: what is recorded of others was on a GPU that is gone."""
    context = parts.context
    draft = Transaction(context.journal)
    for instance in parts.ledger.contents.instances:
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
                parts.lifetimes.draft_end(draft, instance.lease, EndReason.GPU_LOST)
    for lease in context.state.leases.values():
        if not any(True for _ in context.state.instances_of(lease.id)):
            parts.lifetimes.draft_end(draft, lease.id, "instance-lost")
    if draft:
        await draft.write()


async def _end_what_a_reboot_took(parts: Parts) -> None:
    observer = parts.observer
    if parts.ledger.contents.boot_id not in {"", observer.boot_id_now()}:
        await _end_what_was_before_the_boot(parts)
    await observer.adopt_boot_id(observer.boot_id_now())


async def _end_what_was_before_the_boot(parts: Parts) -> None:
    """Also on GPUs that are not managed now, or do not answer yet: no instance outlives a boot."""
    context = parts.context
    draft = Transaction(context.journal)
    for lease in tuple(context.state.leases):
        parts.lifetimes.draft_end(draft, lease, REBOOT)
    partitioned = set()
    for instance in parts.ledger.contents.instances:
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

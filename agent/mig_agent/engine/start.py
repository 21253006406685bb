"""Starting: what the ledger says, what the hardware shows, made to agree before anything is served."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import replace

from mig_agent.adapters.clock import Clock
from mig_agent.adapters.host import Host
from mig_agent.adapters.ledger import Ledger
from mig_agent.adapters.ledger_changes import DropInstance
from mig_agent.adapters.nvml import Driver, Observation
from mig_agent.adapters.tokens import KEY_FILE, Tokens
from mig_agent.core.catalog import Catalog, reconcile_layout
from mig_agent.core.errors import ConfigError, DriverError, DriverErrorKind
from mig_agent.core.event import EventKind
from mig_agent.core.model import Instance, Slot
from mig_agent.core.observed import ObservedGpu
from mig_agent.core.policy import Policy
from mig_agent.engine.context import Context, NoTelemetry, Telemetry
from mig_agent.engine.draft import Draft
from mig_agent.engine.events import Events
from mig_agent.engine.journal import Journal
from mig_agent.engine.lanes import Lane
from mig_agent.engine.lifetimes import EndReason
from mig_agent.engine.parts import Parts, wire
from mig_agent.engine.settings import EngineSettings
from mig_agent.engine.state import GpuRecord, State
from mig_agent.engine.tasks import Tasks
from mig_agent.engine.threads import CallThread

RESTART_REVISIONS = 1000
"""Left out at a restart, so that no revision is given twice even where the last ones could not be recorded."""


async def start(
    *,
    driver: Driver,
    ledger: Ledger,
    host: Host,
    catalog: Catalog,
    clock: Clock,
    settings: EngineSettings,
    telemetry: Telemetry | None = None,
) -> Parts:
    """The parts of an engine that has recovered and is ready to serve.

    Raises DriverError where the driver does not answer, LedgerError where the ledger cannot be written, ConfigError
    where the settings name GPUs that are not there or the tokens' key cannot be used.
    """
    contents = ledger.contents
    state = State(settings.node, contents.last_revision + RESTART_REVISIONS, contents.last_generation)
    events = Events()
    events.begin(state.revision)
    context = Context(
        driver=driver,
        host=host,
        catalog=catalog,
        clock=clock,
        settings=settings,
        policy=Policy(creation_cost=settings.creation_cost),
        tokens=Tokens.load_or_make(ledger.path.with_name(KEY_FILE)),
        telemetry=telemetry or NoTelemetry(),
        state=state,
        events=events,
        journal=Journal(ledger, state, events, clock),
        tasks=Tasks(),
        aside=CallThread("aside"),
    )
    parts = wire(context, ledger)
    observation = await _observe(context)
    managed = _selected(observation, settings.gpus)
    for observed in managed:
        _add_gpu(parts, observed)
    _load(parts)
    await _recover(parts, managed, everything=not observation.failed)
    now = clock.now()
    for each in contents.leases:
        lease = state.leases.get(each.lease.id)
        if lease is not None:
            # Whether its answer arrived is not known: one that did must not be lost. A stream did not outlive us.
            parts.lifetimes.begin(lease, each.pid_started, delivered=not lease.hold)
    parts.started_at = now
    started = context.journal.event(
        EventKind.AGENT_STARTED, f"the agent started with {len(managed)} GPUs and {len(state.leases)} leases"
    )
    await context.journal.write((), (started,))
    parts.background.append(asyncio.get_running_loop().create_task(parts.observer.run(), name="observer"))
    if settings.listen_to_driver:
        parts.listening.start()
    return parts


async def _observe(context: Context) -> Observation:
    deadline = context.settings.call_deadline_seconds
    reading = context.aside.run(context.driver.observe)
    try:
        return await asyncio.wait_for(reading, deadline)
    except TimeoutError as error:
        raise DriverError(
            DriverErrorKind.TIMEOUT, "nvmlDeviceGetCount", detail=f"the GPUs could not be read in {deadline:g} s"
        ) from error


def _selected(observation: Observation, names: Iterable[str]) -> list[ObservedGpu]:
    wanted = tuple(names)
    if not wanted:
        return list(observation.gpus)
    for name in wanted:
        if not any(name in {str(gpu.index), gpu.uuid} for gpu in observation.gpus):
            there = ", ".join(f"{gpu.index} ({gpu.uuid})" for gpu in observation.gpus) or "none"
            raise ConfigError(
                f"cannot manage GPU {name}: there is no such GPU", f"the GPUs of this machine are {there}"
            )
    return [gpu for gpu in observation.gpus if str(gpu.index) in wanted or gpu.uuid in wanted]


def _add_gpu(parts: Parts, observed: ObservedGpu) -> None:
    context, settings = parts.context, parts.context.settings
    record = GpuRecord(
        index=observed.index,
        uuid=observed.uuid,
        layout=parts.observer.layout_of(observed),
        mode=observed.mode,
        minor=observed.minor,
        cordon=parts.ledger.contents.cordons.get(observed.uuid),
    )
    context.state.add_gpu(record)
    context.lanes[observed.uuid] = Lane(
        observed.uuid,
        observed.index,
        clock=context.clock,
        deadline=settings.call_deadline_seconds,
        on_hung=parts.observer.hung,
        on_answered=parts.observer.answered,
    )
    from_file = context.catalog.layout(observed.model, observed.memory_mib)
    for words in reconcile_layout(observed.layout, from_file)[1]:
        context.journal.mention(context.journal.event(EventKind.PROFILE_DIFFERS, words, gpu=observed.uuid))


def _load(parts: Parts) -> None:
    """The ledger's instances and leases, as they were recorded."""
    state, contents = parts.context.state, parts.ledger.contents
    for each in contents.leases:
        if each.ended_at is None:
            state.put_lease(each.lease)
    for instance in contents.instances:
        record = state.gpus.get(instance.slot.gpu)
        if record is not None:
            state.put(_with_whole_profile(instance, record))


def _with_whole_profile(instance: Instance, record: GpuRecord) -> Instance:
    """The record alone does not tell engines and other placements of the profile."""
    profile = record.layout.by_id.get(instance.slot.profile.id)
    if profile is None:
        return instance
    return replace(instance, slot=Slot(record.uuid, profile, instance.slot.placement))


async def _recover(parts: Parts, managed: list[ObservedGpu], *, everything: bool) -> None:
    context, observer = parts.context, parts.observer
    for observed in managed:
        try:
            await observer.compare(context.state.gpus[observed.uuid], observed)
        except DriverError as error:
            await observer.unread(observed.uuid, error)
    if everything and not context.settings.gpus:
        await _end_what_is_nowhere(parts)
    await observer.adopt_boot_id(observer.boot_id_now())


async def _end_what_is_nowhere(parts: Parts) -> None:
    """All GPUs of the machine were read: what is recorded of others was on a GPU that is gone."""
    context = parts.context
    draft = Draft(context.journal)
    for instance in parts.ledger.contents.instances:
        if instance.slot.gpu not in context.state.gpus:
            draft.changes.append(DropInstance(instance.generation))
            if instance.lease is not None:
                parts.lifetimes.draft_end(draft, instance.lease, EndReason.GPU_LOST)
    for lease in context.state.leases.values():
        if not any(True for _ in context.state.instances_of(lease.id)):
            parts.lifetimes.draft_end(draft, lease.id, "instance-lost")
    if draft:
        await draft.write()

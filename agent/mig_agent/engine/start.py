"""Starting: what the ledger says, what the hardware shows, made to agree before anything is served."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from mig_agent.adapters.clock import Clock
from mig_agent.adapters.host import Host
from mig_agent.adapters.ledger import Ledger
from mig_agent.adapters.ledger_changes import DropInstance
from mig_agent.adapters.nvml import Driver, Observation
from mig_agent.adapters.tokens import KEY_FILE, Tokens
from mig_agent.core.catalog import Catalog
from mig_agent.core.errors import ConfigError, DriverError
from mig_agent.core.event import Event, EventKind
from mig_agent.core.observed import ObservedGpu
from mig_agent.core.patience import Patience
from mig_agent.core.policy import Policy, Reuse
from mig_agent.core.recovery import REBOOT
from mig_agent.engine.context import Context, NoTelemetry, Telemetry
from mig_agent.engine.draft import Draft
from mig_agent.engine.events import Events
from mig_agent.engine.journal import Journal
from mig_agent.engine.lifetimes import EndReason
from mig_agent.engine.newcomers import Claim, Newcomers, add_gpu, load_instances, selected
from mig_agent.engine.parts import Parts, wire
from mig_agent.engine.settings import EngineSettings
from mig_agent.engine.state import State
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
    claim: Claim = lambda _index, _uuid: None,
) -> Parts:
    """The parts of an engine that has recovered and is ready to serve. `claim` is called for each GPU that is taken.

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
        policy=Policy(creation_cost=settings.creation_cost, reuse=Reuse(settings.reuse)),
        tokens=Tokens.load_or_make(ledger.path.with_name(KEY_FILE)),
        telemetry=telemetry or NoTelemetry(),
        state=state,
        events=events,
        journal=Journal(ledger, state, events, clock),
        tasks=Tasks(),
        patience=Patience.of(
            each.ended_at - each.lease.created_at for each in contents.leases if each.ended_at is not None
        ),
        aside=CallThread("aside"),
    )
    parts = wire(context, ledger)
    newcomers = Newcomers(parts, claim)
    observation = await newcomers.observe()
    managed = _selected(observation, settings.gpus)
    for observed in managed:
        claim(observed.index, observed.uuid)
        add_gpu(parts, observed)
    _load(parts)
    await _recover(parts, managed, everything=not observation.failed)
    now = clock.now()
    for each in contents.leases:
        lease = state.leases.get(each.lease.id)
        if lease is not None:
            # Whether its answer arrived is not known: one that did must not be lost. A stream did not outlive us.
            parts.lifetimes.begin(lease, each.pid_started, delivered=not lease.hold)
    newcomers.note_missing(observation.failed)
    parts.observer.also.append(newcomers.look)
    parts.started_at = now
    started = context.journal.event(
        EventKind.AGENT_STARTED, f"the agent started with {len(managed)} GPUs and {len(state.leases)} leases"
    )
    await context.journal.write((), (started, *_of_damage(context, ledger)))
    parts.background.append(asyncio.get_running_loop().create_task(parts.observer.run(), name="observer"))
    if settings.listen_to_driver:
        parts.listening.start()
    return parts


def _of_damage(context: Context, ledger: Ledger) -> tuple[Event, ...]:
    if ledger.set_aside is None:
        return ()
    words = (
        f"the ledger was damaged: it is kept as {ledger.set_aside}, and an empty one stands in for it. Its leases are "
        "not known any more; instances found without it are left alone until an administrator sets `foreign: adopt`"
    )
    return (context.journal.event(EventKind.LEDGER_SET_ASIDE, words, kept_as=str(ledger.set_aside)),)


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


def _load(parts: Parts) -> None:
    """The ledger's leases and instances, as they were recorded."""
    state, contents = parts.context.state, parts.ledger.contents
    for each in contents.leases:
        if each.ended_at is None:
            state.put_lease(each.lease)
    for gpu in state.gpus:
        load_instances(parts, gpu)


async def _recover(parts: Parts, managed: list[ObservedGpu], *, everything: bool) -> None:
    context, observer = parts.context, parts.observer
    for observed in managed:
        try:
            await observer.compare(context.state.gpus[observed.uuid], observed)
        except DriverError as error:
            await observer.unread(observed.uuid, error)
    if everything and not context.settings.gpus:
        await _end_what_is_nowhere(parts)
    if parts.ledger.contents.boot_id not in {"", observer.boot_id_now()}:
        await _end_what_was_before_the_boot(parts)
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


async def _end_what_was_before_the_boot(parts: Parts) -> None:
    """Also on GPUs that are not managed now, or do not answer yet: no instance outlives a boot."""
    context = parts.context
    draft = Draft(context.journal)
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

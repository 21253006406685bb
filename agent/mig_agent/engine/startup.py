"""Startup: constructs the engine's parts, and reconciles the ledger with the hardware before anything is served.

All GPUs are read when the agent starts, and again when it resumes. An agent that starts paused shows the last known
state.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from mig_agent.adapters.clock import Clock
from mig_agent.adapters.device_backends import device_backends
from mig_agent.adapters.host import Host
from mig_agent.adapters.ledger.gpu_cache import gpu_of, text_of
from mig_agent.adapters.ledger.reader import Contents
from mig_agent.adapters.ledger.records import DropInstance, ForgetConfirmation, PutGpus
from mig_agent.adapters.ledger.store import Ledger
from mig_agent.adapters.nvml import Driver, Observation
from mig_agent.adapters.shares.enforcer import Enforcer
from mig_agent.adapters.shares.survey import ShareSurvey
from mig_agent.adapters.threads import CallThread
from mig_agent.adapters.tokens import KEY_FILE, Tokens
from mig_agent.core.catalog import Catalog
from mig_agent.core.errors import ConfigError, DriverError, LedgerError
from mig_agent.core.events import Event, EventKind
from mig_agent.core.load_history import LeaseTimes, RecentRequests, ended_lease
from mig_agent.core.observation import ObservedGpu
from mig_agent.core.planning.plan import Policy, Reuse
from mig_agent.core.quantities import counted
from mig_agent.core.recovery import REBOOT
from mig_agent.engine.accounting import Accounting
from mig_agent.engine.acquire import Acquirer
from mig_agent.engine.admin import Admin
from mig_agent.engine.cancellation import Cancellation
from mig_agent.engine.context import Context, EngineSettings, NoTelemetry, Telemetry
from mig_agent.engine.discovery import Discovery, LockGpu, selected
from mig_agent.engine.draining import Draining
from mig_agent.engine.driver_events import DriverEvents
from mig_agent.engine.event_bus import Events
from mig_agent.engine.execution import Executor
from mig_agent.engine.fair_share import FairShare
from mig_agent.engine.history import History
from mig_agent.engine.idempotency import RequestLog
from mig_agent.engine.idle_leases import IdleLeases
from mig_agent.engine.instances import InstanceDestroyer, Preflight, Quarantine
from mig_agent.engine.journal import Journal, Transaction
from mig_agent.engine.lease_recovery import LeaseRecovery
from mig_agent.engine.leases import Leases
from mig_agent.engine.lifecycle import EndReason, LeaseLifecycle, degraded_event, leases_with_devices_elsewhere
from mig_agent.engine.limits import LimitCheck
from mig_agent.engine.maintenance import Maintenance
from mig_agent.engine.peaks import PeakSampler
from mig_agent.engine.queueing import RequestQueue
from mig_agent.engine.reconciler import Reconciler
from mig_agent.engine.repairs import Repairs
from mig_agent.engine.share_watch import ShareWatch
from mig_agent.engine.shares import Shares
from mig_agent.engine.state import CheckedState, GpuRecord, State
from mig_agent.engine.tasks import Tasks, restarting

RESTART_REVISIONS = 1000
"""How many revisions a restart skips, so that none is used twice even if the last ones could not be committed."""
LEDGER_WATCH_SECONDS = 2.0
"""Time between two checks whether the ledger's files are in place: three calls of stat(2)."""
CLOSING_SECONDS = 5.0
"""Time limit of a stopping agent for the steps in progress, in seconds, also where the driver hangs."""


_MOST_EVENTS = 10_000
"""The most recorded events that are read for fair share: as many as the ledger keeps."""


@dataclass(slots=True, kw_only=True)
class Parts:
    """Holds the parts of one running engine."""

    context: Context
    ledger: Ledger
    request_log: RequestLog
    lifecycle: LeaseLifecycle
    leases: Leases
    quarantine: Quarantine
    reconciler: Reconciler
    shares: Shares
    share_watch: ShareWatch
    queue: RequestQueue
    limits: LimitCheck
    fair_share: FairShare
    cancellation: Cancellation
    acquirer: Acquirer
    admin: Admin
    draining: Draining
    idle_leases: IdleLeases
    lease_recovery: LeaseRecovery
    driver_events: DriverEvents
    driver_startup: DriverStartup
    maintenance: Maintenance
    history: History
    started_at: float = 0.0
    """Wall-clock time at which it began to serve."""
    background: list[asyncio.Task[None]] = field(default_factory=list)

    async def stop_background(self) -> None:
        """Stop the tasks that run as long as the engine does."""
        self.maintenance.close()
        self.draining.close()
        self.driver_events.close()
        for task in self.background:
            task.cancel()
        for task in self.background:
            with contextlib.suppress(asyncio.CancelledError):
                await task
        self.background.clear()

    async def close(self) -> None:
        """Refuse waiting requests, let the steps in progress end, and close the ledger. Leases stay active."""
        context = self.context
        context.closing = True
        self.queue.close()
        self.lifecycle.close()
        self.quarantine.close()
        await self.stop_background()
        peaks = context.accounting.peak_changes()
        if peaks:
            context.journal.commit(peaks)  # the ledger writes it before it closes
        await context.tasks.end(CLOSING_SECONDS)
        for worker in context.gpu_workers.values():
            worker.close()
        self.shares.close()
        await context.blocking_calls.run(self.ledger.close)
        context.blocking_calls.close()
        context.events.end()


async def start(
    *,
    driver: Driver,
    ledger: Ledger,
    host: Host,
    catalog: Catalog,
    clock: Clock,
    settings: EngineSettings,
    telemetry: Telemetry | None = None,
    claim: LockGpu = lambda _index, _uuid: None,
    paused: Iterable[str] = (),
    no_driver: str = "",
    enforcers: Sequence[Enforcer] = (),
) -> Parts:
    """Start an engine: return its parts, recovered and ready to serve. `claim` locks each GPU that it manages.

    It starts paused if there are reasons in `paused`, or an administrator's pause in the ledger. Then the driver is not
    used (nor opened, if it was not), and the GPUs are read when the agent resumes. It also starts paused if `no_driver`
    says why the driver could not be opened, and resumes by itself when it can. `enforcers` are the ways in which memory
    limits of shares can be enforced here.

    Raises DriverError if the driver does not answer, LedgerError if the ledger cannot be written, and ConfigError if
    the settings name GPUs that do not exist or the tokens' key cannot be used.
    """
    parts = _construct(driver, ledger, host, catalog, clock, settings, telemetry or NoTelemetry(), claim, enforcers)
    try:
        await _recover(parts, paused, no_driver)
    except BaseException:
        # Its threads would go on, and the ledger's could still commit while the next start reads it.
        await parts.close()
        raise
    return parts


async def _recover(parts: Parts, paused: Iterable[str], no_driver: str) -> None:
    """Take up the ledger's leases, read the GPUs unless the agent starts paused, and start the background tasks."""
    contents = parts.ledger.contents
    context, state, lifecycle = parts.context, parts.context.state, parts.lifecycle
    if context.settings.fair_share_half_life_seconds is not None:
        with contextlib.suppress(LedgerError):  # the order of the queue is no reason not to start
            ended = await context.blocking_calls.run(lambda: parts.ledger.events(0.0, "", _MOST_EVENTS))
            parts.fair_share.remember(ended)
    for recorded in contents.leases:
        if recorded.ended_at is None:
            state.put_lease(recorded.lease)
    is_paused = parts.maintenance.begin(contents.paused, paused, no_driver)
    if is_paused:
        await parts.driver_startup.load_last_known()
    else:
        await parts.driver_startup.read_gpus()
    parts.started_at = context.clock.now()
    lifecycle.remember_unconfirmed(contents.unconfirmed & state.leases.keys())
    for each in contents.leases:
        lease = state.leases.get(each.lease.id)
        if lease is not None:
            lifecycle.resume(lease)
    old = tuple(ForgetConfirmation(each) for each in contents.unconfirmed - state.leases.keys())
    accounting = context.accounting.begin_changes(parts.started_at)
    await context.journal.commit((*old, *accounting), _doubt_events(context))
    await parts.draining.end_overdue()
    loop = asyncio.get_running_loop()
    if context.settings.sample_usage_seconds is not None:
        sampling = PeakSampler(context).run(context.settings.sample_usage_seconds)
        parts.background.append(loop.create_task(sampling, name="peak sampler"))
    parts.background.append(loop.create_task(restarting("observer", parts.reconciler.run), name="observer"))
    if context.share_survey.enforcers:
        watching = restarting("share watch", parts.share_watch.run)
        parts.background.append(loop.create_task(watching, name="share watch"))
    parts.background.append(loop.create_task(_watch_ledger(parts), name="ledger watch"))
    if context.settings.listen_to_driver and not is_paused:
        parts.driver_events.start()


def started_event(context: Context) -> Event:
    """Return the event that the agent serves, with what it found."""
    leases, paused = counted(len(context.state.leases), "lease"), context.driver_use.paused
    words = f"with {counted(len(context.state.gpus), 'GPU')} and {leases}"
    if paused:
        words = f"paused ({'; '.join(paused)}) with {leases}"
    return context.journal.event(EventKind.AGENT_STARTED, f"the agent started {words}")


def policy_of(settings: EngineSettings) -> Policy:
    """Return the planner's policy that these settings ask for."""
    return Policy(creation_cost=settings.creation_cost, reuse=Reuse(settings.reuse))


def _construct(  # noqa: PLR0917 -- from `start` alone
    driver: Driver,
    ledger: Ledger,
    host: Host,
    catalog: Catalog,
    clock: Clock,
    settings: EngineSettings,
    telemetry: Telemetry,
    lock: LockGpu,
    enforcers: Sequence[Enforcer],
) -> Parts:
    """Construct the state, the context and all parts of an engine, without reading the driver."""
    contents = ledger.contents
    state = (CheckedState if settings.check_threads else State)(
        settings.node, contents.last_revision + RESTART_REVISIONS, contents.last_generation
    )
    state.doubt = contents.doubt
    state.former = {each.lease.id: each for each in contents.former}
    state.unmanaged = {each.generation: each.slot.gpu for each in contents.instances if each.lease is not None}
    events = Events()
    events.begin(state.revision)
    context = Context(
        driver=driver,
        backends=device_backends(driver, host, enforcers),
        share_survey=ShareSurvey(driver, host, enforcers),
        host=host,
        catalog=catalog,
        clock=clock,
        settings=settings,
        policy=policy_of(settings),
        tokens=Tokens.load_or_make(ledger.path.with_name(KEY_FILE)),
        telemetry=telemetry,
        state=state,
        events=events,
        journal=Journal(ledger, state, events, clock),
        tasks=Tasks(),
        lease_times=LeaseTimes.of(
            ended_lease(each.lease, each.ended_at) for each in contents.leases if each.ended_at is not None
        ),
        recent_requests=RecentRequests(clock.now()),
        accounting=Accounting(contents, catalog),
        blocking_calls=CallThread("aside"),
    )
    request_log = RequestLog(ledger, contents.leases, more_ended=contents.more_ended)
    lifecycle = LeaseLifecycle(context, request_log)
    quarantine = Quarantine(context)
    destroyer = InstanceDestroyer(context, quarantine)
    shares = Shares(
        context,
        destroyer,
        {each.generation: each.slot.gpu for each in contents.instances if each.kind.shares_memory},
    )
    lifecycle.end_devices_by(shares.end_soon)
    repairs = Repairs(context, lifecycle, quarantine, destroyer, shares)
    reconciler = Reconciler(
        context,
        lifecycle=lifecycle,
        quarantine=quarantine,
        repairs=repairs,
        request_log=request_log,
        boot_id=contents.boot_id,
    )
    executor = Executor(
        context=context,
        request_log=request_log,
        lifecycle=lifecycle,
        quarantine=quarantine,
        preflight=Preflight(context, quarantine),
        destroyer=destroyer,
        shares=shares,
        reconciler=reconciler,
    )
    limits = LimitCheck(context, executor)
    fair_share = FairShare(context)
    queue = RequestQueue(context, executor, limits, fair_share)
    admin = Admin(context, destroyer, reconciler)
    driver_events = DriverEvents(context.driver, reconciler.hint)
    discovery = Discovery(context, contents, reconciler, lock)
    reconciler.follow_up(admin.destroy_overdue)
    reconciler.follow_up(discovery.look)
    reconciler.follow_up(shares.sweep)
    share_watch = ShareWatch(context)
    reconciler.follow_up(share_watch.look_for_strangers)
    draining = Draining(context, lifecycle)
    idle_leases = IdleLeases(context, lifecycle, reconciler)
    reconciler.follow_up(draining.end_overdue)
    reconciler.follow_up(idle_leases.look)
    lease_recovery = LeaseRecovery(context, request_log, lifecycle, reconciler)
    driver_startup = DriverStartup(
        context, contents, lifecycle=lifecycle, reconciler=reconciler, discovery=discovery, recovery=lease_recovery
    )
    return Parts(
        context=context,
        ledger=ledger,
        request_log=request_log,
        lifecycle=lifecycle,
        leases=Leases(context, request_log, lifecycle, limits),
        quarantine=quarantine,
        reconciler=reconciler,
        shares=shares,
        share_watch=share_watch,
        queue=queue,
        limits=limits,
        fair_share=fair_share,
        cancellation=Cancellation(queue),
        acquirer=Acquirer(context, request_log, lifecycle, queue, limits),
        admin=admin,
        draining=draining,
        idle_leases=idle_leases,
        lease_recovery=lease_recovery,
        driver_events=driver_events,
        driver_startup=driver_startup,
        maintenance=Maintenance(context, driver_events, driver_startup, reconciler.hint),
        history=History(context, ledger),
    )


async def _watch_ledger(parts: Parts) -> None:
    """Notice when the ledger's files are removed or replaced under the agent: the next start would lose all leases.

    Recording the event is the commit that writes the ledger again. If it fails, no lease is granted any more.
    """
    context, reported = parts.context, ""
    wake = asyncio.Event()
    while True:
        timer = context.clock.call_later(LEDGER_WATCH_SECONDS, wake.set)
        try:
            await wake.wait()
        finally:
            timer.cancel()
        wake.clear()
        words = parts.ledger.missing()
        if words and (words != reported or not context.journal.error):
            message = f"{words}; the ledger is written anew from what the agent has open"
            context.journal.record(context.journal.event(EventKind.LEDGER_FAILED, message))
        reported = words


def _doubt_events(context: Context) -> tuple[Event, ...]:
    """Return the event that the ledger does not account for everything, at each start until that is settled."""
    doubt = context.state.doubt
    if doubt is None:
        return ()
    former = f" The former one is kept as {doubt.kept_as}." if doubt.kept_as else ""
    known = (
        "The restored one knows nothing of the leases since then"
        if doubt.restored
        else "An empty ledger stands in for it, and no earlier lease counts"
    )
    words = (
        f"the ledger {doubt.why}.{former} {known}: instances that it does not account for are left alone. "
        "`migctl recover` brings an earlier lease back to the holder of its token, and `migctl adopt` takes over "
        "instances that are no longer needed"
    )
    return (
        context.journal.event(
            EventKind.LEDGER_RESTORED if doubt.restored else EventKind.LEDGER_QUARANTINED,
            words,
            kept_as=doubt.kept_as,
            since=doubt.at,
            restored=doubt.restored,
        ),
    )


class DriverStartup:
    """Reads all GPUs when the agent starts, and when it resumes. Not thread-safe; use from the event loop."""

    def __init__(
        self,
        context: Context,
        contents: Contents,
        *,
        lifecycle: LeaseLifecycle,
        reconciler: Reconciler,
        discovery: Discovery,
        recovery: LeaseRecovery,
    ) -> None:
        """Recover from `contents`, the ledger as it was opened."""
        self._context = context
        self._contents = contents
        self._lifecycle = lifecycle
        self._reconciler = reconciler
        self._discovery = discovery
        self._recovery = recovery
        self._read = False
        self._remembered = dict(contents.gpus)

    async def read_gpus(self) -> None:
        """Read all GPUs. Raises DriverError if the driver does not answer, and the other errors of `start`."""
        if self._read:
            await self._discovery.count()  # first, so that a driver that does not answer ends no lease
            await self._reconciler.compare_all()
            await self._reconciler.run_followups()
        else:
            await self._recover_all()
            self._read = True
        await self._recovery.void_missing()
        await self.remember()

    async def load_last_known(self) -> None:
        """Load the last known state of the node, for an agent that starts paused. Raises LedgerError."""
        # A GPU whose text another version wrote in another format is not shown.
        known: list[ObservedGpu] = []
        for uuid, text in self._remembered.items():
            with contextlib.suppress(ValueError, KeyError, TypeError):
                known.append(gpu_of(uuid, text))
        for each in selected(known, self._context.settings.gpus):
            self._discovery.add(each)
            self._discovery.load_instances(each.uuid)
        await self._end_leases_of_earlier_boot()

    async def remember(self) -> None:
        """Commit the state of the GPUs if it has changed; a failure is ignored."""
        gpus = {record.uuid: text_of(_as_observed(record)) for record in self._context.state.gpus.values()}
        if gpus != self._remembered:
            with contextlib.suppress(LedgerError):
                await self._context.journal.commit((PutGpus(gpus),))
                self._remembered = gpus

    async def _recover_all(self) -> None:
        context, discovery = self._context, self._discovery
        observation = await discovery.observe()
        managed = _selected(observation, context.settings.gpus)
        for observed in managed:
            discovery.lock(observed.index, observed.uuid)
        for uuid in context.state.gpus.keys() - {observed.uuid for observed in managed}:
            context.state.remove_gpu(uuid)
            context.gpu_workers.pop(uuid).close()
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
        """End leases on GPUs that were removed. Call only if all GPUs of the machine have been read."""
        context = self._context
        transaction = Transaction(context.journal)
        for instance in self._contents.instances:
            gpu = instance.slot.gpu
            if gpu not in context.state.gpus:
                transaction.changes.append(DropInstance(instance.generation))
                context.state.unmanaged.pop(instance.generation, None)
                if instance.lease is None:
                    continue
                event = degraded_event(context, instance, EndReason.GPU_LOST)
                if event is not None and instance.lease in leases_with_devices_elsewhere(context, gpu):
                    transaction.events.append(event)
                else:
                    self._lifecycle.add_lease_end(transaction, instance.lease, EndReason.GPU_LOST)
        for lease in context.state.leases.values():
            if not any(True for _ in context.state.instances_of(lease.id)):
                self._lifecycle.add_lease_end(transaction, lease.id, "instance-lost")
        if transaction:
            await transaction.commit()

    async def _end_leases_of_earlier_boot(self) -> None:
        reconciler = self._reconciler
        if self._contents.boot_id not in {"", reconciler.boot_id_now()}:
            await self._end_all_leases()
        await reconciler.adopt_boot_id(reconciler.boot_id_now())

    async def _end_all_leases(self) -> None:
        """End all leases, also on GPUs that are not managed now or do not answer yet: no instance survives a reboot."""
        context = self._context
        transaction = Transaction(context.journal)
        for lease in tuple(context.state.leases):
            self._lifecycle.add_lease_end(transaction, lease, REBOOT)
        partitioned = set()
        for instance in self._contents.instances:
            if instance.slot.gpu not in context.state.gpus:
                transaction.changes.append(DropInstance(instance.generation))
            elif instance.kind.needs_mig_mode:
                partitioned.add(instance.slot.gpu)
        for uuid in partitioned:
            record = context.state.gpus[uuid]
            if not record.mode.current:
                words = f"GPU {record.index} lost its MIG mode with the reboot; {record.reason}"
                transaction.events.append(context.journal.event(EventKind.GPU_MODE_CHANGED, words, gpu=uuid))
        if transaction:
            await transaction.commit()


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
        # A GPU that does not answer may be the one that is named.
        if not observation.failed and not selected(observation.gpus, (name,)):
            there = ", ".join(f"{gpu.index} ({gpu.uuid})" for gpu in observation.gpus) or "none"
            raise ConfigError(
                f"cannot manage GPU {name}: there is no such GPU", f"the GPUs of this machine are {there}"
            )
    return selected(observation.gpus, wanted)

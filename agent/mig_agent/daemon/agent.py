"""The whole agent: locks, hardware, ledger, manager and frontends, and how all of it stops."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

import structlog

from mig_agent import __version__
from mig_agent.adapters import catalog_files
from mig_agent.adapters.clock import SystemClock
from mig_agent.adapters.failpoints import FAILPOINTS
from mig_agent.adapters.filelock import lock_gpus, lock_state_directory
from mig_agent.adapters.ledger.store import LEDGER_FILE, Ledger
from mig_agent.adapters.lock_holders import HolderSearch
from mig_agent.adapters.private_dir import PrivateDir, refuse_if_replaceable
from mig_agent.adapters.threads import CallThread
from mig_agent.adapters.tokens import KEY_FILE
from mig_agent.config import Settings
from mig_agent.core.model import GpuUuid, Isolation
from mig_agent.core.shares import Fractions
from mig_agent.daemon.hardware import CannotServeError, Hardware, open_hardware, selected_gpus, simulated_file
from mig_agent.daemon.logs import EventLog
from mig_agent.daemon.metrics import MetricsServer
from mig_agent.daemon.roles import configured_roles
from mig_agent.daemon.servers import Servers
from mig_agent.daemon.share_enforcers import share_enforcers
from mig_agent.daemon.socket_watch import watch_sockets
from mig_agent.daemon.web.service import WebService
from mig_agent.engine import startup
from mig_agent.engine.context import FIXED_SETTINGS, EngineSettings
from mig_agent.engine.manager import Manager, manager_over
from mig_agent.frontends.grpc.handlers import method_handlers
from mig_agent.frontends.grpc.identity import Roles
from mig_agent.frontends.grpc.servicer import Held, PartitionManagerServicer
from mig_agent.frontends.metrics import Metrics

if TYPE_CHECKING:
    from mig_agent.daemon.kubernetes import Kubernetes

_CHECK_THREADS = "MIG_AGENT_CHECK_THREADS"
"""For tests: the agent fails if its engine is used off the event loop."""
_LAST_ANSWERS_SECONDS = 2.0
"""Time for open calls after the manager has closed, so that decided answers still reach their callers."""
_CLOSING_SECONDS = 3.0
_MOST_EVENTS_AT_START = 1000

_log = structlog.get_logger(__name__)


@dataclass(kw_only=True)
class Agent:
    """An agent that serves."""

    settings: Settings
    """Those in use: a reload of the configuration replaces them."""
    servers: Servers
    servicers: tuple[PartitionManagerServicer, ...]
    manager: Manager
    ledger: Ledger
    hardware: Hardware
    roles: Roles
    """Those of the start."""
    metrics: MetricsServer
    web: WebService
    kubernetes: Kubernetes | None = None
    """None if the setting `kubernetes` is off."""
    driver_thread: CallThread = field(repr=False)

    def facts(self) -> Mapping[str, object]:
        """Return the fields of the log line that says that the agent serves."""
        view = self.manager.view
        return {
            "version": __version__,
            "node": view.node,
            "listen": self.servers.addresses,
            "admin": str(self.settings.admin_address),
            "metrics": self.metrics.shown,
            "web": self.web.shown,
            "state_dir": str(self.settings.state_dir),
            "gpus": len(view.gpus),
            "paused": self.manager.paused,
            "leases": len(view.leases),
        }

    async def stop(self) -> None:
        """Finish the step in progress, refuse waiting requests and keep the leases.

        Takes at most `stop_deadline` and a few seconds; waits for no driver call that hangs.
        """
        deadline = self.settings.stop_deadline
        await self.servers.set_not_serving()
        for servicer in self.servicers:
            servicer.stop()
        if self.kubernetes is not None:
            await self.kubernetes.stop()
        # No new calls from here on; open ones get their answers from the manager's end.
        last_calls = asyncio.create_task(self.servers.stop(deadline + _LAST_ANSWERS_SECONDS), name="last calls")
        try:
            await asyncio.wait_for(self.manager.close(), deadline)
        except TimeoutError:
            _log.warning("a step did not end in time; the next start reconciles it", seconds=deadline)
        await self.servers.stop(_LAST_ANSWERS_SECONDS)
        await last_calls
        await asyncio.wait({self.driver_thread.run(self.hardware.driver.close_at_exit)}, timeout=_CLOSING_SECONDS)


async def start_agent(settings: Settings, stack: AsyncExitStack, lines_dropped: Callable[[], int]) -> Agent:
    """Take the locks and addresses, recover and serve. What must be released at the end is put on the stack.

    `lines_dropped` returns the number of dropped log lines so far.

    Raises ConfigError, LockedError, CannotServeError, DriverError and LedgerError, all with messages for people.
    """
    _make_state_dir(settings)
    search = HolderSearch()  # one for all locks, so that together they do not delay the start for long
    state_lock = stack.enter_context(lock_state_directory(settings.state_dir, search))
    servers = Servers(settings, search)
    stack.push_async_callback(servers.stop, 0.0)
    await servers.start()

    metrics = Metrics(lines_dropped)
    driver_thread = CallThread("driver")
    roles = configured_roles(settings, servers.user_names)
    kubernetes = await _connect_to_kubernetes(settings)
    paused = () if kubernetes is None else kubernetes.paused
    ledger = Ledger.open(settings.state_dir / LEDGER_FILE, keep_lock=state_lock.keep)
    stack.callback(ledger.close)
    starts_paused = bool(paused or ledger.contents.paused)
    hardware, there = await _in_time(driver_thread, settings, metrics, paused=starts_paused)
    if hardware.absent:
        paused = (*paused, hardware.absent)
    starts_paused = starts_paused or bool(hardware.absent or hardware.no_driver)
    # Held for the life of the process, whatever happens to the rest.
    stack.enter_context(lock_gpus(hardware.lock_folder, sorted(there.items()), search))

    def claim(index: int, uuid: GpuUuid) -> None:
        """Lock a GPU that answers only now."""
        if uuid not in claimed:
            stack.enter_context(lock_gpus(hardware.lock_folder, [(index, uuid)]))
            claimed.add(uuid)

    claimed = set(there.values())
    clock = SystemClock()
    began = clock.now()
    manager = manager_over(
        await startup.start(
            driver=hardware.driver,
            ledger=ledger,
            host=hardware.host,
            catalog=catalog_files.load(settings.profiles_dir),
            clock=clock,
            settings=_engine_settings(settings, None if starts_paused else there),
            telemetry=metrics,
            claim=claim,
            paused=paused,
            no_driver=hardware.no_driver,
            enforcers=share_enforcers(settings, hardware),
        )
    )
    metrics.watch(lambda: manager.published)
    event_log = EventLog()
    stack.callback(event_log.flush)
    # Recovery's events happened before there was an observer.
    for event in await manager.history.events(began, None, _MOST_EVENTS_AT_START):
        event_log(event)
    manager.observers.extend((metrics.observe, event_log))
    watching = asyncio.create_task(watch_sockets(servers.sockets, manager.record_sockets), name="socket watch")
    stack.callback(watching.cancel)
    servers.on_renewal(lambda renewal: manager.record_certificates(renewal.words, taken=renewal.taken))
    metrics_server, web = await _serve_http(settings, manager, metrics, stack)
    held: Held = {}
    servicers = tuple(
        PartitionManagerServicer(manager, admin=admin, roles=roles, held=held, connection_ends=servers.connection_ends)
        for admin in (False, True)
    )
    # Nothing of the start can fail from here on.
    await manager.announce()
    users, admins = (method_handlers(servicer, settings.max_calls, servicer.refused) for servicer in servicers)
    await servers.open(users, admins)
    if kubernetes is None:
        await servers.ready(True)
    else:
        await kubernetes.start(manager, hardware, metrics.registry, servers.ready)
    return Agent(
        settings=settings,
        servers=servers,
        servicers=servicers,
        manager=manager,
        ledger=ledger,
        hardware=hardware,
        roles=roles,
        metrics=metrics_server,
        web=web,
        kubernetes=kubernetes,
        driver_thread=driver_thread,
    )


async def _serve_http(
    settings: Settings, manager: Manager, metrics: Metrics, stack: AsyncExitStack
) -> tuple[MetricsServer, WebService]:
    """Serve metrics and the web page, or report why that cannot be done now."""
    metrics_server, web = MetricsServer(metrics.registry), WebService(manager, settings)
    for service, address, part in ((metrics_server, settings.metrics, "metrics"), (web, settings.web, "web")):
        stack.callback(service.close)
        await service.serve_at(address)
        service.report_to(partial(manager.report_problem, part))
    return metrics_server, web


def _make_state_dir(settings: Settings) -> None:
    """Create the folder if missing, and make sure that only the agent's user can enter it."""
    folder = settings.state_dir
    known = {LEDGER_FILE, KEY_FILE, "lock", simulated_file(settings)}
    with FAILPOINTS.around("state-folder"):
        state = PrivateDir.open(folder, "keep state in", known)
    state.close()
    refuse_if_replaceable(folder, "the state directory", "give another --state-dir")


async def _connect_to_kubernetes(settings: Settings) -> Kubernetes | None:
    if not settings.kubernetes:
        return None
    from mig_agent.daemon.kubernetes import Kubernetes  # noqa: PLC0415 -- costs only an agent that needs it

    return await Kubernetes.connect(settings)


async def _in_time(
    thread: CallThread, settings: Settings, metrics: Metrics, *, paused: bool
) -> tuple[Hardware, Mapping[int, GpuUuid]]:
    """Return the hardware and the GPUs to manage by index; no GPUs for an agent that starts paused.

    Raises CannotServeError if the driver does not answer within `call_deadline`.
    """

    def open_and_select() -> tuple[Hardware, Mapping[int, GpuUuid]]:
        hardware = open_hardware(settings, metrics.nvml_call, paused=paused)
        if paused or hardware.absent or hardware.no_driver:
            return hardware, {}
        there = hardware.driver.uuids()
        return hardware, there if settings.gpus is None else selected_gpus(there, settings.gpus)

    try:
        return await asyncio.wait_for(thread.run(open_and_select), settings.call_deadline)
    except TimeoutError:
        raise CannotServeError(
            f"cannot serve: the NVIDIA driver has not answered for {settings.call_deadline:g} s",
            "see what `nvidia-smi` and `dmesg` say",
        ) from None


def changed_engine_settings(used: EngineSettings, settings: Settings) -> EngineSettings:
    """Return the engine's settings after a reload: those that only a start can set stay as they are."""
    fixed = {name: getattr(used, name) for name in FIXED_SETTINGS}
    return replace(_engine_settings(settings, None), **fixed)


def _engine_settings(settings: Settings, managed: Mapping[int, GpuUuid] | None) -> EngineSettings:
    """Return the engine's settings; `managed` are the selected GPUs as far as known, None if no driver was asked."""
    names = tuple(settings.gpus or ()) if managed is None else tuple(managed.values())
    return EngineSettings(
        node=settings.node_name,
        # Without a selection, GPUs that do not answer now belong to the agent, too.
        gpus=() if settings.gpus is None else names,
        creation_cost=settings.creation_cost,
        strict_fifo=settings.strict_fifo,
        reservation_after_seconds=settings.reservation_after,
        idle_limit_seconds=settings.idle_limit,
        foreign=settings.foreign,
        reuse=settings.reuse,
        isolation=Isolation(settings.isolation),
        fractions=Fractions(settings.fractions),
        fractions_by_gpu=dict(settings.fractions_by_gpu),
        share_headroom_mib=settings.share_headroom,
        least_share_mib=settings.least_share,
        max_waiting=settings.max_waiting,
        limits=settings.limits,
        fair_share_half_life_seconds=settings.fair_share_half_life if settings.fair_share else None,
        idle_after_seconds=settings.idle_after,
        end_idle_after_seconds=settings.end_idle_after,
        reread_seconds=settings.reread,
        call_deadline_seconds=settings.call_deadline,
        sample_usage_seconds=settings.sample_usage,
        keep_accounting_seconds=settings.keep_accounting,
        follows_pods=settings.kubernetes,
        check_threads=bool(os.environ.get(_CHECK_THREADS)),
    )

"""The real manager over the real adapter, the real pynvml and simulated GPUs, with a clock that is turned by hand."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar, cast

from mig_agent.adapters import catalog_files
from mig_agent.adapters.clock import Clock
from mig_agent.adapters.host import Host
from mig_agent.adapters.ledger.store import LEDGER_FILE, Ledger
from mig_agent.adapters.nvml import Driver
from mig_agent.adapters.shares.enforcer import Enforcer
from mig_agent.core.catalog import Catalog
from mig_agent.core.errors import LedgerError
from mig_agent.core.events import Event, EventKind
from mig_agent.core.model import Gpu, Holder, Instance, InstanceState, Lease, LeaseId, Request, RequestId, Want
from mig_agent.core.owner import Pod, PodOwner, ProcessOwner
from mig_agent.core.requests import memory_want, profile_want
from mig_agent.engine import startup
from mig_agent.engine.callers import Caller
from mig_agent.engine.context import EngineSettings
from mig_agent.engine.discovery import LockGpu
from mig_agent.engine.manager import Manager, manager_over
from mig_agent.engine.results import Granted
from mig_agent.simulator import STATE_FILE, Simulator, open_library
from support.clock import VirtualClock
from support.simulated import machine

PATIENCE_SECONDS = 60.0
ANYBODY = Caller(name="somebody")
A_POD = Pod(namespace="team-a", name="train-0")
ADMIN = Caller(name="root", uid=0, admin=True)
CREATE = "nvmlDeviceCreateGpuInstanceWithPlacement"
CREATE_COMPUTE = "nvmlGpuInstanceCreateComputeInstance"
DESTROY = "nvmlGpuInstanceDestroy"
DESTROY_COMPUTE = "nvmlComputeInstanceDestroy"

_Answer = TypeVar("_Answer")
_CATALOG: Catalog = catalog_files.load()


@dataclass
class Node:
    """One running engine and the machine below it."""

    manager: Manager
    simulator: Simulator
    clock: VirtualClock
    ledger: Ledger
    host: Host
    driver: Driver
    settings: EngineSettings
    happened: list[Event] = field(default_factory=list)

    # Requests

    def request(self, *wants: str | Want, name: str = "alice", **fields: Any) -> Request:
        """A request for devices: a profile's name, a quantity of memory, or a Want.

        `pod`, `kubelet_devices` and `pid` say who will own the lease.
        """
        holder = fields.pop("holder", Holder(name=name, tenant=fields.pop("tenant", "")))
        pod, devices, pid = (fields.pop(each, None) for each in ("pod", "kubelet_devices", "pid"))
        if pod is not None or devices:
            fields["owner"] = PodOwner(pod=pod or A_POD, devices=devices or (), is_bound=bool(devices))
        elif pid is not None:
            fields["owner"] = ProcessOwner(pid=pid)
        return Request(
            wants=tuple(_want(each) for each in wants),
            request_id=RequestId(fields.pop("request_id", uuid.uuid4().hex)),
            holder=holder,
            **fields,
        )

    async def acquire(self, *wants: str | Want, **fields: Any) -> Granted:
        """A granted lease, its answer delivered."""
        granted = await self.manager.acquire(self.request(*wants, **fields), ANYBODY)
        self.manager.delivered(granted.lease.id)
        return granted

    async def release(self, granted: Granted) -> None:
        """Ends a lease as its holder does."""
        await self.manager.release(granted.lease.id, granted.token, ANYBODY)

    def start(self, coroutine: Coroutine[Any, Any, _Answer]) -> asyncio.Task[_Answer]:
        """Something that goes on beside the test."""
        return asyncio.get_running_loop().create_task(coroutine)

    # Looking

    def gpu(self, index: int = 0) -> Gpu:
        return next(gpu for gpu in self.manager.snapshot.view.gpus if gpu.index == index)

    def instances(self, state: InstanceState | None = None, *, gpu: int | None = None) -> list[Instance]:
        view = self.manager.snapshot.view
        return [
            instance
            for each in view.gpus
            if gpu is None or each.index == gpu
            for instance in each.instances
            if state is None or instance.state is state
        ]

    @property
    def leases(self) -> dict[LeaseId, Lease]:
        return dict(self.manager.snapshot.view.leases)

    def layout(self, gpu: int = 0) -> str:
        """A GPU's instances in short: `0:1g.5gb=leased 4:3g.20gb=idle`."""
        return " ".join(
            f"{each.slot.placement.start}:{each.slot.profile.name}={each.state}" for each in self.gpu(gpu).instances
        )

    def where(self, granted: Granted, device: int = 0) -> str:
        """The device of a lease as the simulator's hand names it: `0/13`."""
        found = granted.devices[device]
        return f"{found.gpu_index}/{found.gpu_instance_id}"

    def creations(self) -> int:
        return self.simulator.calls(CREATE)

    def kinds(self) -> list[EventKind]:
        return [event.kind for event in self.happened]

    def told(self, kind: EventKind) -> list[Event]:
        return [event for event in self.happened if event.kind is kind]

    # Waiting

    async def until(self, condition: Callable[[], object]) -> None:
        """Returns when the condition holds; fails after a generous time."""
        deadline = asyncio.get_running_loop().time() + PATIENCE_SECONDS
        while not condition():
            assert asyncio.get_running_loop().time() < deadline, "it did not come about"
            await asyncio.sleep(0.002)

    async def stuck(self, gpu: int = 0, *, reader: bool = False) -> None:
        """Returns when a call of the driver is under way on a GPU: one that hangs by an injected fault."""
        lane = self.manager._context.gpu_workers[self.gpu(gpu).uuid]
        track = lane._reader if reader else lane._worker
        await self.until(lambda: any(call.started for call in track._awaited))

    async def look(self) -> None:
        """Compares ledger and hardware now; what it tells may be heard a moment later (`quiet`)."""
        await self.manager._parts.reconciler.look()

    async def nothing_out(self) -> None:
        """Returns when no call of the driver is under way: the clock may be turned past their deadline now."""
        lanes = self.manager._context.gpu_workers
        await self.until(
            lambda: not any(each._in_flight for lane in lanes.values() for each in (lane._worker, lane._reader))
        )

    async def at_rest(self) -> None:
        """As `quiet`, once no reconciliation is due or under way either: nothing would see the clock jump then."""
        context, reconciler = self.manager._context, self.manager._parts.reconciler

        def resting() -> bool:
            return not (reconciler._wake.is_set() or context.driver_use._inside or context.tasks._running)

        while True:
            await self.quiet()
            await self.until(resting)
            await self.nothing_out()
            with contextlib.suppress(LedgerError):
                await context.journal.commit(())
            if resting():
                return

    async def quiet_but(self, *waiting: asyncio.Task[Any]) -> None:
        """As `quiet`, while requests wait in the queue that these tasks asked for."""
        for _ in range(5):
            await self.manager._context.journal.commit(())
            await asyncio.sleep(0)
        assert not any(each.done() for each in waiting)

    async def quiet(self) -> None:
        """Returns when no task of the engine is under way and everything is on the disk, or has failed to get there."""
        context = self.manager._context
        while context.tasks._running:
            await asyncio.wait(tuple(context.tasks._running), timeout=PATIENCE_SECONDS)
        with contextlib.suppress(LedgerError):
            await context.journal.commit(())


def _want(text: str | Want) -> Want:
    if isinstance(text, Want):
        return text
    return profile_want(text) if "g." in text else memory_want(text)


def settings(**changes: Any) -> EngineSettings:
    """As configured, but that nothing is looked at by itself: tests say when."""
    by_hand = {"listen_to_driver": False, "reread_seconds": 1e9, "sample_usage_seconds": None}
    return EngineSettings(**{"node": "node-1", **by_hand, "check_threads": True, **changes})


async def start(
    folder: Path,
    there: str = "",
    /,
    *,
    clock: Clock | None = None,
    mig_mode: bool = True,
    driver_version: str = "580.95.05",
    catalog: Catalog = _CATALOG,
    claim: LockGpu = lambda _index, _uuid: None,
    opened: bool = True,
    paused: tuple[str, ...] = (),
    no_driver: str = "",
    enforcers: Callable[[Driver, Host], Sequence[Enforcer]] = lambda _driver, _host: (),
    **changes: Any,
) -> Node:
    """Starts an engine over these GPUs; without any over the machine that is in the folder already.

    Without `opened` the driver is as an agent that starts paused has it.
    """
    simulator = (
        machine(folder, there, mig_mode=mig_mode, driver_version=driver_version)
        if there
        else Simulator(folder / STATE_FILE)
    )
    host = Host(simulator.host_root, simulated=True)
    clock = VirtualClock() if clock is None else clock
    driver = (Driver.open if opened else Driver.closed)(open_library(simulator.state_file))
    ledger = Ledger.open(folder / LEDGER_FILE)
    chosen = settings(**changes)
    manager = manager_over(
        await startup.start(
            driver=driver,
            ledger=ledger,
            host=host,
            catalog=catalog,
            clock=clock,
            settings=chosen,
            claim=claim,
            paused=paused,
            no_driver=no_driver,
            enforcers=enforcers(driver, host),
        )
    )
    await manager.announce()
    node = Node(
        manager=manager,
        simulator=simulator,
        # Only tests with a clock of their own making turn it.
        clock=cast("VirtualClock", clock),
        ledger=ledger,
        host=host,
        driver=driver,
        settings=chosen,
    )
    manager.observers.append(node.happened.append)
    return node


@contextlib.asynccontextmanager
async def engine(folder: Path, there: str = "", /, **changes: Any) -> AsyncIterator[Node]:
    """An engine that is closed at the end."""
    node = await start(folder, there, **changes)
    try:
        yield node
    finally:
        await node.manager.close()


async def killed(node: Node) -> None:
    """Ends an engine as a SIGKILL would: what was handed to the ledger is on the disk, and nothing comes after it.

    A call that the driver has begun comes to its end, as it does in the kernel.
    """
    context, parts = node.manager._context, node.manager._parts
    await asyncio.to_thread(node.ledger.close)
    parts.lifecycle.close()
    parts.quarantine.close()
    await parts.stop_background()
    while context.tasks._running:
        for task in tuple(context.tasks._running):
            task.cancel()
        await asyncio.sleep(0)
    await node.until(
        lambda: not any(lane._worker._in_flight or lane._reader._in_flight for lane in context.gpu_workers.values())
    )
    for lane in context.gpu_workers.values():
        lane.close()
    parts.shares.close()
    context.blocking_calls.close()

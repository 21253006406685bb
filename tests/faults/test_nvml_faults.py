"""Each call of the driver fails with each of its codes, once and for good, or hangs, under all that the agent does."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from functools import partial
from pathlib import Path
from typing import Any

import pynvml
import pytest

from mig_agent.adapters.nvml import ChangeListener, Driver
from mig_agent.core.errors import DriverError, RefusedError
from mig_agent.core.events import EventKind
from mig_agent.core.model import GpuState, InstanceState, Want
from mig_agent.engine import driver_events
from mig_agent.engine.gpu_worker import WatchedThread
from mig_agent.engine.results import Granted
from mig_agent.simulator import Code
from support.doors import nvml_calls
from support.engine import ADMIN, Node, engine, start
from support.figures import Figure
from support.nvmlfaults import (
    COUNTERS,
    HANGING,
    LISTED,
    NOTHING_WITHOUT,
    OF_NO_GPU,
    ON_ITS_FACE,
    SERVING,
    SHARES,
    STARTING,
    codes_of,
)

GPUS = "a100-40gb:2,h100-80gb:1:off"
SICK, WELL, HOPPER = "0", "1", "2"
WHOLE = Want(whole_gpu=True, text="whole")
MANY = 100_000
"""Times that a fault strikes which is there for good."""


class Life:
    """What a node goes through: every kind of request, while something is wrong on one GPU."""

    def __init__(self, node: Node, call: str) -> None:
        self.node = node
        self.everywhere = call in OF_NO_GPU
        self.kept: list[Granted] = []

    async def begin(self) -> None:
        """In good times: leases that are to stand, and idle instances."""
        node = self.node
        self.kept = [await node.acquire("1g.5gb", gpus=(gpu,)) for gpu in (SICK, WELL)]
        for each in [await node.acquire(profile, gpus=(SICK,)) for profile in ("2g.10gb", "1g.5gb")]:
            await node.release(each)
        await node.quiet()

    async def go_through(self) -> None:
        """In bad times. Whatever is refused is refused in words; the GPUs that are well serve on."""
        node = self.node
        taken = [
            await self.ask(node.acquire("2g.10gb", gpus=(SICK,))),
            await self.ask(node.acquire("1g.5gb", gpus=(WELL,)), must=not self.everywhere),
            await self.ask(node.acquire("1g.5gb", "1g.5gb", gpus=(SICK, WELL))),
        ]
        await node.manager.usage()
        await node.look()
        for each in taken:
            if each is not None and each.lease.id in node.leases:
                await node.release(each)
        taken = [
            await self.ask(node.acquire("4g.20gb", gpus=(SICK,))),
            await self.ask(node.acquire("3g.20gb"), must=not self.everywhere),
        ]
        for enable in (True, False):
            await self.ask(node.manager.set_mig_mode(HOPPER, enable, ADMIN))
            await self.ask(node.manager.reclaim((), ADMIN))
        for each in taken:
            if each is not None and each.lease.id in node.leases:
                await node.release(each)

    async def ask(self, request: Coroutine[Any, Any, Any], *, must: bool = False) -> Any:
        """The answer; None where it was refused, in words."""
        answer: Any = (await asyncio.gather(request, return_exceptions=True))[0]
        if isinstance(answer, RefusedError):
            assert answer.refusal.message.startswith("cannot "), answer
            assert not must, answer
            return None
        assert not isinstance(answer, BaseException), answer
        return answer

    async def recover(self) -> None:
        """In good times again: it comes back by itself, without a person and without a restart."""
        node = self.node
        node.simulator.clear()
        for _ in range(4):
            await node.until(lambda: not any(lane.hung for lane in node.manager._context.gpu_workers.values()))
            await node.quiet()
            await node.look()
            await node.nothing_out()  # it listens to the driver, and looks of itself
            node.clock.advance(61)
            await node.quiet()
        await node.look()

    async def check(self, *, may_end: bool) -> None:
        """No leak, nothing half there, nothing lost that was promised, and all of it usable."""
        node = self.node
        # Whether it was switched on or off at last, it can be switched now, and is not what it was not told to be.
        await node.manager.set_mig_mode(HOPPER, False, ADMIN)
        states = {gpu.index: (gpu.state, gpu.reason) for gpu in node.manager.snapshot.view.gpus}
        assert [state for state, _ in states.values()] == [GpuState.READY, GpuState.READY, GpuState.WHOLE], states
        there = {
            (index, instance["id"]): len(instance["compute"])
            for index, gpu in enumerate(node.simulator.machine()["gpus"])
            for instance in gpu["instances"]
        }
        assert set(there.values()) <= {1}
        indices = {gpu.uuid: gpu.index for gpu in node.manager.snapshot.view.gpus}
        known = {(indices[each.slot.gpu], each.gpu_instance_id): each for each in node.instances()}
        whole = {where for where in known if where[1] is None}
        assert set(known) - whole == set(there)
        assert {each.state for each in known.values()} <= {InstanceState.IDLE, InstanceState.LEASED}
        held = [generation for lease in node.leases.values() for generation in lease.instances]
        assert sorted(held) == sorted(each.generation for each in known.values() if each.lease is not None)
        ended = {event.lease: event.data["reason"] for event in node.told(EventKind.LEASE_ENDED)}
        for each in self.kept:
            if each.lease.id not in node.leases:
                assert may_end
                assert ended[each.lease.id] == "gpu-lost"
            else:
                await node.release(each)
        assert not node.leases
        await node.manager.reclaim((), ADMIN)
        assert not any(gpu["instances"] for gpu in node.simulator.machine()["gpus"])
        for gpu in (SICK, WELL):
            await node.release(await node.acquire("7g.40gb", gpus=(gpu,)))
        await node.release(await node.acquire(WHOLE, gpus=(HOPPER,)))


def place_of(call: str) -> int | None:
    """The GPU that is sick; None where a fault of this call cannot be kept to one."""
    if call in OF_NO_GPU:
        return None
    return int(HOPPER) if call in {"nvmlDeviceSetMigMode", "nvmlDeviceGetUtilizationRates"} else int(SICK)


def struck(node: Node) -> bool:
    """Whether the one fault has struck."""
    return all(fault["times"] != MANY for fault in node.simulator.machine()["faults"])


def test_the_table_names_every_call_of_the_adapter() -> None:
    assert set(LISTED) == nvml_calls()
    assert set(LISTED) == SERVING | STARTING | ON_ITS_FACE | COUNTERS | SHARES


@pytest.mark.parametrize("times", [1, MANY], ids=["once", "for good"])
@pytest.mark.parametrize("call", sorted(SERVING))
async def test_a_call_fails_while_it_serves(tmp_path: Path, call: str, times: int, figure: Figure) -> None:
    for code in codes_of(call) if times == MANY else LISTED[call]:
        async with engine(tmp_path / code.name, GPUS) as node:
            life = Life(node, call)
            await life.begin()
            node.simulator.fail(call, code, gpu=place_of(call), times=times)
            await life.go_through()
            assert times == MANY or not node.simulator.machine()["faults"]
            assert struck(node)
            await life.recover()
            await life.check(may_end=code is Code.GPU_IS_LOST)
    figure("calls of NVML x codes, while it serves", len(codes_of(call)) if times == MANY else 0)


@pytest.mark.parametrize("call", sorted(STARTING))
async def test_a_call_fails_while_it_starts(
    tmp_path: Path, call: str, figure: Figure, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once is overcome where it is about one GPU; for good the others serve, until it answers again."""
    monkeypatch.setattr(driver_events, "AGAIN_SECONDS", 0.01)
    monkeypatch.setattr(driver_events, "WAIT_SECONDS", 0.01)
    for code in codes_of(call):
        folder = tmp_path / code.name
        async with engine(folder, GPUS) as node:
            life = Life(node, call)
            await life.begin()
        node.simulator.fail(call, code, gpu=place_of(call), times=MANY)
        if call in NOTHING_WITHOUT:
            with pytest.raises(DriverError, match=f"cannot complete {call}"):
                await start(folder, clock=node.clock)
            assert struck(node)
            node.simulator.clear()
        after = await start(folder, clock=node.clock, listen_to_driver=True)
        try:
            life.node = after
            if call not in OF_NO_GPU:
                await life.ask(after.acquire("1g.5gb", gpus=(WELL,)), must=True)
            await after.until(partial(struck, after))
            await life.recover()
            for lease in tuple(after.leases.values()):
                if lease.id not in {each.lease.id for each in life.kept}:
                    await after.manager.release(lease.id, "", ADMIN)
            await life.check(may_end=code is Code.GPU_IS_LOST)
        finally:
            await after.manager.close()
    figure("calls of NVML x codes, while it starts", len(codes_of(call)))


@pytest.mark.parametrize("call", sorted(HANGING))
async def test_a_call_hangs(tmp_path: Path, call: str, figure: Figure) -> None:
    """Whoever waits for it is answered after the deadline; its GPU is set aside until the driver answers."""
    async with engine(tmp_path, GPUS) as node:
        life = Life(node, call)
        await life.begin()
        node.simulator.hang(call, gpu=place_of(call))
        going = node.start(life.go_through())
        set_aside = False
        while not going.done():
            await asyncio.sleep(0.005)
            if hanging() > hung(node) and busy(node) <= hanging():
                node.clock.advance(31)
                set_aside = set_aside or hung(node) > 0
        await going
        assert set_aside
        view = node.manager.snapshot.view
        aside = [gpu for gpu in view.gpus if gpu.state is GpuState.CORDONED]
        assert len(aside) == 1 or call in OF_NO_GPU
        for gpu in aside:
            assert gpu.reason.startswith("the driver has not come back from: ")
        await life.recover()
        await life.check(may_end=False)
        told = [event.kind for event in node.happened]
        assert told.count(EventKind.GPU_CORDONED) == told.count(EventKind.GPU_UNCORDONED) >= 1
    figure("calls of NVML that hang", 1)


@pytest.mark.parametrize("call", sorted(ON_ITS_FACE))
async def test_a_call_fails_that_is_seen_on_the_adapters_face_alone(tmp_path: Path, call: str, figure: Figure) -> None:
    """The engine does not make it, or only at the very end: the adapter says in its own words how it failed."""
    async with engine(tmp_path, GPUS) as node:
        driver = node.driver
        methods = {
            "nvmlEventSetFree": lambda: listens(driver).close(),
            "nvmlShutdown": driver.close,
            "nvmlSystemGetNVMLVersion": driver._nvml.library_version,
        }
        for code in codes_of(call):
            node.simulator.fail(call, code, gpu=place_of(call))
            with pytest.raises(DriverError, match=f"cannot complete {call}"):
                methods[call]()
    figure("calls of NVML x codes, on the adapter's face alone", len(codes_of(call)))


def listens(driver: Driver) -> ChangeListener:
    listener = driver.listen()
    assert listener is not None
    return listener


async def test_it_listens_again_after_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver_events, "AGAIN_SECONDS", 0.01)
    monkeypatch.setattr(driver_events, "WAIT_SECONDS", 0.01)
    async with engine(tmp_path, "a100-40gb", listen_to_driver=True) as node:
        node.simulator.fail("nvmlEventSetWait_v2", Code.UNKNOWN)
        await node.until(lambda: struck(node))
        node.simulator.create_foreign(0, "1g.5gb")
        await node.until(lambda: node.instances(InstanceState.FOREIGN))


def hanging() -> int:
    """Calls that do not come back, in the simulated library."""
    return int(pynvml.nvmlLib.hanging)


def busy(node: Node) -> int:
    """Threads that are in a call; nobody's deadline shall pass for a call that comes back."""
    return sum(bool(track._in_flight) for track in tracks(node))


def hung(node: Node) -> int:
    """Threads that the engine knows to wait for such a call."""
    return sum(bool(track.hung) for track in tracks(node))


def tracks(node: Node) -> list[WatchedThread]:
    return [track for lane in node.manager._context.gpu_workers.values() for track in (lane._worker, lane._reader)]

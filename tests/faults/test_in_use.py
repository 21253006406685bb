"""Instances that the driver will not destroy: set aside for ever longer, and whoever holds them is named."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

from mig_agent.core.errors import Reason, RefusedError
from mig_agent.core.events import EventKind
from mig_agent.core.model import InstanceState
from mig_agent.engine.results import Granted
from support.engine import ADMIN, Node, engine

CONTAINER = "3f4e" * 16
SHORT = CONTAINER[:12]


async def idle(node: Node, profile: str = "1g.5gb") -> Granted:
    granted = await node.acquire(profile)
    await node.release(granted)
    return granted


def blocked(node: Node) -> str:
    """Why the one instance that is set aside is."""
    (instance,) = node.instances(InstanceState.BLOCKED)
    return instance.reason


@pytest.mark.parametrize("listed", [True, False], ids=["listed by NVML", "only an open device node"])
@pytest.mark.parametrize("container", [CONTAINER, ""], ids=["in a container", "on the host"])
@pytest.mark.parametrize("way", ["victim", "reclaim"])
async def test_the_holder_is_named_with_pid_command_and_container(
    tmp_path: Path, way: str, container: str, listed: bool
) -> None:
    async with engine(tmp_path, "a100-40gb") as node:
        where = node.where(await idle(node))
        command = "python train.py --lr 0.1" if listed else "dcgm-exporter -f default-counters.csv"
        take = node.simulator.occupy if listed else node.simulator.hold
        pid = take(where, name=command, container=container)
        inside = f", container {SHORT}" if container else ""
        holder = f"{command} (pid {pid}{inside})"
        if way == "victim":
            with pytest.raises(RefusedError) as refused:
                await node.acquire("7g.40gb")
            refusal = refused.value.refusal
            assert refusal.reason in {Reason.NO_CAPACITY, Reason.IN_USE}
            assert refusal.retryable
            assert "slice 6" in str(refusal.blockers) + refusal.message
        else:
            assert not await node.manager.reclaim((), ADMIN)
        assert blocked(node) == f"held by {holder}"
        await node.quiet()
        (told,) = node.told(EventKind.INSTANCE_BLOCKED)
        assert told.message == f"1g.5gb on slice 6 of GPU 0 is blocked: held by {holder}"
        node.simulator.vacate(pid)
        node.clock.advance(2)
        await node.until(lambda: not node.instances(InstanceState.BLOCKED))
        await node.acquire("7g.40gb")


async def test_all_who_hold_it_are_named(tmp_path: Path) -> None:
    async with engine(tmp_path, "a100-40gb") as node:
        where = node.where(await idle(node))
        first = node.simulator.hold(where, name="dcgm-exporter")
        second = node.simulator.hold(where, name="nv-hostengine", gpu_instance_only=True, container=CONTAINER)
        assert not await node.manager.reclaim((), ADMIN)
        assert blocked(node) == f"held by dcgm-exporter (pid {first}), nv-hostengine (pid {second}, container {SHORT})"


async def test_the_pauses_grow_as_long_as_somebody_holds_it(tmp_path: Path) -> None:
    """A handle without a process is seen by nobody but who tries to destroy the instance, so it is tried again."""
    async with engine(tmp_path, "a100-40gb") as node:
        granted = await idle(node)
        pid = node.simulator.hold(node.where(granted))
        for seconds in (1, 2, 4, 8, 16, 32, 60, 60):
            assert not await node.manager.reclaim((), ADMIN)
            node.clock.advance(seconds - 0.5)
            await node.quiet()
            assert node.instances(InstanceState.BLOCKED)
            node.clock.advance(1)
            await node.until(lambda: node.instances(InstanceState.IDLE))
        node.simulator.vacate(pid)
        assert await node.manager.reclaim((), ADMIN)
        assert node.layout() == ""


async def test_a_blocked_instance_is_neither_leased_nor_destroyed_and_others_are(tmp_path: Path) -> None:
    async with engine(tmp_path, "a100-40gb") as node:
        first, second = await node.acquire("1g.5gb"), await node.acquire("1g.5gb")
        for each in (first, second):
            await node.release(each)
        node.simulator.hold(node.where(first))
        destroyed = await node.manager.reclaim((), ADMIN)
        assert [each.generation for each in destroyed] == [second.devices[0].generation]
        granted = await node.acquire("1g.5gb")
        assert granted.devices[0].uuid != first.devices[0].uuid
        await node.acquire("3g.20gb")


async def test_a_mode_switch_names_who_holds_the_gpu(tmp_path: Path) -> None:
    async with engine(tmp_path, "h100-80gb") as node:
        where = node.where(await idle(node, "1g.10gb"))
        pid = node.simulator.hold(where, name="dcgm-exporter", container=CONTAINER)
        with pytest.raises(RefusedError) as refused:
            await node.manager.set_mig_mode("0", False, ADMIN)
        assert refused.value.refusal.reason is Reason.IN_USE
        assert f"dcgm-exporter (pid {pid}, container {SHORT})" in refused.value.refusal.message


async def test_it_comes_back_when_the_process_ends(tmp_path: Path) -> None:
    """A real one, that is killed."""
    async with engine(tmp_path, "a100-40gb") as node:
        where = node.where(await idle(node))
        process = await asyncio.create_subprocess_exec(sys.executable, "-c", "input()", stdin=asyncio.subprocess.PIPE)
        try:
            node.simulator.occupy(where, pid=process.pid, name="python train.py")
            with pytest.raises(RefusedError):
                await node.acquire("7g.40gb")
            assert f"pid {process.pid}" in blocked(node)
        finally:
            process.kill()
            await process.communicate()
        node.clock.advance(2)
        await node.until(lambda: node.instances(InstanceState.IDLE))
        await node.acquire("7g.40gb")

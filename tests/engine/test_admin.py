"""What administrators do: cordon, reclaim, MIG mode; and what the idle limit does by itself."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from mig_agent.core.errors import Reason, RefusedError
from mig_agent.core.events import EventKind
from mig_agent.core.model import GpuState, InstanceState, Want
from mig_agent.simulator import Code
from support.engine import ADMIN, CREATE, DESTROY, DESTROY_COMPUTE, engine

WHOLE = Want(whole_gpu=True, text="whole")
SET_MODE = "nvmlDeviceSetMigMode"


async def test_nothing_new_is_placed_on_a_cordoned_gpu(tmp_path: Path) -> None:
    async with engine(tmp_path, "a100-40gb:2") as node:
        kept = await node.acquire("1g.5gb", gpus=("0",))
        gpu = await node.manager.cordon("0", True, "fan is loud", ADMIN)
        assert (gpu.state, gpu.reason) == (GpuState.CORDONED, "cordoned by root: fan is loud")
        assert (await node.manager.cordon("0", True, "", ADMIN)).reason == gpu.reason
        assert (await node.acquire("1g.5gb")).devices[0].gpu_index == 1
        with pytest.raises(RefusedError) as refused:
            await node.acquire("1g.5gb", gpus=("0",))
        assert "fan is loud" in refused.value.refusal.message + str(refused.value.refusal.blockers)
        assert kept.lease.id in node.leases
        await node.release(kept)
        gpu = await node.manager.cordon(gpu.uuid, False, "", ADMIN)
        assert (gpu.state, gpu.reason) == (GpuState.READY, "")
        assert (await node.acquire("1g.5gb", gpus=("0",))).devices[0].reused
        assert node.kinds().count(EventKind.GPU_CORDONED) == node.kinds().count(EventKind.GPU_UNCORDONED) == 1


async def test_an_unknown_gpu_is_refused(tmp_path: Path) -> None:
    async with engine(tmp_path, "a100-40gb:2") as node:
        for call in (
            node.manager.cordon("5", True, "", ADMIN),
            node.manager.reclaim(("5",), ADMIN),
            node.manager.set_mig_mode("5", True, ADMIN),
        ):
            with pytest.raises(RefusedError) as refused:
                await call
            assert refused.value.refusal.reason is Reason.UNKNOWN_GPU
            assert "0, 1" in refused.value.refusal.hint


# Reclaim


async def test_reclaim_destroys_idle_instances_of_the_agent(tmp_path: Path) -> None:
    async with engine(tmp_path, "a100-40gb:2") as node:
        leased = await node.acquire("1g.5gb", gpus=("0",))
        idle = [await node.acquire("1g.5gb", gpus=(gpu,)) for gpu in ("0", "1", "1")]
        for each in idle:
            await node.release(each)
        node.simulator.create_foreign(1, "1g.5gb", start=0)
        await node.look()
        destroyed = await node.manager.reclaim(("1",), ADMIN)
        assert {each.generation for each in destroyed} == {each.devices[0].generation for each in idle[1:]}
        assert node.layout(1) == "0:1g.5gb=foreign"
        assert len(await node.manager.reclaim((), ADMIN)) == 1
        assert [each.lease for each in node.instances(gpu=0)] == [leased.lease.id]
        assert await node.manager.reclaim((), ADMIN) == ()


async def test_reclaim_blocks_instances_in_use(tmp_path: Path) -> None:
    async with engine(tmp_path, "a100-40gb") as node:
        idle = [await node.acquire("1g.5gb") for _ in range(2)]
        for each in idle:
            await node.release(each)
        node.simulator.hold(node.where(idle[0]))
        assert len(await node.manager.reclaim((), ADMIN)) == 1
        assert [each.state for each in node.instances()] == [InstanceState.BLOCKED]


@pytest.mark.parametrize(("call", "left"), [(DESTROY_COMPUTE, [InstanceState.IDLE]), (DESTROY, [])])
async def test_a_failure_while_reclaiming_leaves_nothing_half_done(
    tmp_path: Path, call: str, left: list[InstanceState]
) -> None:
    """What failed whole is idle again; of what failed half the rest is removed."""
    async with engine(tmp_path, "a100-40gb") as node:
        for each in [await node.acquire("1g.5gb") for _ in range(3)]:
            await node.release(each)
        node.simulator.fail(call, Code.UNKNOWN)
        assert len(await node.manager.reclaim((), ADMIN)) == 2
        assert [each.state for each in node.instances()] == left
        assert len(node.simulator.machine()["gpus"][0]["instances"]) == len(left)


async def test_reclaim_skips_reserved_instances(tmp_path: Path) -> None:
    async with engine(tmp_path, "a100-40gb") as node:
        first = await node.acquire("1g.5gb")
        await node.release(first)
        task = node.start(node.acquire("1g.5gb"))
        destroyed = await node.manager.reclaim((), ADMIN)
        granted = await task
        assert granted.lease.id in node.leases
        assert (granted.devices[0].reused, len(destroyed)) in {(True, 0), (False, 1)}


async def test_the_idle_limit_is_off_unless_configured(tmp_path: Path) -> None:
    async with engine(tmp_path, "a100-40gb") as node:
        await node.release(await node.acquire("1g.5gb"))
        node.clock.advance(1e6)
        await node.look()
        assert len(node.instances(InstanceState.IDLE)) == 1


async def test_the_idle_limit_destroys_what_has_been_idle_too_long(tmp_path: Path) -> None:
    async with engine(tmp_path, "a100-40gb", idle_limit_seconds=1000.0) as node:
        leased = await node.acquire("1g.5gb")
        await node.release(await node.acquire("2g.10gb"))
        node.clock.advance(900)
        await node.release(await node.acquire("3g.20gb"))
        await node.look()
        assert len(node.instances()) == 3
        node.clock.advance(101)
        await node.look()
        assert {each.slot.profile.name for each in node.instances()} == {"1g.5gb", "3g.20gb"}
        assert leased.lease.id in node.leases


# MIG mode


async def test_a_hopper_switches_at_once(tmp_path: Path) -> None:
    async with engine(tmp_path, "h100-80gb", mig_mode=False) as node:
        answer = await node.manager.set_mig_mode("0", True, ADMIN)
        assert (answer.needs, answer.mode.current, answer.mode.pending) == ("", True, True)
        assert node.gpu().state is GpuState.READY
        assert node.layout() == ""
        await node.release(await node.acquire("1g.10gb"))
        answer = await node.manager.set_mig_mode("0", False, ADMIN)
        assert not answer.mode.current
        assert node.layout() == "0:whole=idle"
        await node.acquire(WHOLE)


async def test_an_ampere_needs_a_reset(tmp_path: Path) -> None:
    async with engine(tmp_path, "a100-40gb", mig_mode=False) as node:
        answer = await node.manager.set_mig_mode("0", True, ADMIN)
        assert answer.needs == "reset"
        assert not answer.mode.current
        assert answer.mode.pending
        assert "reset" in answer.message
        assert node.gpu().state is GpuState.WHOLE
        assert "next reset" in node.gpu().reason
        node.simulator.reset_gpu(0)
        await node.look()
        assert node.gpu().state is GpuState.READY


async def test_a_mode_that_is_set_already_is_not_switched(tmp_path: Path) -> None:
    async with engine(tmp_path, "h100-80gb") as node:
        granted = await node.acquire("1g.10gb")
        answer = await node.manager.set_mig_mode("0", True, ADMIN)
        assert "already" in answer.message
        assert granted.lease.id in node.leases


@pytest.mark.parametrize("trouble", ["leased", "foreign", "process", "whole", "plain process"])
async def test_the_mode_is_not_switched_while_anything_runs_or_is_leased(tmp_path: Path, trouble: str) -> None:
    off = trouble in {"whole", "plain process"}
    async with engine(tmp_path, "h100-80gb", mig_mode=not off) as node:
        if trouble == "leased":
            await node.acquire("1g.10gb", name="bob")
        elif trouble == "foreign":
            node.simulator.create_foreign(0, "1g.10gb")
            await node.look()
        elif trouble == "process":
            granted = await node.acquire("1g.10gb")
            await node.release(granted)
            node.simulator.occupy(node.where(granted))
        elif trouble == "whole":
            await node.acquire(WHOLE)
        else:
            node.simulator.occupy("0")
        with pytest.raises(RefusedError) as refused:
            await node.manager.set_mig_mode("0", off, ADMIN)
        refusal = refused.value.refusal
        assert refusal.reason is Reason.IN_USE
        assert refusal.message.startswith("cannot ")
        if trouble == "leased":
            assert "bob" in refusal.message
        assert node.simulator.calls(SET_MODE) == 0
        assert node.gpu().state is (GpuState.WHOLE if off else GpuState.READY)


async def test_the_first_of_many_blockers_is_in_the_message_and_all_are_listed(tmp_path: Path) -> None:
    async with engine(tmp_path, "h100-80gb") as node:
        for name in ("bob", "carol", "dave"):
            await node.acquire("1g.10gb", name=name)
        with pytest.raises(RefusedError) as refused:
            await node.manager.set_mig_mode("0", False, ADMIN)
        refusal = refused.value.refusal
        assert refusal.message.endswith(", and 2 more")
        assert refusal.message.count("GPU 0") == 1
        assert {each.holder for each in refusal.blockers} == {"bob", "carol", "dave"}
        assert len(refusal.blockers) == 3


@pytest.mark.parametrize("there", ["a100-40gb", "h100-80gb"])
@pytest.mark.parametrize("on", [True, False], ids=["on", "off"])
async def test_the_mode_is_switched_only_on_request(tmp_path: Path, there: str, on: bool) -> None:
    async with engine(tmp_path, there, mig_mode=on, idle_limit_seconds=60.0) as node:
        wanted = WHOLE if not on else "4G"
        granted = await node.acquire(wanted)
        await node.release(granted)
        for asked in ("4G", WHOLE):
            if asked != wanted:
                with contextlib.suppress(RefusedError):
                    await node.release(await node.acquire(asked))
        await node.manager.cordon("0", True, "", ADMIN)
        await node.manager.cordon("0", False, "", ADMIN)
        await node.manager.reclaim((), ADMIN)
        node.clock.advance(3600)
        await node.look()
    async with engine(tmp_path) as node:
        await node.look()
        assert node.gpu().mode.current is on
        assert node.simulator.calls(SET_MODE) == 0


async def test_a_gpu_without_mig_mode_says_so(tmp_path: Path) -> None:
    async with engine(tmp_path, "t4") as node:
        with pytest.raises(RefusedError) as refused:
            await node.manager.set_mig_mode("0", True, ADMIN)
        assert refused.value.refusal.reason is Reason.NOT_SUPPORTED
        assert "it has no MIG mode" in node.gpu().reason


@pytest.mark.parametrize(("code", "reason"), [(Code.NO_PERMISSION, Reason.NOT_PERMITTED), (999, Reason.DRIVER_FAILED)])
async def test_a_driver_that_refuses_the_mode_is_quoted(tmp_path: Path, code: int, reason: Reason) -> None:
    async with engine(tmp_path, "h100-80gb", mig_mode=False) as node:
        node.simulator.fail(SET_MODE, code)
        with pytest.raises(RefusedError) as refused:
            await node.manager.set_mig_mode("0", True, ADMIN)
        assert refused.value.refusal.reason is reason
        assert node.gpu().state is GpuState.WHOLE
        await node.acquire(WHOLE)


async def test_nothing_is_placed_while_the_mode_is_switched(tmp_path: Path) -> None:
    async with engine(tmp_path, "h100-80gb:2") as node:
        node.simulator.hang(SET_MODE)
        task = node.start(node.manager.set_mig_mode("0", False, ADMIN))
        await node.stuck()
        assert node.gpu(0).state is GpuState.CORDONED
        assert (await node.acquire("1g.10gb")).devices[0].gpu_index == 1
        node.simulator.clear()
        await task
        assert node.gpu(0).state is GpuState.WHOLE


async def test_a_creation_under_way_keeps_the_mode_from_being_switched(tmp_path: Path) -> None:
    async with engine(tmp_path, "h100-80gb") as node:
        node.simulator.hang(CREATE)
        task = node.start(node.acquire("1g.10gb"))
        await node.stuck()
        with pytest.raises(RefusedError):
            await node.manager.set_mig_mode("0", False, ADMIN)
        node.simulator.clear()
        await task


# Usage


async def test_usage_is_reported_and_unknown_usage_is_not_zero(tmp_path: Path) -> None:
    async with engine(tmp_path, "a100-40gb,h100-80gb") as node:
        used = await node.acquire("1g.5gb")
        idle = await node.acquire("1g.10gb")
        pid = node.simulator.occupy(node.where(used), used_mib=500)
        usage = await node.manager.usage()
        first = usage[used.devices[0].generation]
        assert first.memory_total_mib == 4864
        assert first.memory_used_mib is not None
        assert first.memory_used_mib >= 500
        (process,) = first.processes or ()
        assert (process.pid, process.used_mib) == (pid, 500)
        assert first.utilization_percent is None
        assert usage[idle.devices[0].generation].processes == ()
        node.simulator.lose_gpu(0)
        lost = (await node.manager.usage())[used.devices[0].generation]
        assert (lost.memory_used_mib, lost.processes) == (None, None)

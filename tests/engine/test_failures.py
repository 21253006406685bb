"""What the engine does when the driver fails, hangs or lies, and when instances are in use."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from mig_agent.core.errors import DriverError, Reason, RefusedError
from mig_agent.core.events import EventKind
from mig_agent.core.model import GpuState, InstanceState
from mig_agent.simulator import Code
from support.engine import ADMIN, CREATE, CREATE_COMPUTE, DESTROY, Node, engine, start

FAILURES = [Code.INSUFFICIENT_RESOURCES, Code.IN_USE, Code.UNKNOWN, Code.NO_PERMISSION, Code.INVALID_ARGUMENT]


def made(node: Node, gpu: int = 0) -> list[tuple[int, int]]:
    """What the hardware has: start and number of compute instances of each."""
    return [(each["start"], len(each["compute"])) for each in node.simulator.machine()["gpus"][gpu]["instances"]]


@pytest.mark.parametrize("call", [CREATE, CREATE_COMPUTE])
@pytest.mark.parametrize("code", FAILURES)
async def test_a_failed_creation_is_undone_and_tried_elsewhere(tmp_path: Path, call: str, code: Code) -> None:
    async with engine(tmp_path, "a100-40gb") as node:
        node.simulator.fail(call, code)
        granted = await node.acquire("1g.5gb")
        placement = granted.devices[0].placement
        assert placement is not None
        assert placement.start != 6  # where it would have been, and failed
        assert made(node) == [(placement.start, 1)]
        assert [each.state for each in node.instances()] == [InstanceState.LEASED]
        (told,) = node.told(EventKind.STEP_FAILED)
        assert told.message.startswith("cannot create ")
        assert told.message.count("cannot create") == 1


async def test_a_start_that_fails_writes_nothing_more(tmp_path: Path) -> None:
    """If its threads went on they could commit while the next start reads the ledger, which would look damaged."""
    async with engine(tmp_path, "a100-40gb") as node:
        simulator = node.simulator
    simulator.fail("nvmlDeviceGetCount", Code.UNKNOWN, times=None)
    with pytest.raises(DriverError, match="cannot complete nvmlDeviceGetCount"):
        await start(tmp_path)
    assert "ledger" not in {thread.name for thread in threading.enumerate()}


async def test_tries_are_bounded_and_the_answer_says_what_failed(tmp_path: Path) -> None:
    async with engine(tmp_path, "a100-40gb") as node:
        fault = node.simulator.fail(CREATE, Code.UNKNOWN, times=None)
        with pytest.raises(RefusedError) as refused:
            await node.acquire("1g.5gb")
        refusal = refused.value.refusal
        assert refusal.reason is Reason.DRIVER_FAILED
        assert refusal.retryable
        assert refusal.message.startswith("cannot serve 1g.5gb: cannot create 1g.5gb")
        assert node.creations() == 0 or node.creations() <= 4
        assert node.instances() == []
        node.simulator.clear(fault)
        await node.acquire("1g.5gb")


async def test_a_failure_on_one_gpu_leads_to_another(tmp_path: Path) -> None:
    async with engine(tmp_path, "a100-40gb:2") as node:
        node.simulator.fail(CREATE, Code.UNKNOWN, gpu=0, times=None)
        assert (await node.acquire("7g.40gb")).devices[0].gpu_index == 1


async def test_instances_created_for_a_failed_request_become_idle(tmp_path: Path) -> None:
    async with engine(tmp_path, "a100-40gb:2") as node:
        node.simulator.fail(CREATE, Code.UNKNOWN, gpu=1, times=None)
        with pytest.raises(RefusedError):
            await node.acquire("7g.40gb", "7g.40gb")
        await node.quiet()
        assert node.layout(0) == "0:7g.40gb=idle"
        assert node.layout(1) == ""
        node.simulator.clear()
        assert sorted(device.reused for device in (await node.acquire("7g.40gb", "7g.40gb")).devices) == [False, True]


async def test_a_half_made_instance_that_cannot_be_undone_is_removed_later(tmp_path: Path) -> None:
    async with engine(tmp_path, "a100-40gb") as node:
        node.simulator.fail(CREATE_COMPUTE, Code.UNKNOWN)
        fault = node.simulator.fail(DESTROY, Code.UNKNOWN, times=None)
        granted = await node.acquire("1g.5gb")
        assert len(made(node)) == 2
        assert [each.state for each in node.instances() if each.lease is None] == [InstanceState.BLOCKED]
        node.simulator.clear(fault)
        node.clock.advance(2)
        await node.quiet()
        assert (await node.manager.reclaim((), ADMIN))[0].slot.placement.start == 6
        assert len(made(node)) == 1
        assert granted.lease.id in node.leases


# In use


async def test_an_idle_instance_with_a_process_is_never_leased(tmp_path: Path) -> None:
    async with engine(tmp_path, "a100-40gb") as node:
        first = await node.acquire("1g.5gb")
        await node.release(first)
        pid = node.simulator.occupy(node.where(first), name="python still-there.py")
        second = await node.acquire("1g.5gb")
        assert not second.devices[0].reused
        assert second.devices[0].uuid != first.devices[0].uuid
        blocked = node.instances(InstanceState.BLOCKED)
        assert [each.generation for each in blocked] == [first.devices[0].generation]
        assert f"python still-there.py (pid {pid})" in blocked[0].reason
        node.simulator.vacate(pid)
        node.clock.advance(2)
        await node.until(lambda: node.instances(InstanceState.IDLE))
        assert (await node.acquire("1g.5gb")).devices[0].uuid == first.devices[0].uuid
        assert EventKind.INSTANCE_UNBLOCKED in node.kinds()


async def test_a_blocked_instance_is_checked_with_back_off(tmp_path: Path) -> None:
    async with engine(tmp_path, "a100-40gb") as node:
        first = await node.acquire("1g.5gb")
        await node.release(first)
        node.simulator.occupy(node.where(first))
        await node.acquire("1g.5gb")
        blocks = node.manager._parts.quarantine
        for seconds in (1, 2, 4, 8, 16, 32, 60, 60):
            generation = first.devices[0].generation
            timer = blocks._timers[generation]
            node.clock.advance(seconds - 0.5)
            assert blocks._timers[generation] is timer
            node.clock.advance(0.5)
            await node.quiet()
        assert len(node.instances(InstanceState.BLOCKED)) == 1


async def test_a_victim_in_use_for_a_moment_is_destroyed_all_the_same(tmp_path: Path) -> None:
    async with engine(tmp_path, "a100-40gb") as node:
        first = await node.acquire("1g.5gb")
        await node.release(first)
        node.simulator.fail(DESTROY, Code.IN_USE, times=3)
        await node.acquire("7g.40gb")
        assert node.layout() == "0:7g.40gb=leased"


@pytest.mark.parametrize("gpu_instance_only", [True, False])
async def test_a_victim_in_use_is_blocked_and_its_process_named(tmp_path: Path, *, gpu_instance_only: bool) -> None:
    async with engine(tmp_path, "a100-40gb") as node:
        first = await node.acquire("1g.5gb")
        await node.release(first)
        pid = node.simulator.hold(node.where(first), name="dcgm-exporter", gpu_instance_only=gpu_instance_only)
        with pytest.raises(RefusedError) as refused:
            await node.acquire("7g.40gb")
        assert refused.value.refusal.reason in {Reason.NO_CAPACITY, Reason.IN_USE}
        blocked = node.instances(InstanceState.BLOCKED)
        assert f"dcgm-exporter (pid {pid})" in blocked[0].reason
        node.simulator.vacate(pid)
        node.clock.advance(2)
        await node.until(lambda: not node.instances(InstanceState.BLOCKED))
        await node.acquire("7g.40gb")


async def test_other_victims_survive_when_one_is_in_use(tmp_path: Path) -> None:
    async with engine(tmp_path, "a100-40gb:2") as node:
        leases = [await node.acquire("1g.5gb", gpus=("0",)) for _ in range(3)]
        for each in leases:
            await node.release(each)
        for each in leases:
            node.simulator.hold(node.where(each))
        granted = await node.acquire("7g.40gb")
        assert granted.devices[0].gpu_index == 1
        assert {each.state for each in node.instances(gpu=0)} <= {InstanceState.BLOCKED, InstanceState.IDLE}
        assert len(made(node)) == 3


# Hanging, lying, disappearing


async def test_a_hung_gpu_is_cordoned_until_its_driver_call_returns(tmp_path: Path) -> None:
    async with engine(tmp_path, "a100-40gb:2") as node:
        node.simulator.hang(CREATE, gpu=0)
        task = node.start(node.acquire("1g.5gb"))
        await node.stuck()
        node.clock.advance(31)
        granted = await task
        assert granted.devices[0].gpu_index == 1
        assert node.gpu(0).state is GpuState.CORDONED
        assert "create 1g.5gb" in node.gpu(0).reason
        assert EventKind.GPU_CORDONED in node.kinds()
        with pytest.raises(RefusedError):
            await node.acquire("1g.5gb", gpus=("0",))
        node.simulator.clear()
        await node.until(lambda: node.gpu(0).state is GpuState.READY)
        assert node.layout(0) == ""
        assert made(node) == []
        await node.quiet()
        assert EventKind.GPU_UNCORDONED in node.kinds()
        assert (await node.acquire("1g.5gb", gpus=("0",))).devices[0].gpu_index == 0


async def test_a_hung_reader_thread_cordons_its_gpu_too(tmp_path: Path) -> None:
    async with engine(tmp_path, "a100-40gb:2") as node:
        first = await node.acquire("1g.5gb", gpus=("0",))
        await node.release(first)
        node.simulator.hang("nvmlDeviceGetComputeRunningProcesses_v3")
        task = node.start(node.acquire("1g.5gb"))
        await node.stuck(reader=True)
        node.clock.advance(31)
        assert node.gpu(0).state is GpuState.CORDONED
        node.simulator.clear()
        await task
        await node.until(lambda: node.gpu(0).state is GpuState.READY)


async def test_a_hung_destroy_keeps_its_victim_until_the_driver_answers(tmp_path: Path) -> None:
    async with engine(tmp_path, "a100-40gb") as node:
        first = await node.acquire("1g.5gb")
        await node.release(first)
        node.simulator.hang(DESTROY)
        task = node.start(node.acquire("7g.40gb"))
        await node.stuck()
        node.clock.advance(31)
        with pytest.raises(RefusedError):
            await task
        assert node.instances(InstanceState.DESTROYING)
        node.simulator.clear()
        await node.until(lambda: node.gpu(0).state is GpuState.READY)
        assert not node.instances(InstanceState.DESTROYING)
        await node.acquire("7g.40gb")


async def test_a_remnant_is_not_taken_for_destroyed(tmp_path: Path) -> None:
    async with engine(tmp_path, "a100-40gb:2") as node:
        first = await node.acquire("1g.5gb", gpus=("0",))
        await node.release(first)
        node.simulator.leave_remnant(gpu=0, times=None)
        granted = await node.acquire("7g.40gb")
        assert granted.devices[0].gpu_index == 1
        assert len(made(node)) == 1
        node.simulator.clear()
        for _ in range(8):
            node.clock.advance(60)
            await node.quiet()
            await node.look()
        assert (await node.acquire("7g.40gb", gpus=("0",))).devices[0].gpu_index == 0


async def test_deleted_devices_that_are_still_listed_are_ignored(tmp_path: Path) -> None:
    async with engine(tmp_path, "a100-40gb") as node:
        node.simulator.list_stale()
        for profile in ("1g.5gb", "7g.40gb", "1g.5gb", "3g.20gb"):
            await node.release(await node.acquire(profile))
        assert node.instances(InstanceState.LEASED) == []


async def test_leases_on_a_lost_gpu_end_with_an_event(tmp_path: Path) -> None:
    async with engine(tmp_path, "a100-40gb:2") as node:
        lost = await node.acquire("1g.5gb", gpus=("0",))
        kept = await node.acquire("1g.5gb", gpus=("1",))
        both = await node.acquire("1g.5gb", gpus=("1",))
        node.simulator.lose_gpu(0)
        await node.look()
        assert node.gpu(0).state is GpuState.LOST
        assert set(node.leases) == {kept.lease.id, both.lease.id}
        ended = node.told(EventKind.LEASE_ENDED)
        assert [(event.lease, event.data["reason"]) for event in ended] == [(lost.lease.id, "gpu-lost")]
        assert (await node.acquire("1g.5gb")).devices[0].gpu_index == 1


async def test_a_gpu_that_is_lost_in_the_middle_leads_to_another(tmp_path: Path) -> None:
    async with engine(tmp_path, "a100-40gb:2") as node:
        first = await node.acquire("1g.5gb", gpus=("0",))
        await node.release(first)
        node.simulator.lose_gpu(0)
        assert (await node.acquire("1g.5gb")).devices[0].gpu_index == 1


async def test_an_instance_that_vanished_is_not_leased(tmp_path: Path) -> None:
    async with engine(tmp_path, "a100-40gb") as node:
        first = await node.acquire("1g.5gb")
        await node.release(first)
        node.simulator.destroy_foreign(node.where(first))
        second = await node.acquire("1g.5gb")
        assert not second.devices[0].reused
        assert EventKind.INSTANCE_LOST in node.kinds()
        assert len(node.instances()) == 1


async def test_a_placement_taken_by_others_meanwhile_is_noticed(tmp_path: Path) -> None:
    async with engine(tmp_path, "a100-40gb") as node:
        node.simulator.create_foreign(0, "1g.5gb", start=6)
        granted = await node.acquire("1g.5gb")
        placement = granted.devices[0].placement
        assert placement is not None
        assert placement.start != 6
        assert [each.slot.placement.start for each in node.instances(InstanceState.FOREIGN)] == [6]

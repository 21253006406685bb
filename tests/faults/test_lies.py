"""A driver that answers success and has done nothing, or goes on listing what is gone, or tells only a part."""

from __future__ import annotations

from pathlib import Path

import pytest

from mig_agent.core.errors import RefusedError
from mig_agent.core.events import EventKind
from mig_agent.core.model import InstanceState
from mig_agent.simulator import Code
from support.engine import ADMIN, Node, engine
from support.figures import Figure


def made(node: Node, gpu: int = 0) -> list[str]:
    """The names of the GPU instances on the hardware."""
    return [f"{gpu}/{each['id']}" for each in node.simulator.machine()["gpus"][gpu]["instances"]]


async def back_to_normal(node: Node) -> None:
    """The driver tells the truth again, and time passes."""
    node.simulator.clear()
    for _ in range(8):
        node.clock.advance(61)
        await node.quiet()
        await node.look()


@pytest.mark.parametrize("way", ["victim", "reclaim", "mode"])
async def test_a_destroy_that_answers_success_and_leaves_the_instance(tmp_path: Path, way: str, figure: Figure) -> None:
    async with engine(tmp_path, "h100-80gb:2") as node:
        first = await node.acquire("1g.10gb", gpus=("0",))
        await node.release(first)
        node.simulator.leave_remnant(gpu=0, times=None)
        if way == "victim":
            with pytest.raises(RefusedError, match="cannot"):
                await node.acquire("7g.80gb", gpus=("0",))
        elif way == "reclaim":
            assert not await node.manager.reclaim(("0",), ADMIN)
        else:
            with pytest.raises(RefusedError, match="cannot disable MIG mode on GPU 0"):
                await node.manager.set_mig_mode("0", False, ADMIN)
        assert len(made(node)) == 1
        known = [f"0/{each.gpu_instance_id}" for each in node.instances(gpu=0)]
        assert known == made(node)  # not forgotten, and nobody's
        assert not node.instances(InstanceState.LEASED)
        assert (await node.acquire("7g.80gb")).devices[0].gpu_index == 1
        await back_to_normal(node)
        await node.acquire("7g.80gb", gpus=("0",))
        assert len(made(node)) == 1
    figure("ways in which the driver lies", 1)


async def test_deleted_devices_that_stay_listed_disturb_nobody(tmp_path: Path, figure: Figure) -> None:
    async with engine(tmp_path, "a100-40gb:2") as node:
        node.simulator.list_stale(gpu=0)
        kept = await node.acquire("1g.5gb", gpus=("0",))
        for profile in ("2g.10gb", "3g.20gb", "2g.10gb", "4g.20gb", "1g.5gb"):
            granted = await node.acquire(profile, gpus=("0",))
            assert granted.devices[0].gpu_index == 0
            await node.look()
            await node.release(granted)
            await node.manager.reclaim(("0",), ADMIN)
            await node.look()
        assert list(node.leases) == [kept.lease.id]
        assert [each.lease for each in node.instances(gpu=0)] == [kept.lease.id]
        assert not node.told(EventKind.INSTANCE_LOST)
        usage = await node.manager.usage()
        assert usage[kept.devices[0].generation].memory_total_mib
    figure("ways in which the driver lies", 1)


async def test_an_instance_that_is_not_found_by_its_id_and_is_there_is_not_forgotten(
    tmp_path: Path, figure: Figure
) -> None:
    async with engine(tmp_path, "a100-40gb") as node:
        first = await node.acquire("1g.5gb")
        await node.release(first)
        node.simulator.fail("nvmlDeviceGetGpuInstanceById", Code.NOT_FOUND, times=None)
        assert not await node.manager.reclaim((), ADMIN)
        assert len(made(node)) == 1
        await back_to_normal(node)
        assert node.layout() == "6:1g.5gb=idle"
        assert await node.manager.reclaim((), ADMIN)
        assert not made(node)
    figure("ways in which the driver lies", 1)


async def test_a_gpu_that_says_that_it_has_no_mig_keeps_its_leases(tmp_path: Path, figure: Figure) -> None:
    async with engine(tmp_path, "a100-40gb:2") as node:
        kept = await node.acquire("1g.5gb", gpus=("0",))
        node.simulator.fail("nvmlDeviceGetMigMode", Code.NOT_SUPPORTED, gpu=0, times=None)
        for _ in range(4):
            await node.look()
        assert kept.lease.id in node.leases
        assert "cannot be read" in node.gpu(0).reason
    async with engine(tmp_path, clock=node.clock) as after:
        assert [gpu.index for gpu in after.manager.snapshot.view.gpus] == [1]
        assert kept.lease.id in after.leases
        await back_to_normal(after)
        assert after.layout(0) == "6:1g.5gb=leased"
    figure("ways in which the driver lies", 1)


async def test_compute_instances_that_are_not_told_of_cost_nobody_a_lease(tmp_path: Path, figure: Figure) -> None:
    async with engine(tmp_path, "a100-40gb") as node:
        kept = await node.acquire("1g.5gb")
        node.simulator.fail("nvmlGpuInstanceGetComputeInstanceProfileInfo", Code.NOT_SUPPORTED, times=None)
        for _ in range(4):
            await node.look()
        assert kept.lease.id in node.leases
        await back_to_normal(node)
        assert node.layout() == "6:1g.5gb=leased"
    figure("ways in which the driver lies", 1)


async def test_a_profile_that_is_left_out_once_costs_nobody_a_lease(tmp_path: Path, figure: Figure) -> None:
    """What the driver lists by profile cannot be seen without the profile; it is asked for them again."""
    async with engine(tmp_path, "a100-40gb") as node:
        kept = await node.acquire("1g.5gb")
        await node.release(await node.acquire("2g.10gb"))
    node.simulator.fail("nvmlDeviceGetGpuInstancePossiblePlacements", Code.NOT_SUPPORTED)
    async with engine(tmp_path, clock=node.clock) as after:
        assert not after.simulator.machine()["faults"]
        assert kept.lease.id in after.leases
        assert {each.slot.profile.name for each in after.instances()} == {"1g.5gb", "2g.10gb"}
        assert "1g.5gb" in {profile.name for profile in after.gpu().layout.profiles}
        assert not (await after.acquire("1g.5gb")).devices[0].reused
    figure("ways in which the driver lies", 1)

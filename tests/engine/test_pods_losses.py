"""A pod's lease of several devices outlives the loss of one: its containers still have the nodes of the others."""

from __future__ import annotations

from pathlib import Path

import pytest

from mig_agent.adapters.ledger.store import Ledger
from mig_agent.core.errors import RefusedError
from mig_agent.core.events import EventKind
from mig_agent.core.model import GpuState, Holder, InstanceState, live_devices
from mig_agent.core.owner import KubeletDevice, Pod
from mig_agent.engine.callers import Caller
from mig_agent.engine.results import Granted
from mig_agent.simulator import Code
from support.engine import Node, engine, killed, start
from support.ledgers import rewritten
from support.owners import bound

KUBELET = Caller(name="kubelet", scheduler=True)
POD = Pod(namespace="team-a", name="train-7f2c", uid="6b8f")
LOST = ("nvmlDeviceGetMigMode", Code.GPU_IS_LOST)


async def leased(node: Node, *profiles: str) -> Granted:
    devices = tuple(
        KubeletDevice(resource=f"nvidia.com/mig-{profile}", id=f"mig-agent-{number}")
        for number, profile in enumerate(profiles)
    )
    request = node.request(*profiles, holder=Holder(tenant="team-a"), pod=POD, kubelet_devices=devices)
    return await node.manager.acquire(request, KUBELET)


def standing_now(node: Node, granted: Granted) -> list[bool]:
    """Of each device of the lease, whether its instance is there."""
    view = node.manager.snapshot.view
    return [each is not None for each in live_devices(view, view.leases[granted.lease.id])]


def index_of(granted: Granted, gpu: int) -> int:
    return next(number for number, each in enumerate(granted.devices) if each.gpu_index == gpu)


async def test_a_lost_gpu_degrades_the_lease_of_a_pod(tmp_path: Path) -> None:
    async with engine(tmp_path, "a100-40gb:2") as node:
        granted = await leased(node, "7g.40gb", "7g.40gb")
        node.simulator.lose_gpu(1)
        await node.look()
        await node.look()
        assert node.leases == {granted.lease.id: granted.lease}
        assert [each.state for each in node.instances(gpu=0)] == [InstanceState.LEASED]
        lost = index_of(granted, 1)
        assert standing_now(node, granted) == [number != lost for number in range(2)]
        await node.quiet()
        (told,) = node.told(EventKind.LEASE_DEGRADED)
        assert told.lease == granted.lease.id
        assert told.gpu_index == 1
        assert told.holder == "pod team-a/train-7f2c"
        assert told.data["reason"] == "gpu-lost"
        assert f"nvidia.com/mig-7g.40gb mig-agent-{lost}" in told.message
        assert "its GPU was lost" in told.message
        with pytest.raises(RefusedError, match="pod team-a/train-7f2c"):
            await node.acquire("1g.5gb")  # nobody else gets what its container has open


async def test_the_lease_ends_with_its_last_device(tmp_path: Path) -> None:
    async with engine(tmp_path, "a100-40gb:2") as node:
        await leased(node, "7g.40gb", "7g.40gb")
        node.simulator.lose_gpu(1)
        await node.look()
        node.simulator.lose_gpu(0)
        await node.look()
        assert not node.leases
        (ended,) = node.told(EventKind.LEASE_ENDED)
        assert ended.data["reason"] == "gpu-lost"
        await node.quiet()
        assert len(node.told(EventKind.LEASE_DEGRADED)) == 1


async def test_a_lease_on_the_lost_gpu_alone_ends(tmp_path: Path) -> None:
    async with engine(tmp_path, "a100-40gb:2") as node:
        granted = await leased(node, "3g.20gb", "3g.20gb")
        assert {each.gpu_index for each in granted.devices} == {0}
        node.simulator.lose_gpu(0)
        await node.look()
        assert not node.leases
        await node.quiet()
        assert not node.told(EventKind.LEASE_DEGRADED)


async def test_a_gpu_that_answers_again_brings_the_device_back(tmp_path: Path) -> None:
    async with engine(tmp_path, "a100-40gb:2") as node:
        granted = await leased(node, "7g.40gb", "7g.40gb")
        node.simulator.fail(*LOST, gpu=1)
        await node.look()
        assert node.gpu(1).state is GpuState.LOST
        assert standing_now(node, granted).count(False) == 1
        await node.look()
        assert node.gpu(1).state is GpuState.READY
        assert standing_now(node, granted) == [True, True]
        assert [each.lease for each in node.instances()] == [granted.lease.id] * 2


async def test_a_gpu_that_was_reset_has_nothing_of_it_any_more_and_serves_others(tmp_path: Path) -> None:
    async with engine(tmp_path, "a100-40gb:2") as node:
        granted = await leased(node, "7g.40gb", "7g.40gb")
        node.simulator.lose_gpu(1)
        await node.look()
        node.simulator.reset_gpu(1)
        await node.look()
        assert node.layout(1) == ""
        assert standing_now(node, granted).count(False) == 1
        assert (await node.acquire("7g.40gb")).devices[0].gpu_index == 1
        await node.manager.owner_ended(granted.lease.id, "its pod has ended")
        assert [each.state for each in node.instances(gpu=0)] == [InstanceState.IDLE]
        assert [each.state for each in node.instances(gpu=1)] == [InstanceState.LEASED]


@pytest.mark.parametrize("dies", [False, True])
async def test_an_instance_that_vanished_is_missed_alone_whatever_becomes_of_the_agent(
    tmp_path: Path, dies: bool
) -> None:
    node = await start(tmp_path, "a100-40gb:1")
    granted = await leased(node, "1g.5gb", "2g.10gb")
    if dies:
        await killed(node)
    node.simulator.destroy_foreign(node.where(granted))
    if not dies:
        await node.look()
        (told,) = node.told(EventKind.LEASE_DEGRADED)
        assert told.data["reason"] == "instance-lost"
        await killed(node)
    async with engine(tmp_path, clock=node.clock) as again:
        assert again.leases == {granted.lease.id: granted.lease}
        assert standing_now(again, granted) == [False, True]
        await again.look()
        assert not again.told(EventKind.LEASE_DEGRADED), "it was told once"
        again.simulator.destroy_foreign(again.where(granted, 1))
        await again.look()
        assert not again.leases
        assert not again.instances()


async def test_a_gpu_that_is_not_in_the_machine_any_more_is_a_loss_like_any_other(tmp_path: Path) -> None:
    node = await start(tmp_path, "a100-40gb:2")
    granted = await leased(node, "7g.40gb", "7g.40gb")
    await killed(node)
    # The record is of a machine with one GPU more than there is now.
    with rewritten(node.ledger.path) as ledger:
        ledger.execute("UPDATE instance SET gpu = 'GPU-gone' WHERE gpu = ?", (node.gpu(1).uuid,))
    node.simulator.destroy_foreign(node.where(granted, index_of(granted, 1)))
    async with engine(tmp_path, clock=node.clock) as again:
        assert set(again.leases) == {granted.lease.id}
        assert [each.state for each in again.instances()] == [InstanceState.LEASED]
        assert standing_now(again, granted).count(False) == 1
        recorded = await again.manager.history.events(0.0, None, 1000)
        (told,) = [each for each in recorded if each.kind is EventKind.LEASE_DEGRADED]
        assert "GPU-gone" in told.message


async def test_what_is_on_a_gpu_that_is_not_managed_now_is_left_of_it(tmp_path: Path) -> None:
    """Else it would be idle when the GPU is managed again, under a container that has its nodes."""
    node = await start(tmp_path, "a100-40gb:2")
    granted = await leased(node, "7g.40gb", "7g.40gb")
    await killed(node)
    async with engine(tmp_path, clock=node.clock, gpus=("0",)) as only:
        only.simulator.destroy_foreign(node.where(granted, index_of(granted, 0)))
        await only.look()
        assert set(only.leases) == {granted.lease.id}
        assert standing_now(only, granted) == [False, False]
    async with engine(tmp_path, clock=node.clock) as again:
        assert [each.lease for each in again.instances()] == [granted.lease.id]
        again.simulator.destroy_foreign(node.where(granted, index_of(granted, 1)))
        await again.look()
        assert not again.leases


async def test_a_loss_that_cannot_be_recorded_is_found_again(tmp_path: Path) -> None:
    def full(*_: object) -> None:
        raise OverflowError("database or disk is full")

    async with engine(tmp_path, "a100-40gb:1") as node:
        granted = await leased(node, "1g.5gb", "2g.10gb")
        node.simulator.destroy_foreign(node.where(granted))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Ledger, "_commit", full)
            await node.look()
        assert standing_now(node, granted) == [True, True]
        assert not node.told(EventKind.LEASE_DEGRADED)
        await node.look()
        assert standing_now(node, granted) == [False, True]
        assert len(node.told(EventKind.LEASE_DEGRADED)) == 1


async def test_after_a_reboot_nothing_is_left_of_it(tmp_path: Path) -> None:
    node = await start(tmp_path, "a100-40gb:2")
    granted = await leased(node, "7g.40gb", "7g.40gb")
    node.simulator.destroy_foreign(node.where(granted, 1))
    await node.look()
    assert set(node.leases) == {granted.lease.id}
    await killed(node)
    node.simulator.reboot()
    async with engine(tmp_path, clock=node.clock) as again:
        assert not again.leases
        assert not again.instances()


async def test_what_is_left_of_it_after_its_compute_instance_was_taken_goes(tmp_path: Path) -> None:
    """A GPU instance without a compute instance is of no use to the pod, and holds slices."""
    async with engine(tmp_path, "a100-40gb:1") as node:
        granted = await leased(node, "1g.5gb", "2g.10gb")
        taken = granted.devices[0]
        node.simulator.destroy_foreign(node.where(granted))
        assert taken.placement is not None
        node.simulator.create_foreign(0, "1g.5gb", start=taken.placement.start, with_compute=False)
        await node.look()
        assert set(node.leases) == {granted.lease.id}
        assert standing_now(node, granted) == [False, True]


@pytest.mark.parametrize("arrives", [True, False])
async def test_a_lease_that_was_taken_for_a_pod_is_the_pods_once_it_has_come(tmp_path: Path, arrives: bool) -> None:
    """Until then no container has its nodes, and it is all or nothing like any other."""
    async with engine(tmp_path, "a100-40gb:2") as node:
        request = node.request("7g.40gb", "7g.40gb", holder=Holder(tenant="team-a"), pod=POD)
        granted = await node.manager.acquire(request, KUBELET)
        if arrives:
            await node.manager.bind(granted.lease.id, bound(POD))
        node.simulator.lose_gpu(1)
        await node.look()
        await node.quiet()
        assert (granted.lease.id in node.leases) is arrives
        assert bool(node.told(EventKind.LEASE_DEGRADED)) is arrives
        assert [each.state for each in node.instances(gpu=0)] == [
            InstanceState.LEASED if arrives else InstanceState.IDLE
        ]

"""Draining: GPUs become empty by themselves or at a deadline, over restarts and kills; pods are left alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from mig_agent.core.errors import RefusedError
from mig_agent.core.events import EventKind
from mig_agent.core.model import GpuState
from mig_agent.core.owner import KubeletDevice
from support.engine import ADMIN, Node, engine, killed, start

DEVICE = KubeletDevice(resource="nvidia.com/mig-1g.5gb", id="mig-agent-0")


async def drained(node: Node, *gpus: str, deadline: float | None = None) -> tuple[str, ...]:
    _, leases = await node.manager.drain(gpus, deadline, "a fan is loud", ADMIN)
    return tuple(each.id for each in leases)


async def test_a_drained_gpu_gets_nothing_new_and_becomes_empty_by_itself(tmp_path: Path) -> None:
    async with engine(tmp_path, "a100-40gb:2") as node:
        held = await node.acquire("1g.5gb", gpus=("0",))
        assert await drained(node, "0") == (held.lease.id,)
        gpu = node.gpu(0)
        assert (gpu.state, gpu.reason, gpu.draining) == (GpuState.CORDONED, "drained by root: a fan is loud", True)
        assert gpu.drain_until is None
        assert node.manager.snapshot.warnings == {held.lease.id: "GPU 0 is drained by root: a fan is loud"}
        with pytest.raises(RefusedError):
            await node.acquire("1g.5gb", gpus=("0",))
        assert (await node.acquire("1g.5gb")).devices[0].gpu_index == 1
        node.clock.advance(1e6)
        await node.quiet()
        assert held.lease.id in node.leases
        await node.release(held)
        await node.until(lambda: node.told(EventKind.GPU_DRAINED))
        assert node.told(EventKind.GPU_DRAINED)[0].message == "GPU 0 is drained: nothing is leased there"


async def test_at_the_deadline_the_leases_end_and_their_holders_were_warned(tmp_path: Path) -> None:
    async with engine(tmp_path, "a100-40gb:2") as node:
        there, elsewhere = await node.acquire("1g.5gb", gpus=("0",)), await node.acquire("1g.5gb", gpus=("1",))
        await drained(node, "0", deadline=7200.0)
        warning = node.told(EventKind.LEASE_WARNED)[0]
        assert warning.lease == there.lease.id
        assert "ends in 2h at the latest: GPU 0 is drained by root: a fan is loud" in warning.message
        node.clock.advance(3600)
        assert node.manager.snapshot.warnings[there.lease.id].endswith("; the lease ends in 1h")
        assert there.lease.id in node.leases
        node.clock.advance(3600)
        await node.until(lambda: there.lease.id not in node.leases)
        ended = node.told(EventKind.LEASE_ENDED)[0]
        assert ended.data["reason"] == "drained"
        assert "GPU 0 is drained by root: a fan is loud, and the deadline is over" in ended.message
        assert elsewhere.lease.id in node.leases


async def test_the_lease_of_a_pod_never_ends_by_a_drain(tmp_path: Path) -> None:
    async with engine(tmp_path, "a100-40gb") as node:
        pod = await node.acquire("1g.5gb", kubelet_devices=(DEVICE,))
        await drained(node, deadline=60.0)
        assert node.told(EventKind.LEASE_WARNED) == []
        node.clock.advance(3600)
        await node.look()
        await node.quiet()
        assert pod.lease.id in node.leases


async def test_undrain_uses_the_gpus_again_and_leaves_a_cordon(tmp_path: Path) -> None:
    async with engine(tmp_path, "a100-40gb:2") as node:
        await node.manager.cordon("1", True, "", ADMIN)
        held = await node.acquire("1g.5gb")
        await drained(node, "0", deadline=60.0)
        assert [each.index for each in await node.manager.undrain((), ADMIN)] == [0]
        assert [node.gpu(index).state for index in (0, 1)] == [GpuState.READY, GpuState.CORDONED]
        node.clock.advance(3600)
        await node.quiet()
        assert held.lease.id in node.leases
        assert await node.manager.undrain((), ADMIN) == ()


async def test_uncordon_ends_a_drain_and_a_later_drain_changes_it(tmp_path: Path) -> None:
    async with engine(tmp_path, "a100-40gb") as node:
        await drained(node, deadline=60.0)
        await drained(node)
        assert (node.gpu().draining, node.gpu().drain_until) == (True, None)
        await node.manager.cordon("0", False, "", ADMIN)
        assert not node.gpu().draining
        await node.manager.cordon("0", True, "", ADMIN)
        assert not node.gpu().draining


@pytest.mark.parametrize("over", [False, True], ids=["the deadline comes later", "the deadline came meanwhile"])
async def test_a_drain_survives_a_kill(tmp_path: Path, *, over: bool) -> None:
    node = await start(tmp_path, "a100-40gb")
    held = await node.acquire("1g.5gb")
    await drained(node, deadline=600.0)
    clock = node.clock
    await killed(node)
    if over:
        clock.advance(601)
    async with engine(tmp_path, clock=clock) as again:
        assert again.gpu().draining
        assert (held.lease.id in again.leases) is not over
        clock.advance(600)
        await again.until(lambda: held.lease.id not in again.leases)
    async with engine(tmp_path, clock=clock) as once_more:
        assert once_more.gpu().draining
        await once_more.manager.undrain((), ADMIN)
    async with engine(tmp_path, clock=clock) as last:
        assert not last.gpu().draining
        assert last.gpu().state is GpuState.READY


async def test_an_empty_gpu_is_drained_at_once_and_says_so(tmp_path: Path) -> None:
    async with engine(tmp_path, "a100-40gb:2") as node:
        held = await node.acquire("1g.5gb", gpus=("1",))
        await drained(node, "0", "1", "0", deadline=3600.0)
        told = node.told(EventKind.GPU_DRAINED)
        assert [each.message for each in told] == ["GPU 0 is drained: nothing is leased there"]
        assert len([each for each in node.told(EventKind.GPU_CORDONED) if "GPU 0" in each.message]) == 1
        await node.release(held)
        await node.until(lambda: len(node.told(EventKind.GPU_DRAINED)) == 2)

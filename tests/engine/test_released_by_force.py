"""The lease of a pod that has come and does not use it: an administrator may end it, and nobody what is in use."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from mig_agent.core.errors import Reason, RefusedError
from mig_agent.core.events import EventKind
from mig_agent.core.model import Holder, InstanceState
from mig_agent.core.owner import KubeletDevice, Pod
from mig_agent.engine.callers import Caller
from mig_agent.engine.results import Granted
from mig_agent.simulator import Code
from support.engine import ADMIN, ANYBODY, Node, engine
from support.owners import bound

SCHEDULER = Caller(name="volcano", scheduler=True)
POD = Pod(namespace="team-a", name="train-7f2c", uid="6b8f")
DEVICE = KubeletDevice(resource="nvidia.com/mig-1g.5gb", id="mig-agent-0")
LISTING = "nvmlDeviceGetComputeRunningProcesses_v3"


async def arrived(node: Node, *wants: str, **fields: Any) -> Granted:
    holder = Holder(tenant="namespace team-a")
    request = node.request(*(wants or ("1g.5gb",)), holder=holder, pod=POD, **fields)
    granted = await node.manager.acquire(request, SCHEDULER)
    node.manager.delivered(granted.lease.id)
    await node.manager.bind(granted.lease.id, bound(POD))
    return granted


async def force(node: Node, granted: Granted, caller: Caller = ADMIN) -> None:
    await node.manager.release(granted.lease.id, "", caller, force=True)


@contextmanager
def refused(reason: Reason, words: str = "") -> Iterator[None]:
    with pytest.raises(RefusedError) as caught:
        yield
    assert caught.value.refusal.reason is reason
    assert words in caught.value.refusal.message


async def test_an_administrator_ends_what_its_pod_does_not_use(tmp_path: Path) -> None:
    async with engine(tmp_path, "a100-40gb:1", follows_pods=True) as node:
        granted = await arrived(node, "1g.5gb", "2g.10gb")
        with refused(Reason.IN_USE, "has it as long as it is on this node"):
            await node.manager.release(granted.lease.id, "", ADMIN)
        await force(node, granted)
        assert not node.leases
        assert {each.state for each in node.instances()} == {InstanceState.IDLE}
        (told,) = node.told(EventKind.LEASE_ENDED)
        assert told.message.endswith(": released by root by force, while its pod is on this node")
        assert (told.data["by"], told.data["role"], told.data["reason"]) == ("root", "admin", "forced")
        await force(node, granted)  # that it has ended is no error, as with any other


@pytest.mark.parametrize("caller", [ANYBODY, SCHEDULER, Caller(name="alice", uid=1000)])
async def test_other_callers_cannot(tmp_path: Path, caller: Caller) -> None:
    async with engine(tmp_path, "a100-40gb:1", follows_pods=True) as node:
        granted = await arrived(node)
        for token in ("", granted.token):
            with refused(Reason.NOT_PERMITTED, "by force"):
                await node.manager.release(granted.lease.id, token, caller, force=True)
        assert set(node.leases) == {granted.lease.id}


async def test_a_lease_with_a_process_is_not_ended(tmp_path: Path) -> None:
    async with engine(tmp_path, "a100-40gb:1", follows_pods=True) as node:
        granted = await arrived(node, "1g.5gb", "1g.5gb")
        pid = node.simulator.occupy(node.where(granted, 1), name="python train.py")
        with refused(Reason.IN_USE, f"python train.py (pid {pid})"):
            await force(node, granted)
        assert set(node.leases) == {granted.lease.id}
        assert {each.state for each in node.instances()} == {InstanceState.LEASED}
        node.simulator.vacate(pid)
        await force(node, granted)
        assert not node.leases


async def test_a_lease_with_kubelet_devices_is_not_ended(tmp_path: Path) -> None:
    """The container has it open, whether or not something computes at this moment."""
    async with engine(tmp_path, "a100-40gb:1", follows_pods=True) as node:
        granted = await arrived(node)
        await node.manager.bind(granted.lease.id, bound(POD, (DEVICE,)))
        with refused(Reason.IN_USE, str(DEVICE)):
            await force(node, granted)
        assert set(node.leases) == {granted.lease.id}


async def test_a_lease_that_gets_kubelet_devices_meanwhile_is_not_ended(tmp_path: Path) -> None:
    async with engine(tmp_path, "a100-40gb:1", follows_pods=True) as node:
        granted = await arrived(node)
        node.simulator.hang(LISTING)
        forced = node.start(force(node, granted))
        await node.stuck(reader=True)
        await node.manager.bind(granted.lease.id, bound(POD, (DEVICE,)))
        node.simulator.clear()
        with refused(Reason.IN_USE, str(DEVICE)):
            await forced
        assert set(node.leases) == {granted.lease.id}


async def test_a_lease_that_cannot_be_checked_is_not_ended(tmp_path: Path) -> None:
    async with engine(tmp_path, "a100-40gb:1", follows_pods=True) as node:
        granted = await arrived(node)
        fault = node.simulator.fail(LISTING, Code.UNKNOWN, times=None)
        with refused(Reason.GPU_UNAVAILABLE, "cannot tell whether it is in use"):
            await force(node, granted)
        node.simulator.clear(fault)
        await node.manager.pause("", ADMIN, lasting=True)
        with refused(Reason.PAUSED):
            await force(node, granted)
        assert set(node.leases) == {granted.lease.id}


async def test_a_lease_on_a_gpu_silent_since_the_start_is_not_ended(tmp_path: Path) -> None:
    async with engine(tmp_path, "a100-40gb:2", follows_pods=True) as node:
        granted = await arrived(node, gpus=("1",))
        node.simulator.fail("nvmlDeviceGetMigMode", Code.UNKNOWN, times=None, gpu=1)
    async with engine(tmp_path, follows_pods=True) as node:
        with refused(Reason.GPU_UNAVAILABLE, "cannot tell whether it is in use"):
            await force(node, granted)
        node.simulator.clear()
        await node.look()
        await force(node, granted)
        assert not node.leases


async def test_other_leases_are_released_by_force_as_without(tmp_path: Path) -> None:
    """A workload on them is the holder's, which ends with the lease or blocks the instance, as ever."""
    async with engine(tmp_path, "a100-40gb:1", follows_pods=True) as node:
        granted = await node.acquire("1g.5gb")
        node.simulator.occupy(node.where(granted))
        await force(node, granted)
        assert not node.leases

"""Containers get their devices: all of a pod's at once, the same ones again, and in their turn."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path

import pytest

from mig_agent.adapters.kubelet import CheckpointEntry
from mig_agent.core.errors import Reason, RefusedError
from mig_agent.core.events import EventKind
from mig_agent.core.model import InstanceState
from mig_agent.core.owner import KubeletDevice, Pod
from mig_agent.frontends.kubernetes.device_plugin import prestart
from mig_agent.frontends.kubernetes.device_plugin.allocations import lease_by_device, unserved
from mig_agent.simulator import Code
from support.owners import devices_of, pod_of
from support.plugged import LARGE, MIDDLE, SMALL, Plugged, devices, plugged


def variables(at: Plugged, name: str) -> dict[str, str]:
    """Return the variables of a CDI file."""
    content = json.loads((at.folder.folder / f"mig-agent.io-mig_{name}.json").read_text())
    (device,) = content["devices"]
    assert device["name"] == name
    return dict(each.split("=", 1) for each in device["containerEdits"]["env"])


def uuids(at: Plugged) -> set[str]:
    return {each.uuid for each in at.node.instances(InstanceState.LEASED)}


async def test_a_pod_gets_an_instance_and_a_file(tmp_path: Path) -> None:
    async with plugged(tmp_path) as at:
        (one,) = devices(3)
        (allocated,) = await at.allocating.allocate([[one]])
        assert allocated.cdi_names == ("mig-agent.io/mig=mig-1g.10gb-3",)
        assert not at.node.leases, "Allocate makes nothing"
        at.words.put("train", one)
        await at.start(one)
        (lease,) = at.node.leases.values()
        assert pod_of(lease) == Pod(namespace="team-a", name="train", uid="uid-train")
        assert devices_of(lease) == (one,)
        assert lease.expires_at is None
        (uuid,) = uuids(at)
        assert variables(at, "mig-1g.10gb-3") == {"CUDA_VISIBLE_DEVICES": uuid, "NVIDIA_VISIBLE_DEVICES": "void"}


async def test_a_restart_of_the_container_keeps_its_instance(tmp_path: Path) -> None:
    async with plugged(tmp_path) as at:
        await at.admit("train", *devices(0))
        await at.start(*devices(0))
        before = uuids(at), at.lease(devices(0)[0]).id
        await at.start(*devices(0))
        assert (uuids(at), at.lease(devices(0)[0]).id) == before
        assert at.node.creations() == 1


async def test_all_of_a_pod_is_one_request_whichever_container_starts_first(tmp_path: Path) -> None:
    async with plugged(tmp_path) as at:
        small, middle = devices(0, 1), devices(0, resource=MIDDLE)
        await at.admit("train", small[0], *middle)
        await at.admit("train", small[1], container="second")
        await at.start(small[0])
        (lease,) = at.node.leases.values()
        assert set(devices_of(lease)) == {*small, *middle}
        await asyncio.gather(at.start(*middle), at.start(small[1]))
        assert len(at.node.leases) == 1
        first = variables(at, "mig-1g.10gb-0")["CUDA_VISIBLE_DEVICES"].split(",")
        assert sorted(first) == sorted(variables(at, "mig-3g.40gb-0")["CUDA_VISIBLE_DEVICES"].split(","))
        second = variables(at, "mig-1g.10gb-1")["CUDA_VISIBLE_DEVICES"]
        assert {*first, second} == uuids(at)
        assert second not in first


async def test_calls_for_two_resources_of_one_pod_at_once_make_one_request(tmp_path: Path) -> None:
    async with plugged(tmp_path) as at:
        small, middle = devices(0), devices(0, resource=MIDDLE)
        await at.admit("train", *small, *middle)
        await asyncio.gather(at.start(*small), at.start(*middle))
        assert len(at.node.leases) == 1
        assert at.node.creations() == 2


async def test_two_pods_that_collide_never_hold_halves(tmp_path: Path) -> None:
    """Each asks for a middle and four small ones, of which only one set fits."""
    async with plugged(tmp_path) as at:
        for number, name in enumerate(("first", "second")):
            has = (*devices(*range(4 * number, 4 * number + 4)), *devices(number, resource=MIDDLE))
            await at.admit(name, *has[:4])
            await at.admit(name, has[4], container="second")
        waiting = [at.begin(devices(0, 1, 2, 3)), at.begin(devices(4, 5, 6, 7))]
        await at.node.until(lambda: any(each.done() for each in waiting))
        await at.node.until(lambda: len(at.node.manager.snapshot.queue) == 1)
        assert len(at.node.leases) == 1
        (held,) = at.node.leases.values()
        at.words.drop(pod_of(held).name)
        await at.following.poll()  # had not seen it: the API server says that it is gone
        await asyncio.gather(*waiting)
        (other,) = at.node.leases.values()
        assert pod_of(other) != pod_of(held)


async def test_start_that_times_out_has_a_reason_and_keeps_its_place_in_the_queue(tmp_path: Path) -> None:
    async with plugged(tmp_path) as at:
        await at.admit("big", *devices(0, resource=LARGE))
        await at.start(*devices(0, resource=LARGE))
        await at.admit("small", *devices(0))
        with pytest.raises(RefusedError) as refused:
            await at.start(*devices(0), seconds=0.05)
        words = refused.value.refusal
        assert words.reason is Reason.NO_CAPACITY
        assert words.message.startswith("cannot start pod team-a/small yet: ")
        assert SMALL in words.message
        assert "place 1 in the agent's queue" in words.message
        assert "pod team-a/big" in words.message, "who has it"
        (queued,) = at.node.manager.snapshot.queue
        with pytest.raises(RefusedError):
            await at.start(*devices(0), seconds=0.01)
        assert [each.request_id for each in at.node.manager.snapshot.queue] == [queued.request_id]
        # When capacity returns the lease is made before the kubelet asks again.
        at.words.drop("big")
        await at.following.poll()
        await at.node.until(lambda: at.node.leases and at.holder(devices(0)[0]) == "small")
        await at.start(*devices(0), seconds=0.5)
        assert [reason for _, reason, _ in at.words.told] == ["WaitingForDevices", "DevicesReady"]


async def test_pods_priority_orders_the_queue(tmp_path: Path) -> None:
    async with plugged(tmp_path) as at:
        await at.admit("big", *devices(0, resource=LARGE))
        await at.start(*devices(0, resource=LARGE))
        for number, name in enumerate(("late", "urgent"), 1):
            await at.admit(name, *devices(number, resource=LARGE))
        at.words.facts["urgent"] = replace(at.words.facts["urgent"], priority=2_000_000_000)
        late = at.begin(devices(1, resource=LARGE))
        await at.node.until(lambda: len(at.node.manager.snapshot.queue) == 1)
        urgent = at.begin(devices(2, resource=LARGE))
        await at.node.until(lambda: len(at.node.manager.snapshot.queue) == 2)
        at.words.drop("big")
        await at.following.poll()
        await urgent
        assert not late.done()
        late.cancel()
        await asyncio.gather(late, return_exceptions=True)


async def test_device_of_an_ended_pod_is_reassigned(tmp_path: Path) -> None:
    """A pod of a StatefulSet has the name of the one before it, and often its devices."""
    async with plugged(tmp_path) as at:
        await at.admit("train-0", *devices(0), uid="uid-old")
        await at.start(*devices(0))
        before = at.lease(devices(0)[0]).id
        at.words.drop("train-0")
        await at.admit("train-0", *devices(0), uid="uid-new")
        await at.start(*devices(0))
        after = at.lease(devices(0)[0])
        assert after.id != before
        assert pod_of(after).uid == "uid-new"
        assert len(at.node.leases) == 1


async def test_allocation_ends_the_old_lease_even_if_no_uid_is_known(tmp_path: Path) -> None:
    async with plugged(tmp_path) as at:
        await at.admit("train-0", *devices(0))
        at.words.recorded = ()  # no UID is known
        await at.start(*devices(0))
        before = at.lease(devices(0)[0]).id
        await at.allocating.allocate([devices(0)])
        await at.start(*devices(0))
        assert at.lease(devices(0)[0]).id != before


async def test_init_container_starts_by_the_checkpoint_alone(tmp_path: Path) -> None:
    async with plugged(tmp_path) as at:
        at.words.put("train", container="main")
        at.words.recorded = (CheckpointEntry(pod_uid="uid-train", container="prepare", devices=devices(0)),)
        await at.start(*devices(0))
        assert at.holder(devices(0)[0]) == "train"


async def test_container_without_a_pod_is_refused_with_a_message(tmp_path: Path) -> None:
    async with plugged(tmp_path) as at:
        with pytest.raises(RefusedError, match=r"which pod was given nvidia\.com/mig-1g\.10gb mig-agent-9"):
            await at.start(*devices(9))
        at.words.silent = True
        with pytest.raises(RefusedError, match="cannot list the pods"):
            await at.start(*devices(9))


async def test_waiting_starts_are_refused_when_the_agent_stops(tmp_path: Path) -> None:
    async with plugged(tmp_path) as at:
        await at.admit("big", *devices(0, resource=LARGE))
        await at.start(*devices(0, resource=LARGE))
        await at.admit("small", *devices(0))
        waiting = at.begin(devices(0))
        await at.node.until(lambda: at.node.manager.snapshot.queue)
        at.starting.close()
        with pytest.raises(RefusedError) as refused:
            await waiting
        assert refused.value.refusal.reason is Reason.SHUTTING_DOWN


async def test_without_an_api_server_pods_start_all_the_same(tmp_path: Path) -> None:
    async with plugged(tmp_path, has_api=False) as at:
        await at.admit("train", *devices(0))
        await at.start(*devices(0))
        assert at.holder(devices(0)[0]) == "train"


async def test_memory_is_served_by_either_model(tmp_path: Path) -> None:
    memory = "mig-agent.io/memory-20g"
    async with plugged(tmp_path, "a100-40gb:1,h100-80gb:1") as at:
        for number in range(5):
            await at.admit(f"pod-{number}", *devices(number, resource=memory))
            await at.start(*devices(number, resource=memory))
        used = {each.slot.profile.name for each in at.node.instances(InstanceState.LEASED)}
        assert used == {"3g.20gb", "1g.20gb"}, used


async def test_unsatisfiable_pod_blocks_no_others(tmp_path: Path) -> None:
    """The scheduler adds up numbers, and binds a pod that asks for two things of which only one fits at a time."""
    async with plugged(tmp_path) as at:
        has = (*devices(0, resource=MIDDLE), *devices(0, resource=LARGE))
        await at.admit("both", *has)
        with pytest.raises(RefusedError, match="do not fit on this node together") as refused:
            await at.start(*devices(0, resource=MIDDLE))
        first = refused.value.refusal
        assert not first.retryable
        assert first.hint.endswith("in several pods")
        with pytest.raises(RefusedError) as again:
            await at.start(*devices(0, resource=LARGE))
        assert again.value.refusal.message == first.message, "the kubelet counts events by their words"
        assert len(at.node.told(EventKind.REQUEST_REFUSED)) == 1, "it asks every 13 s, for ever"
        await at.following.poll()
        assert set(has) <= at.table.listed, "the kubelet has given them away all the same"
        assert unserved(at.table, {}, (), (MIDDLE, LARGE)) == ()
        at.words.drop("both")
        await at.admit("fits", *devices(0, resource=LARGE))
        assert unserved(at.table, {}, (), (LARGE,)) == devices(0, resource=LARGE)
        await at.start(*devices(0, resource=LARGE))
        assert unserved(at.table, lease_by_device(at.node.manager.snapshot.view), (), (LARGE,)) == ()


async def test_start_of_a_pod_being_deleted_is_cancelled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kubelet would wait for our answer before it ends the pod."""
    monkeypatch.setattr(prestart, "_POLL_SECONDS", 0.01)
    async with plugged(tmp_path) as at:
        await at.admit("big", *devices(0, resource=LARGE))
        await at.start(*devices(0, resource=LARGE))
        await at.admit("small", *devices(0))
        waiting = at.begin(devices(0))
        await at.node.until(lambda: at.node.manager.snapshot.queue)
        at.words.facts["small"] = replace(at.words.facts["small"], deleting=True)
        with pytest.raises(RefusedError, match="it is being deleted"):
            await waiting
        await at.node.until(lambda: not at.node.manager.snapshot.queue)


async def test_an_id_that_the_kubelet_gave_to_two_pods_takes_nothing_from_the_first(tmp_path: Path) -> None:
    """The kubelet forgets ids whose Allocate is under way when a pod ends meanwhile (seen with 1.36.3)."""
    async with plugged(tmp_path, "h100-80gb:2") as at:
        (one,) = devices(0, resource=LARGE)
        await at.admit("first", one)
        await at.start(one)
        before = at.lease(one).id
        await at.following.poll()
        await at.admit("second", one)
        for _ in range(2):
            await at.following.poll()
            with pytest.raises(RefusedError, match="to two pods, team-a/first and team-a/second"):
                await at.start(one)
        assert at.lease(one).id == before, "its pod lives"
        at.words.drop("first")
        await at.following.poll()
        await at.start(one)
        assert at.holder(one) == "second"


async def test_a_container_that_starts_again_gets_another_device_for_one_that_was_lost(tmp_path: Path) -> None:
    async with plugged(tmp_path, "h100-80gb:3") as at:
        await at.admit("train", *devices(0, 1, resource=LARGE))
        await at.start(*devices(0, 1, resource=LARGE))
        (before,) = at.node.leases.values()
        lost = at.node.instances(InstanceState.LEASED)[0]
        at.node.simulator.lose_gpu(0)
        await at.node.look()
        await at.following.poll()
        assert set(at.node.leases) == {before.id}, "its pod has what is left of it"
        assert not at.node.instances(InstanceState.IDLE, gpu=1)
        await at.start(*devices(0, 1, resource=LARGE))
        assert len(at.node.leases) == 2
        seen = variables(at, "mig-7g.80gb-0")["CUDA_VISIBLE_DEVICES"].split(",")
        assert set(seen) == {each.uuid for gpu in (1, 2) for each in at.node.instances(gpu=gpu)}
        await at.start(*devices(0, 1, resource=LARGE))
        assert len(at.node.leases) == 2, "and keeps it from then on"
        at.node.simulator.reset_gpu(0)
        await at.node.look()
        assert lost.uuid not in variables(at, "mig-7g.80gb-0")["CUDA_VISIBLE_DEVICES"]
        at.words.drop("train")
        await at.following.poll()
        assert not at.node.leases


async def test_container_waits_with_a_message_if_its_lost_device_cannot_be_replaced(tmp_path: Path) -> None:
    async with plugged(tmp_path, "h100-80gb:2") as at:
        await at.admit("train", *devices(0, 1, resource=LARGE))
        await at.start(*devices(0, 1, resource=LARGE))
        (lease,) = at.node.leases.values()
        at.node.simulator.lose_gpu(0)
        await at.node.look()
        with pytest.raises(RefusedError, match=r"mig-7g\.80gb"):
            await at.start(*devices(0, 1, resource=LARGE), seconds=0.3)
        assert set(at.node.leases) == {lease.id}
        await at.admit("other", *devices(2, resource=LARGE))
        with pytest.raises(RefusedError):
            await at.start(*devices(2, resource=LARGE), seconds=0.3)


async def test_recovered_device_belongs_to_its_pod_again(tmp_path: Path) -> None:
    async with plugged(tmp_path, "h100-80gb:2") as at:
        await at.admit("train", *devices(0, 1, resource=LARGE))
        await at.start(*devices(0, 1, resource=LARGE))
        before = uuids(at)
        at.node.simulator.fail("nvmlDeviceGetMigMode", Code.GPU_IS_LOST, gpu=0)
        await at.node.look()
        await at.node.look()
        await at.start(*devices(0, 1, resource=LARGE))
        assert len(at.node.leases) == 1
        assert uuids(at) == before


async def test_devices_of_another_plugin_with_the_same_name_are_ignored(tmp_path: Path) -> None:
    """The scene after another plugin served the name: its pods still run."""
    theirs = KubeletDevice(resource=SMALL, id="GPU-a")
    async with plugged(tmp_path) as at:
        at.words.put("theirs", theirs)
        await at.following.poll()
        assert unserved(at.table, {}, (), (SMALL,)) == ()
        with pytest.raises(RefusedError, match="another device plugin gave it"):
            await at.start(theirs)
        await at.admit("ours", *devices(0))
        at.words.put("ours", theirs, container="second")
        await at.start(*devices(0))
        (lease,) = at.node.leases.values()
        assert devices_of(lease) == devices(0)

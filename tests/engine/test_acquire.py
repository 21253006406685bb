"""From a request to a lease and back, over simulated GPUs."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from mig_agent.core.errors import Reason, Refusal, RefusedError
from mig_agent.core.events import EventKind
from mig_agent.core.model import GpuState, InstanceState, RequestId, Want
from support.engine import ADMIN, ANYBODY, CREATE, DESTROY, engine, killed, start

WHOLE = Want(whole_gpu=True, text="whole")


async def test_a_request_for_memory_becomes_the_smallest_instance(tmp_path: Path) -> None:
    async with engine(tmp_path, "a100-40gb:1,h100-80gb:2") as node:
        granted = await node.acquire("4G")
        assert [(device.profile, device.gpu_index) for device in granted.devices] == [("1g.5gb", 0)]
        device = granted.devices[0]
        assert device.uuid.startswith("MIG-")
        assert not device.reused
        assert node.layout() == "6:1g.5gb=leased"
        assert node.leases[granted.lease.id].instances == (device.generation,)


async def test_a_release_leaves_the_instance_idle_and_the_next_request_takes_it(tmp_path: Path) -> None:
    async with engine(tmp_path, "a100-40gb") as node:
        first = await node.acquire("4G")
        await node.release(first)
        assert node.layout() == "6:1g.5gb=idle"
        second = await node.acquire("4G")
        assert second.devices[0].reused
        assert second.devices[0].uuid == first.devices[0].uuid
        assert second.lease.id != first.lease.id
        assert node.creations() == 1
        assert len(node.instances(InstanceState.LEASED)) == 1


async def test_a_large_request_destroys_only_the_idle_instances_in_its_way(tmp_path: Path) -> None:
    async with engine(tmp_path, "a100-40gb") as node:
        kept = await node.acquire("1g.5gb")
        node.simulator.occupy(node.where(kept))
        others = [await node.acquire("1g.5gb") for _ in range(4)]
        for each in others:
            await node.release(each)
        await node.acquire("3g.20gb")
        there = {(each.slot.placement.start, each.slot.profile.name, each.state.value) for each in node.instances()}
        assert (6, "1g.5gb", "leased") in there
        assert (0, "3g.20gb", "leased") in there
        machine = node.simulator.machine()["gpus"][0]["instances"]
        assert any(compute["processes"] for instance in machine for compute in instance["compute"])
        events = node.told(EventKind.INSTANCE_DESTROYED)
        assert {event.data["reason"] for event in events} == {"needed"}


async def test_published_instances_never_overlap_while_slices_are_reused(tmp_path: Path) -> None:
    async with engine(tmp_path, "a100-40gb") as node:
        small = [await node.acquire("1g.5gb") for _ in range(7)]
        for each in small:
            await node.release(each)
        node.simulator.set_latency(create_seconds=0.02, destroy_seconds=0.02)
        task = node.start(node.acquire("7g.40gb"))
        states: set[str] = set()
        while not task.done():
            taken = 0
            for instance in node.instances():
                states.add(instance.state.value)
                assert not taken & instance.slot.placement.mask
                taken |= instance.slot.placement.mask
            await asyncio.sleep(0.001)
        await task
        assert {"destroying", "creating"} <= states
        assert node.layout() == "0:7g.40gb=leased"


async def test_several_devices_are_all_or_nothing_and_in_order(tmp_path: Path) -> None:
    async with engine(tmp_path, "a100-40gb,h100-80gb") as node:
        granted = await node.acquire("2g.10gb", "3g.40gb", "1g.5gb")
        assert [device.profile for device in granted.devices] == ["2g.10gb", "3g.40gb", "1g.5gb"]
        assert [device.gpu_index for device in granted.devices] == [0, 1, 0]
        with pytest.raises(RefusedError) as refused:
            await node.acquire("7g.40gb", "7g.80gb")
        assert refused.value.refusal.reason is Reason.NO_CAPACITY
        assert len(node.instances()) == 3
        await node.release(granted)
        again = await node.acquire("2g.10gb", "3g.40gb", "1g.5gb")
        assert all(device.reused for device in again.devices)


async def test_gpus_are_worked_on_at_the_same_time(tmp_path: Path) -> None:
    async with engine(tmp_path, "h100-80gb:3") as node:
        node.simulator.hang(CREATE, gpu=0)
        node.simulator.hang(CREATE, gpu=1)
        stuck = [node.start(node.acquire("7g.80gb", gpus=(str(gpu),))) for gpu in (0, 1)]
        await node.until(lambda: len(node.instances(InstanceState.CREATING)) == 2)
        assert (await node.acquire("7g.80gb")).devices[0].gpu_index == 2
        node.simulator.clear()
        granted = await asyncio.gather(*stuck)
        assert {each.devices[0].gpu_index for each in granted} == {0, 1}


async def test_a_gpu_without_mig_mode_is_leased_whole(tmp_path: Path) -> None:
    async with engine(tmp_path, "h100-80gb:2", mig_mode=False) as node:
        assert node.gpu().state is GpuState.WHOLE
        assert "MIG mode is off; `migctl mode enable --gpu 0`" in node.gpu().reason
        granted = await node.acquire(WHOLE)
        assert node.gpu(granted.devices[0].gpu_index).reason == "MIG mode is off", (
            "it cannot be switched on while there is a lease"
        )
        device = granted.devices[0]
        assert (device.uuid, device.placement, device.gpu_instance_id) == (device.gpu, None, None)
        assert device.memory_mib == 81559
        assert (await node.acquire(WHOLE)).devices[0].gpu_index != device.gpu_index
        with pytest.raises(RefusedError):
            await node.acquire(WHOLE)
        await node.release(granted)
        assert (await node.acquire(WHOLE)).devices[0].uuid == device.uuid
        assert node.creations() == 0


async def test_a_whole_gpu_in_use_is_not_leased(tmp_path: Path) -> None:
    async with engine(tmp_path, "h100-80gb", mig_mode=False) as node:
        pid = node.simulator.occupy("0", name="python train.py")
        with pytest.raises(RefusedError):
            await node.acquire(WHOLE)
        assert node.instances()[0].state is InstanceState.BLOCKED
        assert "python train.py" in node.instances()[0].reason
        node.simulator.vacate(pid)
        node.clock.advance(2)
        await node.until(lambda: node.instances(InstanceState.IDLE))
        await node.acquire(WHOLE)


async def test_whole_gpus_and_partitions_live_side_by_side(tmp_path: Path) -> None:
    async with engine(tmp_path, "h100-80gb,a100-40gb", mig_mode=False) as node:
        await node.manager.set_mig_mode("0", True, ADMIN)
        partition = await node.acquire("1g.10gb")
        whole = await node.acquire(WHOLE)
        assert (partition.devices[0].gpu_index, whole.devices[0].gpu_index) == (0, 1)


# The same request again


async def test_the_same_request_gets_the_same_answer(tmp_path: Path) -> None:
    async with engine(tmp_path, "a100-40gb") as node:
        request = node.request("4G")
        first = await node.manager.acquire(request, ANYBODY)
        again = await node.manager.acquire(request, ANYBODY)
        assert (again.lease, again.token, again.devices) == (first.lease, first.token, first.devices)
        assert len(node.instances()) == 1


async def test_the_same_request_twice_at_once_is_served_once(tmp_path: Path) -> None:
    async with engine(tmp_path, "a100-40gb") as node:
        request = node.request("4G")
        both = await asyncio.gather(*(node.manager.acquire(request, ANYBODY) for _ in range(2)))
        assert both[0].lease == both[1].lease
        assert len(node.instances()) == 1


async def test_an_id_cannot_be_used_for_another_request(tmp_path: Path) -> None:
    async with engine(tmp_path, "a100-40gb") as node:
        await node.acquire("4G", request_id="mine")
        with pytest.raises(RefusedError) as refused:
            await node.acquire("2g.10gb", request_id="mine")
        assert refused.value.refusal.reason is Reason.REQUEST_ID_REUSED


async def test_a_lease_that_has_ended_is_not_given_again(tmp_path: Path) -> None:
    async with engine(tmp_path, "a100-40gb") as node:
        granted = await node.acquire("4G", request_id="mine")
        await node.release(granted)
        with pytest.raises(RefusedError) as refused:
            await node.acquire("4G", request_id="mine")
        assert refused.value.refusal.reason is Reason.LEASE_ENDED
        assert "released" in refused.value.refusal.message
        node.clock.advance(24 * 3600 + 60)
        await node.look()
        assert (await node.acquire("4G", request_id="mine")).lease.id != granted.lease.id


async def test_a_request_without_an_id_gets_one(tmp_path: Path) -> None:
    async with engine(tmp_path, "a100-40gb") as node:
        leases = [
            (await node.manager.acquire(node.request("4G", request_id=RequestId("")), ANYBODY)).lease for _ in range(2)
        ]
        assert leases[0].request_id
        assert leases[0].request_id != leases[1].request_id


# Refusals, dry runs, revisions


async def test_a_refusal_has_its_reason(tmp_path: Path) -> None:
    async with engine(tmp_path, "a100-40gb") as node:
        for asked, reason in (("1g.10gbx", Reason.UNKNOWN_PROFILE), ("48G", Reason.TOO_LARGE)):
            with pytest.raises(RefusedError) as refused:
                await node.acquire(asked)
            assert refused.value.refusal.reason is reason
        assert [event.data["reason"] for event in node.told(EventKind.REQUEST_REFUSED)] == [
            "unknown-profile",
            "too-large",
        ]


async def test_a_dry_run_changes_nothing(tmp_path: Path) -> None:
    async with engine(tmp_path, "a100-40gb") as node:
        before = node.manager.snapshot.view
        outcomes = node.manager.plan([node.request("4G"), node.request("48G")])
        assert [type(outcome).__name__ for outcome in outcomes] == ["Plan", "Refusal"]
        assert node.manager.snapshot.view is before
        assert node.simulator.machine()["gpus"][0]["instances"] == []


async def test_a_plan_for_an_old_revision_is_refused(tmp_path: Path) -> None:
    async with engine(tmp_path, "a100-40gb") as node:
        revision = node.manager.snapshot.view.revision
        await node.acquire("4G", if_revision=revision)
        with pytest.raises(RefusedError) as refused:
            await node.acquire("4G", if_revision=revision)
        assert refused.value.refusal.reason is Reason.REVISION_CHANGED


async def test_a_refusal_for_the_revision_says_what_has_changed_of_what_matters(tmp_path: Path) -> None:
    async with engine(tmp_path, "a100-40gb:2") as node:

        def changed(since: int) -> tuple[str, ...]:
            (refusal,) = node.manager.plan([node.request("4G", if_revision=since)])
            assert isinstance(refusal, Refusal)
            assert refusal.reason is Reason.REVISION_CHANGED
            assert refusal.revision == node.manager.snapshot.view.revision
            return refusal.changed

        start = node.manager.snapshot.view.revision
        granted = await node.acquire("4G")
        assert changed(start) == ("instance-created", "lease-granted")
        leased = node.manager.snapshot.view.revision
        await node.manager.renew(granted.lease.id, granted.token, 60.0, ANYBODY)
        assert changed(leased) == ()  # nothing that a plan goes by
        await node.release(granted)
        await node.manager.cordon("1", True, "a fan", ADMIN)
        assert changed(leased) == ("lease-ended", "gpu-cordoned")
        assert changed(start)[:3] == ("instance-created", "lease-granted", "lease-ended")
        assert changed(0) == ("unknown",)  # before this agent
        assert changed(node.manager.snapshot.view.revision + 1) == ("unknown",)  # of another one
        with pytest.raises(RefusedError) as refused:
            await node.acquire("4G", if_revision=leased)
        assert refused.value.refusal.changed == changed(leased)


async def test_a_published_view_does_not_change(tmp_path: Path) -> None:
    async with engine(tmp_path, "a100-40gb") as node:
        before = node.manager.snapshot.view
        granted = await node.acquire("4G")
        after = node.manager.snapshot.view
        assert before.leases == {}
        assert before.gpus[0].instances == ()
        assert after.revision > before.revision
        assert granted.revision == after.revision


async def test_only_the_selected_gpus_are_managed(tmp_path: Path) -> None:
    async with engine(tmp_path, "a100-40gb,h100-80gb:2", gpus=("0", "2")) as node:
        assert [gpu.index for gpu in node.manager.snapshot.view.gpus] == [0, 2]
        with pytest.raises(RefusedError):
            await node.acquire("4G", gpus=("1",))


async def test_a_repeated_answer_without_devices_still_hides_all_gpus(tmp_path: Path) -> None:
    """Its GPU is not managed any more. A process whose variables are not set would see every GPU of the node."""
    node = await start(tmp_path, "h100-80gb:2")
    await node.acquire("4G", gpus=("0",), request_id="again")
    await killed(node)
    async with engine(tmp_path, clock=node.clock, gpus=("1",)) as after:
        granted = await after.acquire("4G", gpus=("0",), request_id="again")
        assert granted.devices == ()
        assert granted.environment == {"CUDA_VISIBLE_DEVICES": "", "NVIDIA_VISIBLE_DEVICES": ""}


# Clients that go away


async def test_a_client_that_goes_away_in_the_middle_leaves_an_idle_instance(tmp_path: Path) -> None:
    async with engine(tmp_path, "a100-40gb") as node:
        node.simulator.hang(CREATE)
        task = node.start(node.acquire("4G"))
        await node.until(lambda: node.instances(InstanceState.CREATING))
        task.cancel()
        await asyncio.wait([task])
        node.simulator.clear()
        await node.until(lambda: node.instances(InstanceState.IDLE))
        assert not node.leases
        assert (await node.acquire("4G")).devices[0].reused


async def test_one_of_two_callers_going_away_does_not_disturb_the_other(tmp_path: Path) -> None:
    async with engine(tmp_path, "a100-40gb") as node:
        node.simulator.hang(CREATE)
        request = node.request("4G")
        first, second = (node.start(node.manager.acquire(request, ANYBODY)) for _ in range(2))
        await node.until(lambda: node.instances(InstanceState.CREATING))
        first.cancel()
        await asyncio.wait([first])
        node.simulator.clear()
        granted = await second
        assert granted.lease.id in node.leases


async def test_closing_refuses_new_requests_and_keeps_leases(tmp_path: Path) -> None:
    async with engine(tmp_path, "a100-40gb") as node:
        granted = await node.acquire("4G")
        waiting = node.start(node.acquire("7g.40gb", wait_seconds=600.0))
        await node.until(lambda: node.manager.snapshot.queue)
        await node.manager.close()
        with pytest.raises(RefusedError) as refused:
            await waiting
        assert refused.value.refusal.reason is Reason.SHUTTING_DOWN
        with pytest.raises(RefusedError) as refused:
            await node.acquire("4G")
        assert refused.value.refusal.reason is Reason.SHUTTING_DOWN
    async with engine(tmp_path, clock=node.clock) as after:
        assert after.leases == {granted.lease.id: granted.lease}


async def test_the_step_in_progress_ends_before_the_agent_stops(tmp_path: Path) -> None:
    async with engine(tmp_path, "a100-40gb") as node:
        small = await node.acquire("1g.5gb")
        await node.release(small)
        node.simulator.hang(DESTROY)
        task = node.start(node.acquire("7g.40gb"))
        await node.until(lambda: node.instances(InstanceState.DESTROYING))
        closing = node.start(node.manager.close())
        await asyncio.sleep(0)
        node.simulator.clear()
        await closing
        with pytest.raises(RefusedError):
            await task
    async with engine(tmp_path) as after:
        assert not after.leases
        assert {each.state for each in after.instances()} <= {InstanceState.IDLE}
        assert len(after.simulator.machine()["gpus"][0]["instances"]) == len(after.instances())

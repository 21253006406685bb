"""Ledger and hardware after restarts, reboots and other people's doings."""

from __future__ import annotations

from pathlib import Path

import pytest

from mig_agent.adapters.ledger.store import LEDGER_FILE
from mig_agent.core.errors import ConfigError, Reason, RefusedError
from mig_agent.core.events import EventKind
from mig_agent.core.model import GpuState, InstanceState, Want
from mig_agent.simulator import STATE_FILE, Simulator
from support.engine import ANYBODY, engine, start

WHOLE = Want(whole_gpu=True, text="whole")


async def test_a_restart_finds_everything_as_it_was(tmp_path: Path) -> None:
    async with engine(tmp_path, "a100-40gb,h100-80gb") as node:
        kept = await node.acquire("2g.10gb", "1g.10gb", name="bob", ttl_seconds=5000.0)
        idle = await node.acquire("1g.5gb")
        await node.release(idle)
        await node.manager.cordon("1", True, "fan", ANYBODY)
        before = node.manager.snapshot.view
    async with engine(tmp_path, clock=node.clock) as after:
        view = after.manager.snapshot.view
        assert dict(view.leases) == dict(before.leases)
        assert [gpu.instances for gpu in view.gpus] == [gpu.instances for gpu in before.gpus]
        assert view.gpus[1].state is GpuState.CORDONED
        assert "fan" in view.gpus[1].reason
        assert view.revision > before.revision
        again = await after.manager.acquire(
            after.request("2g.10gb", "1g.10gb", name="bob", ttl_seconds=5000.0, request_id=kept.lease.request_id),
            ANYBODY,
        )
        assert (again.lease, again.token, again.devices) == (kept.lease, kept.token, kept.devices)
        assert (await after.acquire("1g.5gb")).devices[0].reused


async def test_an_ended_lease_is_remembered_over_a_restart(tmp_path: Path) -> None:
    async with engine(tmp_path, "a100-40gb") as node:
        await node.release(await node.acquire("4G", request_id="mine"))
    async with engine(tmp_path, clock=node.clock) as after:
        with pytest.raises(RefusedError) as refused:
            await after.acquire("4G", request_id="mine")
        assert refused.value.refusal.reason is Reason.LEASE_ENDED


async def test_generations_are_never_used_again(tmp_path: Path) -> None:
    async with engine(tmp_path, "a100-40gb") as node:
        first = await node.acquire("1g.5gb")
        await node.release(first)
        second = await node.acquire("7g.40gb")
        await node.release(second)
    async with engine(tmp_path) as after:
        third = await after.acquire("1g.5gb")
        numbers = [each.devices[0].generation for each in (first, second, third)]
        assert numbers == sorted(set(numbers))


async def test_an_instance_that_vanished_ends_its_lease(tmp_path: Path) -> None:
    async with engine(tmp_path, "a100-40gb") as node:
        gone, kept = await node.acquire("1g.5gb"), await node.acquire("1g.5gb")
        node.simulator.destroy_foreign(node.where(gone))
        await node.look()
        assert list(node.leases) == [kept.lease.id]
        assert node.told(EventKind.LEASE_ENDED)[0].data["reason"] == "instance-lost"
        assert [each.lease for each in node.instances()] == [kept.lease.id]


async def test_the_rest_of_a_lease_that_lost_an_instance_is_idle(tmp_path: Path) -> None:
    async with engine(tmp_path, "a100-40gb:2") as node:
        granted = await node.acquire("7g.40gb", "7g.40gb")
        node.simulator.destroy_foreign(node.where(granted))
        await node.look()
        assert not node.leases
        assert [each.state for each in node.instances()] == [InstanceState.IDLE]


async def test_a_reset_under_our_feet_ends_the_leases(tmp_path: Path) -> None:
    async with engine(tmp_path, "a100-40gb:2") as node:
        lost = await node.acquire("1g.5gb", gpus=("0",))
        kept = await node.acquire("1g.5gb", gpus=("1",))
        node.simulator.reset_gpu(0)
        await node.look()
        assert list(node.leases) == [kept.lease.id]
        assert node.layout(0) == ""
        assert node.told(EventKind.LEASE_ENDED)[0].lease == lost.lease.id


@pytest.mark.parametrize("while_running", [True, False])
async def test_a_reboot_ends_all_leases(tmp_path: Path, *, while_running: bool) -> None:
    async with engine(tmp_path, "a100-40gb,h100-80gb") as node:
        first = await node.acquire("1g.5gb", "1g.10gb")
        await node.acquire("3g.20gb")
        await node.release(await node.acquire("1g.5gb"))
        if while_running:
            node.simulator.reboot()
            await node.look()
            reasons = [event.data["reason"] for event in node.told(EventKind.LEASE_ENDED)]
            assert reasons == ["released", "reboot", "reboot"]
            assert not node.leases
    if not while_running:
        node.simulator.reboot()
    async with engine(tmp_path, clock=node.clock) as after:
        assert not after.leases
        assert after.gpu(0).state is GpuState.READY
        assert after.gpu(1).state is GpuState.WHOLE  # a Hopper loses its mode
        assert "migctl mode enable --gpu 1" in after.gpu(1).reason
        assert [each.slot.profile.name for each in after.instances()] == ["whole"]
        with pytest.raises(RefusedError) as refused:
            await after.acquire("1g.5gb", "1g.10gb", request_id=first.lease.request_id)
        assert "reboot" in refused.value.refusal.message
        recorded = await after.manager.history.events(0.0, None, 1000)
        assert [event.data["reason"] for event in recorded if event.kind is EventKind.LEASE_ENDED].count("reboot") == 2


async def test_a_second_look_finds_nothing_to_repair(tmp_path: Path) -> None:
    async with engine(tmp_path, "a100-40gb:2,h100-80gb") as node:
        await node.acquire("1g.5gb", "7g.40gb")
        node.simulator.create_foreign(2, "1g.10gb")
        node.simulator.reset_gpu(0)
        await node.look()
        await node.quiet()
        revision = node.manager.snapshot.view.revision
        happened = len(node.happened)
        await node.look()
        assert len(node.happened) == happened
        assert node.manager.snapshot.view.revision == revision


# Other people's instances


async def test_foreign_instances_are_left_alone(tmp_path: Path) -> None:
    async with engine(tmp_path, "a100-40gb") as node:
        node.simulator.create_foreign(0, "3g.20gb", start=4)
        await node.look()
        assert node.layout() == "4:3g.20gb=foreign"
        with pytest.raises(RefusedError) as refused:
            await node.acquire("7g.40gb")
        assert "foreign" in str(refused.value.refusal.blockers)
        with pytest.raises(RefusedError):
            await node.acquire("3g.20gb", "2g.10gb", "2g.10gb")
        await node.acquire("4g.20gb")
        assert not await node.manager.reclaim((), ANYBODY)
        node.simulator.destroy_foreign(foreign(node.simulator))
        await node.look()
        assert node.layout() == "0:4g.20gb=leased"


def foreign(simulator: Simulator) -> str:
    """The one at slice 4."""
    instance = next(each for each in simulator.machine()["gpus"][0]["instances"] if each["start"] == 4)
    return f"0/{instance['id']}"


async def test_foreign_instances_are_found_at_start(tmp_path: Path) -> None:
    async with engine(tmp_path, "a100-40gb") as node:
        node.simulator.create_foreign(0, "1g.5gb", start=0)
        node.simulator.create_foreign(0, "1g.5gb", start=1, with_compute=False)
    async with engine(tmp_path) as after:
        assert after.layout() == "0:1g.5gb=foreign 1:1g.5gb=foreign"


async def test_idle_foreign_instances_are_adopted_where_that_is_configured(tmp_path: Path) -> None:
    async with engine(tmp_path, "a100-40gb", foreign="adopt") as node:
        idle, _ = node.simulator.create_foreign(0, "1g.5gb", start=0)
        busy, _ = node.simulator.create_foreign(0, "1g.5gb", start=1)
        pid = node.simulator.occupy(f"0/{busy}")
        node.simulator.create_foreign(0, "1g.5gb", start=2, with_compute=False)
        await node.look()
        assert node.layout() == "0:1g.5gb=idle 1:1g.5gb=foreign 2:1g.5gb=foreign"
        granted = await node.acquire("1g.5gb")
        assert granted.devices[0].gpu_instance_id == idle
        node.simulator.vacate(pid)
        await node.look()
        assert node.layout() == "0:1g.5gb=leased 1:1g.5gb=idle 2:1g.5gb=foreign"
    async with engine(tmp_path) as after:
        assert list(after.leases) == [granted.lease.id]


async def test_without_its_ledger_all_instances_are_foreign(tmp_path: Path) -> None:
    async with engine(tmp_path, "a100-40gb") as node:
        await node.acquire("1g.5gb")
    (tmp_path / LEDGER_FILE).write_bytes(b"this is not a database, but it was one" * 200)
    for suffix in ("-wal", "-shm"):
        (tmp_path / f"{LEDGER_FILE}{suffix}").unlink(missing_ok=True)
    async with engine(tmp_path) as after:
        assert after.layout() == "6:1g.5gb=foreign"
        doubt = after.manager.snapshot.doubt
        assert doubt is not None
        assert doubt.kept_as == str(tmp_path / f"{LEDGER_FILE}.damaged-1")


# GPUs that come and go


async def test_a_mode_switched_by_others_is_noticed(tmp_path: Path) -> None:
    async with engine(tmp_path, "h100-80gb") as node:
        node.simulator.set_mig_mode(0, on=False)
        await node.look()
        assert node.gpu().state is GpuState.WHOLE
        await node.quiet()
        assert EventKind.GPU_MODE_CHANGED in node.kinds()
        whole = await node.acquire(WHOLE)
        await node.release(whole)
        node.simulator.set_mig_mode(0, on=True)
        await node.look()
        assert node.gpu().state is GpuState.READY
        assert node.layout() == ""
        await node.acquire("1g.10gb")


async def test_a_lease_on_a_removed_gpu_ends(tmp_path: Path) -> None:
    async with engine(tmp_path, "a100-40gb") as node:
        await node.acquire("1g.5gb")
    (tmp_path / STATE_FILE).unlink()
    async with engine(tmp_path, "h100-80gb") as after:
        assert not after.leases
        recorded = await after.manager.history.events(0.0, None, 1000)
        assert any(event.kind is EventKind.LEASE_ENDED for event in recorded)


async def test_a_lease_on_an_unmanaged_gpu_stays_active(tmp_path: Path) -> None:
    async with engine(tmp_path, "a100-40gb:2") as node:
        granted = await node.acquire("1g.5gb", gpus=("1",))
    async with engine(tmp_path, gpus=("0",)) as after:
        assert list(after.leases) == [granted.lease.id]
        assert after.instances() == []
    async with engine(tmp_path) as again:
        assert again.instances()[0].lease == granted.lease.id


async def test_a_gpu_with_repeated_failed_readings_is_cordoned(tmp_path: Path) -> None:
    async with engine(tmp_path, "a100-40gb:2") as node:
        granted = await node.acquire("1g.5gb", gpus=("0",))
        fault = node.simulator.fail("nvmlDeviceGetMigMode", 999, gpu=0, times=None)
        for _ in range(3):
            await node.look()
        assert node.gpu(0).state is GpuState.CORDONED
        assert "cannot be read" in node.gpu(0).reason
        assert granted.lease.id in node.leases
        assert (await node.acquire("1g.5gb")).devices[0].gpu_index == 1
        node.simulator.clear(fault)
        await node.look()
        assert node.gpu(0).state is GpuState.READY


async def test_a_selected_gpu_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot manage GPU 7: there is no such GPU"):
        await start(tmp_path, "a100-40gb", gpus=("7",))


async def test_changes_by_others_are_found_by_driver_events(tmp_path: Path) -> None:
    async with engine(tmp_path, "a100-40gb", listen_to_driver=True) as node:
        await node.acquire("1g.5gb")
        node.simulator.create_foreign(0, "3g.20gb", start=0)
        await node.until(lambda: node.instances(InstanceState.FOREIGN))

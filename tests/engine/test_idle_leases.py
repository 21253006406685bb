"""Idle leases: warned about, and ended where that is configured; never while the use is not known, never of pods."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mig_agent.core.events import EventKind
from mig_agent.core.model import LeaseId
from mig_agent.core.owner import KubeletDevice
from mig_agent.engine.idle_leases import IdleLeases
from support.engine import engine, killed, start

HOUR = 3600.0
ENDING: dict[str, Any] = {"idle_after_seconds": HOUR, "end_idle_after_seconds": 2 * HOUR}


async def test_an_idle_lease_is_warned_about_once_and_ended(tmp_path: Path) -> None:
    async with engine(tmp_path, "a100-40gb", **ENDING) as node:
        await node.look()
        idle = await node.acquire("1g.5gb")
        used = await node.acquire("1g.5gb")
        node.simulator.occupy(node.where(used))
        for _ in range(2):
            node.clock.advance(HOUR / 2 + 1)
            await node.look()
        await node.quiet()
        (warning,) = node.told(EventKind.LEASE_WARNED)
        assert warning.lease == idle.lease.id
        assert "is idle: no process for 1h; the lease ends in 59m unless a process uses it" in warning.message
        snapshot = node.manager.snapshot
        assert set(snapshot.idle_since) == set(snapshot.warnings) == {idle.lease.id}
        assert node.manager.published.idle == {idle.lease.id}
        node.clock.advance(HOUR)
        await node.look()
        assert set(node.leases) == {used.lease.id}
        (ended,) = node.told(EventKind.LEASE_ENDED)
        assert ended.data["reason"] == "idle"
        assert "no process used its devices for 2h (end_idle_after)" in ended.message
        assert len(node.told(EventKind.LEASE_WARNED)) == 1


async def test_without_the_setting_an_idle_lease_does_not_end(tmp_path: Path) -> None:
    async with engine(tmp_path, "a100-40gb") as node:
        idle = await node.acquire("1g.5gb")
        await node.look()
        node.clock.advance(1000 * HOUR)
        await node.look()
        assert idle.lease.id in node.leases
        assert node.manager.snapshot.warnings == {idle.lease.id: "idle for 41d16h"}


async def test_a_lease_with_one_used_device_is_not_idle(tmp_path: Path) -> None:
    async with engine(tmp_path, "a100-40gb", **ENDING) as node:
        both = await node.acquire("1g.5gb", "1g.5gb")
        node.simulator.occupy(node.where(both, 1))
        for _ in range(5):
            node.clock.advance(HOUR)
            await node.look()
        assert both.lease.id in node.leases
        assert not node.manager.snapshot.idle_since


async def test_a_pods_lease_is_never_idle(tmp_path: Path) -> None:
    async with engine(tmp_path, "a100-40gb", **ENDING) as node:
        device = KubeletDevice(resource="nvidia.com/mig-1g.5gb", id="mig-agent-0")
        pod = await node.acquire("1g.5gb", kubelet_devices=(device,))
        await node.look()
        node.clock.advance(100 * HOUR)
        await node.look()
        assert pod.lease.id in node.leases


async def test_time_in_which_the_use_was_not_read_does_not_count(tmp_path: Path) -> None:
    """A pause, a hung GPU, or an agent that was away: nothing is known of the time between."""
    async with engine(tmp_path, "a100-40gb", reread_seconds=60.0, **ENDING) as node:
        lease = await node.acquire("1g.5gb")
        await node.look()
        node.clock.advance(30)
        context = node.manager._context
        context.driver_use.paused = ("a test",)  # its timer goes on, and reads nothing
        node.clock.advance(3 * HOUR)
        context.driver_use.paused = ()
        assert not node.manager.snapshot.idle_since
        await node.look()
        await node.quiet()
        assert lease.lease.id in node.leases
        assert not node.manager.snapshot.idle_since


async def test_after_a_restart_the_time_begins_again(tmp_path: Path) -> None:
    node = await start(tmp_path, "a100-40gb", **ENDING)
    lease = await node.acquire("1g.5gb")
    await node.look()
    clock = node.clock
    await killed(node)
    clock.advance(10 * HOUR)
    async with engine(tmp_path, clock=clock, **ENDING) as again:
        await again.look()
        assert lease.lease.id in again.leases
        clock.advance(2 * HOUR)
        await again.look()
        assert lease.lease.id not in again.leases


async def test_a_commit_does_not_look_at_every_lease(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with engine(tmp_path, "a100-40gb") as node:
        await node.acquire("1g.5gb")
        looks: list[LeaseId] = []
        monkeypatch.setattr(IdleLeases, "_since", lambda _self, lease: looks.append(lease.id))
        granted = await node.acquire("1g.5gb")
        await node.release(granted)
        assert looks == []
        await node.look()
        assert looks

"""A reboot: every lease ends with that reason, and a MIG mode that was lost is reported with what restores it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from mig_agent.core.events import EventKind
from support.agent import Agent, short_folder
from support.engine import engine

COMMAND = re.compile(r"`migctl (mode enable --gpu 1)`")


@pytest.fixture
def folder() -> Iterator[Path]:
    with short_folder() as path:
        yield path


def test_a_real_agent_after_a_reboot(folder: Path) -> None:
    with Agent(folder, "a100-40gb:1,h100-80gb:1") as agent:
        leases = [agent.ask("request", "--mig-profile", profile)["lease"] for profile in ("1g.5gb", "2g.20gb")]
        agent.kill()
        agent.simulator.reboot()
        agent.start()
        assert not agent.ask("status")["leases"]
        events = agent.ask("events")["events"]
        ended = {each["lease"]: each for each in events if each["kind"] == "lease-ended"}
        assert set(ended) == set(leases)
        for each in ended.values():
            assert each["data"]["reason"] == "reboot"
            assert "the machine was rebooted" in each["message"]
        ampere, hopper = agent.ask("status")["gpus"]
        assert (ampere["state"], ampere["mig"]["current"]) == ("ready", True)
        assert (hopper["state"], hopper["mig"]["current"]) == ("whole", False)
        (lost,) = [each["message"] for each in events if each["kind"] == "gpu-mode-changed"]
        assert lost.startswith("GPU 1 lost its MIG mode with the reboot")
        refused = agent.migctl("request", "--mig-profile", "2g.20gb", code=3)
        for words in (hopper["reason"], lost, agent.migctl("status").stdout + refused.stderr):
            assert COMMAND.search(words), words
        command = COMMAND.search(lost)
        assert command is not None
        agent.migctl(*command[1].split())
        assert agent.ask("request", "--mig-profile", "2g.20gb")["devices"][0]["gpu_index"] == 1


async def test_a_lease_on_a_gpu_that_is_not_managed_now_ends_too(tmp_path: Path) -> None:
    async with engine(tmp_path, "a100-40gb:2") as node:
        granted = await node.acquire("1g.5gb", gpus=("1",))
        node.simulator.reboot()
    async with engine(tmp_path, clock=node.clock, gpus=("0",)) as after:
        assert not after.leases
        recorded = await after.manager.history.events(0.0, None, 1000)
        (ended,) = [event for event in recorded if event.kind is EventKind.LEASE_ENDED]
        assert (ended.lease, ended.data["reason"]) == (granted.lease.id, "reboot")
    async with engine(tmp_path, clock=node.clock) as again:
        assert not again.instances()


async def test_instances_that_a_service_made_at_boot_are_not_taken_for_ours(tmp_path: Path) -> None:
    """In the same places and with the same ids, as after the last boot; their GPU answers late."""
    async with engine(tmp_path, "a100-40gb") as node:
        granted = await node.acquire("1g.5gb")
        node.simulator.reboot()
        made, _ = node.simulator.create_foreign(0, "1g.5gb", start=6)
        assert made == granted.devices[0].gpu_instance_id
        fault = node.simulator.fail("nvmlDeviceGetMinorNumber", 999, times=None)
    async with engine(tmp_path, clock=node.clock) as after:
        assert not after.manager.snapshot.view.gpus
        assert not after.leases
        after.simulator.clear(fault)
        await after.look()
        assert after.layout() == "6:1g.5gb=foreign"

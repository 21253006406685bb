"""Leases of pods end with their pods, and with nothing else."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

from mig_agent.adapters.kubelet import Identity
from mig_agent.core.model import InstanceState
from support.owners import devices_of
from support.plugged import LARGE, Plugged, devices, plugged


async def running(at: Plugged, name: str = "train", number: int = 0) -> None:
    await at.admit(name, *devices(number))
    await at.start(*devices(number))
    await at.following.poll()


async def test_a_pod_that_is_gone_leaves_an_idle_instance(tmp_path: Path) -> None:
    async with plugged(tmp_path) as at:
        await running(at)
        at.words.drop("train")
        await at.following.poll()
        assert not at.node.leases
        assert [each.state for each in at.node.instances()] == [InstanceState.IDLE]


async def test_silent_kubelet_ends_no_lease(tmp_path: Path) -> None:
    async with plugged(tmp_path) as at:
        await running(at)
        at.words.drop("train")
        at.words.silent = True
        await at.following.poll()
        assert len(at.node.leases) == 1


async def test_kubelet_that_has_just_started_ends_no_lease_of_a_live_pod(tmp_path: Path) -> None:
    async with plugged(tmp_path) as at:
        await running(at)
        at.words.kubelet = Identity(1, 1, 2)
        pods, at.words.pods = at.words.pods, {}
        for _ in range(3):
            await at.following.poll()
        assert len(at.node.leases) == 1
        at.words.pods = pods
        await at.following.poll()
        at.words.pods = {}
        await at.following.poll()
        assert not at.node.leases, "this run of the kubelet has shown it"


async def test_pod_that_ended_while_the_agent_was_down_is_found_by_the_api_server(tmp_path: Path) -> None:
    async with plugged(tmp_path) as at:
        await at.admit("train", *devices(0))
        await at.start(*devices(0))
        del at.words.pods["train"]  # never looked at since
        await at.following.poll()
        assert len(at.node.leases) == 1
        at.words.facts["train"] = replace(at.words.facts["train"], phase="Succeeded")
        await at.following.poll()
        assert not at.node.leases


async def test_without_an_api_server_only_leases_of_listed_pods_end(tmp_path: Path) -> None:
    async with plugged(tmp_path, has_api=False) as at:
        await at.admit("train", *devices(0))
        await at.start(*devices(0))
        at.words.drop("train")
        await at.following.poll()
        assert len(at.node.leases) == 1


async def test_request_of_an_ended_pod_is_cancelled(tmp_path: Path) -> None:
    async with plugged(tmp_path) as at:
        await at.admit("big", *devices(0, resource=LARGE))
        await at.start(*devices(0, resource=LARGE))
        await at.admit("small", *devices(0))
        waiting = at.begin(devices(0))
        await at.node.until(lambda: at.node.manager.snapshot.queue)
        await at.following.poll()
        at.words.drop("small")
        await at.following.poll()
        await at.node.until(lambda: not at.node.manager.snapshot.queue)
        await asyncio.gather(waiting, return_exceptions=True)
        assert not at.table.acquisitions


async def test_a_pod_of_the_same_name_with_other_devices_does_not_keep_the_former_ones(tmp_path: Path) -> None:
    async with plugged(tmp_path) as at:
        await running(at, "train-0", 0)
        at.words.drop("train-0")
        await at.admit("train-0", *devices(1), uid="uid-new")
        await at.start(*devices(1))
        await at.following.poll()
        (lease,) = at.node.leases.values()
        assert devices_of(lease) == devices(1)


async def test_pods_of_one_name_are_judged_each_by_its_own_devices(tmp_path: Path) -> None:
    """The same holds where no UID tells them apart."""
    async with plugged(tmp_path) as at:
        for number in (0, 1):
            if number:
                at.words.drop("train-0")
            await at.admit("train-0", *devices(number))
            at.words.recorded = ()
            await at.start(*devices(number))
            if not number:
                await at.following.poll()
        await at.following.poll()
        (lease,) = at.node.leases.values()
        assert devices_of(lease) == devices(1)
        assert set(devices(1)) <= at.table.listed
        await at.following.poll()
        assert len(at.node.leases) == 1


async def test_files_go_with_the_lease(tmp_path: Path) -> None:
    async with plugged(tmp_path) as at:
        await running(at, "first", 0)
        await running(at, "second", 1)
        at.words.drop("first")
        await at.following.poll()
        await at.injector.tidy(lambda: [each for lease in at.node.leases.values() for each in devices_of(lease)])
        assert at.folder.names() == ("mig-1g.10gb-1",)


async def test_devices_allocated_to_no_pod_are_forgotten(tmp_path: Path) -> None:
    """The kubelet allocates and then does not admit the pod after all."""
    async with plugged(tmp_path) as at:
        await at.allocating.allocate([devices(0)])
        await at.following.poll()
        assert set(at.table.pending) == set(devices(0)), "it may be listed in a moment"
        at.table.pending[devices(0)[0]] -= 11.0
        await at.following.poll()
        assert not at.table.pending


async def test_kubelet_is_not_queried_while_it_allocates(tmp_path: Path) -> None:
    async with plugged(tmp_path) as at:
        await running(at)
        at.words.drop("train")
        at.table.allocating = 1
        await at.following.poll()
        assert len(at.node.leases) == 1
        at.table.allocating = 0
        await at.following.poll()
        assert not at.node.leases


async def test_queries_for_many_pods_are_spread_over_scans(tmp_path: Path) -> None:
    """An old kubelet lists pods that have ended: each has to be asked about, also where the first ones live on."""
    async with plugged(tmp_path, "h100-80gb:4") as at:
        for number in range(26):
            await at.admit(f"pod-{number}", *devices(number))
            await at.start(*devices(number))
        at.words.pods = {}  # as after a restart of the kubelet and the agent
        for number in range(22, 26):
            at.words.facts[f"pod-{number}"] = replace(at.words.facts[f"pod-{number}"], phase="Succeeded")
        for _ in range(6):
            await at.following.poll()
        assert len(at.node.leases) == 22

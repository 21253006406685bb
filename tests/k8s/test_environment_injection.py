"""Devices by environment variables: made in Allocate, known by their ids alone."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from mig_agent.core.errors import Reason, RefusedError
from mig_agent.core.model import KubeletDevice
from mig_agent.frontends.kubernetes.device_plugin import environment
from mig_agent.frontends.kubernetes.device_plugin.environment import EnvironmentAllocating, EnvironmentStarting
from mig_agent.frontends.kubernetes.resources import Naming, resources_of
from support.plugged import LARGE, SMALL, Plugged, devices, plugged


@pytest.fixture
async def at(tmp_path: Path) -> AsyncIterator[Plugged]:
    async with plugged(tmp_path) as found:
        yield found


def allocating(at: Plugged) -> EnvironmentAllocating:
    resources = {each.name: each for each in resources_of(at.node.manager.snapshot.view, Naming())}
    return EnvironmentAllocating(at.node.manager, at.book, resources, lambda: None)


async def test_the_answer_names_what_was_made(at: Plugged) -> None:
    first, second = await allocating(at).allocate([devices(0, 1), devices(2)])
    made = [*first.variables["NVIDIA_VISIBLE_DEVICES"].split(","), second.variables["NVIDIA_VISIBLE_DEVICES"]]
    assert set(made) == {each.uuid for each in at.node.instances()}
    assert len(made) == 3
    await EnvironmentStarting(at.node.manager).start(devices(0, 1), 1.0)


async def test_what_is_not_had_in_time_is_refused(at: Plugged, monkeypatch: pytest.MonkeyPatch) -> None:
    await allocating(at).allocate([devices(0, resource=LARGE)])
    monkeypatch.setattr(environment, "MOST_SECONDS", 0.05)
    with pytest.raises(RefusedError) as refused:
        await allocating(at).allocate([devices(0)])
    assert refused.value.refusal.reason is Reason.WAITED_TOO_LONG
    assert "leased to a pod with nvidia.com/mig-7g.80gb" in refused.value.refusal.message, "who is in the way"
    assert not at.node.manager.snapshot.queue


async def test_an_id_that_comes_again_ends_the_lease_of_the_pod_before(at: Plugged) -> None:
    await allocating(at).allocate([devices(0, resource=LARGE)])
    before = set(at.node.leases)
    await allocating(at).allocate([devices(0, resource=LARGE)])
    assert len(at.node.leases) == 1
    assert set(at.node.leases) != before


async def test_leases_end_one_by_one_as_their_pods_go(at: Plugged) -> None:
    await allocating(at).allocate([devices(0)])
    await allocating(at).allocate([devices(1)])
    await at.following.look()
    assert len(at.node.leases) == 2, "not listed yet"
    at.words.put("first", *devices(0))
    at.words.put("second", *devices(1))
    await at.following.look()
    at.words.drop("first")
    await at.following.look()
    (lease,) = at.node.leases.values()
    assert lease.kubelet_devices == devices(1)


async def down_while_it_ended(at: Plugged, *has: KubeletDevice) -> None:
    """A pod got its devices, and was gone before this agent ever looked."""
    await allocating(at).allocate([has])
    at.book.on_way.clear()


async def test_what_nobody_has_any_more_is_given_back_though_its_pod_was_never_seen(at: Plugged) -> None:
    await down_while_it_ended(at, *devices(0))
    at.words.put("other", *devices(1))
    await at.following.look()
    assert not at.node.leases


async def test_an_api_server_that_is_silent_ends_nothing(at: Plugged) -> None:
    await down_while_it_ended(at, *devices(0))
    at.words.bound_to_node = False
    await at.following.look()
    assert len(at.node.leases) == 1


async def test_a_kubelet_that_does_not_list_all_of_its_pods_ends_nothing(at: Plugged) -> None:
    """It has just started, or has not admitted one yet: whose the device is cannot be told."""
    await down_while_it_ended(at, *devices(0))
    at.words.put("running", *devices(1))
    at.words.pods.clear()
    await at.following.look()
    assert len(at.node.leases) == 1
    at.words.facts["running"] = replace(at.words.facts["running"], phase="Succeeded")
    await at.following.look()
    assert not at.node.leases


async def test_a_device_that_only_an_init_container_has_is_its_pods_until_the_pod_ends(at: Plugged) -> None:
    await down_while_it_ended(at, *devices(0))
    at.words.put("train", *devices(1))
    at.words.facts["train"] = replace(at.words.facts["train"], resources={SMALL: 2})
    await at.following.look()
    assert len(at.node.leases) == 1, "one of the two that it asks for is not listed"
    at.words.drop("train")
    await at.following.look()
    assert not at.node.leases


async def test_what_was_just_allocated_is_on_its_way(at: Plugged) -> None:
    await allocating(at).allocate([devices(0)])
    await at.following.look()
    assert len(at.node.leases) == 1


async def test_a_kubelet_that_lists_pods_that_have_ended_keeps_nobodys_lease(at: Plugged) -> None:
    at.words.lists_finished = True
    await allocating(at).allocate([devices(0)])
    at.words.put("train", *devices(0))
    await at.following.look()
    assert len(at.node.leases) == 1
    at.words.facts["train"] = replace(at.words.facts["train"], phase="Succeeded")
    await at.following.look()
    assert not at.node.leases
    assert not at.book.listed, "the kubelet counts it as free"


async def test_what_came_too_late_is_given_back(at: Plugged) -> None:
    """The lease was being recorded when the kubelet was told that it takes too long; no list ever shows its device."""
    await allocating(at).allocate([devices(0)])
    (lease,) = at.node.leases.values()
    at.book.abandoned.add(lease.request_key)
    await at.following.look()
    assert not at.node.leases
    assert not at.book.abandoned


async def test_what_is_gone_after_a_reboot_is_said_in_words(at: Plugged) -> None:
    with pytest.raises(RefusedError, match="its MIG devices are gone, as after a reboot"):
        await EnvironmentStarting(at.node.manager).start(devices(0), 1.0)

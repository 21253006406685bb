"""A lease is taken for a pod, the pod is bound, and it sees that very device: what a scheduler of its own relies on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from mig_agent.client import Client, Lease, Pod, Refused
from support.cluster import installed
from support.cluster import kubelet as kubelets
from support.cluster.cluster import Cluster
from support.cluster.layout import NODE
from support.cluster.pods import MEMORY, PROFILE, container, is_held_up, is_running, pod
from support.cluster.space import Space

SLICE, WHOLE = f"{PROFILE}1g.10gb", f"{PROFILE}7g.80gb"
ONE = {SLICE: 1}


@pytest.fixture(scope="module")
def scheduler(cluster: Cluster) -> Iterator[Client]:
    """One that may take leases for pods."""
    with Client(installed.address(cluster).replace("mig-agent.sock", "admin.sock"), patience=60) as client:
        yield client


def pending(space: Space, name: str, limits: Mapping[str, int], **spec: object) -> Pod:
    """A pod that nobody binds but the test."""
    body = pod(name, [container(limits=limits)], schedulerName="by-hand", **spec)
    made = space.cluster.api.create(f"{space.path}/pods", body)
    return Pod(namespace=space.name, name=name, uid=made["metadata"]["uid"])


def take(scheduler: Client, of: Pod, **asking: Any) -> Lease:
    """As a scheduler does, which may be killed and ask again."""
    asking = {"mig_profile": "1g.10gb", "ttl": 600, **asking}
    return scheduler.acquire(pod=of, request_id=of.uid, **asking)


def bind(space: Space, of: Pod) -> None:
    target = {"apiVersion": "v1", "kind": "Node", "name": NODE}
    body = {"apiVersion": "v1", "kind": "Binding", "metadata": {"name": of.name}, "target": target}
    space.cluster.api.create(f"{space.path}/pods/{of.name}/binding", body)


def devices(lease: Lease) -> list[str]:
    return [each.uuid for each in lease.devices]


def test_a_pod_sees_what_was_taken_for_it(space: Space, scheduler: Client) -> None:
    space.until_allocatable(SLICE, 7)
    mine = pending(space, "a", ONE)
    lease = take(scheduler, mine)
    found = space.lease("a")
    assert (found.id, found.arrived, found.tenant) == (lease.id, False, f"namespace {space.name}")
    space.until_allocatable(WHOLE, 0)
    assert space.allocatable(SLICE) == 7, "one of them is kept for the pod"
    bind(space, mine)
    space.until_running("a")
    assert space.visible("a") == devices(lease)
    found = space.lease("a")
    assert (found.id, found.arrived, found.expires_at) == (lease.id, True, None)
    assert space.instances() == ["1g.10gb"]
    assert space.allocatable(SLICE) == 7
    with pytest.raises(Refused, match=f"pod {space.name}/a has it"):
        scheduler.release(lease.id, lease.token)
    again = take(scheduler, mine)
    assert (again.id, again.token, devices(again)) == (lease.id, lease.token, devices(lease))
    space.delete("a")
    space.until_allocatable(WHOLE, 1)
    assert space.instances() == ["1g.10gb"], "it falls idle"


def test_no_other_pod_gets_it(space: Space, scheduler: Client) -> None:
    mine = pending(space, "a", ONE)
    lease = take(scheduler, mine)
    others = [f"p{number}" for number in range(3)]
    for name in others:
        space.pod(name, ONE)
    space.until_running(*others)
    assert not {space.visible(name)[0] for name in others} & set(devices(lease))
    bind(space, mine)
    space.until_running("a")
    assert space.visible("a") == devices(lease)
    assert space.instances() == ["1g.10gb"] * 4


def test_it_is_kept_on_a_full_gpu_while_others_wait(space: Space, scheduler: Client) -> None:
    """The cluster's own scheduler sees seven, and binds a seventh pod: that one waits, and the eighth is taken in."""
    mine = pending(space, "a", ONE)
    lease = take(scheduler, mine)
    others = [f"p{number}" for number in range(7)]
    for name in others:
        space.pod(name, ONE)
    pods = space.until(
        lambda pods: (
            sum(is_running(pods[name]) for name in others) == 6 and sum(is_held_up(pods[name]) for name in others) == 1
        ),
        "six run and one waits",
    )
    (waiting,) = [name for name in others if not is_running(pods[name])]
    space.until(lambda _: kubelets.healthy(space.cluster)[SLICE] == 8, "the kubelet has one for the pod on its way")
    bind(space, mine)
    space.until_running("a")
    assert space.visible("a") == devices(lease)
    assert not is_running(space.pods()[waiting])
    space.delete("a")
    space.until_running(waiting)
    assert space.visible(waiting) == devices(lease), "it was given back"


def test_an_amount_of_memory_is_served_by_what_was_taken(space: Space, scheduler: Client) -> None:
    mine = pending(space, "a", {f"{MEMORY}10g": 1})
    lease = take(scheduler, mine, mig_profile="2g.20gb")
    bind(space, mine)
    space.until_running("a")
    assert space.visible("a") == devices(lease)
    assert space.instances() == ["2g.20gb"]


def test_all_devices_of_all_containers_in_one_lease(space: Space, scheduler: Client) -> None:
    """An init container hands its device on; the second container has one of another kind."""
    limits = {f"{PROFILE}2g.20gb": 1}
    mine = Pod(namespace=space.name, name="a")
    body = pod(
        "a",
        [container(limits=ONE), container("second", limits=limits)],
        initContainers=[container("first", limits=ONE, script="true")],
        schedulerName="by-hand",
    )
    made = space.cluster.api.create(f"{space.path}/pods", body)
    mine = Pod(namespace=space.name, name="a", uid=made["metadata"]["uid"])
    lease = scheduler.acquire(devices=["1g.10gb", "2g.20gb"], pod=mine, request_id=mine.uid, ttl=600)
    bind(space, mine)
    space.until_running("a")
    small, large = devices(lease)
    assert (space.visible("a"), space.visible("a", "second")) == ([small], [large])
    assert space.lease("a").id == lease.id
    assert space.instances() == ["1g.10gb", "2g.20gb"]


def test_what_fits_none_of_its_devices_ends_and_the_pod_runs_all_the_same(space: Space, scheduler: Client) -> None:
    mine = pending(space, "a", ONE)
    lease = take(scheduler, mine, mig_profile="3g.40gb")
    bind(space, mine)
    space.until_running("a")
    assert space.lease("a").id != lease.id
    space.until(
        lambda _: any(each.startswith("PromiseNotUsed: ") and lease.id in each for each in space.events("a")),
        "the pod is told",
    )


def test_one_whose_pod_never_comes_lapses(space: Space, scheduler: Client) -> None:
    mine = pending(space, "a", ONE)
    lease = take(scheduler, mine, ttl=3)
    space.until(lambda _: not space.leases(), "it has ended")
    space.until_allocatable(WHOLE, 1)
    bind(space, mine)
    space.until_running("a")
    assert space.lease("a").id != lease.id
    assert space.instances() == ["1g.10gb"], "the idle instance serves it as any other pod"


def test_a_gang_is_taken_back_by_its_tokens(space: Space, scheduler: Client) -> None:
    gang = [pending(space, name, ONE) for name in ("a", "b")]
    leases = [take(scheduler, each, ttl=60) for each in gang]
    leases[0].renew(600)
    for each in leases:
        scheduler.release(each.id, each.token)
    assert not space.leases()
    space.until_allocatable(WHOLE, 1)


def test_an_agent_killed_before_the_pod_comes_keeps_it(space: Space, scheduler: Client) -> None:
    mine = pending(space, "a", ONE)
    lease = take(scheduler, mine)
    installed.kill_agent(space.cluster)
    assert take(scheduler, mine).id == lease.id, "and the scheduler gets it again by the same call"
    space.until(lambda _: kubelets.healthy(space.cluster)[SLICE] == 7, "the kubelet has devices to give")
    bind(space, mine)
    space.until_running("a")
    assert space.visible("a") == devices(lease)
    assert space.instances() == ["1g.10gb"]


@pytest.mark.parametrize("when", ["before", "after"])
def test_an_agent_killed_while_it_hands_over_does_so_when_it_is_back(
    space: Space, scheduler: Client, when: str
) -> None:
    """The lease is the pod's by then, and the container's file is not written, or not answered for."""
    mine = pending(space, "a", ONE)
    lease = take(scheduler, mine)
    try:
        installed.crash_at(space.cluster, f"{when}-cdi-file")
        installed.until_agent_ready(space.cluster)
        space.until(lambda _: kubelets.healthy(space.cluster)[SLICE] > 0, "the kubelet has devices to give")
        bind(space, mine)
        installed.until_agent_died(space.cluster)
    finally:
        installed.crash_no_more(space.cluster)
    space.until_running("a")
    assert space.visible("a") == devices(lease)
    assert space.lease("a").id == lease.id
    assert space.instances() == ["1g.10gb"]

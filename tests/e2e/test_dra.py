"""Dynamic Resource Allocation on stock Kubernetes: a claim by memory gets the smallest fitting slot.

On a cluster of its own: a kubelet that has known a device plugin counts its resources for five minutes more.
"""

from __future__ import annotations

import contextlib
import itertools
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from mig_agent.client import Client, MigAgentError
from mig_agent.client.types import LeaseInfo
from support.agent import eventually
from support.cluster import cluster as clusters
from support.cluster import installed, programs
from support.cluster.api import Json
from support.cluster.cluster import Cluster
from support.cluster.pods import MEMORY, container, pod
from support.cluster.space import Space

pytestmark = pytest.mark.xdist_group("dra")

CLAIMS = "/apis/resource.k8s.io/v1"
SLICES = f"{CLAIMS}/resourceslices"
GPUS = "a100-40gb:1,h100-80gb:1"
_numbers = itertools.count(1)


@pytest.fixture(scope="module")
def publishing() -> Iterator[Cluster]:
    """A cluster where the agent is a DRA driver."""
    cluster = clusters.start(Path(tempfile.mkdtemp(prefix="mig-agent-e2e-")), programs.ensure())
    try:
        installed.label(cluster)
        installed.install(cluster, installed.load_image(cluster), gpus=GPUS, values={"advertise": "dra"})
        eventually(lambda: len(slices(cluster)) >= 2, "the slices are published", 60.0)
        yield cluster
    finally:
        cluster.stop()


@pytest.fixture(scope="module")
def caller(publishing: Cluster) -> Iterator[Client]:
    with Client(installed.address(publishing), patience=60) as client:
        yield client


@pytest.fixture
def space(publishing: Cluster, caller: Client) -> Iterator[Space]:
    """A namespace of the test's own; the GPUs are empty before and after."""
    publishing.check()
    space = Space(publishing, caller, f"test-{next(_numbers)}")
    space.open()
    try:
        yield space
    finally:
        space.close()


def slices(cluster: Cluster) -> list[Json]:
    return cluster.api.items(SLICES)


def counters(cluster: Cluster) -> list[int]:
    """All counters of all GPUs."""
    return [
        int(counter["value"])
        for each in slices(cluster)
        for group in each["spec"].get("sharedCounters") or ()
        for counter in group["counters"].values()
    ]


def claim(space: Space, name: str, memory: str) -> None:
    """A claim by memory, of the class that the chart makes."""
    words = f'device.capacity["mig-agent.io"].memory.compareTo(quantity("{memory}")) >= 0'
    exactly = {"deviceClassName": "mig-agent.io", "selectors": [{"cel": {"expression": words}}]}
    space.cluster.api.create(
        f"{CLAIMS}/namespaces/{space.name}/resourceclaims",
        {
            "apiVersion": "resource.k8s.io/v1",
            "kind": "ResourceClaim",
            "metadata": {"name": name},
            "spec": {"devices": {"requests": [{"name": "gpu", "exactly": exactly}]}},
        },
    )


def using(name: str, *claims: str) -> Json:
    """A pod with one container that uses these claims."""
    of_container = container()
    of_container["resources"] = {"claims": [{"name": each} for each in claims]}
    return pod(name, [of_container], resourceClaims=[{"name": each, "resourceClaimName": each} for each in claims])


def lease_of(space: Space, name: str) -> LeaseInfo:
    """The lease of a claim."""
    (found,) = (each for each in space.status().leases if each.holder == f"claim {space.name}/{name}")
    return found


@pytest.mark.parametrize(
    ("memory", "profile"),
    [("4Gi", "1g.5gb"), ("8Gi", "1g.10gb"), ("15Gi", "3g.20gb"), ("30Gi", "7g.40gb"), ("45Gi", "7g.80gb")],
)
def test_a_claim_by_memory_runs_on_the_smallest_slot(space: Space, memory: str, profile: str) -> None:
    claim(space, "gpu", memory)
    space.create(using("train", "gpu"))
    space.until_running("train")
    (device,) = lease_of(space, "gpu").devices
    assert device.profile == profile
    assert space.visible("train") == [device.uuid]
    space.cluster.api.delete(f"{space.path}/pods/train")
    space.until(lambda pods: not pods, "the pod is gone")
    eventually(lambda: not space.status().leases, "the lease has ended", 30.0)
    space.cluster.api.delete(f"{CLAIMS}/namespaces/{space.name}/resourceclaims/gpu")


def test_a_pod_with_two_claims_sees_both(space: Space) -> None:
    for name in ("one", "two"):
        claim(space, name, "4Gi")
    space.create(using("train", "one", "two"))
    space.until_running("train")
    uuids = {lease_of(space, name).devices[0].uuid for name in ("one", "two")}
    assert len(uuids) == 2
    assert set(space.visible("train")) == uuids


def test_an_extended_resource_is_served_by_a_claim(space: Space) -> None:
    space.create(pod("train", [container(limits={f"{MEMORY}10g": 1})]))
    space.until_running("train")
    (lease,) = space.status().leases
    assert lease.devices[0].profile == "1g.10gb"
    assert space.visible("train") == [lease.devices[0].uuid]


def test_what_is_leased_outside_dra_has_no_counters_and_nothing_is_lost(space: Space) -> None:
    with space.agent.acquire(mig_profile="7g.80gb"):
        eventually(lambda: counters(space.cluster).count(0) >= 8, "the slices of the H100 are held", 30.0)
        claim(space, "large", "45Gi")
        space.create(using("train", "large"))
        space.until(lambda pods: "train" in pods, "the pod waits")
        assert all(each >= 0 for each in counters(space.cluster))
    space.until_running("train")
    (device,) = lease_of(space, "large").devices
    assert device.profile == "7g.80gb"


def test_an_agent_killed_between_two_writes_mends_the_pool_and_keeps_claims(publishing: Cluster, space: Space) -> None:
    claim(space, "small", "4Gi")
    space.create(using("stays", "small"))
    space.until_running("stays")
    (device,) = lease_of(space, "small").devices
    installed.crash_at(publishing, "after-resource-slice-again")
    try:
        with contextlib.suppress(MigAgentError):
            space.agent.acquire(mig_profile="7g.80gb", ttl=60)
        installed.until_agent_died(publishing)
    finally:
        installed.crash_no_more(publishing)
    assert lease_of(space, "small").devices == (device,)
    claim(space, "next", "4Gi")
    space.create(using("train", "next"))
    space.until_running("train")
    assert all(each >= 0 for each in counters(publishing))
    for lease in space.status().leases:
        if lease.holder and not lease.holder.startswith("claim "):
            space.agent.release(lease.id, force=True)


def test_a_slot_freed_by_force_is_handed_over_after_its_container_has_ended(space: Space) -> None:
    """The scheduler gives it out at once, and the next Prepare comes before the old claim's Unprepare."""
    for number in range(5):
        name = f"p{number}"
        claim(space, name, "45Gi")
        space.create(using(name, name))
        space.until_running(name)
        (lease,) = space.status().leases
        assert lease.holder == f"claim {space.name}/{name}"
        space.cluster.api.delete(f"{space.path}/pods/{name}", gracePeriodSeconds="0")

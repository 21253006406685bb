"""The agent kills itself where it changes something for Kubernetes: nothing is lost, left over or given twice."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.cluster import installed
from support.cluster import kubelet as kubelets
from support.cluster.pods import PROFILE, has_failed, is_running, restarts
from support.cluster.space import Space

SLICE = f"{PROFILE}1g.10gb"
ONE = {SLICE: 1}
CDI_FOLDER = "/var/run/cdi"
WHEN = pytest.mark.parametrize("when", ["before", "after"])


@pytest.fixture
def held(space: Space) -> Iterator[Space]:
    """With a pod that runs all the while, and an agent that is whole again in the end."""
    space.running("a", ONE)
    before = space.lease("a")
    try:
        yield space
    finally:
        installed.crash_no_more(space.cluster)
        space.until(lambda _: kubelets.healthy(space.cluster)[SLICE] > 0, "the kubelet has devices to give")
    pods = space.pods()
    assert is_running(pods["a"])
    assert restarts(pods["a"]) == 0
    assert space.lease("a").devices == before.devices
    # What comes next gets what nobody else has, and for each pod that is there one instance stands and one file.
    space.running("next", ONE)
    there = space.pods()
    uuids = [device.uuid for each in space.leases().values() for device in each.devices]
    assert set(space.leases()) == set(there)
    assert len(set(uuids)) == len(uuids) == len(there)
    space.until(lambda _: len(cdi_files(space)) == len(there), "one CDI file for each device")


def cdi_files(space: Space) -> list[str]:
    return space.cluster.node.run("ls", CDI_FOLDER).split()


def ready_to_die(space: Space, place: str) -> None:
    installed.crash_at(space.cluster, place)
    installed.until_agent_ready(space.cluster)
    space.until(lambda _: kubelets.healthy(space.cluster)[SLICE] > 0, "the kubelet has devices to give")


@WHEN
def test_killed_where_a_cdi_file_is_written(held: Space, when: str) -> None:
    """The lease is committed by then: the container starts with that very device once an agent lives."""
    ready_to_die(held, f"{when}-cdi-file")
    held.pod("b", ONE)
    installed.until_agent_died(held.cluster)
    assert not has_failed(held.pods()["b"])
    installed.crash_no_more(held.cluster)
    held.until_running("b")
    assert held.visible("b") == [device.uuid for device in held.lease("b").devices]


@WHEN
def test_killed_where_a_cdi_file_is_removed(held: Space, when: str) -> None:
    held.running("b", ONE)
    ready_to_die(held, f"{when}-cdi-removal")
    held.cluster.api.delete(f"{held.path}/pods/b")
    installed.until_agent_died(held.cluster)
    installed.crash_no_more(held.cluster)
    held.until(lambda pods: "b" not in pods and "b" not in held.leases(), "it is gone, and so is its lease")


@WHEN
def test_killed_where_it_begins_to_serve(held: Space, when: str) -> None:
    installed.crash_at(held.cluster, f"{when}-plugin-socket")
    installed.until_agent_died(held.cluster)

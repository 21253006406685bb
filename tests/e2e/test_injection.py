"""A container runtime that knows no CDI: devices by the environment, made inside Allocate."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.cluster import installed
from support.cluster.pods import PROFILE
from support.cluster.space import Space

SLICE = f"{PROFILE}1g.10gb"


@pytest.fixture
def by_environment(space: Space) -> Iterator[Space]:
    """With the chart's value for it, which is taken back afterwards."""
    installed.install_again(space.cluster, deviceInjection="environment")
    try:
        yield space
    finally:
        installed.install_again(space.cluster)


def test_a_pod_runs_and_gives_back(by_environment: Space) -> None:
    """The kubelet does not say in Allocate whose the device is, so the lease does not know its pod."""
    space = by_environment
    space.pod("a", {SLICE: 1})
    space.until_running("a")
    (lease,) = space.status().leases
    (given,) = [device.uuid for device in lease.devices]
    assert space.environment("a")["NVIDIA_VISIBLE_DEVICES"] == given
    space.delete("a")
    space.until(lambda _: not space.status().leases, "its lease has ended")
    space.pod("b", {SLICE: 1})
    space.until_running("b")
    assert space.environment("b")["NVIDIA_VISIBLE_DEVICES"] == given, "the idle instance serves again"
    space.delete("b")
    space.until(lambda _: not space.status().leases, "its lease has ended, too")


def test_what_ended_while_the_agent_was_away_is_given_back(by_environment: Space) -> None:
    """Nobody can say which pod had it; but the kubelet lists all that are bound to the node, and none has it."""
    space = by_environment
    space.pod("a", {SLICE: 1})
    space.pod("stays", {SLICE: 1})
    space.until_running("a", "stays")
    installed.label_away(space.cluster)
    try:
        space.cluster.api.delete(f"{space.path}/pods/a")
        space.until(lambda pods: "a" not in pods, "it is gone")
    finally:
        installed.label_back(space.cluster)
    space.until(lambda _: len(space.status().leases) == 1, "its lease has ended, and no other")
    given = space.environment("stays")["NVIDIA_VISIBLE_DEVICES"]
    assert [device.uuid for lease in space.status().leases for device in lease.devices] == [given]

    # Where no device plugin asks the kubelet any more, its record of devices tells whose they are.
    installed.install_again(space.cluster, deviceInjection="environment", advertise="node-status")
    space.cluster.api.delete(f"{space.path}/pods/stays")
    space.until(lambda _: not space.status().leases, "its lease has ended, too")

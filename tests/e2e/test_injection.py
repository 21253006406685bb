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

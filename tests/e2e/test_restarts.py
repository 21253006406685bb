"""Parts of the node end and come back under running pods: these go on, and nothing is lost."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from support.cluster import installed
from support.cluster import kubelet as kubelets
from support.cluster.pods import MEMORY, PROFILE, is_running, restarts
from support.cluster.space import Space

SLICE = f"{PROFILE}1g.10gb"
ONE = {SLICE: 1}
OTHER = {f"{MEMORY}20g": 1}


def kubelet(space: Space) -> None:
    space.cluster.node.restart("kubelet")


def kubelet_and_agent(space: Space) -> None:
    installed.kill_agent(space.cluster)
    space.cluster.node.restart("kubelet")


def agent(space: Space) -> None:
    installed.kill_agent(space.cluster)
    check_ready(space)


def agents_pod(space: Space) -> None:
    """As an upgrade does it: SIGTERM, and a new pod."""
    installed.replace_agent(space.cluster)
    check_ready(space)


def check_ready(space: Space) -> None:
    """A pod that is bound by who looks only whether the agent's pod is ready would be admitted."""
    assert kubelets.healthy(space.cluster)[SLICE] > 0, installed.agent_log(space.cluster)


def api_server(space: Space) -> None:
    space.cluster.node.restart("kube-apiserver")
    space.cluster.until_ready()


def containerd(space: Space) -> None:
    space.cluster.node.restart("containerd")


@pytest.mark.parametrize(
    "ends", [kubelet, agent, kubelet_and_agent, agents_pod, api_server, containerd], ids=lambda each: each.__name__
)
def test_pods_go_on(space: Space, ends: Callable[[Space], None]) -> None:
    space.running("a", ONE)
    space.running("b", OTHER)
    before = space.leases()
    uuids = {name: space.visible(name) for name in before}
    ends(space)
    # A pod that is bound before the kubelet knows the agent again is rejected for good; that is Kubernetes' own gap.
    space.until(lambda _: kubelets.healthy(space.cluster)[SLICE] > 0, "the kubelet has devices to give")
    # A new pod shows that everything is back; what it gets is not what the others have.
    (device,) = space.running("new", ONE)
    assert device.uuid not in [uuid for each in uuids.values() for uuid in each]
    pods = space.pods()
    after = space.leases()
    for name, lease in before.items():
        assert is_running(pods[name]), name
        assert restarts(pods[name]) == 0, name
        assert (after[name].id, after[name].devices) == (lease.id, lease.devices)
    # What ends afterwards is noticed, and what it had is used again.
    space.delete("a")
    assert [device.uuid for device in space.running("next", ONE)] == uuids["a"]


def test_a_pod_that_ends_while_the_agent_is_away_gives_its_device_back(space: Space) -> None:
    space.running("a", ONE)
    (given,) = space.visible("a")
    installed.label_away(space.cluster)
    try:
        space.cluster.api.delete(f"{space.path}/pods/a")
        space.until(lambda pods: "a" not in pods, "it is gone")
    finally:
        installed.label_back(space.cluster)
    space.until(lambda _: not space.leases(), "its lease ends once the agent is back")
    assert [device.uuid for device in space.running("b", ONE)] == [given]

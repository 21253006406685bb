"""The chart is upgraded, rolled back, taken away and installed again, under running pods."""

from __future__ import annotations

import stat
from collections.abc import Iterator

import pytest

from mig_agent.adapters.host import Host
from mig_agent.client import Client
from support.cluster import installed
from support.cluster.pods import PROFILE, is_running, restarts
from support.cluster.space import Space

SLICE = f"{PROFILE}1g.10gb"
ONE = {SLICE: 1}


def annotation(space: Space) -> str:
    """Of the agent's pod: whatever changes it makes a new one. "none" while there is no pod."""
    path = f"/api/v1/namespaces/{installed.NAMESPACE}/pods/{installed.agent_pod(space.cluster) or 'none'}"
    pod = space.cluster.api.find(path)
    found: str = pod["metadata"]["annotations"].get("tests/version", "") if pod else "none"
    return found


def check(space: Space, lease: str) -> None:
    """The pod runs on undisturbed, with what it had."""
    pod = space.pods()["a"]
    assert is_running(pod)
    assert restarts(pod) == 0
    assert space.lease("a").id == lease


def nvidia_devices(space: Space) -> list[str]:
    """What the node's /dev has for NVIDIA's driver. It is the machine's own, which may have some without any GPU."""
    listing = "ls -d /dev/nvidia* /dev/nvidia-caps*/* 2>/dev/null || true"
    return space.cluster.node.run("sh", "-c", listing).splitlines()


def check_node_without_a_gpu(space: Space) -> None:
    """There is no driver in the agent's container, and the machine of the tests has no GPU: it is left as it is."""
    cluster = space.cluster
    before, devices = space.node(), nvidia_devices(space)
    # The ledger of before knows GPUs.
    others = {"state": "/var/lib/mig-agent-without"}
    installed.install_again(cluster, simulate="", runtimeClassName="", paths=others)
    with Client(installed.address(cluster), patience=60) as client:
        status = client.status()
    assert (status.gpus, status.paused) == ((), ("this node has no NVIDIA GPU",))
    pods = f"/api/v1/namespaces/{installed.NAMESPACE}/pods"
    (pod,) = cluster.api.items(pods, labelSelector=installed.SELECTOR)
    assert is_running(pod)
    assert restarts(pod) == 0
    after = space.node()
    for part in ("labels", "annotations"):
        assert after["metadata"][part] == before["metadata"][part]
    assert not {name: n for name, n in after["status"]["allocatable"].items() if "/" in name and n != "0"}
    assert [each["type"] for each in after["status"]["conditions"]] == [
        each["type"] for each in before["status"]["conditions"]
    ]
    sockets = cluster.layout.private("/var/lib") / "kubelet/device-plugins"
    assert [path.name for path in sockets.glob("*.sock")] == ["kubelet.sock"]
    assert nvidia_devices(space) == devices, "it made no device node, and took none away"


@pytest.fixture
def installed_again(space: Space) -> Iterator[None]:
    """Whatever happens, the next test finds an agent."""
    yield
    if not installed.agent_pod(space.cluster) or not space.status().gpus:
        installed.install_again(space.cluster)


def test_upgrade_rollback_uninstall_install(space: Space, installed_again: None) -> None:
    del installed_again
    cluster = space.cluster
    labels = dict(space.node()["metadata"]["labels"])
    state = cluster.layout.private("/var/lib") / "mig-agent"
    assert stat.S_IMODE(state.stat().st_mode) == 0o700, "the kubelet makes it for everybody to enter"
    space.running("a", ONE)
    lease = space.lease("a").id

    installed.install_again(cluster, podAnnotations={"tests/version": "new"})
    space.until(lambda _: annotation(space) == "new", "the new pod is there")
    check(space, lease)
    space.running("b", ONE)

    installed.helm(cluster, "rollback", installed.RELEASE, "--wait")
    space.until(lambda _: annotation(space) == "", "the pod of before is back")
    installed.until_agent_ready(cluster)
    check(space, lease)
    space.running("c", ONE)
    idle = space.lease("c").devices[0].uuid
    space.delete("c")

    installed.helm(cluster, "uninstall", installed.RELEASE, "--wait")
    assert installed.agent_pod(cluster) == ""
    assert is_running(space.pods()["a"])
    space.until_allocatable(SLICE, 0)
    left = {key for key in space.node()["metadata"]["labels"] if "nvidia.com" in key or "mig-agent" in key}
    assert left <= {installed.LABEL}, "labels of the agent's own are gone"
    kinds = {condition["type"] for condition in space.node()["status"]["conditions"]}
    assert "MigGpuProblem" not in kinds
    sockets = cluster.layout.private("/var/lib") / "kubelet/device-plugins"
    assert [path.name for path in sockets.glob("*.sock")] == ["kubelet.sock"]
    cdi = cluster.layout.private("/run") / "cdi"
    text = "".join(path.read_text() for path in cdi.iterdir())
    assert idle not in text, "what nobody holds is gone"

    if not Host().has_nvidia_gpu():
        check_node_without_a_gpu(space)
    installed.install_again(cluster)
    check(space, lease)
    space.until_allocatable(SLICE, 7)
    space.until(lambda _: {*space.node()["metadata"]["labels"]} == {*labels}, "its labels are back")
    (device,) = space.running("d", ONE)
    assert device.uuid not in space.visible("a") + space.visible("b")
    check(space, lease)

"""A GPU is lost under a pod that has devices on two: what is left stays its own, and a restart mends the rest."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from mig_agent.client.types import LeaseInfo
from mig_agent.simulator import STATE_FILE, Simulator
from support.cluster import installed
from support.cluster.pods import PROFILE, container, is_held_up, is_running, pod, restarts
from support.cluster.space import Space

OF_H100, OF_A30 = f"{PROFILE}1g.10gb", f"{PROFILE}1g.6gb"
A30 = 1


@pytest.fixture
def watchful(space: Space) -> Iterator[Space]:
    """The agent looks at its GPUs every second."""
    settings = {"start_deadline": "8s", "reread": "1s"}
    installed.install_again(space.cluster, settings=settings)
    try:
        yield space
    finally:
        simulator(space).reset_gpu(A30)
        installed.install_again(space.cluster)


def simulator(space: Space) -> Simulator:
    return Simulator(space.cluster.layout.private("/var/lib") / "mig-agent" / STATE_FILE)


def leases_of(space: Space, name: str) -> list[LeaseInfo]:
    """A pod may have two: one with what is left, and one with what came for the rest."""
    return [each for each in space.status().leases if each.pod is not None and each.pod.name == name]


def kill_container(space: Space, name: str) -> None:
    (status,) = space.pods()[name]["status"]["containerStatuses"]
    task = status["containerID"].removeprefix("containerd://")
    space.cluster.node.run("ctr", "tasks", "kill", "--signal", "SIGKILL", task)


def test_a_pod_keeps_what_is_left_and_gets_another_device_for_what_it_lost(watchful: Space) -> None:
    space = watchful
    space.create(pod("both", [container(limits={OF_H100: 1, OF_A30: 1})], restartPolicy="Always"))
    space.until_running("both")
    (lease,) = leases_of(space, "both")
    (kept,) = [each.uuid for each in lease.devices if each.profile == "1g.10gb"]

    simulator(space).lose_gpu(A30)
    space.until(lambda _: any(each.startswith("DeviceLost: ") for each in space.events("both")), "the pod is told")
    (words,) = [each for each in space.events("both") if each.startswith("DeviceLost: ")]
    assert f"({OF_A30} mig-agent-" in words
    assert "its GPU was lost" in words
    (now,) = leases_of(space, "both")
    assert now.id == lease.id
    assert {each.uuid for each in now.devices} == {kept, ""}
    assert is_running(space.pods()["both"])
    for number in range(6):
        (device,) = space.running(f"other-{number}", {OF_H100: 1})
        assert device.uuid != kept, "nobody gets what its container has"

    kill_container(space, "both")
    space.until(lambda pods: is_held_up(pods["both"]), "there is no other A30", may_fail=True)
    simulator(space).reset_gpu(A30)
    space.until(lambda pods: is_running(pods["both"]) and restarts(pods["both"]), "it has another one", seconds=180)
    # The driver may give the new instance the UUID of the lost one: what tells them apart is the lease.
    (first, second) = sorted(leases_of(space, "both"), key=lambda each: each.created_at)
    assert first.id == lease.id
    assert {each.uuid for each in first.devices} == {kept, ""}
    (another,) = second.devices
    assert another.profile == "1g.6gb"
    assert set(space.visible("both")) == {kept, another.uuid}
    space.cluster.api.delete(f"{space.path}/pods/both")
    space.until(lambda pods: "both" not in pods and not leases_of(space, "both"), "both of its leases have ended")

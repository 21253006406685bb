"""What pods get that ask for resources."""

from __future__ import annotations

from functools import partial

import pytest

from support.cluster.pods import (
    MEMORY,
    PROFILE,
    TELL,
    container,
    is_running,
    is_unschedulable,
    phase,
    pod,
    restarts,
    stateful_set,
)
from support.cluster.space import Pods, Space

SLICE = f"{PROFILE}1g.10gb"
ONE = {SLICE: 1}
WHOLE_GPU = f"{PROFILE}7g.80gb"
WHOLE = {WHOLE_GPU: 1}


def test_a_pod_gets_a_mig_device(space: Space) -> None:
    script = f"ls /dev/nvidia-caps | wc -l; {TELL}; sleep 1000000"
    space.create(pod("a", [container(limits=ONE, script=script)]))
    space.until_running("a")
    (device,) = space.lease("a").devices
    assert device.profile == "1g.10gb"
    assert space.visible("a") == [device.uuid]
    assert space.environment("a")["NVIDIA_VISIBLE_DEVICES"] == "void", "the NVIDIA runtime must not add others"
    assert space.log("a").splitlines()[0] == "2", "the control nodes of the GPU instance and the compute instance"


def test_seven_fill_a_gpu_and_an_eighth_waits(space: Space) -> None:
    names = [f"p{number}" for number in range(8)]
    space.until_allocatable(SLICE, 7)
    for name in names:
        space.pod(name, ONE)
    pods = space.until(
        lambda pods: sum(map(is_running, pods.values())) == 7 and any(map(is_unschedulable, pods.values())),
        "seven run and one waits",
    )
    (waiting,) = [name for name, each in pods.items() if not is_running(each)]
    assert len({space.visible(name)[0] for name in names if name != waiting}) == 7
    first = next(name for name in names if name != waiting)
    given_back = space.visible(first)
    space.delete(first)
    space.until_running(waiting)
    assert space.visible(waiting) == given_back, "the instance that was released serves the next pod as it is"


def test_a_whole_gpu_waits_while_anything_runs_and_takes_idle_instances(space: Space) -> None:
    space.running("small", ONE)
    space.until_allocatable(WHOLE_GPU, 0)
    space.pod("large", WHOLE)
    space.until(lambda pods: is_unschedulable(pods["large"]), "the scheduler has looked at the large pod")
    space.delete("small")
    space.until_running("large")
    assert [device.profile for device in space.lease("large").devices] == ["7g.80gb"]
    assert space.instances() == ["7g.80gb"], "the idle instance had to go"


def test_memory_is_served_by_whatever_gpu_has_it(space: Space) -> None:
    resource = f"{MEMORY}10g"
    space.until_allocatable(resource, 9)
    names = [f"p{number}" for number in range(9)]
    for name in names:
        space.pod(name, {resource: 1})
    space.until_running(*names)
    devices = [device for name in names for device in space.lease(name).devices]
    assert sorted(device.profile for device in devices) == ["1g.10gb"] * 7 + ["2g.12gb"] * 2
    assert len({device.gpu for device in devices}) == 2


def test_containers_of_a_pod_get_their_own_devices(space: Space) -> None:
    """The first container gets none, the third two of different resources; all of it is one lease."""
    both = {f"{PROFILE}2g.20gb": 1, f"{MEMORY}20g": 1}
    space.create(pod("a", [container("plain"), container("one", ONE), container("both", both)]))
    space.until_running("a")
    seen = {name: space.visible("a", name) for name in ("plain", "one", "both")}
    profiles = {device.uuid: device.profile for device in space.lease("a").devices}
    assert seen["plain"] == [""]
    assert [profiles[uuid] for uuid in seen["one"]] == ["1g.10gb"]
    of_both = sorted(profiles[uuid] for uuid in seen["both"])
    assert len(of_both) == 2
    assert "2g.20gb" in of_both
    assert len(profiles) == 3
    assert set(seen["one"]).isdisjoint(seen["both"])


def test_two_devices_of_one_resource(space: Space) -> None:
    devices = space.running("a", {f"{PROFILE}1g.10gb": 2})
    assert sorted(space.visible("a")) == sorted(device.uuid for device in devices)
    assert len(devices) == 2


def test_an_init_container_hands_its_device_on(space: Space) -> None:
    first = container("first", ONE, script=TELL)
    space.create(pod("a", [container(limits=ONE)], initContainers=[first]))
    space.until_running("a")
    assert space.visible("a", "first") == space.visible("a")
    assert len(space.lease("a").devices) == 1
    assert space.instances() == ["1g.10gb"]


def test_init_containers_and_sidecars_have_their_own(space: Space) -> None:
    """One that only an init container asks for, one of a sidecar's, one of the main container's: one lease."""
    only_first = container("first", {f"{MEMORY}20g": 1}, script=TELL)
    sidecar = container("sidecar", {f"{PROFILE}1g.6gb": 1}, restartPolicy="Always")
    space.create(pod("a", [container(limits=ONE)], initContainers=[only_first, sidecar]))
    space.until_running("a")
    profiles = {device.uuid: device.profile for device in space.lease("a").devices}
    seen = {name: space.visible("a", name) for name in ("first", "sidecar", "main")}
    assert [profiles[uuid] for uuid in seen["sidecar"]] == ["1g.6gb"]
    assert [profiles[uuid] for uuid in seen["main"]] == ["1g.10gb"]
    assert len({uuid for each in seen.values() for uuid in each}) == 3


def is_anew(name: str, uid: str, pods: Pods) -> bool:
    """Whether a pod of that name, but another than that, runs."""
    return name in pods and pods[name]["metadata"]["uid"] != uid and is_running(pods[name])


def test_a_pod_of_the_same_name_is_another_pod(space: Space) -> None:
    """As a StatefulSet makes them: the next one comes as soon as the last is gone."""
    apps = f"/apis/apps/v1/namespaces/{space.name}/statefulsets"
    space.cluster.api.create(apps, stateful_set("set", 1, ONE))
    space.until(lambda pods: "set-0" in pods and is_running(pods["set-0"]), "its pod runs")
    for _ in range(3):
        uid, lease = space.pods()["set-0"]["metadata"]["uid"], space.lease("set-0").id
        space.cluster.api.delete(f"{space.path}/pods/set-0")
        space.until(partial(is_anew, "set-0", uid), "the next one runs")
        space.until(lambda _: len(space.status().leases) == 1, "the lease of the one before has ended")
        assert space.lease("set-0").id != lease
    space.cluster.api.delete(f"{apps}/set")


def test_what_can_never_be_served_is_told_and_stands_in_nobodys_way(space: Space) -> None:
    never = {f"{PROFILE}7g.80gb": 1, f"{PROFILE}3g.40gb": 1}
    space.pod("never", never)
    space.until(lambda _: any("cannot" in each for each in space.events("never")), "its events say why")
    (device,) = space.running("other", WHOLE)
    assert device.profile == "7g.80gb"


def test_a_container_that_starts_again_keeps_its_device(space: Space) -> None:
    script = f"[ -e /kept/been ] || {{ touch /kept/been; {TELL}; exit 1; }}; {TELL}; sleep 1000000"
    again = container(limits=ONE, script=script, volumeMounts=[{"name": "kept", "mountPath": "/kept"}])
    space.create(pod("a", [again], restartPolicy="Always", volumes=[{"name": "kept", "emptyDir": {}}]))
    space.until(lambda pods: restarts(pods["a"]) == 1 and is_running(pods["a"]), "it runs for the second time")
    assert space.visible("a") == space.visible("a", previous="true")
    assert space.instances() == ["1g.10gb"]


def test_a_pod_that_ends_gives_its_device_back(space: Space) -> None:
    space.create(pod("a", [container(limits=ONE, script=TELL)]))
    space.until(lambda pods: phase(pods["a"]) == "Succeeded", "it ends")
    (given,) = space.visible("a")
    space.until(lambda _: not space.leases(), "its lease ends though the pod is still shown")
    assert space.instances() == ["1g.10gb"], "idle, not destroyed"
    assert space.running("b", ONE)[0].uuid == given


def test_a_pod_that_is_terminating_still_owns_its_device(space: Space) -> None:
    """It says when it is told to go, and stays until its marker is gone."""
    script = 'trap "echo told" TERM; touch /kept/stay; while [ -e /kept/stay ]; do sleep 0.1; done'
    slow = container(limits=ONE, script=script, volumeMounts=[{"name": "kept", "mountPath": "/kept"}])
    where = space.cluster.layout.private("/run") / space.name
    where.mkdir()
    kept = {"name": "kept", "hostPath": {"path": f"/run/{space.name}"}}
    space.create(pod("slow", [slow], volumes=[kept], terminationGracePeriodSeconds=600))
    space.until_running("slow")
    lease = space.lease("slow")
    space.until(lambda _: (where / "stay").exists(), "it waits")
    space.cluster.api.delete(f"{space.path}/pods/slow")
    space.until(lambda _: "told" in space.log("slow"), "it is told to go")
    # Whatever happens meanwhile makes the agent look again.
    space.running("other", ONE)
    space.delete("other")
    assert space.lease("slow").id == lease.id
    (where / "stay").unlink()
    space.until(lambda pods: not pods and not space.leases(), "pod and lease are gone")


@pytest.mark.parametrize("resource", [f"{PROFILE}1g.10gb", f"{MEMORY}80g"])
def test_resources_stand_on_the_node_by_name(space: Space, resource: str) -> None:
    capacity = space.node()["status"]["capacity"]
    assert resource in capacity

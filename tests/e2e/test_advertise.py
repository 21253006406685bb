"""No device plugin: the node's numbers are in its status, and a scheduler tells pods their devices by an annotation.

On a cluster of its own: a kubelet that has known a device plugin counts its resources for five minutes more.
"""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from mig_agent.client import Client, Lease, Pod
from support.agent import eventually
from support.cluster import cluster as clusters
from support.cluster import installed, programs, scheduling
from support.cluster import kubelet as kubelets
from support.cluster.api import ApiError, Json
from support.cluster.cluster import Cluster
from support.cluster.layout import NODE
from support.cluster.otherplugin import another_plugin
from support.cluster.pods import MEMORY, PROFILE, condition, container, is_running, phase, pod
from support.cluster.space import Space

pytestmark = pytest.mark.xdist_group("advertise")

ONE, TWO, SEVEN, AMOUNT = f"{PROFILE}1g.10gb", f"{PROFILE}2g.20gb", f"{PROFILE}7g.80gb", f"{MEMORY}10g"
VISIBLE = "mig-agent.io/visible-devices"
OURS = "mig-agent.io/node-resources"
SCHEDULER = "of-the-tests"
MERGE = "application/merge-patch+json"
ARRIVAL_SECONDS = 30
GONE = "another-node"
RUNTIME_CLASSES = "/apis/node.k8s.io/v1/runtimeclasses"
VALUES = {"advertise": "node-status", "settings": {"pod_arrival": f"{ARRIVAL_SECONDS}s"}}
_numbers = itertools.count(1)


@pytest.fixture(scope="module")
def advertising() -> Iterator[Cluster]:
    """A cluster where the agent only shows numbers."""
    cluster = clusters.start(Path(tempfile.mkdtemp(prefix="mig-agent-e2e-")), programs.ensure())
    try:
        installed.label(cluster)
        installed.install(cluster, installed.load_image(cluster), gpus="h100-80gb:1", values=VALUES)
        yield cluster
    finally:
        cluster.stop()


@pytest.fixture(scope="module")
def caller(advertising: Cluster) -> Iterator[Client]:
    """Who calls the agent as a scheduler does."""
    with Client(installed.address(advertising), patience=60) as client:
        yield client


@pytest.fixture
def space(advertising: Cluster, caller: Client) -> Iterator[Space]:
    """A namespace of the test's own; the GPU is empty before and after."""
    advertising.check()
    space = Space(advertising, caller, f"test-{next(_numbers)}")
    space.open()
    try:
        yield space
    finally:
        space.close()


@dataclass(frozen=True)
class Placed:
    """A pod, and the lease that was taken for it."""

    pod: Pod
    lease: Lease

    @property
    def uuid(self) -> str:
        return self.lease.devices[0].uuid


def waiting(space: Space, name: str, limits: Mapping[str, int], script: str | None = None) -> Pod:
    """A pod for a scheduler of its own, which gets its device by the annotation."""
    field = {"fieldPath": f"metadata.annotations['{VISIBLE}']"}
    variable = {"name": "NVIDIA_VISIBLE_DEVICES", "valueFrom": {"fieldRef": field}}
    more = {} if script is None else {"script": script}
    space.create(pod(name, [container(limits=limits, env=[variable], **more)], schedulerName=SCHEDULER))
    return Pod(namespace=space.name, name=name, uid=space.pods()[name]["metadata"]["uid"])


def take(space: Space, of: Pod, profile: str = "1g.10gb", *, ttl: float | None = 60.0) -> Lease:
    """As a scheduler does before it binds."""
    return space.agent.acquire(mig_profile=profile, pod=of, ttl=ttl, request_id=of.uid)


def bind(space: Space, name: str, uuid: str = "", node: str = NODE) -> None:
    """In one write with the annotation."""
    metadata = {"name": name, "annotations": {VISIBLE: uuid}}
    target = {"apiVersion": "v1", "kind": "Node", "name": node}
    space.cluster.api.create(
        f"{space.path}/pods/{name}/binding",
        {"apiVersion": "v1", "kind": "Binding", "metadata": metadata, "target": target},
    )


def placed(space: Space, name: str, limits: Mapping[str, int] | None = None, script: str | None = None) -> Placed:
    """A pod that a scheduler has placed."""
    of = waiting(space, name, {ONE: 1} if limits is None else limits, script)
    lease = take(space, of)
    bind(space, name, lease.devices[0].uuid)
    return Placed(of, lease)


def leases(space: Space) -> set[str]:
    return {each.id for each in space.status().leases}


def until_ended(space: Space, lease: Lease, words: str) -> None:
    space.until(lambda _: lease.id not in leases(space), f"lease {lease.id} has ended")
    (event,) = [each for each in space.agent.events() if each.kind == "lease-ended" and each.lease == lease.id]
    assert words in event.message


def until_arrived(space: Space, lease: Lease) -> None:
    def arrived(_: object) -> bool:
        return any(each.id == lease.id and each.arrived for each in space.status().leases)

    space.until(arrived, f"the pod of lease {lease.id} has come")


def written(space: Space) -> str:
    """By the agent, as it stands on the node."""
    folder = space.cluster.layout.private("/var/log") / "pods"
    return "".join(path.read_text() for path in folder.glob(f"{installed.NAMESPACE}_*/agent/*.log"))


def annotation(space: Space) -> str:
    found: str = space.node()["metadata"].get("annotations", {}).get(OURS, "")
    return found


def told(space: Space, reason: str) -> list[str]:
    """What events of the node say."""
    found = space.cluster.api.items("/api/v1/namespaces/default/events", fieldSelector=f"involvedObject.name={NODE}")
    return [each["message"] for each in found if each["reason"] == reason]


def resources(found: Json) -> set[str]:
    """Of a node, those that could be the agent's."""
    status = found["status"]
    return {name for part in ("capacity", "allocatable") for name in status[part] if name.startswith((PROFILE, MEMORY))}


# Numbers


def test_numbers_follow_leases_and_come_back_when_they_are_overwritten(space: Space) -> None:
    space.until_allocatable(ONE, 7)
    space.until_allocatable(SEVEN, 1)
    assert set(annotation(space).split(",")) == resources(space.node())
    with space.agent.lease(mig_profile="3g.40gb", name="somebody on the node"):
        space.until_allocatable(SEVEN, 0)
        space.until_allocatable(f"{PROFILE}3g.40gb", 1)
    space.until_allocatable(SEVEN, 1)
    numbers = {"status": {"capacity": {ONE: "99"}, "allocatable": {ONE: "99"}}}
    space.cluster.api.merge(f"/api/v1/nodes/{NODE}/status", numbers)
    space.until_allocatable(ONE, 7)
    assert space.node()["status"]["capacity"][ONE] == "7"


def test_numbers_survive_a_kubelet_that_starts_again(space: Space) -> None:
    space.until_allocatable(ONE, 7)
    beat = _heartbeat(space)
    space.cluster.node.restart("kubelet")
    space.until(lambda _: _heartbeat(space) != beat, "the kubelet is back")
    space.until_allocatable(ONE, 7)
    with space.agent.lease(mig_profile="7g.80gb", name="somebody on the node"):
        space.until_allocatable(ONE, 0)


def _heartbeat(space: Space) -> str:
    beat: str = condition(space.node(), "Ready")["lastHeartbeatTime"]
    return beat


# The annotation


def test_a_pod_sees_what_was_leased_for_it_and_its_end_ends_the_lease(space: Space) -> None:
    first = placed(space, "a")
    space.until_running("a")
    until_arrived(space, first.lease)
    assert space.environment("a")["NVIDIA_VISIBLE_DEVICES"] == first.uuid
    second = placed(space, "b", {AMOUNT: 1})
    space.until_running("b")
    assert space.environment("b")["NVIDIA_VISIBLE_DEVICES"] == second.uuid != first.uuid
    # What a scheduler has left is what can be made: five more, beside the two.
    space.until_allocatable(ONE, 6)
    space.until_allocatable(AMOUNT, 6)
    space.until_allocatable(SEVEN, 0)
    space.delete("a")
    until_ended(space, first.lease, "its pod")
    space.until_allocatable(ONE, 6)
    assert leases(space) == {second.lease.id}


def test_a_pod_that_comes_to_its_own_end_ends_its_lease(space: Space) -> None:
    at = placed(space, "short", script='echo "$NVIDIA_VISIBLE_DEVICES"')
    until_ended(space, at.lease, "its pod has ended")
    assert space.log("short").strip() == at.uuid


def test_neither_agent_nor_kubelet_loses_a_lease_when_they_start_again(space: Space) -> None:
    runs, ends = placed(space, "runs"), placed(space, "ends")
    comes = waiting(space, "comes", {ONE: 1})
    promised = take(space, comes, ttl=None)
    space.until_running("runs", "ends")
    for each in (runs, ends):
        until_arrived(space, each.lease)
    space.cluster.api.delete(f"{space.path}/pods/ends", gracePeriodSeconds="0")
    installed.kill_agent(space.cluster)
    until_ended(space, ends.lease, "its pod")
    bind(space, "comes", promised.devices[0].uuid)
    space.cluster.node.restart("kubelet")
    space.until_running("comes")
    until_arrived(space, promised)
    assert leases(space) == {runs.lease.id, promised.id}
    assert space.environment("comes")["NVIDIA_VISIBLE_DEVICES"] == promised.devices[0].uuid != runs.uuid


def test_a_pod_that_is_deleted_before_it_was_bound_ends_its_lease(space: Space) -> None:
    lease = take(space, waiting(space, "never", {ONE: 1}), ttl=None)
    space.until_allocatable(SEVEN, 0)
    space.delete("never")
    until_ended(space, lease, "its pod is gone")
    space.until_allocatable(SEVEN, 1)


def test_a_pod_that_is_bound_elsewhere_ends_its_lease(space: Space) -> None:
    api = space.cluster.api
    api.create("/api/v1/nodes", {"metadata": {"name": GONE}})
    try:
        lease = take(space, waiting(space, "elsewhere", {}), ttl=None)
        bind(space, "elsewhere", node=GONE)
        until_ended(space, lease, f"its pod is on node {GONE}")
    finally:
        api.delete(f"{space.path}/pods/elsewhere", gracePeriodSeconds="0")
        api.delete(f"/api/v1/nodes/{GONE}")


def test_a_pod_that_is_never_bound_is_not_waited_for_for_ever(space: Space) -> None:
    short = take(space, waiting(space, "short", {ONE: 1}), ttl=2.0)
    long = take(space, waiting(space, "long", {ONE: 1}), ttl=None)
    until_ended(space, short, "its time is over")
    until_ended(space, long, f"its pod has not come in {ARRIVAL_SECONDS}s")


def test_while_the_api_server_is_away_nobody_loses_a_lease(space: Space) -> None:
    at = placed(space, "kept")
    space.until_running("kept")
    until_arrived(space, at.lease)
    node = space.cluster.node
    node.kill("kube-apiserver")
    try:
        with space.agent.lease(mig_profile="1g.10gb", name="somebody on the node") as other:
            assert other.devices[0].uuid != at.uuid
        eventually(lambda: "pods of this node cannot be followed" in written(space), "the agent has noticed", 120.0)
        assert at.lease.id in leases(space)
    finally:
        node.start("kube-apiserver")
        space.cluster.until_ready()
    space.until_allocatable(ONE, 7)
    assert at.lease.id in leases(space)
    assert is_running(space.pods()["kept"])
    space.delete("kept")
    until_ended(space, at.lease, "its pod")


# A scheduler


def by_environment(name: str, resource: str) -> Json:
    """The pod of the examples, with another program that stays."""
    (found,) = yaml.safe_load_all((scheduling.EXAMPLE / "environment.yaml").read_text())
    found["metadata"]["name"] = name
    (wanted,) = found["spec"]["containers"]
    wanted |= {key: container(limits={resource: 1})[key] for key in ("command", "resources")}
    found["spec"]["terminationGracePeriodSeconds"] = 1
    return dict(found)


def test_the_reference_scheduler_gives_each_pod_what_it_promised(space: Space, tmp_path: Path) -> None:
    api, forty = space.cluster.api, f"{MEMORY}40g"
    api.create(RUNTIME_CLASSES, {"metadata": {"name": "nvidia"}, "handler": "runc"})
    scheduling.listening(space.cluster, tmp_path)
    with scheduling.installed_on(space.cluster):
        (example,) = yaml.safe_load_all((scheduling.EXAMPLE / "environment.yaml").read_text())
        space.create(example)
        pods = space.until(lambda pods: phase(pods["train"]) == "Succeeded", "the example has run")
        assert space.log("train", "train").split() == ["training", "on", *scheduling.promised_to(pods["train"])]
        space.until(lambda _: not leases(space), "its lease has ended with it")
        for name in "ab":
            space.create(by_environment(name, forty))
        space.until_running("a", "b")
        space.create(by_environment("c", forty))
        full = space.until(lambda pods: scheduling.was_told_why(pods["c"]), "c is told why it waits")["c"]
        message = condition(full, "PodScheduled")["message"]
        assert message.startswith("n1: cannot place 40G (3g.40gb) on GPU 0: ")
        assert f"leased to pod {space.name}/" in message
        space.delete("a")
        pods = space.until_running("b", "c")
        for name in "bc":
            (promised,) = scheduling.promised_to(pods[name])
            seen = space.environment(name, "train")["NVIDIA_VISIBLE_DEVICES"]
            assert seen == promised == space.lease(name).devices[0].uuid
        assert len({each.devices[0].uuid for each in space.leases().values()}) == len(leases(space)) == 2
        for name in "bc":
            space.delete(name)
    api.delete(f"{RUNTIME_CLASSES}/nvidia")


# Others


def test_it_may_follow_pods_and_change_none(space: Space) -> None:
    """Without the setting it may not even list them: tests/e2e/test_rights.py."""
    agent = installed.as_agent(space.cluster)
    space.pod("a")
    assert any(each["metadata"]["name"] == "a" for each in agent.items("/api/v1/pods"))
    marked = {"metadata": {"annotations": {VISIBLE: "MIG-1"}}}
    forbidden: list[tuple[str, str, Json | None]] = [
        ("DELETE", f"{space.path}/pods/a", None),
        ("PATCH", f"{space.path}/pods/a", marked),
        ("POST", f"{space.path}/pods/a/binding", {"metadata": {"name": "a"}, "target": {"kind": "Node", "name": NODE}}),
        ("GET", f"{space.path}/secrets", None),
    ]
    for method, path, body in forbidden:
        with pytest.raises(ApiError, match="forbidden"):
            agent.call(method, path, body, kind=MERGE if method == "PATCH" else "application/json")
    with pytest.raises(ApiError, match="only its own annotations"):
        agent.call("PATCH", f"/api/v1/nodes/{NODE}/status", marked, kind=MERGE)


def test_a_name_that_a_device_plugin_serves_is_refused_in_words(space: Space) -> None:
    space.until_allocatable(TWO, 3)
    with another_plugin(space.cluster.node, TWO, ["MIG-1", "MIG-2"]):
        space.until(lambda _: any(TWO in words for words in told(space, "ResourceRefused")), "it is said on the node")
        space.until_allocatable(TWO, 2)
        assert TWO not in annotation(space).split(",")
        with space.agent.lease(mig_profile="7g.80gb", name="somebody on the node"):
            space.until_allocatable(ONE, 0)
            assert space.allocatable(TWO) == 2


def test_uninstalling_leaves_no_number_behind(space: Space) -> None:
    at = placed(space, "kept")
    space.until_running("kept")
    until_arrived(space, at.lease)
    installed.helm(space.cluster, "uninstall", installed.RELEASE, "--wait")
    assert annotation(space) == ""
    assert resources(space.node()) <= {TWO}, "the other plugin's name is the kubelet's for some minutes more"
    assert is_running(space.pods()["kept"])
    installed.install_again(space.cluster)
    space.until_allocatable(ONE, 7)
    assert leases(space) == {at.lease.id}


def test_with_a_device_plugin_its_numbers_take_the_others_place(space: Space) -> None:
    at = placed(space, "kept")
    space.until_running("kept")
    until_arrived(space, at.lease)
    installed.install_again(space.cluster, advertise="device-plugin")
    space.until(lambda _: annotation(space) == "", "the numbers are a plugin's")
    space.until(lambda _: kubelets.healthy(space.cluster)[ONE] == 7, "the kubelet has devices to give")
    space.until_allocatable(ONE, 7)
    (device,) = space.running("served", {ONE: 1})
    assert device.uuid != at.uuid
    assert leases(space) == {at.lease.id, space.lease("served").id}
    space.delete("kept")
    until_ended(space, at.lease, "its pod")
    space.delete("served")
    space.until(lambda _: not leases(space), "both have ended")


def test_with_nothing_shown_leases_are_their_pods_all_the_same(space: Space) -> None:
    installed.install_again(space.cluster, advertise="none")
    space.until_allocatable(ONE, 0)
    # Without the resource: a kubelet that still counts it for a plugin that has ended rejects who asks for it.
    at = placed(space, "unseen", {})
    space.until_running("unseen")
    until_arrived(space, at.lease)
    assert space.environment("unseen")["NVIDIA_VISIBLE_DEVICES"] == at.uuid
    space.cluster.api.delete(f"{space.path}/pods/unseen")
    until_ended(space, at.lease, "its pod")
    assert annotation(space) == ""

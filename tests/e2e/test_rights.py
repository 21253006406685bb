"""What the agent's service account may do, asked of the API server with the token of the agent's own pod."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.cluster import installed
from support.cluster.api import Api, ApiError, Json
from support.cluster.cluster import Cluster
from support.cluster.layout import NODE
from support.cluster.space import Space

MERGE = "application/merge-patch+json"
STRATEGIC = "application/strategic-merge-patch+json"
ANOTHER = "another-node"
FORBIDDEN = 403
INVALID = 422

POD: Json = {"metadata": {"name": "x"}, "spec": {"containers": [{"name": "c", "image": "x"}]}}
REFUSED: dict[str, tuple[str, str, Json | None]] = {
    "list pods": ("GET", "/api/v1/pods", None),
    "make a pod": ("POST", "/api/v1/namespaces/default/pods", POD),
    "remove a pod": ("DELETE", "/api/v1/namespaces/default/pods/x", None),
    "change a pod": ("PATCH", "/api/v1/namespaces/default/pods/x", {"metadata": {"labels": {"a": "b"}}}),
    "change a pod's status": ("PATCH", "/api/v1/namespaces/default/pods/x/status", {"status": {"phase": "Failed"}}),
    "run a program in a pod": ("POST", "/api/v1/namespaces/default/pods/x/exec", None),
    "evict a pod": ("POST", "/api/v1/namespaces/default/pods/x/eviction", {"metadata": {"name": "x"}}),
    "read secrets": ("GET", f"/api/v1/namespaces/{installed.NAMESPACE}/secrets", None),
    "read its own configuration": ("GET", f"/api/v1/namespaces/{installed.NAMESPACE}/configmaps", None),
    "make a token": ("POST", f"/api/v1/namespaces/{installed.NAMESPACE}/serviceaccounts/mig-agent/token", {}),
    "read events": ("GET", "/api/v1/events", None),
    "remove a node": ("DELETE", f"/api/v1/nodes/{NODE}", None),
    "make a node": ("POST", "/api/v1/nodes", {"metadata": {"name": "x"}}),
    "replace its node": ("PUT", f"/api/v1/nodes/{NODE}", {"metadata": {"name": NODE}}),
    "change its DaemonSet": (
        "PATCH",
        f"/apis/apps/v1/namespaces/{installed.NAMESPACE}/daemonsets/mig-agent",
        {"metadata": {"labels": {"a": "b"}}},
    ),
    "remove its DaemonSet": ("DELETE", f"/apis/apps/v1/namespaces/{installed.NAMESPACE}/daemonsets/mig-agent", None),
    "list DaemonSets": ("GET", "/apis/apps/v1/daemonsets", None),
    "change its own role": (
        "PATCH",
        f"/apis/rbac.authorization.k8s.io/v1/clusterroles/mig-agent-{installed.NAMESPACE}",
        {"rules": []},
    ),
}
"""By RBAC, whatever the objects are."""

LABELS = "mig-agent.io/feature-labels"
RESOURCES = "mig-agent.io/node-resources"
OF_ANOTHER = f"/api/v1/nodes/{ANOTHER}"
OWN = f"/api/v1/nodes/{NODE}"
DENIED: dict[str, tuple[str, str, Json, str]] = {
    "another node's labels": (
        OF_ANOTHER,
        MERGE,
        {"metadata": {"labels": {"nvidia.com/mig.capable": "true"}}},
        "only the node",
    ),
    "another node's status": (
        f"{OF_ANOTHER}/status",
        MERGE,
        {"status": {"capacity": {"nvidia.com/mig-1g.10gb": "7"}}},
        "only the node",
    ),
    "a label of somebody else": (OWN, MERGE, {"metadata": {"labels": {"team": "mine"}}}, "only its feature labels"),
    "the MIG manager's label": (
        OWN,
        MERGE,
        {"metadata": {"labels": {"nvidia.com/mig.config": "all-1g.10gb"}}},
        "only its feature labels",
    ),
    "the GPU operator's label": (
        OWN,
        MERGE,
        {"metadata": {"labels": {"nvidia.com/gpu.deploy.driver": "false"}}},
        "only its feature labels",
    ),
    "its own switch": (OWN, MERGE, {"metadata": {"labels": {installed.LABEL: None}}}, "only its feature labels"),
    "an annotation of somebody else": (
        OWN,
        MERGE,
        {"metadata": {"annotations": {"a": "b"}}},
        "only its own annotations",
    ),
    "a label of somebody else noted as its own": (
        OWN,
        MERGE,
        {"metadata": {"annotations": {LABELS: "nvidia.com/mig.capable,kubernetes.io/os"}}},
        "its own annotations only by names that it serves",
    ),
    "processors noted as its own": (
        OWN,
        MERGE,
        {"metadata": {"annotations": {RESOURCES: "cpu"}}},
        "its own annotations only by names that it serves",
    ),
    "GPUs of another plugin noted as its own and taken away": (
        f"{OWN}/status",
        MERGE,
        {
            "metadata": {"annotations": {RESOURCES: "nvidia.com/gpu"}},
            "status": {"capacity": {"nvidia.com/gpu": None}, "allocatable": {"nvidia.com/gpu": None}},
        },
        "its own annotations only by names that it serves",
    ),
    "labels by way of the status": (
        f"{OWN}/status",
        MERGE,
        {"metadata": {"labels": {"a": "b"}}},
        "only its feature labels",
    ),
    "a taint": (OWN, MERGE, {"spec": {"taints": [{"key": "a", "effect": "NoSchedule"}]}}, "nothing of a node but"),
    "unschedulable": (OWN, MERGE, {"spec": {"unschedulable": True}}, "nothing of a node but"),
    "a finalizer": (OWN, MERGE, {"metadata": {"finalizers": ["a/b"]}}, "nothing of a node but"),
    "processors": (f"{OWN}/status", MERGE, {"status": {"capacity": {"cpu": "999"}}}, "only the resources"),
    "memory taken away": (f"{OWN}/status", MERGE, {"status": {"allocatable": {"memory": None}}}, "only the resources"),
    "GPUs of another plugin": (
        f"{OWN}/status",
        MERGE,
        {"status": {"capacity": {"nvidia.com/gpu": "8"}}},
        "only the resources",
    ),
    "readiness": (
        f"{OWN}/status",
        STRATEGIC,
        {"status": {"conditions": [{"type": "Ready", "status": "False"}]}},
        "no condition but",
    ),
    "an address": (
        f"{OWN}/status",
        STRATEGIC,
        {"status": {"addresses": [{"type": "ExternalIP", "address": "192.0.2.1"}]}},
        "nothing of a node but",
    ),
}
"""By the admission policy."""


@pytest.fixture(scope="module")
def as_agent(cluster: Cluster) -> Api:
    """The API server as the agent's pod meets it."""
    return installed.as_agent(cluster)


@pytest.fixture(scope="module")
def another_node(cluster: Cluster) -> Iterator[None]:
    """A node object without a node."""
    cluster.api.create("/api/v1/nodes", {"metadata": {"name": ANOTHER}})
    yield
    cluster.api.delete(OF_ANOTHER)


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_no_business_of_the_agents_is_refused(as_agent: Api, what: str) -> None:
    method, path, body = REFUSED[what]
    with pytest.raises(ApiError, match="forbidden") as caught:
        as_agent.call(method, path, body, kind=MERGE if method == "PATCH" else "application/json")
    assert caught.value.status == FORBIDDEN


@pytest.mark.usefixtures("another_node")
@pytest.mark.parametrize("what", DENIED)
def test_of_the_nodes_it_changes_only_its_own_share_of_its_own(as_agent: Api, what: str) -> None:
    path, kind, body, words = DENIED[what]
    with pytest.raises(ApiError, match=f"an agent changes {words}") as caught:
        as_agent.call("PATCH", path, body, kind=kind)
    assert caught.value.status in {FORBIDDEN, INVALID}


def test_what_an_agent_with_other_names_left_is_taken_away(space: Space) -> None:
    """As after a change of `resources.profilePrefix`: the annotations say that it was an agent's."""
    label, number = "before.example/mig-1g.10gb.count", "before.example/mig-1g.10gb"
    space.until(lambda _: LABELS in space.node()["metadata"]["annotations"], "the node is labelled")
    noted = space.node()["metadata"]["annotations"][LABELS]
    metadata = {"labels": {label: "7"}, "annotations": {LABELS: f"{label},{noted}", RESOURCES: number}}
    status = {"capacity": {number: "7"}, "allocatable": {number: "7"}}
    space.cluster.api.merge(f"{OWN}/status", {"metadata": metadata, "status": status})
    space.until(lambda _: label not in space.node()["metadata"]["labels"], "the label is gone")
    space.until(lambda _: number not in space.node()["status"]["allocatable"], "the number is gone")
    annotations = space.node()["metadata"]["annotations"]
    assert RESOURCES not in annotations
    assert annotations[LABELS] == noted


def event(name: str, kind: str, about: str, component: str, host: str) -> Json:
    space = "default" if kind == "Node" else installed.NAMESPACE
    involved = {"kind": kind, "name": about, **({} if kind == "Node" else {"namespace": space})}
    source = {"component": component, "host": host}
    return {"metadata": {"name": name}, "involvedObject": involved, "source": source, "reason": "A", "message": "b"}


@pytest.mark.parametrize(
    "told",
    [
        event("x", "Node", ANOTHER, "mig-agent", NODE),
        event("x", "Node", NODE, "kubelet", NODE),
        event("x", "Pod", "y", "mig-agent", ANOTHER),
        event("x", "ServiceAccount", "y", "mig-agent", NODE),
    ],
    ids=["of another node", "in the kubelet's name", "from another node", "of no pod"],
)
def test_it_tells_of_pods_and_its_node_in_its_own_name(as_agent: Api, told: Json) -> None:
    space = told["involvedObject"].get("namespace", "default")
    with pytest.raises(ApiError, match="an agent writes Events"):
        as_agent.create(f"/api/v1/namespaces/{space}/events", told)


def test_it_changes_no_event_of_anybody_else(cluster: Cluster, as_agent: Api) -> None:
    path = "/api/v1/namespaces/default/events"
    cluster.api.create(path, event("others", "Node", NODE, "kubelet", NODE))
    try:
        for change in ({"message": "all is well"}, {"source": {"component": "mig-agent", "host": NODE}}):
            with pytest.raises(ApiError, match="an agent writes Events"):
                as_agent.call("PATCH", f"{path}/others", change, kind=MERGE)
    finally:
        cluster.api.delete(f"{path}/others")


def test_a_token_that_names_no_node_changes_none(cluster: Cluster) -> None:
    """Whoever steals the account's name, without a pod on the node, has nothing of it."""
    path = f"/api/v1/namespaces/{installed.NAMESPACE}/serviceaccounts/mig-agent/token"
    token = cluster.api.create(path, {"spec": {"expirationSeconds": 3600}})["status"]["token"]
    with pytest.raises(ApiError, match="not named by its token"):
        cluster.api.using(token).call(
            "PATCH", OWN, {"metadata": {"labels": {"nvidia.com/mig.capable": "x"}}}, kind=MERGE
        )


def test_the_agent_itself_was_refused_nothing(space: Space) -> None:
    """Its work is done with what it has, and no line of its log tells of a refusal."""
    space.running("a", {"nvidia.com/mig-1g.10gb": 1})
    space.until_allocatable("nvidia.com/mig-1g.10gb", 7)
    space.delete("a")
    log = installed.agent_log(space.cluster, lines=5000)
    assert "forbidden" not in log
    assert "denied request" not in log

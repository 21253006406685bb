"""The agent on a cluster, installed as a user would: its image, its chart, a label on the node."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from mig_agent.adapters.failpoints import VARIABLE
from support.agent import eventually
from support.cluster import agent_image, unlike
from support.cluster.api import Api, Json
from support.cluster.cluster import Cluster
from support.cluster.failures import ClusterError
from support.cluster.layout import NODE
from support.cluster.node import Node
from support.cluster.programs import ROOT

RELEASE = "mig-agent"
NAMESPACE = "mig-agent"
_OWN_LABEL = ("app.kubernetes.io/name", "mig-agent")
SELECTOR = "=".join(_OWN_LABEL)
LABEL = "mig-agent.io/managed"
CHART = ROOT / "deploy/chart/mig-agent"
GPUS = "a100-40gb:1,h100-80gb:1"
PATIENCE_SECONDS = 120.0
_TIMEOUT = "300s"


def load_image(cluster: Cluster) -> str:
    """Builds the image where it is not in the cache, and gives it to all nodes. Returns its name."""
    name, archive = agent_image.build()

    def take(node: Node) -> None:
        node.run("ctr", "images", "import", "--local", "--discard-unpacked-layers", str(archive))

    with ThreadPoolExecutor() as pool:
        list(pool.map(take, cluster.nodes))
    return name


def label(cluster: Cluster, value: str | None = "true", node: str = NODE) -> None:
    """Has the agent serve the node, or, with `false`, not; None takes the label away."""
    cluster.api.merge(f"/api/v1/nodes/{node}", {"metadata": {"labels": {LABEL: value}}})


def install(
    cluster: Cluster, image: str, *, gpus: str | Mapping[str, str] = GPUS, values: Mapping[str, object] | None = None
) -> None:
    """By helm, over what is there; returns when the agents' pods are ready. ClusterError with the words of both.

    `gpus` are those of every node, or by the name of the node.
    """
    if not isinstance(gpus, str):
        _make_namespace(cluster)
        unlike.give(cluster.api, gpus, namespace=NAMESPACE, label=_OWN_LABEL)
        gpus = next(iter(gpus.values()))
    repository, _, tag = image.rpartition(":")
    chosen = {
        "image": {"repository": repository, "tag": tag, "pullPolicy": "Never"},
        "simulate": gpus,
        **(values or {}),
    }
    _values(cluster).write_text(json.dumps(chosen))
    install_again(cluster)


def _make_namespace(cluster: Cluster) -> None:
    """Which helm does itself where nothing is to be in it before."""
    path = f"/api/v1/namespaces/{NAMESPACE}"
    if cluster.api.find(path) is None:
        cluster.api.create("/api/v1/namespaces", {"metadata": {"name": NAMESPACE}})
    account = f"{path}/serviceaccounts/default"
    eventually(lambda: cluster.api.find(account), "the namespace has an account", PATIENCE_SECONDS)


def install_again(cluster: Cluster, **values: object) -> None:
    """With the values of the last `install`, and these over them."""
    file = _values(cluster)
    over = file.with_name("values-over.json")
    over.write_text(json.dumps(values))
    files = ("--values", str(file), "--values", str(over))
    try:
        helm(cluster, "upgrade", "--install", RELEASE, str(CHART), "--create-namespace", *files, "--wait")
    except ClusterError as error:
        raise ClusterError(f"{error}\n{describe(cluster)}") from None


def _values(cluster: Cluster) -> Path:
    return cluster.layout.folder / "values.json"


def helm(cluster: Cluster, *arguments: str) -> str:
    """What helm says; ClusterError when it fails. Its own files stay in the cluster's folder."""
    own = cluster.layout.folder / "helm"
    command = [cluster.node.programs["helm"], *arguments, "--namespace", NAMESPACE]
    if arguments[0] in {"upgrade", "rollback", "uninstall"}:
        command += ["--timeout", _TIMEOUT]
    done = subprocess.run(
        command,
        env=environment(cluster, own),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise ClusterError(f"cannot helm {' '.join(arguments)}: {done.stdout}{done.stderr}")
    return done.stdout


def environment(cluster: Cluster, own: Path) -> dict[str, str]:
    """Of programs outside the node that call its API server; `own` is where helm keeps what it keeps."""
    return {
        "PATH": cluster.node.programs.path,
        "KUBECONFIG": str(cluster.layout.kubeconfig),
        "HOME": str(own),
        "HELM_CACHE_HOME": str(own / "cache"),
        "HELM_CONFIG_HOME": str(own / "config"),
        "HELM_DATA_HOME": str(own / "data"),
    }


def address(cluster: Cluster, node: str = NODE) -> str:
    """Where the agent can be called from outside the node."""
    return f"unix://{cluster.layout.of(node).private('/run')}/mig-agent/mig-agent.sock"


def agent_pod(cluster: Cluster, node: str = NODE) -> str:
    """The name of the agent's pod on a node; "" where there is none."""
    pods = cluster.api.items(
        f"/api/v1/namespaces/{NAMESPACE}/pods", labelSelector=SELECTOR, fieldSelector=f"spec.nodeName={node}"
    )
    return next((pod["metadata"]["name"] for pod in pods if "deletionTimestamp" not in pod["metadata"]), "")


def as_agent(cluster: Cluster) -> Api:
    """The API server as the agent's pod meets it."""
    path = f"/api/v1/namespaces/{NAMESPACE}/serviceaccounts/mig-agent/token"
    bound = {"apiVersion": "v1", "kind": "Pod", "name": agent_pod(cluster)}
    request = {"spec": {"boundObjectRef": bound, "expirationSeconds": 3600}}
    return cluster.api.using(cluster.api.create(path, request)["status"]["token"])


def kill_agent(cluster: Cluster, node: str = NODE) -> None:
    """SIGKILL; returns when the kubelet has started it again and it is ready."""
    name = agent_pod(cluster, node)
    until_agent_ready(cluster, node)
    before = _agents_container(cluster, name)
    killed = cluster.node_named(node)
    killed.run("ctr", "tasks", "kill", "--signal", "SIGKILL", before["containerID"].removeprefix("containerd://"))
    eventually(
        lambda: (
            (again := _agents_container(cluster, name)).get("ready") and again["containerID"] != before["containerID"]
        ),
        "the agent is back",
        PATIENCE_SECONDS,
    )


def replace_agent(cluster: Cluster, node: str = NODE) -> None:
    """The pod is deleted; returns when its DaemonSet has made another, which is ready."""
    before = agent_pod(cluster, node)
    cluster.api.delete(f"/api/v1/namespaces/{NAMESPACE}/pods/{before}")
    eventually(lambda: agent_pod(cluster, node) not in {"", before}, "another pod of the agent", PATIENCE_SECONDS)
    until_agent_ready(cluster, node)


def crash_at(cluster: Cluster, place: str) -> None:
    """From now on every run of the agent kills itself at this place; returns when another pod of it was made."""
    before = agent_pod(cluster)
    _set_environment(cluster, f"{VARIABLE}={place}")
    eventually(lambda: agent_pod(cluster) not in {"", before}, "another pod of the agent", PATIENCE_SECONDS)


def crash_no_more(cluster: Cluster) -> None:
    """Returns when an agent is ready that does not."""
    before = agent_pod(cluster)
    daemon_set = cluster.api.get(f"/apis/apps/v1/namespaces/{NAMESPACE}/daemonsets/{RELEASE}")
    (container,) = daemon_set["spec"]["template"]["spec"]["containers"]
    if any(each["name"] == VARIABLE for each in container["env"]):
        _set_environment(cluster, f"{VARIABLE}-")
        eventually(lambda: agent_pod(cluster) not in {"", before}, "another pod of the agent", PATIENCE_SECONDS)
    until_agent_ready(cluster)


def until_agent_died(cluster: Cluster) -> None:
    """Returns when the agent in this pod has been started anew."""
    eventually(
        lambda: (name := agent_pod(cluster)) and _agents_container(cluster, name).get("restartCount", 0) > 0,
        "the agent has died",
        PATIENCE_SECONDS,
    )


def _set_environment(cluster: Cluster, change: str) -> None:
    """As `kubectl set env` takes it."""
    subprocess.run(
        [cluster.node.programs["kubectl"], "set", "env", "-n", NAMESPACE, f"daemonset/{RELEASE}", change],
        env=environment(cluster, cluster.layout.folder / "kubectl"),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=True,
    )


def label_away(cluster: Cluster) -> None:
    """The label's key goes from the node, and with it the agent's pod; returns when it is gone."""
    label(cluster, None)
    pods = f"/api/v1/namespaces/{NAMESPACE}/pods"
    eventually(lambda: not cluster.api.items(pods, labelSelector=SELECTOR), "no agent", PATIENCE_SECONDS)


def label_back(cluster: Cluster) -> None:
    """Returns when the agent is there again, and ready."""
    label(cluster)
    until_agent_ready(cluster)


def until_agent_ready(cluster: Cluster, node: str = NODE) -> None:
    eventually(
        lambda: (name := agent_pod(cluster, node)) and _agents_container(cluster, name).get("ready"),
        "the agent is ready",
        PATIENCE_SECONDS,
    )


def _agents_container(cluster: Cluster, name: str) -> Json:
    """Its status; empty while there is none."""
    pod = cluster.api.find(f"/api/v1/namespaces/{NAMESPACE}/pods/{name}") or {"status": {}}
    found: list[Json] = pod["status"].get("containerStatuses", [{}])
    return found[0]


def agent_log(cluster: Cluster, lines: int = 40, node: str = NODE) -> str:
    """The end of what the agent has written."""
    path = f"/api/v1/namespaces/{NAMESPACE}/pods/{agent_pod(cluster, node)}/log"
    text: str = cluster.api.call("GET", path, tailLines=str(lines))
    return text


def describe(cluster: Cluster) -> str:
    """Pods and events of the agent's namespace, for the message of an error."""
    pods = cluster.api.items(f"/api/v1/namespaces/{NAMESPACE}/pods")
    events = cluster.api.items(f"/api/v1/namespaces/{NAMESPACE}/events")
    told = [f"{pod['metadata']['name']}: {json.dumps(pod['status'])}" for pod in pods]
    told += [f"{event['involvedObject'].get('name')}: {event['reason']}: {event['message']}" for event in events]
    try:
        told.append(agent_log(cluster))
    except Exception as error:  # noqa: BLE001 -- whatever it is, the first error is what matters
        told.append(f"(no log: {error})")
    return "\n".join(told)

"""The reference scheduler on a cluster, installed as its files say."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from support.agent import eventually
from support.cluster import installed, trusted
from support.cluster.api import Json
from support.cluster.cluster import Cluster
from support.cluster.pods import condition, is_bound
from support.documents import ROOT

NAME = "mig-agent-scheduler"
"""What pods write into `schedulerName`, and the name in its certificate."""
EXAMPLE = ROOT / "examples/scheduler"
_OWN = "mig-scheduler"
_IMAGE = "registry.example/mig-agent:0.1.0"
_NAMESPACE = f"/api/v1/namespaces/{installed.NAMESPACE}"
PATIENCE_SECONDS = 120.0


def listening(cluster: Cluster, folder: Path) -> None:
    """Has the agents listen for schedulers; the certificate of these is in the Secret that their examples mount."""
    trust = trusted.switch_on(cluster, folder, NAME)
    secret = trusted.secret_of(trust.client, trust.authority.ca.read_text(), f"{_OWN}-tls")
    cluster.api.create(f"{_NAMESPACE}/secrets", secret)


@contextmanager
def installed_on(cluster: Cluster, program: str = "scheduler.py") -> Iterator[None]:
    """Runs, beside agents that listen for it; it is gone at the end."""
    files = {path.name: path.read_text() for path in EXAMPLE.iterdir() if path.is_file()}
    cluster.api.create(f"{_NAMESPACE}/configmaps", {"metadata": {"name": _OWN}, "data": files})
    objects = with_image(cluster, (EXAMPLE / "deployment.yaml").read_text())
    objects = objects.replace("/program/scheduler.py", f"/program/{program}")
    try:
        kubectl(cluster, "apply", "-f", "-", stdin=objects)
        eventually(lambda: _container(cluster).get("ready"), "the scheduler runs", PATIENCE_SECONDS)
        yield
    finally:
        kubectl(cluster, "delete", "--ignore-not-found", "--wait", "-f", "-", stdin=objects)
        cluster.api.delete(f"{_NAMESPACE}/configmaps/{_OWN}")


def with_image(cluster: Cluster, objects: str) -> str:
    """An example's objects with the image that the agents have here."""
    path = f"/apis/apps/v1/namespaces/{installed.NAMESPACE}/daemonsets/{installed.RELEASE}"
    (container,) = cluster.api.get(path)["spec"]["template"]["spec"]["containers"]
    return objects.replace(_IMAGE, container["image"])


def switch_to(cluster: Cluster, program: str) -> None:
    """Another program of the example in its place; returns when that one runs, and the former has ended."""
    path = f"/apis/apps/v1/namespaces/{installed.NAMESPACE}/deployments/{_OWN}"
    (container,) = cluster.api.get(path)["spec"]["template"]["spec"]["containers"]
    container["command"] = ["python3", f"/program/{program}"]
    cluster.api.merge(path, {"spec": {"template": {"spec": {"containers": [container]}}}})

    def runs() -> bool:
        pods = cluster.api.items(f"{_NAMESPACE}/pods", labelSelector=f"app={_OWN}")
        commands = [pod["spec"]["containers"][0]["command"] for pod in pods]
        return commands == [container["command"]] and bool(_container(cluster).get("ready"))

    eventually(runs, f"{program} runs", PATIENCE_SECONDS)


def kill(cluster: Cluster) -> None:
    """SIGKILL; returns when the kubelet has started it again."""
    pod = _pod(cluster)
    before = _container(cluster)["containerID"]
    node = cluster.node_named(pod["spec"]["nodeName"])
    node.run("ctr", "tasks", "kill", "--signal", "SIGKILL", before.removeprefix("containerd://"))
    eventually(
        lambda: (again := _container(cluster)).get("ready") and again["containerID"] != before,
        "the scheduler is back",
        PATIENCE_SECONDS,
    )


def log(cluster: Cluster) -> str:
    """What it has said, at most its last lines."""
    text: str = cluster.api.call("GET", f"{_NAMESPACE}/pods/{_pod(cluster)['metadata']['name']}/log", tailLines="60")
    return text


def was_told_why(pod: Json) -> bool:
    """The scheduler has looked at it, and no node has what it asks for."""
    return not is_bound(pod) and condition(pod, "PodScheduled").get("reason") == "Unschedulable"


def promised_to(pod: Json) -> list[str]:
    """The UUIDs that were taken for it, as its annotation names them."""
    text: str = pod["metadata"].get("annotations", {}).get("mig-agent.io/visible-devices", "")
    return text.split(",") if text else []


def _pod(cluster: Cluster) -> Json:
    found = cluster.api.items(f"{_NAMESPACE}/pods", labelSelector=f"app={_OWN}")
    return next((pod for pod in found if "deletionTimestamp" not in pod["metadata"]), {"status": {}})


def _container(cluster: Cluster) -> Json:
    """Its status; empty while there is none."""
    found: list[Json] = _pod(cluster)["status"].get("containerStatuses", [{}])
    return found[0]


def kubectl(cluster: Cluster, *arguments: str, stdin: str) -> None:
    """As the cluster's administrator."""
    done = subprocess.run(
        [cluster.node.programs["kubectl"], *arguments],
        env=installed.environment(cluster, cluster.layout.folder / "kubectl"),
        input=stdin,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"kubectl {' '.join(arguments)}: {done.stdout}{done.stderr}"

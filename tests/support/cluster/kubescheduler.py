"""A kube-scheduler that asks the agents (examples/kube-scheduler) on a cluster, installed as its files say."""

from __future__ import annotations

import fcntl
import hashlib
import os
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import yaml

from support import gostubs
from support.agent import eventually
from support.cluster import images, installed, scheduling
from support.cluster.cluster import Cluster
from support.cluster.failures import ClusterError
from support.cluster.node import Node
from support.cluster.programs import ROOT, cache

NAME = "mig-kube-scheduler"
"""What pods write into `schedulerName`, and the name of whatever is installed."""
EXAMPLE = ROOT / "examples/kube-scheduler"
KINDS = ("extender", "plugin")
"""Folders of the example, each with a way of its own."""
_BUILD_SECONDS = 1500
_ALSO_MADE_FROM = (
    "proto/migagent/v1/partition_manager.proto",
    "agent/mig_agent/pb/MADE-FROM",
    "tests/callers/go/go.mod",
)


def build() -> Path:
    """The kube-scheduler with the plugin in it; built where its sources are not those of the one in the cache.

    Seconds after Kubernetes was built (tests/e2e/modules), as it is a module of the same versions. ClusterError with
    Go's own words.
    """
    sources = sorted((EXAMPLE / "plugin").iterdir())
    made_from = [*sources, *(ROOT / path for path in _ALSO_MADE_FROM)]
    key = hashlib.sha256(b"\0".join(path.read_bytes() for path in made_from)).hexdigest()[:16]
    place = cache() / f"{NAME}-{key}"
    if place.is_dir():
        return place / "kube-scheduler"
    with (cache() / f"{NAME}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if place.is_dir():  # whoever comes second finds the work of the first
            return place / "kube-scheduler"
        print("building the kube-scheduler with the plugin ...", file=sys.stderr, flush=True)
        with tempfile.TemporaryDirectory(dir=cache(), prefix=f".{NAME}-") as aside:
            out = Path(aside) / "out"
            out.mkdir()
            try:
                path = ":".join([*(str(each.parent) for each in gostubs.plugins()), os.environ["PATH"]])
                script = str(EXAMPLE / "plugin/build.sh")
                gostubs.run(
                    "nice", script, str(out), seconds=_BUILD_SECONDS, PATH=path, PROTOC=" ".join(gostubs.protoc())
                )
            except gostubs.GoError as error:
                raise ClusterError(f"cannot build the kube-scheduler with the plugin: {error}") from error
            for older in cache().glob(f"{NAME}-*"):
                (older / "kube-scheduler").unlink(missing_ok=True)
                older.rmdir()
            out.rename(place)
    return place / "kube-scheduler"


def load_images(cluster: Cluster) -> None:
    """Kubernetes' own program and the one with the plugin, as images of which each has nothing else, on all nodes."""
    archive = cluster.layout.folder / "kube-schedulers.tar"
    theirs = Path(cluster.node.programs["kube-scheduler"])
    images.pack_programs(archive, {_image("extender"): theirs, _image("plugin"): build()})

    def take(node: Node) -> None:
        node.run("ctr", "images", "import", "--local", "--discard-unpacked-layers", str(archive))

    with ThreadPoolExecutor() as pool:
        list(pool.map(take, cluster.nodes))
    archive.unlink()


def _image(kind: str) -> str:
    """As its Deployment names it."""
    deployment = yaml.safe_load((EXAMPLE / kind / "deployment.yaml").read_text())
    containers = deployment["spec"]["template"]["spec"]["containers"]
    return next(str(each["image"]) for each in containers if each["name"] == "kube-scheduler")


@contextmanager
def installed_on(cluster: Cluster, kind: str) -> Iterator[None]:
    """One of KINDS runs, beside agents that listen for it; it is gone at the end."""
    files = [*(EXAMPLE / kind).glob("*.py"), EXAMPLE / kind / "configuration.yaml", scheduling.EXAMPLE / "cluster.py"]
    body = {"metadata": {"name": NAME}, "data": {path.name: path.read_text() for path in files}}
    config_maps = f"/api/v1/namespaces/{installed.NAMESPACE}/configmaps"
    rights = (EXAMPLE / "rights.yaml").read_text()
    deployment = scheduling.with_image(cluster, (EXAMPLE / kind / "deployment.yaml").read_text())
    cluster.api.create(config_maps, body)
    try:
        scheduling.kubectl(cluster, "apply", "-f", "-", stdin=f"{rights}\n---\n{deployment}")
        path = f"/apis/apps/v1/namespaces/{installed.NAMESPACE}/deployments/{NAME}"
        eventually(
            lambda: cluster.api.get(path)["status"].get("readyReplicas"), f"{kind} runs", scheduling.PATIENCE_SECONDS
        )
        yield
    finally:
        # Its rights after itself: it gives up its leadership at the end, for which the next one would wait.
        for objects in (deployment, rights):
            scheduling.kubectl(
                cluster, "delete", "--ignore-not-found", "--cascade=foreground", "-f", "-", stdin=objects
            )
        cluster.api.delete(f"{config_maps}/{NAME}")


def logs(cluster: Cluster) -> str:
    """What its containers have said, at most their last lines."""
    pods = f"/api/v1/namespaces/{installed.NAMESPACE}/pods"
    told = []
    for pod in cluster.api.items(pods, labelSelector=f"app={NAME}"):
        for container in [*pod["spec"].get("initContainers", []), *pod["spec"]["containers"]]:
            path = f"{pods}/{pod['metadata']['name']}/log"
            told.append(cluster.api.call("GET", path, container=container["name"], tailLines="60"))
    return "\n".join(told)

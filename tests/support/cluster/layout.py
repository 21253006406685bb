"""Where the files of one cluster are, and the names in it."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from pathlib import Path

NODE = "n1"
"""The first node, which has the control plane; the others are n2, n3, ..."""
MOST_NODES = 9
NODE_ADDRESS = "10.77.0.1"
"""The first node's, on a network of all nodes."""
SERVICE_RANGE = "10.96.0.0/16"
SERVICE_ADDRESS = "10.96.0.1"
"""Of the `kubernetes` service: the first of the range, which clients inside the cluster call on port 443."""
API_PORT = 443

PRIVATE = ("/var/lib", "/var/log", "/run")
"""Folders that a node sees as its own, empty at the start: nothing of the machine's is read or changed."""
CNI_CONFIG = "/var/lib/cni-config"
CDI_FOLDER = "/var/run/cdi"
CONTAINERD_SOCKET = "/run/containerd/containerd.sock"


@dataclass(frozen=True, slots=True)
class Layout:
    """The files of the cluster that lives in `folder` (absolute, on a disk that overlayfs can stand on).

    One that names another node says where that one's own things are; what is the whole cluster's is the same.
    """

    folder: Path
    node: str = NODE

    def of(self, node: str) -> Layout:
        """As seen by another node."""
        return replace(self, node=node)

    @property
    def own(self) -> Path:
        """The folder of the node's own files: the first one's are those of the cluster."""
        return self.folder if self.node == NODE else self.folder / self.node

    @property
    def number(self) -> int:
        """Of the node, from 1."""
        return int(self.node[1:])

    @property
    def address(self) -> str:
        """Of the node."""
        return f"10.77.0.{self.number}"

    @property
    def pod_range(self) -> str:
        """The addresses of the pods on the node."""
        return f"10.{87 + self.number}.0.0/16"

    @property
    def lock(self) -> Path:
        """Held by the cluster's keeper as long as the cluster stands."""
        return self.folder / "lock"

    @property
    def control(self) -> Path:
        """A Unix socket on which the node's first process takes orders."""
        return self.own / "control.sock"

    @property
    def api(self) -> Path:
        """A Unix socket behind which the API server is, reachable from outside the node's network namespace."""
        return self.folder / "api.sock"

    @property
    def pid(self) -> Path:
        """The process id, as the machine counts, of the node's first process."""
        return self.own / "pid"

    @property
    def ready(self) -> Path:
        """There once the cluster works; the names of its nodes, in words."""
        return self.folder / "ready"

    @property
    def pki(self) -> Path:
        return self.folder / "pki"

    @property
    def kubeconfig(self) -> Path:
        """For programs anywhere on the machine, as an administrator of the cluster."""
        return self.folder / "kubeconfig"

    @property
    def inner_kubeconfig(self) -> Path:
        """The same for programs in a node's namespaces."""
        return self.folder / "kubeconfig-inside"

    def log(self, part: str) -> Path:
        """What a part of the cluster has written."""
        return self.own / "logs" / f"{part}.log"

    def private(self, path: str) -> Path:
        """Where one of the PRIVATE folders is on the machine."""
        return self.own / "root" / path.strip("/").replace("/", "-")

    @property
    def cgroup(self) -> str:
        """The name of the node's own cgroup in every hierarchy."""
        name = f"mig-agent-cluster-{hashlib.sha256(str(self.folder).encode()).hexdigest()[:12]}"
        return name if self.node == NODE else f"{name}-{self.node}"


def node_names(count: int) -> tuple[str, ...]:
    """Of a cluster with so many nodes."""
    return tuple(f"n{number}" for number in range(1, count + 1))

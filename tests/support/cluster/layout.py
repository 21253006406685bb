"""Where the files of one cluster are, and the names in it."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

NODE = "n1"
NODE_ADDRESS = "10.77.0.1"
SERVICE_RANGE = "10.96.0.0/16"
SERVICE_ADDRESS = "10.96.0.1"
"""Of the `kubernetes` service: the first of the range, which clients inside the cluster call on port 443."""
POD_RANGE = "10.88.0.0/16"
API_PORT = 443

PRIVATE = ("/var/lib", "/var/log", "/run")
"""Folders that the node sees as its own, empty at the start: nothing of the machine's is read or changed."""
CNI_CONFIG = "/var/lib/cni-config"
CDI_FOLDER = "/var/run/cdi"
CONTAINERD_SOCKET = "/run/containerd/containerd.sock"


@dataclass(frozen=True, slots=True)
class Layout:
    """The files of the cluster that lives in `folder` (absolute, on a disk that overlayfs can stand on)."""

    folder: Path

    @property
    def lock(self) -> Path:
        """Held by the cluster's keeper as long as the cluster stands."""
        return self.folder / "lock"

    @property
    def control(self) -> Path:
        """A Unix socket on which the node's first process takes orders."""
        return self.folder / "control.sock"

    @property
    def api(self) -> Path:
        """A Unix socket behind which the API server is, reachable from outside the node's network namespace."""
        return self.folder / "api.sock"

    @property
    def pid(self) -> Path:
        """The process id, as the machine counts, of the node's first process."""
        return self.folder / "pid"

    @property
    def ready(self) -> Path:
        """There once the cluster works."""
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
        """The same for programs in the node's namespaces."""
        return self.folder / "kubeconfig-inside"

    def log(self, part: str) -> Path:
        """What a part of the cluster has written."""
        return self.folder / "logs" / f"{part}.log"

    def private(self, path: str) -> Path:
        """Where one of the PRIVATE folders is on the machine."""
        return self.folder / "root" / path.strip("/").replace("/", "-")

    @property
    def cgroup(self) -> str:
        """The name of the node's own cgroup in every hierarchy."""
        return f"mig-agent-cluster-{hashlib.sha256(str(self.folder).encode()).hexdigest()[:12]}"

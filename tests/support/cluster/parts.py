"""The programs of a cluster, with their command lines and configuration files."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from support.cluster.credentials import CONTROLLER_MANAGER, SCHEDULER, Credentials, node_user, write_kubeconfig
from support.cluster.layout import (
    API_PORT,
    CDI_FOLDER,
    CNI_CONFIG,
    CONTAINERD_SOCKET,
    NODE_ADDRESS,
    SERVICE_ADDRESS,
    SERVICE_RANGE,
    Layout,
)
from support.cluster.programs import CNI, Programs

_ETCD = "http://127.0.0.1:2379"
SERVER = f"https://{SERVICE_ADDRESS}:{API_PORT}"
"""The API server, for whoever is in a node's network."""
PAUSE = "registry.k8s.io/pause:3.10"


@dataclass(frozen=True, slots=True)
class Part:
    """One program of the cluster."""

    name: str
    argv: tuple[str, ...]


def control_plane(layout: Layout, programs: Programs, credentials: Credentials) -> dict[str, Part]:
    """Of the whole cluster, by name. Their configuration files are written on the way."""
    for part, user in (("controller-manager", CONTROLLER_MANAGER), ("scheduler", SCHEDULER)):
        write_kubeconfig(layout.pki / f"{part}.kubeconfig", credentials, user, SERVER)
    found = (
        Part("etcd", (programs["etcd"], *_etcd())),
        Part("kube-apiserver", (programs["kube-apiserver"], *_apiserver(credentials))),
        Part("kube-controller-manager", (programs["kube-controller-manager"], *_manager(layout, credentials))),
        Part(
            "kube-scheduler",
            (
                programs["kube-scheduler"],
                f"--kubeconfig={layout.pki / 'scheduler.kubeconfig'}",
                "--leader-elect=false",
                "--bind-address=127.0.0.1",
            ),
        ),
    )
    return {part.name: part for part in found}


def of_node(layout: Layout, programs: Programs, credentials: Credentials) -> dict[str, Part]:
    """Of one node, by name; likewise."""
    _write(layout, "containerd.toml", _containerd())
    _write(layout, "kubelet.json", json.dumps(_kubelet(layout, credentials), indent=1))
    _write_cni(layout)
    write_kubeconfig(layout.own / "kubelet.kubeconfig", credentials, node_user(layout.node), SERVER)
    found = (
        Part("containerd", (programs["containerd"], "--config", str(layout.own / "containerd.toml"))),
        Part(
            "kubelet",
            (
                programs["kubelet"],
                f"--config={layout.own / 'kubelet.json'}",
                f"--kubeconfig={layout.own / 'kubelet.kubeconfig'}",
                f"--hostname-override={layout.node}",
                f"--node-ip={layout.address}",
            ),
        ),
    )
    return {part.name: part for part in found}


def _write(layout: Layout, name: str, text: str) -> None:
    (layout.own / name).write_text(text, encoding="utf-8")


def _etcd() -> tuple[str, ...]:
    return (
        "--data-dir=/var/lib/etcd/data",
        f"--listen-client-urls={_ETCD}",
        f"--advertise-client-urls={_ETCD}",
        "--listen-peer-urls=http://127.0.0.1:2380",
        "--initial-advertise-peer-urls=http://127.0.0.1:2380",
        "--initial-cluster=default=http://127.0.0.1:2380",
    )


def _apiserver(credentials: Credentials) -> tuple[str, ...]:
    return (
        f"--etcd-servers={_ETCD}",
        # Clients in pods call the service's address, which the node has on its loopback: there is no kube-proxy.
        "--bind-address=0.0.0.0",
        f"--advertise-address={NODE_ADDRESS}",
        f"--secure-port={API_PORT}",
        f"--tls-cert-file={credentials.server.cert}",
        f"--tls-private-key-file={credentials.server.key}",
        f"--token-auth-file={credentials.token_file}",
        "--authorization-mode=Node,RBAC",
        "--enable-admission-plugins=NodeRestriction",
        "--allow-privileged",
        f"--service-cluster-ip-range={SERVICE_RANGE}",
        "--service-account-issuer=https://kubernetes.default.svc",
        f"--service-account-key-file={credentials.service_accounts.cert}",
        f"--service-account-signing-key-file={credentials.service_accounts.key}",
        f"--kubelet-client-certificate={credentials.kubelet_client.cert}",
        f"--kubelet-client-key={credentials.kubelet_client.key}",
        "--kubelet-preferred-address-types=InternalIP",
        "--endpoint-reconciler-type=none",
        "--profiling=false",
    )


def _manager(layout: Layout, credentials: Credentials) -> tuple[str, ...]:
    return (
        f"--kubeconfig={layout.pki / 'controller-manager.kubeconfig'}",
        f"--service-account-private-key-file={credentials.service_accounts.key}",
        f"--root-ca-file={credentials.authority}",
        "--use-service-account-credentials",
        "--leader-elect=false",
        "--bind-address=127.0.0.1",
        "--flex-volume-plugin-dir=/var/lib/kubelet/volume-plugins",
    )


def _kubelet(layout: Layout, credentials: Credentials) -> dict[str, object]:
    return {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "authentication": {
            "anonymous": {"enabled": False},
            "webhook": {"enabled": True},
            "x509": {"clientCAFile": str(credentials.authority)},
        },
        "authorization": {"mode": "Webhook"},
        "containerRuntimeEndpoint": f"unix://{CONTAINERD_SOCKET}",
        "cgroupDriver": "cgroupfs",
        "cgroupRoot": f"/{layout.cgroup}",
        "failCgroupV1": False,
        "failSwapOn": False,
        "enforceNodeAllocatable": [],
        "localStorageCapacityIsolation": False,
        "makeIPTablesUtilChains": False,
        "oomScoreAdj": 0,
        "resolvConf": "",
        "clusterDNS": ["10.96.0.10"],  # nobody answers there; without an address every pod gets a warning
        "volumePluginDir": "/var/lib/kubelet/volume-plugins",
        # The machine's own settings stay as they are: the node sees files with what the kubelet would write.
        "protectKernelDefaults": True,
        # A nearly full disk is no reason to evict what is being tested.
        "evictionHard": {
            "memory.available": "1Mi",
            "nodefs.available": "0%",
            "nodefs.inodesFree": "0%",
            "imagefs.available": "0%",
            "imagefs.inodesFree": "0%",
        },
        "imageGCHighThresholdPercent": 100,
        "maxPods": 250,
    }


def _containerd() -> str:
    return f"""version = 3
root = "/var/lib/containerd"
state = "/run/containerd"
disabled_plugins = ["io.containerd.internal.v1.opt"]

[grpc]
address = "{CONTAINERD_SOCKET}"

[plugins."io.containerd.cri.v1.images"]
snapshotter = "overlayfs"

[plugins."io.containerd.cri.v1.images".pinned_images]
sandbox = "{PAUSE}"

[plugins."io.containerd.cri.v1.runtime"]
restrict_oom_score_adj = true
disable_apparmor = true
enable_cdi = true
cdi_spec_dirs = ["{CDI_FOLDER}"]

[plugins."io.containerd.cri.v1.runtime".cni]
bin_dirs = ["{CNI}"]
conf_dir = "{CNI_CONFIG}"

[plugins."io.containerd.cri.v1.runtime".containerd]
default_runtime_name = "runc"

[plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc]
runtime_type = "io.containerd.runc.v2"

[plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc.options]
SystemdCgroup = false
"""


def _write_cni(layout: Layout) -> None:
    bridge = {
        "type": "bridge",
        "bridge": "cni0",
        "isGateway": True,
        "ipMasq": False,  # pods reach the nodes and each other, nothing beyond
        "ipam": {"type": "host-local", "subnet": layout.pod_range, "routes": [{"dst": "0.0.0.0/0"}]},
    }
    config = {"cniVersion": "0.4.0", "name": "pods", "plugins": [bridge]}
    folder = layout.private("/var/lib") / Path(CNI_CONFIG).name
    folder.mkdir(parents=True)
    (folder / "10-pods.conflist").write_text(json.dumps(config))

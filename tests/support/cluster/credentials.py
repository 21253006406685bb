"""Who may call the API server, and with what: certificates, tokens, kubeconfig files."""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from support.certificates import Authority, Pem
from support.cluster.layout import NODE_ADDRESS, SERVICE_ADDRESS, Layout

ADMIN = "admin"
CONTROLLER_MANAGER = "system:kube-controller-manager"
SCHEDULER = "system:kube-scheduler"
_GROUPS = {ADMIN: "system:masters", CONTROLLER_MANAGER: "", SCHEDULER: ""}


@dataclass(frozen=True, slots=True)
class Credentials:
    """Made anew for every cluster."""

    authority: Path
    server: Pem
    service_accounts: Pem
    """Its key signs the tokens of service accounts."""
    kubelet_client: Pem
    """As which the API server calls the kubelet, for logs and exec."""
    token_file: Path
    tokens: dict[str, str]


def node_user(node: str) -> str:
    """As whom a node's kubelet calls."""
    return f"system:node:{node}"


def make(layout: Layout, nodes: Sequence[str]) -> Credentials:
    """Written into the layout's `pki` folder, which only root can read."""
    layout.pki.mkdir(mode=0o700)
    authority = Authority(layout.pki, "cluster")
    groups = _GROUPS | {node_user(node): "system:nodes" for node in nodes}
    tokens = {user: secrets.token_hex(16) for user in groups}
    token_file = layout.pki / "tokens.csv"
    token_file.write_text(
        "".join(f'{tokens[user]},{user},{user},"{group}"\n' for user, group in groups.items()), encoding="ascii"
    )
    return Credentials(
        authority=authority.ca,
        server=authority.issue(
            "kube-apiserver", also=(SERVICE_ADDRESS, NODE_ADDRESS, "kubernetes.default.svc", "kubernetes.default")
        ),
        service_accounts=authority.issue("service-accounts"),
        kubelet_client=authority.issue("kube-apiserver-kubelet-client", organization="system:masters"),
        token_file=token_file,
        tokens=tokens,
    )


def write_kubeconfig(file: Path, credentials: Credentials, user: str, server: str) -> None:
    """JSON, which is YAML too; the authority's certificate stays a file."""
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [
            {"name": "here", "cluster": {"server": server, "certificate-authority": str(credentials.authority)}}
        ],
        "users": [{"name": user, "user": {"token": credentials.tokens[user]}}],
        "contexts": [{"name": "here", "context": {"cluster": "here", "user": user, "namespace": "default"}}],
        "current-context": "here",
    }
    file.touch(mode=0o600)
    file.write_text(json.dumps(config, indent=1))

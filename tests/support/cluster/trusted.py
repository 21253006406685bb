"""Certificates on a cluster: those that the agents show, in a Secret, and those of who calls them over the network."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from support.certificates import Authority, Pem
from support.cluster import installed
from support.cluster.api import Json
from support.cluster.cluster import Cluster
from support.cluster.layout import NODE

SECRET = "mig-agent-tls"  # noqa: S105 -- its name
SERVICE = installed.RELEASE
SERVER_NAME = f"{SERVICE}.{installed.NAMESPACE}.svc"
PORT = 7400
_SECRETS = f"/api/v1/namespaces/{installed.NAMESPACE}/secrets"
_CONFIG_MAPS = f"/api/v1/namespaces/{installed.NAMESPACE}/configmaps"
_SLICES = f"/apis/discovery.k8s.io/v1/namespaces/{installed.NAMESPACE}/endpointslices"


def secret_of(server: Pem, client_ca: str, name: str = SECRET) -> Json:
    """As cert-manager lays it out. `client_ca` is PEM, one certificate or several."""
    files = {"tls.crt": server.cert.read_text(), "tls.key": server.key.read_text(), "ca.crt": client_ca}
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": name},
        "type": "kubernetes.io/tls",
        "data": {name: base64.b64encode(text.encode()).decode() for name, text in files.items()},
    }


def publish(cluster: Cluster, server: Pem, client_ca: str) -> None:
    """The Secret of the agents' certificate, made or replaced; kubelets bring it to the agents when they next look."""
    body = secret_of(server, client_ca)
    if cluster.api.find(f"{_SECRETS}/{SECRET}") is None:
        cluster.api.create(_SECRETS, body)
    else:
        cluster.api.merge(f"{_SECRETS}/{SECRET}", {"data": body["data"]})


def publish_bundle(cluster: Cluster, name: str, *authorities: Authority) -> None:
    """A ConfigMap with several authorities, as trust-manager writes it; made or replaced."""
    data = {"ca.crt": "".join(each.ca.read_text() for each in authorities)}
    if cluster.api.find(f"{_CONFIG_MAPS}/{name}") is None:
        cluster.api.create(_CONFIG_MAPS, {"metadata": {"name": name}, "data": data})
    else:
        cluster.api.merge(f"{_CONFIG_MAPS}/{name}", {"data": data})


def server_certificate(authority: Authority, file: str = "server") -> Pem:
    """For the name of the agents' Service."""
    return authority.issue(SERVER_NAME, file=file, also=[SERVER_NAME])


@dataclass(frozen=True, slots=True)
class Trust:
    """An authority that signed the agents' certificate, and that of a scheduler that they know."""

    authority: Authority
    client: Pem
    server: Pem
    """The agents' own."""

    def flags(self, cluster: Cluster, node: str = NODE) -> list[str]:
        """For migctl: the agent of a node, by its address in the Service."""
        return flags(cluster, self.authority, self.client, node)


def flags(cluster: Cluster, authority: Authority, client: Pem, node: str = NODE) -> list[str]:
    """For migctl, with any certificate."""
    return [
        *("--address", address(cluster, node), "--tls-ca", str(authority.ca)),
        *("--tls-cert", str(client.cert), "--tls-key", str(client.key)),
        *("--tls-server-name", SERVER_NAME),
    ]


def switch_on(cluster: Cluster, folder: Path, name: str = "scheduler", **values: object) -> Trust:
    """Has the agents of an installed chart listen for the scheduler of this name; its certificate is in the folder."""
    authority = Authority(folder, "cluster")
    server = server_certificate(authority)
    publish(cluster, server, authority.ca.read_text())
    install(cluster, name, **values)
    return Trust(authority, authority.issue(name), server)


def install(cluster: Cluster, name: str = "scheduler", **values: object) -> None:
    """With the Secret that is there."""
    installed.install_again(cluster, scheduler={"enabled": True, "names": [name], **values})


def addresses(cluster: Cluster) -> Mapping[str, str]:
    """HOST:PORT of the agent that is ready on each node, as a scheduler finds them."""
    found = {}
    for each in cluster.api.items(_SLICES, labelSelector=f"kubernetes.io/service-name={SERVICE}"):
        (port,) = (port["port"] for port in each["ports"] if port["name"] == "grpc")
        for endpoint in each["endpoints"]:
            if endpoint["conditions"].get("ready"):
                found[endpoint["nodeName"]] = f"{endpoint['addresses'][0]}:{port}"
    return found


def address(cluster: Cluster, node: str = NODE) -> str:
    """HOST:PORT of the agent of a node. Raises KeyError where none is ready."""
    return addresses(cluster)[node]

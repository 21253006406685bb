"""Credentials for the API server: by the service account of the agent's pod, or by a kubeconfig.

Service accounts are read here: `kubernetes` costs a quarter of a second and 20 MiB, which every agent of a cluster
would pay. That library serves kubeconfigs, which may ask for certificates, proxies and programs. Only this imports it.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import yaml

from mig_agent.core.errors import ConfigError

SERVICE_ACCOUNT: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_HINT: Final = "run the agent by the Helm chart, or give --kubeconfig FILE"
_MOST_IDLE: Final = 8
"""Connections that are kept for the next call: readers, changes, events and two watches."""
_KEEPALIVE: Final = (("SO_KEEPALIVE", 1), ("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3))
"""A watch whose peer has gone silently is found out by the kernel, in about a minute."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Credentials:
    """The address of the API server, the connections to it, and what authenticates a request."""

    address: str
    """`https://10.96.0.1:443`."""
    pool: Any
    """urllib3's, which is imported only with Kubernetes."""
    headers: Callable[[], Mapping[str, str]]
    """The headers that authenticate a request made now. Raises OSError."""
    configuration: Any = None
    """The library's own, which its websockets take; None for a service account."""


def find_credentials(kubeconfig: Path | None) -> Credentials:
    """Read a kubeconfig, or without one the pod's service account. Sends nothing. Raises ConfigError."""
    try:
        return service_account() if kubeconfig is None else _from_kubeconfig(kubeconfig, "", _HINT)
    except ImportError as error:
        raise _not_installed(error) from error


def user_credentials(kubeconfig: Path | None, context: str) -> Credentials:
    """Return the credentials that kubectl would use: of a file, else of KUBECONFIG or ~/.kube/config. Sends nothing.

    An empty `context` is the current one of the kubeconfig. Raises ConfigError.
    """
    try:
        return _from_kubeconfig(kubeconfig, context, "see `kubectl config get-contexts`, or give --kubeconfig FILE")
    except ImportError as error:
        raise _not_installed(error) from error


def _not_installed(error: ImportError) -> ConfigError:
    return ConfigError(
        f"cannot reach the API server: {error}", "install what it takes: pip install 'mig-agent[kubernetes]'"
    )


def service_account(folder: Path | None = None) -> Credentials:
    """Return the credentials of the pod that this process runs in. Raises ConfigError where it runs in none.

    The token is read for each request, and the authority for each connection, since the kubelet renews both. Proxies of
    the environment are not used: the API server's Service is inside of the cluster.
    """
    from urllib3 import PoolManager  # noqa: PLC0415 -- an agent without Kubernetes may not have it
    from urllib3.connection import HTTPConnection  # noqa: PLC0415 -- the same

    folder = folder or SERVICE_ACCOUNT
    token, authority = folder / "token", folder / "ca.crt"
    host, port = (os.environ.get(f"KUBERNETES_SERVICE_{part}", "") for part in ("HOST", "PORT"))

    def headers() -> Mapping[str, str]:
        return {"Authorization": f"Bearer {token.read_text(encoding='ascii').strip()}"}

    missing = "" if host and port else "KUBERNETES_SERVICE_HOST and KUBERNETES_SERVICE_PORT are not set"
    for path in (token, authority):
        missing = missing or _missing(path)
    if missing:
        raise ConfigError(f"cannot reach the API server as a pod of it: {missing}", _HINT)
    keepalive = [
        (socket.SOL_SOCKET if name.startswith("SO_") else socket.IPPROTO_TCP, getattr(socket, name), value)
        for name, value in _KEEPALIVE
    ]
    pool = PoolManager(
        cert_reqs="CERT_REQUIRED",
        ca_certs=str(authority),
        retries=False,
        maxsize=_MOST_IDLE,
        socket_options=[*HTTPConnection.default_socket_options, *keepalive],
    )
    return Credentials(address=f"https://{f'[{host}]' if ':' in host else host}:{port}", pool=pool, headers=headers)


def _missing(path: Path) -> str:
    """Return why a file cannot be used; empty where it can."""
    try:
        return "" if path.read_bytes().strip() else f"{path} is empty"
    except OSError as error:
        return str(error)


def _from_kubeconfig(path: Path | None, context: str, hint: str) -> Credentials:
    from kubernetes import config  # noqa: PLC0415 -- see the module
    from kubernetes.client import Configuration  # noqa: PLC0415 -- see the module
    from kubernetes.client.rest import RESTClientObject  # noqa: PLC0415 -- see the module

    configuration = Configuration()
    try:
        config.load_kube_config(  # type: ignore[no-untyped-call] # it has no types
            config_file=None if path is None else str(path),
            context=context or None,
            client_configuration=configuration,
        )
    except (config.ConfigException, yaml.YAMLError, OSError, ValueError, LookupError, TypeError) as error:
        what = path or "your kubeconfig"
        raise ConfigError(f"cannot reach the API server with {what}: {str(error).rstrip('.')}", hint) from error
    configuration.retries = False  # they are ours, with a bound on all of them together
    configuration.keep_alive = True

    def headers() -> Mapping[str, str]:
        found: Mapping[str, Any] = configuration.auth_settings()
        return {each["key"]: each["value"] for each in found.values() if each["in"] == "header" and each["value"]}

    address = str(configuration.host).rstrip("/")
    pool = RESTClientObject(configuration).pool_manager
    return Credentials(address=address, pool=pool, headers=headers, configuration=configuration)

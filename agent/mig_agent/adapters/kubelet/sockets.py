"""Sockets of device plugins: one gRPC server per resource, since Allocate does not say which resource it is for.

gRPC removes the file of a Unix socket some time after its server has stopped, even if another server has bound the path
meanwhile. So each socket gets a name that was never used in this folder and is bound once.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import grpc

from mig_agent.adapters.failpoints import FAILPOINTS
from mig_agent.adapters.kubelet.registration import Identity, KubeletError, KubeletPaths

SERVICE: Final = "v1beta1.DevicePlugin"
_BEGINNING = "mig-agent_"
_END = ".sock"
_LONGEST_PATH = 107
"""Limit of a Unix socket's path in bytes, `sun_path` in unix(7)."""
_OPTIONS: Final[Sequence[tuple[str, int]]] = (("grpc.so_reuseport", 0),)


class PluginSocket:
    """One gRPC server on a socket of its own in the plugins' folder, until the kubelet removes that socket."""

    def __init__(self, paths: KubeletPaths, label: str) -> None:
        """`label` is part of the file name and shows people which resource the socket is for."""
        self.name = f"{_BEGINNING}{label}_{secrets.token_hex(3)}{_END}"
        self._path = paths.plugins / self.name
        self._server: grpc.aio.Server | None = None
        self._identity: Identity | None = None

    @property
    def is_there(self) -> bool:
        """True while the socket that was bound exists: a kubelet that starts removes it."""
        return self._identity is not None and Identity.of(self._path) == self._identity

    async def start(self, methods: Mapping[str, grpc.RpcMethodHandler[Any, Any]]) -> None:
        """Listen and serve. Raises KubeletError if the socket cannot be bound."""
        with FAILPOINTS.around("plugin-socket"):
            server = bound_server(self._path, SERVICE, methods)
        await server.start()
        self._server = server
        self._identity = Identity.of(self._path)

    async def stop(self, seconds: float = 0.0) -> None:
        """Stop serving and remove the socket; open calls get `seconds` to finish. Harmless if stopped already."""
        server, self._server = self._server, None
        if server is not None:
            await server.stop(seconds)
        with contextlib.suppress(OSError), FAILPOINTS.around("plugin-socket-removal"):
            self._path.unlink(missing_ok=True)


def bound_server(path: Path, service: str, methods: Mapping[str, grpc.RpcMethodHandler[Any, Any]]) -> grpc.aio.Server:
    """Return a server of one service that is bound to a socket and not yet started. Raises KubeletError."""
    if len(bytes(path)) > _LONGEST_PATH:
        raise KubeletError(f"cannot listen on {path}: a socket's path has at most {_LONGEST_PATH} bytes")
    server = grpc.aio.server(options=_OPTIONS)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, dict(methods)),))
    try:
        server.add_insecure_port(f"unix:{path}")
    except RuntimeError as error:
        raise KubeletError(
            f"cannot listen on {path}: is {path.parent} there, and may the agent write to it?"
        ) from error
    return server


def remove_stale_sockets(paths: KubeletPaths) -> None:
    """Remove the sockets that a killed agent left in the plugins' folder. Blocking, but quick."""
    for path in _own_sockets(paths.plugins):
        with contextlib.suppress(OSError), FAILPOINTS.around("stale-plugin-socket"):
            path.unlink(missing_ok=True)


def _own_sockets(folder: Path) -> tuple[Path, ...]:
    try:
        return tuple(folder.glob(f"{_BEGINNING}*{_END}"))
    except OSError:
        return ()

"""Sockets of a DRA driver: one on which it is served, and one in the folder where the kubelet looks for plugins.

Both get names that were never used: the kubelet notices a new file at once, and gRPC removes the file of a socket some
time after its server has stopped, even if another server has bound the path meanwhile.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import grpc

from mig_agent.adapters.failpoints import FAILPOINTS
from mig_agent.adapters.kubelet.registration import KubeletError, KubeletPaths
from mig_agent.adapters.kubelet.sockets import bound_server
from mig_agent.pb.kubelet.pluginregistration.v1 import pluginregistration_pb2 as pb

SERVICE: Final = "k8s.io.kubelet.pkg.apis.dra.v1.DRAPlugin"
_REGISTRATION: Final = "pluginregistration.Registration"
_TYPE: Final = "DRAPlugin"
_VERSIONS: Final = ("v1.DRAPlugin",)

Context = grpc.aio.ServicerContext[Any, Any]


class DriverSockets:
    """The two gRPC servers of one driver. Not thread-safe; use from the event loop."""

    def __init__(self, paths: KubeletPaths, driver: str, on_registered: Callable[[str], None]) -> None:
        """`on_registered` is called at each registration with the kubelet's error message, empty if there is none."""
        self._driver = driver
        self._folder = paths.driver_folder(driver)
        self._registry = paths.plugin_registry
        name = f"mig-agent_{secrets.token_hex(3)}"
        self._service = self._folder / f"{name}.sock"
        self._registration = self._registry / f"{name}-reg.sock"
        self._on_registered = on_registered
        self._servers: list[grpc.aio.Server] = []

    async def start(self, methods: Mapping[str, grpc.RpcMethodHandler[Any, Any]]) -> None:
        """Serve the driver, then let the kubelet find it. Raises KubeletError."""
        try:
            with FAILPOINTS.around("driver-folder"):
                self._folder.mkdir(mode=0o750, parents=True, exist_ok=True)
        except OSError as error:
            raise KubeletError(f"cannot make the folder {self._folder}: {error.strerror or error}") from error
        self._remove_stale()
        await self._serve(self._service, SERVICE, methods)
        await self._serve(self._registration, _REGISTRATION, self._registration_methods())

    async def stop(self, seconds: float = 0.0) -> None:
        """Stop serving and remove the sockets; open calls get `seconds` to finish."""
        servers, self._servers = self._servers, []
        for server in reversed(servers):
            await server.stop(seconds)
        for path in (self._registration, self._service):
            with contextlib.suppress(OSError), FAILPOINTS.around("driver-socket-removal"):
                path.unlink(missing_ok=True)

    async def _serve(self, path: Path, service: str, methods: Mapping[str, grpc.RpcMethodHandler[Any, Any]]) -> None:
        with FAILPOINTS.around("driver-socket"):
            server = bound_server(path, service, methods)
        self._servers.append(server)
        await server.start()

    def _registration_methods(self) -> Mapping[str, grpc.RpcMethodHandler[Any, Any]]:
        return {
            "GetInfo": grpc.unary_unary_rpc_method_handler(
                self._info,
                request_deserializer=pb.InfoRequest.FromString,
                response_serializer=pb.PluginInfo.SerializeToString,
            ),
            "NotifyRegistrationStatus": grpc.unary_unary_rpc_method_handler(
                self._notified,
                request_deserializer=pb.RegistrationStatus.FromString,
                response_serializer=pb.RegistrationStatusResponse.SerializeToString,
            ),
        }

    async def _info(self, _request: pb.InfoRequest, _context: Context) -> pb.PluginInfo:
        return pb.PluginInfo(
            type=_TYPE, name=self._driver, endpoint=str(self._service), supported_versions=list(_VERSIONS)
        )

    async def _notified(self, request: pb.RegistrationStatus, _context: Context) -> pb.RegistrationStatusResponse:
        self._on_registered("" if request.plugin_registered else request.error or "the kubelet gave no reason")
        return pb.RegistrationStatusResponse()

    def _remove_stale(self) -> None:
        """Remove the sockets that a killed agent left."""
        for folder in (self._registry, self._folder):
            for path in folder.glob("mig-agent_*.sock"):
                with contextlib.suppress(OSError), FAILPOINTS.around("stale-driver-socket"):
                    path.unlink(missing_ok=True)

"""A device plugin of somebody else on a node: it serves one resource, and a variable tells containers what they got."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import grpc

from mig_agent.pb.kubelet.deviceplugin.v1beta1 import deviceplugin_pb2 as pb
from mig_agent.pb.kubelet.deviceplugin.v1beta1 import deviceplugin_pb2_grpc as rpc
from support.cluster.node import Node

GIVEN = "GIVEN_BY_ANOTHER"
"""The variable."""
_SOCKET = "another.sock"
_SECONDS = 30.0


class _Plugin:
    """As much of `v1beta1.DevicePlugin` as is called where no preference and no preparation is offered."""

    def __init__(self, ids: Sequence[str]) -> None:
        self._ids = ids
        self.over = threading.Event()

    def options(self, _request: pb.Empty, _context: grpc.ServicerContext) -> pb.DevicePluginOptions:
        return pb.DevicePluginOptions()

    def list_and_watch(self, _request: pb.Empty, _context: grpc.ServicerContext) -> Iterator[pb.ListAndWatchResponse]:
        yield pb.ListAndWatchResponse(devices=[pb.Device(ID=each, health="Healthy") for each in self._ids])
        self.over.wait()

    def allocate(self, request: pb.AllocateRequest, _context: grpc.ServicerContext) -> pb.AllocateResponse:
        asked = request.container_requests
        return pb.AllocateResponse(
            container_responses=[
                pb.ContainerAllocateResponse(envs={GIVEN: ",".join(each.devices_ids)}) for each in asked
            ]
        )


@contextmanager
def another_plugin(node: Node, resource: str, ids: Sequence[str]) -> Iterator[None]:
    """It is registered with the node's kubelet, until the end."""
    folder = node.layout.private("/var/lib") / "kubelet/device-plugins"
    plugin = _Plugin(ids)
    server = grpc.server(ThreadPoolExecutor(2))
    methods: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
        "GetDevicePluginOptions": grpc.unary_unary_rpc_method_handler(
            plugin.options,
            request_deserializer=pb.Empty.FromString,
            response_serializer=pb.DevicePluginOptions.SerializeToString,
        ),
        "Allocate": grpc.unary_unary_rpc_method_handler(
            plugin.allocate,
            request_deserializer=pb.AllocateRequest.FromString,
            response_serializer=pb.AllocateResponse.SerializeToString,
        ),
        "ListAndWatch": grpc.unary_stream_rpc_method_handler(
            plugin.list_and_watch,
            request_deserializer=pb.Empty.FromString,
            response_serializer=pb.ListAndWatchResponse.SerializeToString,
        ),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("v1beta1.DevicePlugin", methods),))
    server.add_insecure_port(f"unix:{folder / _SOCKET}")
    server.start()
    try:
        with grpc.insecure_channel(f"unix:{folder / 'kubelet.sock'}") as channel:
            request = pb.RegisterRequest(version="v1beta1", endpoint=_SOCKET, resource_name=resource)
            rpc.RegistrationStub(channel).Register(request, timeout=_SECONDS)
        yield
    finally:
        plugin.over.set()
        server.stop(None).wait(_SECONDS)

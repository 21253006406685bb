"""The service `v1beta1.DevicePlugin` of one resource: translates between messages and the plugin."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, Protocol

import grpc

from mig_agent.adapters.grpc_errors import STATUS
from mig_agent.core.errors import RefusedError
from mig_agent.core.owner import KubeletDevice
from mig_agent.frontends.kubernetes.device_plugin import messages
from mig_agent.frontends.kubernetes.device_plugin.allocate import Allocated
from mig_agent.frontends.kubernetes.resources import Resource, number_of
from mig_agent.pb.kubelet.deviceplugin.v1beta1 import deviceplugin_pb2 as pb

_HEALTHY, _UNHEALTHY = "Healthy", "Unhealthy"
_BEFORE_DEADLINE_SECONDS = 3.0
"""How long before the kubelet's deadline a call is answered, so that the answer arrives in time."""

Context = grpc.aio.ServicerContext[Any, Any]


class Decisions(Protocol):
    """Decides about containers, for all resources; the plugin implements it."""

    async def allocate(self, containers: Sequence[Sequence[KubeletDevice]]) -> Sequence[Allocated]:
        """Return for each container what it is to be started with."""
        ...

    async def start_container(self, devices: Sequence[KubeletDevice], seconds: float) -> None:
        """Wait until a container with these devices may start, `seconds` at most. Raises RefusedError."""
        ...


class ResourceService:
    """Serves the devices of one resource to the kubelet. Not thread-safe; use from the event loop."""

    def __init__(self, resource: Resource, decisions: Decisions, start_deadline: float) -> None:
        self.resource = resource
        self._decisions = decisions
        self._deadline = start_deadline
        self.ids: tuple[str, ...] = ()
        """The ids of the healthy devices in the list, whether or not the kubelet reads it now."""
        self.known: frozenset[str] = frozenset()
        """All ids that were ever listed, of former devices as unhealthy ones: a kubelet 1.36 panics if an id leaves the
        list while it allocates it."""
        self.streams = 0
        """The number of open streams of the list: one while the kubelet reads it."""
        self._changed = asyncio.Event()

    def show(self, ids: tuple[str, ...]) -> None:
        """Set the healthy devices, and send the list to the kubelet at once if it has changed."""
        if ids != self.ids:
            self.ids = ids
            self.known |= set(ids)
            self._changed.set()
            self._changed = asyncio.Event()

    def methods(self) -> Mapping[str, grpc.RpcMethodHandler[Any, Any]]:
        """Return the handlers by method name, for a gRPC server."""
        unary = grpc.unary_unary_rpc_method_handler
        return {
            "GetDevicePluginOptions": unary(
                self.options,
                request_deserializer=pb.Empty.FromString,
                response_serializer=pb.DevicePluginOptions.SerializeToString,
            ),
            "ListAndWatch": grpc.unary_stream_rpc_method_handler(
                self.list_and_watch,
                request_deserializer=pb.Empty.FromString,
                response_serializer=pb.ListAndWatchResponse.SerializeToString,
            ),
            "GetPreferredAllocation": unary(
                self.prefer,
                request_deserializer=pb.PreferredAllocationRequest.FromString,
                response_serializer=pb.PreferredAllocationResponse.SerializeToString,
            ),
            "Allocate": unary(
                self.allocate,
                request_deserializer=pb.AllocateRequest.FromString,
                response_serializer=pb.AllocateResponse.SerializeToString,
            ),
            "PreStartContainer": unary(
                self.pre_start,
                request_deserializer=pb.PreStartContainerRequest.FromString,
                response_serializer=pb.PreStartContainerResponse.SerializeToString,
            ),
        }

    async def options(self, _request: pb.Empty, _context: Context) -> pb.DevicePluginOptions:
        """Answer that PreStartContainer is required; the kubelet asks while it answers Register."""
        return pb.DevicePluginOptions(pre_start_required=True)

    async def list_and_watch(self, _request: pb.Empty, _context: Context) -> AsyncIterator[pb.ListAndWatchResponse]:
        """Yield the list now, and again whenever it changes."""
        self.streams += 1
        try:
            while True:
                changed = self._changed
                yield self._list()
                await changed.wait()
        finally:
            self.streams -= 1

    def _list(self) -> pb.ListAndWatchResponse:
        there = set(self.ids)
        health = {each: _HEALTHY if each in there else _UNHEALTHY for each in sorted(self.known, key=number_of)}
        return pb.ListAndWatchResponse(devices=[pb.Device(ID=each, health=word) for each, word in health.items()])

    async def prefer(
        self, _request: pb.PreferredAllocationRequest, _context: Context
    ) -> pb.PreferredAllocationResponse:
        """Answer with no preference: one id is as good as another."""
        return pb.PreferredAllocationResponse()

    async def allocate(self, request: pb.AllocateRequest, _context: Context) -> pb.AllocateResponse:
        """Answer with the CDI names of each container's devices."""
        containers = [self._devices(each.devices_ids) for each in request.container_requests]
        allocated = await self._decisions.allocate(containers)
        return pb.AllocateResponse(
            container_responses=[
                pb.ContainerAllocateResponse(cdi_devices=[pb.CDIDevice(name=name) for name in each.cdi_names])
                for each in allocated
            ]
        )

    async def pre_start(self, request: pb.PreStartContainerRequest, context: Context) -> pb.PreStartContainerResponse:
        """Answer when a container may start, or with the refusal as a status."""
        left: float | None = context.time_remaining()  # None if the caller gives no deadline, whatever its type says
        seconds = self._deadline if left is None else max(min(self._deadline, left - _BEFORE_DEADLINE_SECONDS), 0.0)
        try:
            await self._decisions.start_container(self._devices(request.devices_ids), seconds)
        except RefusedError as error:
            await context.abort(STATUS[error.refusal.reason], messages.for_kubelet(error.refusal))
        return pb.PreStartContainerResponse()

    def _devices(self, ids: Sequence[str]) -> tuple[KubeletDevice, ...]:
        return tuple(KubeletDevice(resource=self.resource.name, id=each) for each in ids)

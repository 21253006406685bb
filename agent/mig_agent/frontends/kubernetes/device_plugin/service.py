"""The service `v1beta1.DevicePlugin` of one resource: only translation between messages and the plugin."""

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
"""For the answer to be made and sent before the kubelet stops waiting."""

Context = grpc.aio.ServicerContext[Any, Any]


class Decisions(Protocol):
    """What the plugin decides for all resources."""

    async def allocate(self, containers: Sequence[Sequence[KubeletDevice]]) -> Sequence[Allocated]:
        """For each container, what it is to be started with."""
        ...

    async def start(self, devices: Sequence[KubeletDevice], seconds: float) -> None:
        """Returns when a container with these devices may start. Raises RefusedError."""
        ...


class ResourceService:
    """One resource's devices as the kubelet sees them. Belongs to the event loop."""

    def __init__(self, resource: Resource, decisions: Decisions, start_deadline: float) -> None:
        self.resource = resource
        self._decisions = decisions
        self._deadline = start_deadline
        self.ids: tuple[str, ...] = ()
        """Those that there are, as the kubelet is told, or will be when it listens."""
        self.known: frozenset[str] = frozenset()
        """All that were ever told of. A kubelet 1.36 panics where an id leaves the list while it allocates it, so those
        that there are no more stay, as broken ones."""
        self.streams = 0
        """How many lists are open: one while the kubelet listens."""
        self._changed = asyncio.Event()

    def show(self, ids: tuple[str, ...]) -> None:
        """Tells the kubelet at once where that is another list."""
        if ids != self.ids:
            self.ids = ids
            self.known |= set(ids)
            self._changed.set()
            self._changed = asyncio.Event()

    def methods(self) -> Mapping[str, grpc.RpcMethodHandler[Any, Any]]:
        """By name, for a gRPC server."""
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
        """The kubelet asks while it answers Register."""
        return pb.DevicePluginOptions(pre_start_required=True)

    async def list_and_watch(self, _request: pb.Empty, _context: Context) -> AsyncIterator[pb.ListAndWatchResponse]:
        """The list, and the list again whenever it changes."""
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
        """Not offered: one id is as good as another."""
        return pb.PreferredAllocationResponse()

    async def allocate(self, request: pb.AllocateRequest, _context: Context) -> pb.AllocateResponse:
        """What containers are to be started with."""
        containers = [self._devices(each.devices_ids) for each in request.container_requests]
        allocated = await self._decisions.allocate(containers)
        return pb.AllocateResponse(
            container_responses=[
                pb.ContainerAllocateResponse(cdi_devices=[pb.CDIDevice(name=name) for name in each.cdi_names])
                for each in allocated
            ]
        )

    async def pre_start(self, request: pb.PreStartContainerRequest, context: Context) -> pb.PreStartContainerResponse:
        """Before each start of a container."""
        left: float | None = context.time_remaining()  # None for who gives no deadline, whatever its type says
        seconds = self._deadline if left is None else max(min(self._deadline, left - _BEFORE_DEADLINE_SECONDS), 0.0)
        try:
            await self._decisions.start(self._devices(request.devices_ids), seconds)
        except RefusedError as error:
            await context.abort(STATUS[error.refusal.reason], messages.for_kubelet(error.refusal))
        return pb.PreStartContainerResponse()

    def _devices(self, ids: Sequence[str]) -> tuple[KubeletDevice, ...]:
        return tuple(KubeletDevice(resource=self.resource.name, id=each) for each in ids)

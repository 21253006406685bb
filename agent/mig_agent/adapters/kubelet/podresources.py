"""A client of the kubelet's pod resources API: active pods and the devices of their containers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import cast

import grpc

from mig_agent.adapters.kubelet.registration import Identity, KubeletError, KubeletPaths, channel_to, why
from mig_agent.core.owner import KubeletDevice
from mig_agent.pb.kubelet.podresources.v1 import podresources_pb2 as pb
from mig_agent.pb.kubelet.podresources.v1 import podresources_pb2_grpc as rpc

_SECONDS = 5.0
"""Deadline of a call, in seconds. The kubelet answers in milliseconds, except on a machine under load."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedContainer:
    """A container with all its devices, of any plugin."""

    name: str
    devices: tuple[KubeletDevice, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedPod:
    """A pod. The kubelet omits its UID here, and its plain init containers."""

    namespace: str
    name: str
    containers: tuple[ListedContainer, ...] = ()

    @property
    def devices(self) -> tuple[KubeletDevice, ...]:
        """Devices of all its containers."""
        return tuple(device for container in self.containers for device in container.devices)


class PodResources:
    """Client of `v1.PodResourcesLister`. Not thread-safe; use from the event loop."""

    def __init__(self, paths: KubeletPaths) -> None:
        self._socket = paths.pod_resources
        self._channel = channel_to(self._socket)
        self._stub = cast("rpc.PodResourcesListerAsyncStub", rpc.PodResourcesListerStub(self._channel))

    @property
    def kubelet(self) -> Identity | None:
        """Identity of the kubelet's socket, which changes when the kubelet restarts; None if there is no socket."""
        return Identity.of(self._socket)

    async def list(self) -> tuple[ListedPod, ...]:
        """Return the pods that the kubelet counts as active.

        Raises KubeletError. A kubelet that has just started answers before it knows its pods again.
        """
        try:
            answer = await self._stub.List(pb.ListPodResourcesRequest(), timeout=_SECONDS)
        except grpc.aio.AioRpcError as error:
            raise KubeletError(f"cannot list the pods of this node: {why(error, self._socket)}") from error
        return tuple(
            ListedPod(
                namespace=pod.namespace,
                name=pod.name,
                containers=tuple(
                    ListedContainer(name=each.name, devices=_devices(each.devices)) for each in pod.containers
                ),
            )
            for pod in answer.pod_resources
        )

    async def allocatable(self) -> tuple[KubeletDevice, ...]:
        """Return all healthy devices of all plugins on the node. Raises KubeletError."""
        try:
            answer = await self._stub.GetAllocatableResources(pb.AllocatableResourcesRequest(), timeout=_SECONDS)
        except grpc.aio.AioRpcError as error:
            raise KubeletError(f"cannot tell who serves resources on this node: {why(error, self._socket)}") from error
        return _devices(answer.devices)

    async def close(self) -> None:
        """Close the connection."""
        await self._channel.close()


def _devices(parts: Iterable[pb.ContainerDevices]) -> tuple[KubeletDevice, ...]:
    return tuple(KubeletDevice(resource=part.resource_name, id=each) for part in parts for each in part.device_ids)

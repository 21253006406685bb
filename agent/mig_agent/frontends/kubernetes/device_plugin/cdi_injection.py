"""CDI injection: a CDI file for each of the kubelet's devices, with the variables of its container."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence

import structlog

from mig_agent.adapters.cdi import CdiError, CdiFolder
from mig_agent.adapters.device_backends import DeviceAccess, joined
from mig_agent.core.errors import DriverError, Reason, refuse
from mig_agent.core.model import Instance, Lease, NodeView
from mig_agent.core.owner import KubeletDevice
from mig_agent.frontends.kubernetes.pod_leases import devices_of
from mig_agent.frontends.kubernetes.resources import Resource, number_of

_LOG = structlog.get_logger(__name__)


def environment(devices: Sequence[DeviceAccess]) -> Mapping[str, str]:
    """Return the variables of a container: CUDA sees these devices, and NVIDIA's runtime adds no others."""
    return joined(each.environment for each in devices) | {"NVIDIA_VISIBLE_DEVICES": "void"}


def instances_of(leases: Mapping[KubeletDevice, Lease], view: NodeView) -> Mapping[KubeletDevice, Instance]:
    """Return the instance of each device that has one."""
    found = {}
    for device, lease in leases.items():
        generation = lease.instances[devices_of(lease).index(device)]
        instance = view.instances.get(generation)
        if instance is not None:
            found[device] = instance
    return found


class CdiInjector:
    """Writes and removes CDI files, in threads, one call at a time. Not thread-safe; use from the event loop."""

    def __init__(
        self,
        folder: CdiFolder,
        resources: Mapping[str, Resource],
        view: Callable[[], NodeView],
        access: Callable[[Instance], DeviceAccess],
    ) -> None:
        self._folder = folder
        self._resources = resources
        self._view = view
        self._access = access
        self._lock = asyncio.Lock()

    def qualified(self, device: KubeletDevice) -> str:
        """Return the CDI name of a device, as Allocate gives it to the kubelet."""
        return self._folder.qualified(self._name(device))

    async def inject(self, container_devices: Sequence[KubeletDevice], leases: Mapping[KubeletDevice, Lease]) -> None:
        """Write the CDI files of one container. Raises RefusedError."""
        found = instances_of(leases, self._view())
        devices = {each: self._access(found[each]) for each in container_devices if each in found}
        variables = environment(tuple(devices.values()))

        def write() -> None:
            for number, (device, content) in enumerate(devices.items()):
                self._folder.write(self._name(device), (content,), variables, with_libraries=number == 0)

        try:
            async with self._lock:
                await asyncio.to_thread(write)
        except CdiError as error:
            raise refuse(Reason.DRIVER_FAILED, error.message, error.hint) from error
        except DriverError as error:
            raise refuse(Reason.DRIVER_FAILED, str(error)) from error

    async def tidy(self, keep: Callable[[], Collection[KubeletDevice]]) -> None:
        """Remove the files of all devices except those that `keep` returns; it is called when the files are listed."""
        try:
            async with self._lock:
                names = await asyncio.to_thread(self._folder.names)
                kept = {self._name(device) for device in keep() if device.resource in self._resources}
                unused = [name for name in names if name not in kept]
                await asyncio.to_thread(self._remove, unused)
        except CdiError as error:
            _LOG.warning(error.message, hint=error.hint)

    def _remove(self, names: Sequence[str]) -> None:
        for name in names:
            self._folder.remove(name)

    def _name(self, device: KubeletDevice) -> str:
        return f"{self._resources[device.resource].label}-{number_of(device.id)}"

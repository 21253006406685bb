"""How devices get into containers by CDI: a file for each of the kubelet's devices, with the container's variables."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence

import structlog

from mig_agent.adapters.cdi import CdiError, CdiFolder
from mig_agent.adapters.devices import DeviceAccess, joined
from mig_agent.core.errors import DriverError, Reason, refuse
from mig_agent.core.model import Instance, Lease, NodeView
from mig_agent.core.owner import KubeletDevice
from mig_agent.frontends.kubernetes.owners import devices_of
from mig_agent.frontends.kubernetes.resources import Resource, number_of

_LOG = structlog.get_logger(__name__)


def environment(devices: Sequence[DeviceAccess]) -> Mapping[str, str]:
    """The variables of a container with these devices: CUDA sees them, NVIDIA's own runtime adds nothing to them."""
    return joined(each.environment for each in devices) | {"NVIDIA_VISIBLE_DEVICES": "void"}


def instances_of(leases: Mapping[KubeletDevice, Lease], view: NodeView) -> Mapping[KubeletDevice, Instance]:
    """The instance that stands for each device, as far as they are there."""
    found = {}
    for device, lease in leases.items():
        generation = lease.instances[devices_of(lease).index(device)]
        instance = view.instances.get(generation)
        if instance is not None:
            found[device] = instance
    return found


class CdiInjector:
    """Writes and removes the files. Belongs to the event loop; the disk is touched in threads, one after the other."""

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
        self._turn = asyncio.Lock()

    def qualified(self, device: KubeletDevice) -> str:
        """As the kubelet is told a device of a resource that is served."""
        return self._folder.qualified(self._name(device))

    async def inject(self, container_devices: Sequence[KubeletDevice], leases: Mapping[KubeletDevice, Lease]) -> None:
        """Writes the files of one container. Raises RefusedError."""
        found = instances_of(leases, self._view())
        devices = {each: self._access(found[each]) for each in container_devices if each in found}
        variables = environment(tuple(devices.values()))

        def write() -> None:
            for number, (device, content) in enumerate(devices.items()):
                self._folder.write(self._name(device), (content,), variables, with_libraries=number == 0)

        try:
            async with self._turn:
                await asyncio.to_thread(write)
        except CdiError as error:
            raise refuse(Reason.DRIVER_FAILED, error.message, error.hint) from error
        except DriverError as error:
            raise refuse(Reason.DRIVER_FAILED, str(error)) from error

    async def tidy(self, keep: Callable[[], Collection[KubeletDevice]]) -> None:
        """Removes the files of devices that nothing stands for; `keep` tells at the last moment for which one does."""
        try:
            async with self._turn:
                there = await asyncio.to_thread(self._folder.names)
                kept = {self._name(device) for device in keep() if device.resource in self._resources}
                gone = [name for name in there if name not in kept]
                await asyncio.to_thread(self._remove, gone)
        except CdiError as error:
            _LOG.warning(error.message, hint=error.hint)

    def _remove(self, names: Sequence[str]) -> None:
        for name in names:
            self._folder.remove(name)

    def _name(self, device: KubeletDevice) -> str:
        return f"{self._resources[device.resource].label}-{number_of(device.id)}"

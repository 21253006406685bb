"""Device backends: the operations on the hardware for each kind of device that a lease can hold.

`core.model.DeviceKind` has the properties of a kind that planning and recovery use.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

from mig_agent.adapters.host import Host, ProcessInfo
from mig_agent.adapters.nvml import Driver
from mig_agent.core.errors import DriverError, DriverErrorKind
from mig_agent.core.model import MIG_INSTANCE, WHOLE_GPU, DeviceKind, GpuUuid, Instance, Placement, Slot
from mig_agent.core.observation import InstanceUsage, ObservedInstance, ProcessUsage


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceAccess:
    """The device nodes and environment variables with which a container can use one device."""

    gpu_minor: int
    """The minor number of the node `/dev/nvidia<minor>`."""
    gpu_instance_id: int | None = None
    """With the next, identifies the capability nodes; both None if the GPU's node suffices."""
    compute_instance_id: int | None = None
    environment: Mapping[str, str]


class DeviceBackend(Protocol):
    """Creates, checks and destroys devices of one kind. Blocking and thread-safe; methods may raise DriverError."""

    def placements(self, gpu: GpuUuid) -> Mapping[int, Placement]:
        """Return the placements of all devices of this kind on a GPU by the driver's ids, foreign ones included."""

    def create(self, slot: Slot) -> ObservedInstance:
        """Create a device. The error's `left_behind` is True if parts of it may remain."""

    def make_nodes(self, slot: Slot, made: ObservedInstance, gpu_minor: int) -> None:
        """Make the device nodes of a new device. If that fails, destroy the device, which would be unusable."""

    def destroy(self, instance: Instance) -> None:
        """Destroy a device, also an incomplete one. Raises DriverError (IN_USE) while a process uses it."""

    def check_free(self, instance: Instance) -> tuple[ProcessUsage, ...]:
        """Return the processes on a device that is to be leased again.

        Raises DriverError (NOT_FOUND) if it no longer exists, is incomplete, or another device has its UUID.
        """

    def processes(self, instance: Instance) -> tuple[ProcessUsage, ...]:
        """Return the processes that the driver lists on a device."""

    def holders(self, instance: Instance, gpu_minor: int | None) -> tuple[ProcessInfo, ...]:
        """Return the processes that have a device open according to the kernel; the driver may not list them."""

    def usage(self, instance: Instance) -> InstanceUsage:
        """Return how much of a device is used; None for values that the driver does not report."""

    def environment(self, instance: Instance) -> Mapping[str, str]:
        """Return the variables that make a device visible to a process; `joined` combines those of several devices."""

    def access(self, instance: Instance, gpu_minor: int) -> DeviceAccess:
        """Return the device nodes and variables with which a container can use a device."""


class _MigBackend:
    """Serves MIG instances: a GPU instance with the one compute instance that fills it."""

    def __init__(self, driver: Driver, host: Host) -> None:
        self._driver = driver
        self._host = host

    def placements(self, gpu: GpuUuid) -> Mapping[int, Placement]:
        return self._driver.placements(gpu)

    def create(self, slot: Slot) -> ObservedInstance:
        return self._driver.create(slot)

    def make_nodes(self, slot: Slot, made: ObservedInstance, gpu_minor: int) -> None:
        try:
            self._host.make_caps_nodes(gpu_minor, made.gpu_instance_id, made.compute_instances[0])
        except DriverError:
            self._driver.destroy(slot, made.gpu_instance_id)  # unusable without its nodes
            raise

    def destroy(self, instance: Instance) -> None:
        if instance.gpu_instance_id is not None:
            self._driver.destroy(instance.slot, instance.gpu_instance_id)

    def check_free(self, instance: Instance) -> tuple[ProcessUsage, ...]:
        slot, gi, ci = instance.slot, instance.gpu_instance_id, instance.compute_instance_id
        if gi is None or ci is None:
            what = f"look whether {slot} is free"
            raise DriverError(DriverErrorKind.NOT_FOUND, what, detail="it is only half made")
        return self._driver.verify(slot.gpu, gi, ci, instance.uuid)

    def processes(self, instance: Instance) -> tuple[ProcessUsage, ...]:
        return self._driver.processes(instance.slot.gpu, instance.gpu_instance_id)

    def holders(self, instance: Instance, gpu_minor: int | None) -> tuple[ProcessInfo, ...]:
        if gpu_minor is None or instance.gpu_instance_id is None:
            return ()
        return self._host.holders(gpu_minor, instance.gpu_instance_id)

    def usage(self, instance: Instance) -> InstanceUsage:
        # An instance that is leased again keeps its generation, and its next user is not to see the load of the last.
        tenure = f"{instance.generation}/{instance.lease or ''}"
        return self._driver.usage(instance.slot.gpu, instance.gpu_instance_id, tenure=tenure)

    def environment(self, instance: Instance) -> Mapping[str, str]:
        return _visible(instance.uuid)

    def access(self, instance: Instance, gpu_minor: int) -> DeviceAccess:
        return DeviceAccess(
            gpu_minor=gpu_minor,
            gpu_instance_id=instance.gpu_instance_id,
            compute_instance_id=instance.compute_instance_id,
            environment=self.environment(instance),
        )


class _WholeGpuBackend:
    """Serves GPUs without MIG mode, each of which is one device that always exists."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver

    def placements(self, gpu: GpuUuid) -> Mapping[int, Placement]:  # noqa: ARG002 -- of the protocol
        return {}

    def create(self, slot: Slot) -> ObservedInstance:
        raise _always_there(f"create {slot}")

    def make_nodes(self, slot: Slot, made: ObservedInstance, gpu_minor: int) -> None:
        """Do nothing: a GPU has its node."""

    def destroy(self, instance: Instance) -> None:
        raise _always_there(f"destroy {instance.slot}")

    def check_free(self, instance: Instance) -> tuple[ProcessUsage, ...]:
        return self.processes(instance)

    def processes(self, instance: Instance) -> tuple[ProcessUsage, ...]:
        return self._driver.processes(instance.slot.gpu)

    def holders(self, instance: Instance, gpu_minor: int | None) -> tuple[ProcessInfo, ...]:  # noqa: ARG002 -- of the protocol
        return ()

    def usage(self, instance: Instance) -> InstanceUsage:
        return self._driver.usage(instance.slot.gpu)

    def environment(self, instance: Instance) -> Mapping[str, str]:
        return _visible(instance.uuid)

    def access(self, instance: Instance, gpu_minor: int) -> DeviceAccess:
        return DeviceAccess(gpu_minor=gpu_minor, environment=self.environment(instance))


def device_backends(driver: Driver, host: Host) -> Mapping[DeviceKind, DeviceBackend]:
    """Return the backend of each kind of device."""
    return {MIG_INSTANCE: _MigBackend(driver, host), WHOLE_GPU: _WholeGpuBackend(driver)}


def joined(environments: Iterable[Mapping[str, str]]) -> dict[str, str]:
    """Return the environment of a process with several devices: lists, separated by commas, in the devices' order.

    With no device left all variables are there and empty: without them CUDA would see every GPU of the node.
    """
    found = dict(_visible("")) if not (environments := tuple(environments)) else {}
    for each in environments:
        for name, value in each.items():
            found[name] = f"{found[name]},{value}" if name in found else value
    return found


def _visible(uuid: str) -> Mapping[str, str]:
    """Return the variables that make a device visible to CUDA and to NVIDIA's container runtime."""
    return {"CUDA_VISIBLE_DEVICES": uuid, "NVIDIA_VISIBLE_DEVICES": uuid}


def _always_there(what: str) -> DriverError:
    return DriverError(DriverErrorKind.NOT_SUPPORTED, what, detail="a GPU that is leased whole is always there")

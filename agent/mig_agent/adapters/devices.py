"""Device backends: what each kind of device that a lease can hold needs of the hardware, and of its holder's process.

`core.model.DeviceKind` says what planning and recovery must know of a kind; all that touches a device of it is here.
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
    """Says what a container needs to use one device: which device nodes, and which variables."""

    gpu_minor: int
    """Of `/dev/nvidia<minor>`."""
    gpu_instance_id: int | None = None
    """With the next, of the capabilities; both None where the GPU's own node suffices."""
    compute_instance_id: int | None = None
    environment: Mapping[str, str]


class DeviceBackend(Protocol):
    """Creates, checks and destroys devices of one kind. Blocking and thread-safe; methods may raise DriverError."""

    def placements(self, gpu: GpuUuid) -> Mapping[int, Placement]:
        """Return where devices of this kind are on a GPU, whoever made them, by the driver's ids."""

    def create(self, slot: Slot) -> ObservedInstance:
        """Create a device; the error tells where something may be left behind."""

    def make_nodes(self, slot: Slot, made: ObservedInstance, gpu_minor: int) -> None:
        """Make the device nodes of a new device; where that fails, destroy it, since nobody could use it."""

    def destroy(self, instance: Instance) -> None:
        """Destroy a device, or what is left of it. Raises DriverError IN_USE while a process uses it."""

    def check_free(self, instance: Instance) -> tuple[ProcessUsage, ...]:
        """Return the processes on a device that is to be leased again.

        Raises DriverError NOT_FOUND where it is gone, half made, or another has its UUID.
        """

    def processes(self, instance: Instance) -> tuple[ProcessUsage, ...]:
        """Return the processes that the driver lists on a device."""

    def holders(self, instance: Instance, gpu_minor: int | None) -> tuple[ProcessInfo, ...]:
        """Return the processes that have a device open, on which the driver lists none."""

    def usage(self, instance: Instance) -> InstanceUsage:
        """Return what is used of a device; None for what the driver does not tell."""

    def environment(self, instance: Instance) -> Mapping[str, str]:
        """Return the variables by which a process finds its device. Those of several are joined by `joined`."""

    def access(self, instance: Instance, gpu_minor: int) -> DeviceAccess:
        """Return what a container needs to use a device."""


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
            self._driver.destroy(slot, made.gpu_instance_id)  # without its nodes nobody can use it
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
        return self._driver.usage(instance.slot.gpu, instance.gpu_instance_id)

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
    """Return the environment of a process with several devices: lists, separated by commas, in the devices' order."""
    found: dict[str, str] = {}
    for each in environments:
        for name, value in each.items():
            found[name] = f"{found[name]},{value}" if name in found else value
    return found


def _visible(uuid: str) -> Mapping[str, str]:
    """For CUDA, and for NVIDIA's container runtime."""
    return {"CUDA_VISIBLE_DEVICES": uuid, "NVIDIA_VISIBLE_DEVICES": uuid}


def _always_there(what: str) -> DriverError:
    return DriverError(DriverErrorKind.NOT_SUPPORTED, what, detail="a GPU that is leased whole is always there")

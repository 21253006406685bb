"""Device backends: the operations on the hardware for each kind of device that a lease can hold.

`core.model.DeviceKind` has the properties of a kind that planning and recovery use.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, Protocol

from mig_agent.adapters.host import Host, ProcessInfo
from mig_agent.adapters.nvml import Driver
from mig_agent.adapters.shares.enforcer import Enforcer, HolderProcess, Share
from mig_agent.core.errors import DriverError, DriverErrorKind
from mig_agent.core.model import MIG_INSTANCE, SHARE, WHOLE_GPU, DeviceKind, GpuUuid, Instance, Placement, Slot
from mig_agent.core.observation import InstanceUsage, ProcessUsage


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceAccess:
    """The device nodes and environment variables with which a container can use one device."""

    gpu_minor: int
    """The minor number of the node `/dev/nvidia<minor>`."""
    gpu_instance_id: int | None = None
    """With the next, identifies the capability nodes; both None if the GPU's node suffices."""
    compute_instance_id: int | None = None
    environment: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceUser:
    """The user of a device that is to be created, as far as known."""

    uid: int | None = None
    process: HolderProcess | None = None


NO_USER: Final = DeviceUser()


@dataclass(frozen=True, slots=True, kw_only=True)
class CreatedDevice:
    """The identity of a new device; the ids are None for a kind that the driver does not list."""

    uuid: str
    gpu_instance_id: int | None = None
    compute_instance_id: int | None = None


class DeviceBackend(Protocol):
    """Creates, checks and destroys devices of one kind. Blocking and thread-safe; methods may raise DriverError."""

    def placements(self, gpu: GpuUuid) -> Mapping[int, Placement]:
        """Return the placements of all devices of this kind on a GPU by the driver's ids, foreign ones included."""

    def create(self, instance: Instance, user: DeviceUser) -> CreatedDevice:
        """Create a device as intended. The error's `left_behind` is True if parts of it may remain."""

    def make_nodes(self, slot: Slot, made: CreatedDevice, gpu_minor: int) -> None:
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

    def create(self, instance: Instance, user: DeviceUser) -> CreatedDevice:  # noqa: ARG002 -- of the protocol
        made = self._driver.create(instance.slot)
        return CreatedDevice(
            uuid=made.uuid, gpu_instance_id=made.gpu_instance_id, compute_instance_id=made.compute_instances[0]
        )

    def make_nodes(self, slot: Slot, made: CreatedDevice, gpu_minor: int) -> None:
        if made.gpu_instance_id is None or made.compute_instance_id is None:
            raise AssertionError(f"{slot} was created without its ids")
        try:
            self._host.make_caps_nodes(gpu_minor, made.gpu_instance_id, made.compute_instance_id)
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

    def create(self, instance: Instance, user: DeviceUser) -> CreatedDevice:  # noqa: ARG002 -- of the protocol
        raise _always_there(f"create {instance.slot}")

    def make_nodes(self, slot: Slot, made: CreatedDevice, gpu_minor: int) -> None:
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


class _ShareBackend:
    """Serves shares of GPUs without MIG mode, each by the enforcer of its memory limit that is recorded with it."""

    def __init__(self, driver: Driver, enforcers: Sequence[Enforcer]) -> None:
        self._driver = driver
        self._enforcers = {each.enforcement: each for each in enforcers}

    def placements(self, gpu: GpuUuid) -> Mapping[int, Placement]:  # noqa: ARG002 -- of the protocol
        return {}

    def create(self, instance: Instance, user: DeviceUser) -> CreatedDevice:
        share = replace(share_of(instance), uid=user.uid, process=user.process)
        enforcer = self._enforcer(instance, f"create {instance.slot}")
        if enforcer.needs_process and share.process is None:
            raise DriverError(
                DriverErrorKind.NOT_SUPPORTED,
                f"create {instance.slot}",
                detail="its limit holds for a process, and the request names none; use `migctl run`",
            )
        try:
            enforcer.begin(share)
        except DriverError as error:
            raise self._undo(enforcer, instance, error) from error
        return CreatedDevice(uuid=instance.slot.gpu)

    def make_nodes(self, slot: Slot, made: CreatedDevice, gpu_minor: int) -> None:
        """Do nothing: a GPU has its node."""

    def destroy(self, instance: Instance) -> None:
        self._enforcer(instance, f"end {instance.slot}").end(instance.slot.gpu, instance.generation)

    def check_free(self, instance: Instance) -> tuple[ProcessUsage, ...]:
        self._enforcer(instance, f"check {instance.slot}").check(share_of(instance))
        return self.processes(instance)

    def processes(self, instance: Instance) -> tuple[ProcessUsage, ...]:
        pids = self._enforcer(instance, f"look who is on {instance.slot}").processes(share_of(instance))
        return tuple(each for each in self._driver.processes(instance.slot.gpu) if each.pid in pids)

    def holders(self, instance: Instance, gpu_minor: int | None) -> tuple[ProcessInfo, ...]:  # noqa: ARG002 -- of the protocol
        return ()

    def usage(self, instance: Instance) -> InstanceUsage:
        users = self.processes(instance)
        known = [each.used_mib for each in users if each.used_mib is not None]
        return InstanceUsage(
            memory_used_mib=sum(known) if len(known) == len(users) else None,
            memory_total_mib=instance.slot.profile.memory_mib,
            processes=users,
        )

    def environment(self, instance: Instance) -> Mapping[str, str]:
        enforcer = self._enforcer(instance, f"give access to {instance.slot}")
        return {**_visible(instance.uuid), **enforcer.environment(share_of(instance))}

    def access(self, instance: Instance, gpu_minor: int) -> DeviceAccess:
        return DeviceAccess(gpu_minor=gpu_minor, environment=self.environment(instance))

    @staticmethod
    def _undo(enforcer: Enforcer, instance: Instance, error: DriverError) -> DriverError:
        if not error.left_behind:
            return error
        try:
            enforcer.end(instance.slot.gpu, instance.generation)
        except DriverError as left:
            return replace(error, detail=f"{error.detail}; and what was made could not be removed: {left}")
        return replace(error, left_behind=False)

    def _enforcer(self, instance: Instance, what: str) -> Enforcer:
        way = instance.enforced_by
        enforcer = None if way is None else self._enforcers.get(way)
        if enforcer is None:
            raise DriverError(
                DriverErrorKind.NOT_SUPPORTED, what, detail=f"this agent does not enforce limits by {way}"
            )
        return enforcer


def share_of(instance: Instance) -> Share:
    """Return a share as its enforcer knows it, without its user."""
    return Share(
        generation=instance.generation,
        gpu=instance.slot.gpu,
        limit_mib=instance.slot.profile.memory_mib,
        thread_percentage=instance.slot.profile.compute_percent,
    )


def device_backends(
    driver: Driver, host: Host, enforcers: Sequence[Enforcer] = ()
) -> Mapping[DeviceKind, DeviceBackend]:
    """Return the backend of each kind of device; `enforcers` are those of the memory limits of shares."""
    return {
        MIG_INSTANCE: _MigBackend(driver, host),
        WHOLE_GPU: _WholeGpuBackend(driver),
        SHARE: _ShareBackend(driver, enforcers),
    }


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

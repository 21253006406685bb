"""The driver: reads GPUs and instances, creates and destroys instances. Blocking and thread-safe."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import IntEnum
from pathlib import Path
from typing import TypeVar

from mig_agent.adapters.nvml.calls import (
    FULL_COMPUTE_PROFILE_ENUM,
    NO_MEMORY_LIMIT,
    EventSetHandle,
    GpuInstanceHandle,
    Nvml,
    OnCall,
)
from mig_agent.adapters.nvml.compute_meter import ComputeMeter
from mig_agent.adapters.nvml.instances import GONE, InstanceReader
from mig_agent.adapters.nvml.inventory import Inventory, KnownGpu
from mig_agent.core.errors import DriverError, DriverErrorKind
from mig_agent.core.model import GpuUuid, Layout, Placement, Slot
from mig_agent.core.observation import InstanceUsage, ModeChange, ObservedGpu, ObservedInstance, ProcessUsage

_MIB = 1 << 20
_READ_ATTEMPTS = 3
"""Attempts to read a GPU whose instances come and go meanwhile."""
_UNDECIDED = frozenset({DriverErrorKind.UNKNOWN, DriverErrorKind.TIMEOUT, DriverErrorKind.GPU_LOST})
"""Failures of a call that leave it unknown what the call did."""
_CREATE = "nvmlDeviceCreateGpuInstanceWithPlacement"
_DESTROY = "nvmlGpuInstanceDestroy"


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """All GPUs as read at one time."""

    gpus: tuple[ObservedGpu, ...]
    failed: Mapping[int, DriverError]
    """GPUs that could not be read, by index."""


class ComputeMode(IntEnum):
    """Says who may use a GPU side by side. The values are NVML's (`nvmlComputeMode_t`)."""

    DEFAULT = 0
    """Any number of processes."""
    EXCLUSIVE_THREAD = 1
    PROHIBITED = 2
    EXCLUSIVE_PROCESS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryLimit:
    """The limit of a cgroup on the memory of one GPU without MIG mode."""

    soft_bytes: int
    """The memory that its processes are guaranteed."""
    hard_bytes: int | None
    """The most that they get together; None: no limit."""

    def __str__(self) -> str:
        """Return it for messages: `4096 MiB, 4096 MiB guaranteed`."""
        hard = "the whole GPU" if self.hard_bytes is None else f"{self.hard_bytes // _MIB} MiB"
        return f"{hard}, {self.soft_bytes // _MIB} MiB guaranteed"


class Driver:
    """NVML in the agent's own types.

    Every method may raise DriverError, with the call and the GPU that failed. Handles of MIG devices and instances are
    looked up each time, since the driver reuses handles for other instances; handles of GPUs are kept.
    """

    def __init__(self, nvml: Nvml) -> None:
        self._nvml = nvml
        self._gpus = Inventory(nvml)
        self._instances = InstanceReader(nvml)
        self._meter = ComputeMeter(nvml)
        self.version = ""
        """The driver's version: `580.95.05`; empty before the first session."""

    @classmethod
    def open(cls, library: object | None = None, *, on_call: OnCall | None = None) -> Driver:
        """Open a session with the driver, or with a library that replaces NVML; one per process.

        `on_call` is called after every NVML call, in the thread that makes it. Raises DriverError of kind LIBRARY if
        there is no driver.
        """
        driver = cls.closed(library, on_call=on_call)
        driver.reopen()
        return driver

    @classmethod
    def closed(cls, library: object | None = None, *, on_call: OnCall | None = None) -> Driver:
        """Return a Driver without a session, which `reopen` begins. Does not touch the driver."""
        return cls(Nvml(library, on_call=on_call))

    def reopen(self) -> None:
        """Begin a session if none is open, and forget the GPUs of the session before."""
        self._gpus.forget_all()
        self._nvml.open()
        try:
            self.version = self._nvml.driver_version()
        except DriverError:
            self._nvml.shutdown()
            raise
        self._meter.begin(self.version)

    def close(self) -> None:
        """End the session, if one is open, so that the driver can be unloaded; refuse calls until `reopen`.

        Raises DriverError TIMEOUT, with the session still open, if a call in flight does not return.
        """
        self._nvml.shutdown()

    def close_at_exit(self) -> None:
        """End the session as the process exits: wait for no call."""
        self._nvml.shutdown_at_exit()

    # Observation

    def observe(self) -> Observation:
        """Read every GPU with its instances; a GPU that cannot be read does not hide the others."""
        gpus: list[ObservedGpu] = []
        failed: dict[int, DriverError] = {}
        for index in range(self._gpus.count()):
            try:
                gpus.append(self._observe(self._gpus.at(index)))
            except DriverError as error:
                failed[index] = error
        return Observation(gpus=tuple(gpus), failed=failed)

    def count(self) -> int:
        """Return the number of GPUs that the driver knows, those that do not answer included."""
        return self._gpus.count()

    def observe_at(self, index: int) -> ObservedGpu:
        """Read the GPU with this index, with its instances."""
        return self._observe(self._gpus.at(index))

    def uuids(self) -> dict[int, GpuUuid]:
        """Return the UUIDs of the GPUs that answer, by index; nothing else is read."""
        found = {}
        for index in range(self._gpus.count()):
            try:
                found[index] = self._gpus.at(index).uuid
            except DriverError:
                continue  # `observe` reports why
        return found

    def observe_gpu(self, gpu: GpuUuid, *, afresh: bool = False) -> ObservedGpu:
        """Read one GPU with its instances.

        `afresh` also reads its profiles again, by which the driver lists instances.
        """
        known = self._gpus.find(gpu)
        if afresh:
            self._gpus.forget_layout(known)
        return self._observe(known)

    def placements(self, gpu: GpuUuid) -> dict[int, Placement]:
        """Return the placements of the existing GPU instances by id: a cheap read that lists no MIG devices."""
        known = self._gpus.find(gpu)
        layout = self._gpus.layout(known)
        return {} if layout is None else self._instances.placements(known, layout)

    def layout(self, gpu: GpuUuid) -> Layout | None:
        """Return the profiles and placements that the driver reports for the GPU; None if it reports none."""
        return self._gpus.layout(self._gpus.find(gpu))

    def _observe(self, known: KnownGpu) -> ObservedGpu:
        for _ in range(_READ_ATTEMPTS - 1):
            try:
                return self._observe_once(known)
            except DriverError as error:
                if error.kind not in GONE:
                    raise
        return self._observe_once(known)

    def _observe_once(self, known: KnownGpu) -> ObservedGpu:
        mode = self._gpus.mode(known)
        layout = self._gpus.layout(known) if mode.capable else None
        if mode.current and layout is None:
            # Not a GPU without instances: the existing ones would be unknown.
            detail = "the driver lists no profiles though MIG mode is on"
            raise DriverError(
                DriverErrorKind.UNKNOWN, "nvmlDeviceGetGpuInstanceProfileInfo", detail=detail, gpu_index=known.index
            )
        instances: tuple[ObservedInstance, ...] = ()
        pids: tuple[int, ...] | None = ()
        if mode.current:
            instances = () if layout is None else self._instances.observe_all(known, layout)
        else:
            pids = _if_reported(lambda: tuple(each.pid for each in self._instances.processes(known, None)))
        return ObservedGpu(
            index=known.index,
            uuid=known.uuid,
            minor=self._nvml.minor(known.handle, known.index),
            model=known.model,
            memory_mib=known.memory_mib,
            mode=mode,
            layout=layout,
            instances=instances,
            processes=pids or (),
        )

    def reserved_mib(self, gpu: GpuUuid) -> int:
        """Return the memory that the driver keeps of a GPU for itself, rounded up."""
        known = self._gpus.find(gpu)
        return -(-self._nvml.reserved_bytes(known.handle, known.index) // _MIB)

    def compute_mode(self, gpu: GpuUuid) -> ComputeMode:
        """Return who may use a GPU side by side."""
        known = self._gpus.find(gpu)
        return ComputeMode(self._nvml.compute_mode(known.handle, known.index))

    # Who uses it

    def processes(self, gpu: GpuUuid, gpu_instance_id: int | None = None) -> tuple[ProcessUsage, ...]:
        """Return the processes on one instance, or on a GPU without MIG mode."""
        return self._instances.processes(self._gpus.find(gpu), gpu_instance_id)

    def verify(
        self, gpu: GpuUuid, gpu_instance_id: int, compute_instance_id: int, uuid: str
    ) -> tuple[ProcessUsage, ...]:
        """Return the compute processes on a known instance.

        Raises NOT_FOUND if the instance is gone or another one has its UUID. Makes four calls whatever else is on the
        GPU, so it is cheap enough to run before every reuse.
        """
        known = self._gpus.find(gpu)
        device = self._nvml.mig_device(uuid, known.index)
        ids = self._nvml.mig_device_ids(device, known.index)
        if ids != (gpu_instance_id, compute_instance_id):
            detail = f"{uuid} is GPU instance {ids[0]}, compute instance {ids[1]}"
            raise DriverError(DriverErrorKind.NOT_FOUND, "nvmlDeviceGetHandleByUUID", detail, known.index)
        return tuple(
            ProcessUsage(pid=each.pid, used_mib=None if each.used is None else each.used // _MIB)
            for each in self._nvml.compute_processes(device, known.index)
        )

    def usage(self, gpu: GpuUuid, gpu_instance_id: int | None = None, *, tenure: str = "") -> InstanceUsage:
        """Return memory, processes and compute use of one instance or of a GPU without MIG mode.

        What the driver does not report is None. Compute use is measured between two calls with the same `tenure`, which
        names the instance and its lease.
        """
        known = self._gpus.find(gpu)
        utilization = None
        if gpu_instance_id is None:
            memory = _if_reported(lambda: self._nvml.memory(known.handle, known.index))
            utilization = _if_reported(lambda: self._nvml.utilization_percent(known.handle, known.index))
        else:
            devices = self._instances.live_devices(known, gpu_instance_id)
            if not devices:
                self._meter.forget(gpu, gpu_instance_id)
                return InstanceUsage(memory_used_mib=None, memory_total_mib=None)
            # The compute instances of one GPU instance share its memory, so the first one's is the memory of all.
            memory = _if_reported(lambda: self._instances.memory(known, devices[0]))
        processes = _if_reported(lambda: self._instances.processes(known, gpu_instance_id))
        compute = None if gpu_instance_id is None else self._meter.measure(known, gpu_instance_id, tenure)
        return InstanceUsage(
            memory_used_mib=None if memory is None else memory.used // _MIB,
            memory_total_mib=None if memory is None else memory.total // _MIB,
            utilization_percent=utilization,
            compute=compute,
            processes=processes,
        )

    # Memory limits of cgroups on GPUs without MIG mode

    def memory_limit(self, gpu: GpuUuid, cgroup: Path) -> MemoryLimit | None:
        """Return the limit of a cgroup on a GPU; None if it has none.

        Raises NOT_SUPPORTED in MIG mode and with a driver before r615.
        """
        known = self._gpus.find(gpu)
        try:
            answer = self._nvml.memory_limits(known.handle, str(cgroup), known.index)
        except DriverError as error:
            if error.kind is DriverErrorKind.NOT_FOUND:
                return None
            raise
        if (answer.soft, answer.hard) == (0, NO_MEMORY_LIMIT):
            return None
        return MemoryLimit(soft_bytes=answer.soft, hard_bytes=None if answer.hard == NO_MEMORY_LIMIT else answer.hard)

    def set_memory_limit(self, gpu: GpuUuid, cgroup: Path, limit_mib: int | None) -> None:
        """Let the processes of a cgroup have so much of a GPU's memory together, all of it guaranteed; None: no limit.

        The limit is read back. Set None before the cgroup is removed: else its ancestors keep what was guaranteed.
        """
        known = self._gpus.find(gpu)
        soft, hard = (0, NO_MEMORY_LIMIT) if limit_mib is None else (limit_mib * _MIB, limit_mib * _MIB)
        self._nvml.set_memory_limits(known.handle, str(cgroup), soft=soft, hard=hard, index=known.index)
        self.check_memory_limit(gpu, cgroup, limit_mib)

    def check_memory_limit(self, gpu: GpuUuid, cgroup: Path, limit_mib: int | None) -> None:
        """Raise READ_BACK if the limit is not what was set: gone, or changed by another program."""
        found = self.memory_limit(gpu, cgroup)
        wanted = None if limit_mib is None else MemoryLimit(soft_bytes=limit_mib * _MIB, hard_bytes=limit_mib * _MIB)
        if found != wanted:
            detail = f"the limit of {cgroup} is {found or 'none'}, not {wanted or 'none'}"
            raise _read_back("nvmlDeviceSetMemoryLimits_v1", self._gpus.find(gpu), detail)

    # Making and removing

    def create(self, slot: Slot) -> ObservedInstance:
        """Create a GPU instance exactly in this slot with the one compute instance that fills it, and read it back.

        If anything fails after the GPU instance exists, it is removed again here. `left_behind` of the DriverError is
        set if something may remain.
        """
        known = self._gpus.find(slot.gpu)
        enum = FULL_COMPUTE_PROFILE_ENUM.get(slot.profile.compute_slices)
        if enum is None:
            detail = f"no compute instance has {slot.profile.compute_slices} slices"
            raise DriverError(DriverErrorKind.NOT_SUPPORTED, _CREATE, detail, known.index)
        try:
            handle = self._nvml.create_gpu_instance(known.handle, slot.profile.id, slot.placement, known.index)
        except DriverError as error:
            raise replace(error, left_behind=error.kind in _UNDECIDED) from error
        try:
            return self._fill(known, handle, slot, enum)
        except DriverError as error:
            raise self._undo(known, handle, error) from error

    def _fill(self, known: KnownGpu, handle: GpuInstanceHandle, slot: Slot, enum: int) -> ObservedInstance:
        info = self._nvml.gpu_instance_info(handle, known.index)
        if (info.profile_id, info.placement) != (slot.profile.id, slot.placement):
            raise _read_back(_CREATE, known, f"asked for {slot} and got profile {info.profile_id} on {info.placement}")
        profile_id = self._nvml.compute_profile_id(handle, enum, known.index)
        self._nvml.create_compute_instance(handle, profile_id, known.index)
        found = self._instances.observe(known, handle)
        if len(found.compute_instances) != 1 or not found.uuid:
            raise _read_back("nvmlGpuInstanceCreateComputeInstance", known, f"{slot} has no MIG device")
        return found

    def _undo(self, known: KnownGpu, handle: GpuInstanceHandle, error: DriverError) -> DriverError:
        try:
            for compute in self._instances.compute_instances(known, handle).values():
                self._nvml.destroy_compute_instance(compute, known.index)
            self._nvml.destroy_gpu_instance(handle, known.index)
        except DriverError as left:
            detail = f"{error.detail}; and what was made could not be removed: {left}"
            return replace(error, detail=detail, left_behind=True)
        return error

    def destroy(self, slot: Slot, gpu_instance_id: int) -> None:
        """Destroy an instance with its compute instances and read back that it is gone.

        An instance that is gone already, or half, is no error, so an interrupted call can be repeated. Raises
        DriverError: IN_USE while a process runs on it or holds it; NOT_FOUND if the id now belongs to another instance,
        which is left alone; READ_BACK if the driver reports success but still lists it.
        """
        known = self._gpus.find(slot.gpu)
        handle = self._instances.find(known, gpu_instance_id)
        if handle is None:
            self._refuse_listed(known, slot, gpu_instance_id)
            return
        info = self._nvml.gpu_instance_info(handle, known.index)
        if (info.profile_id, info.placement) != (slot.profile.id, slot.placement):
            detail = f"GPU instance {gpu_instance_id} is not {slot} but profile {info.profile_id} on {info.placement}"
            raise DriverError(DriverErrorKind.NOT_FOUND, _DESTROY, detail=detail, gpu_index=known.index)
        users = self._instances.processes(known, gpu_instance_id)
        if users:
            names = tuple(f"pid {process.pid}" for process in users)
            raise DriverError(DriverErrorKind.IN_USE, _DESTROY, gpu_index=known.index, holders=names)
        for compute in self._instances.compute_instances(known, handle).values():
            self._nvml.destroy_compute_instance(compute, known.index)
        self._nvml.destroy_gpu_instance(handle, known.index)
        self._meter.forget(slot.gpu, gpu_instance_id)
        if self._instances.find(known, gpu_instance_id) is not None:
            raise _read_back(_DESTROY, known, f"{slot} is still listed")
        self._refuse_listed(known, slot, gpu_instance_id)

    def _refuse_listed(self, known: KnownGpu, slot: Slot, gpu_instance_id: int) -> None:
        """Raise READ_BACK if the driver still lists the instance, though it finds none by the id.

        An instance that counts as destroyed is forgotten, so neither answer alone is trusted.
        """
        if self.placements(known.uuid).get(gpu_instance_id) == slot.placement:
            raise _read_back(_DESTROY, known, f"{slot} is not found by its id, and is still listed")

    def set_mig_mode(self, gpu: GpuUuid, *, on: bool) -> ModeChange:
        """Request MIG mode on or off; the activation status and the mode read back afterwards give the result."""
        known = self._gpus.find(gpu)
        problem = self._nvml.set_mig_mode(known.handle, known.index, on=on)
        self._gpus.forget(known)  # it may have reset the GPU
        self._meter.forget(gpu)
        mode = self._gpus.mode(self._gpus.find(gpu))
        if problem is None and mode.current is not on:
            problem = DriverErrorKind.RESET_REQUIRED
        return ModeChange(mode=mode, problem=problem)

    # Listening

    def listen(self) -> ChangeListener | None:
        """Return a listener for changes of the MIG configuration by any program; None if the driver reports none."""
        try:
            events = self._nvml.event_set()
        except DriverError as error:
            if error.kind is DriverErrorKind.NOT_SUPPORTED:
                return None
            raise
        registered = 0
        for index in range(self._gpus.count()):
            try:
                self._nvml.register_mig_changes(self._gpus.at(index).handle, events, index)
                registered += 1
            except DriverError:
                continue  # this GPU does not report changes; the periodic read still finds them
        if registered:
            return ChangeListener(self._nvml, events)
        self._nvml.free_event_set(events)
        return None


class ChangeListener:
    """Waits for changes of the MIG configuration. Only one thread may wait."""

    def __init__(self, nvml: Nvml, events: EventSetHandle) -> None:
        self._nvml = nvml
        self._events = events

    def wait(self, seconds: float) -> bool:
        """Wait and return True if something changed within the time. May raise DriverError."""
        return self._nvml.wait_for_event(self._events, int(seconds * 1000))

    def close(self) -> None:
        """Stop listening."""
        self._nvml.free_event_set(self._events)


_Answer = TypeVar("_Answer")


def _if_reported(call: Callable[[], _Answer]) -> _Answer | None:
    """Return the answer; None if the driver does not report this, or not to this process."""
    try:
        return call()
    except DriverError as error:
        if error.kind in {DriverErrorKind.NOT_SUPPORTED, DriverErrorKind.NO_PERMISSION}:
            return None
        raise


def _read_back(call: str, known: KnownGpu, detail: str) -> DriverError:
    return DriverError(DriverErrorKind.READ_BACK, call, detail=detail, gpu_index=known.index)

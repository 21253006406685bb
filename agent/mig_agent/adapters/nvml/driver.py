"""The door to the hardware: what is there, and making and removing instances. Blocking and thread-safe."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

from mig_agent.adapters.nvml.calls import FULL_COMPUTE_PROFILE_ENUM, EventSetHandle, GpuInstanceHandle, Nvml, OnCall
from mig_agent.adapters.nvml.instances import GONE, InstanceReader
from mig_agent.adapters.nvml.inventory import Inventory, KnownGpu
from mig_agent.core.errors import DriverError, DriverErrorKind
from mig_agent.core.model import GpuUuid, Layout, Placement, Slot
from mig_agent.core.observation import InstanceUsage, ModeChange, ObservedGpu, ObservedInstance, ProcessUsage

_MIB = 1 << 20
_READINGS = 3
"""So often a GPU is read when instances come and go meanwhile."""
_UNDECIDED = frozenset({DriverErrorKind.UNKNOWN, DriverErrorKind.TIMEOUT, DriverErrorKind.GPU_LOST})
"""Failures of a call that leave open what it did."""
_CREATE = "nvmlDeviceCreateGpuInstanceWithPlacement"
_DESTROY = "nvmlGpuInstanceDestroy"


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """All GPUs at one reading."""

    gpus: tuple[ObservedGpu, ...]
    failed: Mapping[int, DriverError]
    """GPUs that could not be read, by index."""


class Driver:
    """NVML in this project's words.

    Every method may raise DriverError, with the call and the GPU that failed. Handles of MIG devices and instances are
    looked up anew each time, as the driver gives a used one a new meaning; handles of GPUs are kept.
    """

    def __init__(self, nvml: Nvml) -> None:
        self._nvml = nvml
        self._gpus = Inventory(nvml)
        self._instances = InstanceReader(nvml)
        self.version = ""
        """Of the driver: `580.95.05`; empty before the first session."""

    @classmethod
    def open(cls, library: object | None = None, *, on_call: OnCall | None = None) -> Driver:
        """A session with the driver, or with a library that stands for it. One in a process.

        `on_call` hears of every NVML call, in the thread that makes it. Raises DriverError of kind LIBRARY where there
        is no driver.
        """
        driver = cls.closed(library, on_call=on_call)
        driver.reopen()
        return driver

    @classmethod
    def closed(cls, library: object | None = None, *, on_call: OnCall | None = None) -> Driver:
        """The same with no session yet: `reopen` begins one. Does not touch the driver."""
        return cls(Nvml(library, on_call=on_call))

    def reopen(self) -> None:
        """Begins a session where none is open. What is kept of GPUs from the one before is forgotten."""
        self._gpus.forget_all()
        self._nvml.open()
        try:
            self.version = self._nvml.driver_version()
        except DriverError:
            self._nvml.shutdown()
            raise

    def close(self) -> None:
        """Ends the session, if one is open: the driver can be unloaded. Calls are refused until `reopen`.

        Raises DriverError TIMEOUT, with the session as it was, where a call under way does not come back.
        """
        self._nvml.shutdown()

    def close_at_exit(self) -> None:
        """The same where the process ends: waits for no call."""
        self._nvml.shutdown_at_exit()

    # What is there

    def observe(self) -> Observation:
        """Every GPU with its instances; a GPU that cannot be read does not hide the others."""
        gpus: list[ObservedGpu] = []
        failed: dict[int, DriverError] = {}
        for index in range(self._gpus.count()):
            try:
                gpus.append(self._observe(self._gpus.at(index)))
            except DriverError as error:
                failed[index] = error
        return Observation(gpus=tuple(gpus), failed=failed)

    def count(self) -> int:
        """GPUs that the driver knows, those that do not answer included."""
        return self._gpus.count()

    def observe_at(self, index: int) -> ObservedGpu:
        """The GPU with this index, with its instances."""
        return self._observe(self._gpus.at(index))

    def uuids(self) -> dict[int, GpuUuid]:
        """The GPUs that answer, by index; nothing else is read of them."""
        found = {}
        for index in range(self._gpus.count()):
            try:
                found[index] = self._gpus.at(index).uuid
            except DriverError:
                continue  # `observe` tells why
        return found

    def observe_gpu(self, gpu: GpuUuid, *, afresh: bool = False) -> ObservedGpu:
        """One GPU with its instances; `afresh` also asks again for the profiles by which the driver lists them."""
        known = self._gpus.find(gpu)
        if afresh:
            self._gpus.forget_layout(known)
        return self._observe(known)

    def standing(self, gpu: GpuUuid) -> dict[int, Placement]:
        """Where GPU instances stand now, by their ids: a light look that walks no MIG devices."""
        known = self._gpus.find(gpu)
        layout = self._gpus.layout(known)
        return {} if layout is None else self._instances.standing(known, layout)

    def layout(self, gpu: GpuUuid) -> Layout | None:
        """What the driver says the GPU can be cut into; None where it does not say."""
        return self._gpus.layout(self._gpus.find(gpu))

    def _observe(self, known: KnownGpu) -> ObservedGpu:
        for _ in range(_READINGS - 1):
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
            # Not a GPU without instances: nothing would be known of those that are there.
            detail = "the driver lists no profiles though MIG mode is on"
            raise DriverError(
                DriverErrorKind.UNKNOWN, "nvmlDeviceGetGpuInstanceProfileInfo", detail=detail, gpu_index=known.index
            )
        instances: tuple[ObservedInstance, ...] = ()
        pids: tuple[int, ...] | None = ()
        if mode.current:
            instances = () if layout is None else self._instances.observe_all(known, layout)
        else:
            pids = _unless_untold(lambda: tuple(each.pid for each in self._instances.processes(known, None)))
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

    # Who uses it

    def processes(self, gpu: GpuUuid, gpu_instance_id: int | None = None) -> tuple[ProcessUsage, ...]:
        """The processes on one instance, or on a GPU without MIG mode."""
        return self._instances.processes(self._gpus.find(gpu), gpu_instance_id)

    def verify(
        self, gpu: GpuUuid, gpu_instance_id: int, compute_instance_id: int, uuid: str
    ) -> tuple[ProcessUsage, ...]:
        """The compute processes on an instance that is known; NOT_FOUND where it is gone or another has its UUID.

        Four calls whatever else is on the GPU, so it can stand before every reuse.
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

    def usage(self, gpu: GpuUuid, gpu_instance_id: int | None = None) -> InstanceUsage:
        """Memory and processes of one instance, or of a GPU without MIG mode; what the driver does not tell is None."""
        known = self._gpus.find(gpu)
        utilization = None
        if gpu_instance_id is None:
            memory = _unless_untold(lambda: self._nvml.memory(known.handle, known.index))
            utilization = _unless_untold(lambda: self._nvml.utilization_percent(known.handle, known.index))
        else:
            devices = self._instances.live_devices(known, gpu_instance_id)
            if not devices:
                return InstanceUsage(memory_used_mib=None, memory_total_mib=None)
            # The compute instances of one GPU instance share its memory: the first tells of all.
            memory = _unless_untold(lambda: self._instances.memory(known, devices[0]))
        processes = _unless_untold(lambda: self._instances.processes(known, gpu_instance_id))
        return InstanceUsage(
            memory_used_mib=None if memory is None else memory.used // _MIB,
            memory_total_mib=None if memory is None else memory.total // _MIB,
            utilization_percent=utilization,
            processes=None if processes is None else tuple(process.pid for process in processes),
        )

    # Making and removing

    def create(self, slot: Slot) -> ObservedInstance:
        """A GPU instance exactly in this slot with the one compute instance that fills it, read back from the driver.

        If anything fails after the GPU instance is there, it is removed again here. The DriverError tells where
        something may be left.
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
        """Removes an instance with its compute instances and reads back that it is gone.

        One that is gone already, or half, is no error, so an interrupted call can be made again. Raises DriverError:
        IN_USE while a process is on it or holds it; NOT_FOUND where the id belongs to another instance now, which is
        left alone; READ_BACK where the driver answers success and goes on listing it.
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
        if self._instances.find(known, gpu_instance_id) is not None:
            raise _read_back(_DESTROY, known, f"{slot} is still listed")
        self._refuse_listed(known, slot, gpu_instance_id)

    def _refuse_listed(self, known: KnownGpu, slot: Slot, gpu_instance_id: int) -> None:
        """What is not found by its id must not be in the driver's list either: what is taken for gone is forgotten."""
        if self.standing(known.uuid).get(gpu_instance_id) == slot.placement:
            raise _read_back(_DESTROY, known, f"{slot} is not found by its id, and is still listed")

    def set_mig_mode(self, gpu: GpuUuid, *, on: bool) -> ModeChange:
        """Asks for MIG mode on or off; the activation status and the mode read back afterwards tell how it went."""
        known = self._gpus.find(gpu)
        problem = self._nvml.set_mig_mode(known.handle, known.index, on=on)
        self._gpus.forget(known)  # it may have reset the GPU
        mode = self._gpus.mode(self._gpus.find(gpu))
        if problem is None and mode.current is not on:
            problem = DriverErrorKind.RESET_REQUIRED
        return ModeChange(mode=mode, problem=problem)

    # Listening

    def listen(self) -> ChangeListener | None:
        """Hears of changes of the MIG configuration by anybody; None where the driver does not tell."""
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
                continue  # this GPU does not tell; the slow re-read remains
        if registered:
            return ChangeListener(self._nvml, events)
        self._nvml.free_event_set(events)
        return None


class ChangeListener:
    """Waits for changes of the MIG configuration. One thread may wait."""

    def __init__(self, nvml: Nvml, events: EventSetHandle) -> None:
        self._nvml = nvml
        self._events = events

    def wait(self, seconds: float) -> bool:
        """Whether something changed in the time. May raise DriverError."""
        return self._nvml.wait_for_event(self._events, int(seconds * 1000))

    def close(self) -> None:
        """Stops listening."""
        self._nvml.free_event_set(self._events)


_Answer = TypeVar("_Answer")


def _unless_untold(call: Callable[[], _Answer]) -> _Answer | None:
    """The answer; None where the driver does not tell this, or not to us."""
    try:
        return call()
    except DriverError as error:
        if error.kind in {DriverErrorKind.NOT_SUPPORTED, DriverErrorKind.NO_PERMISSION}:
            return None
        raise


def _read_back(call: str, known: KnownGpu, detail: str) -> DriverError:
    return DriverError(DriverErrorKind.READ_BACK, call, detail=detail, gpu_index=known.index)

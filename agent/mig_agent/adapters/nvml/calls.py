"""pynvml behind plain Python values: the only module that imports it.

Every call goes through `_call`, which turns NVML's errors into DriverError and reports the duration to a callback. C's
buffers and structures are made and read here; handles leave this module as opaque objects. pynvml declares no argument
types, so a structure passed by value would be accepted in silence: always `byref`.
"""

from __future__ import annotations

import _ctypes
import contextlib
import os
import time
from collections.abc import Callable, Sequence
from ctypes import byref, c_uint
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NewType

import pynvml

from mig_agent.adapters.failpoints import FAILPOINTS
from mig_agent.adapters.nvml.session import Session
from mig_agent.core.errors import DriverError, DriverErrorKind
from mig_agent.core.model import Placement
from mig_agent.core.texts import visible


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileAnswer:
    """A GPU instance profile as NVML reports it; memory in MiB."""

    id: int
    name: str
    """NVML's own string; empty if the driver reports none."""
    slices: int
    memory_mib: int
    multiprocessors: int
    copy_engines: int
    decoders: int
    encoders: int
    jpeg: int
    ofa: int


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceAnswer:
    """A GPU instance as NVML reports it."""

    id: int
    profile_id: int
    placement: Placement


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryAnswer:
    """Memory of a device in bytes."""

    total: int
    used: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryLimitsAnswer:
    """The limits of a cgroup on one GPU, in bytes."""

    soft: int
    """The memory that it is guaranteed."""
    hard: int
    """The most that its processes get together; NO_MEMORY_LIMIT: no limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessAnswer:
    """A process with a context on a device; `used` is bytes, or None if the driver does not report it."""

    pid: int
    used: int | None


GpuHandle = NewType("GpuHandle", object)
MigHandle = NewType("MigHandle", object)
"""An index on its GPU, which may later denote another instance: never kept across a change."""
GpuInstanceHandle = NewType("GpuInstanceHandle", object)
ComputeInstanceHandle = NewType("ComputeInstanceHandle", object)
EventSetHandle = NewType("EventSetHandle", object)


@dataclass(frozen=True, slots=True, eq=False)
class CounterSample:
    """The performance counters of a GPU instance at one moment, in a buffer of the driver's library."""

    handle: object


OnCall = Callable[[str, float, DriverErrorKind | None], None]
"""Called after every call with its NVML name, its duration in seconds, and the kind of its failure or None."""

GPU_PROFILE_ENUMS = range(pynvml.NVML_GPU_INSTANCE_PROFILE_COUNT)
COMPUTE_PROFILE_ENUMS = range(pynvml.NVML_COMPUTE_INSTANCE_PROFILE_COUNT)
FULL_COMPUTE_PROFILE_ENUM = MappingProxyType(
    {
        1: pynvml.NVML_COMPUTE_INSTANCE_PROFILE_1_SLICE,
        2: pynvml.NVML_COMPUTE_INSTANCE_PROFILE_2_SLICE,
        3: pynvml.NVML_COMPUTE_INSTANCE_PROFILE_3_SLICE,
        4: pynvml.NVML_COMPUTE_INSTANCE_PROFILE_4_SLICE,
        6: pynvml.NVML_COMPUTE_INSTANCE_PROFILE_6_SLICE,
        7: pynvml.NVML_COMPUTE_INSTANCE_PROFILE_7_SLICE,
        8: pynvml.NVML_COMPUTE_INSTANCE_PROFILE_8_SLICE,
    }
)
"""The compute-instance profile that fills a GPU instance, by the instance's compute slices.

Chosen by enum and never by "the same number of slices": 1_SLICE_REV1 and 7_SLICE_NVL have the same number and make
creation fail where the GPU lacks them.
"""

_KINDS = MappingProxyType(
    {
        pynvml.NVML_ERROR_UNINITIALIZED: DriverErrorKind.LIBRARY,
        pynvml.NVML_ERROR_INVALID_ARGUMENT: DriverErrorKind.INVALID_ARGUMENT,
        pynvml.NVML_ERROR_NOT_SUPPORTED: DriverErrorKind.NOT_SUPPORTED,
        pynvml.NVML_ERROR_NO_PERMISSION: DriverErrorKind.NO_PERMISSION,
        pynvml.NVML_ERROR_NOT_FOUND: DriverErrorKind.NOT_FOUND,
        pynvml.NVML_ERROR_DRIVER_NOT_LOADED: DriverErrorKind.LIBRARY,
        pynvml.NVML_ERROR_TIMEOUT: DriverErrorKind.TIMEOUT,
        pynvml.NVML_ERROR_LIBRARY_NOT_FOUND: DriverErrorKind.LIBRARY,
        pynvml.NVML_ERROR_FUNCTION_NOT_FOUND: DriverErrorKind.NOT_SUPPORTED,
        pynvml.NVML_ERROR_GPU_IS_LOST: DriverErrorKind.GPU_LOST,
        pynvml.NVML_ERROR_RESET_REQUIRED: DriverErrorKind.RESET_REQUIRED,
        pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH: DriverErrorKind.OUTDATED,
        pynvml.NVML_ERROR_IN_USE: DriverErrorKind.IN_USE,
        pynvml.NVML_ERROR_INSUFFICIENT_RESOURCES: DriverErrorKind.INSUFFICIENT_RESOURCES,
        # A structure newer than the driver.
        pynvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH: DriverErrorKind.NOT_SUPPORTED,
    }
)

CHANGING = frozenset(
    {
        "nvmlDeviceCreateGpuInstanceWithPlacement",
        "nvmlGpuInstanceDestroy",
        "nvmlGpuInstanceCreateComputeInstance",
        "nvmlComputeInstanceDestroy",
        "nvmlDeviceSetMigMode",
        "nvmlDeviceSetMemoryLimits_v1",
    }
)
"""Calls that change the hardware: before and after each is a failpoint (`adapters.failpoints`)."""

NO_MEMORY_LIMIT = int(pynvml.NVML_DEVICE_MEMORY_LIMIT_MAX)
"""The hard limit, in bytes, of a cgroup without one."""

SM_UTIL = pynvml.NVML_GPM_METRIC_SM_UTIL
TENSOR_UTIL = pynvml.NVML_GPM_METRIC_ANY_TENSOR_UTIL
MEMORY_BANDWIDTH_UTIL = pynvml.NVML_GPM_METRIC_DRAM_BW_UTIL

_MIN_BUFFER = 16
"""Smallest length, in entries, of a buffer whose length NVML is not given; no GPU has more instances."""


class Nvml:
    """NVML's calls, in sessions that `open` begins and `shutdown` ends. Blocking; thread-safe.

    All methods raise DriverError; of kind LIBRARY while no session is open.
    """

    def __init__(self, library: object | None = None, *, on_call: OnCall | None = None) -> None:
        """`library` replaces the driver's NVML library; None: the driver's, loaded again for each session."""
        self._on_call = on_call
        self._library = library
        self._session = Session()
        self._samples: set[CounterSample] = set()
        """The samples of this session that are not freed."""

    def open(self) -> None:
        """Begin a session; do nothing if one is open."""
        if self._session.is_open:
            return
        pynvml.nvmlLib = self._library
        # Function pointers outlive a change of library.
        pynvml._nvmlGetFunctionPointer_cache.clear()  # noqa: SLF001 -- pynvml has no public way
        try:
            self._invoke("nvmlInitWithFlags", (0,), None)
        except DriverError:
            self._unload()
            raise
        self._session.is_open = True

    def shutdown(self) -> None:
        """End the session, if one is open, and release everything of the driver.

        Raises DriverError TIMEOUT if calls in flight do not return in time.
        """
        if not self._session.close():
            return
        while self._samples:
            with contextlib.suppress(DriverError):
                self._free(self._samples.pop())
        try:
            self._invoke("nvmlShutdown", (), None)
        except DriverError:
            self._session.is_open = True
            raise
        self._unload()

    def shutdown_at_exit(self) -> None:
        """End the session as the process exits: wait for no call, and leave the library loaded."""
        if self._session.is_open:
            self._invoke("nvmlShutdown", (), None)

    def _unload(self) -> None:
        """Unload the driver's library, so that the next session loads the one installed by then.

        A loaded library stays that of the old driver, which a kernel module of another version refuses.
        """
        library, pynvml.nvmlLib = pynvml.nvmlLib, self._library
        if self._library is None and library is not None:
            pynvml._nvmlGetFunctionPointer_cache.clear()  # noqa: SLF001 -- pointers into what is unloaded now
            _ctypes.dlclose(library._handle)  # noqa: SLF001 -- ctypes has no public way

    def _call(self, name: str, *arguments: object, gpu: int | None = None) -> Any:  # noqa: ANN401 -- pynvml is untyped
        with self._session.held(name, gpu):
            return self._invoke(name, arguments, gpu)

    def _invoke(self, name: str, arguments: tuple[object, ...], gpu: int | None) -> Any:  # noqa: ANN401 -- pynvml is untyped
        start = time.perf_counter()
        kind: DriverErrorKind | None = None
        try:
            if name not in CHANGING:
                return getattr(pynvml, name)(*arguments)
            with FAILPOINTS.around(name):
                return getattr(pynvml, name)(*arguments)
        except pynvml.NVMLError as error:
            kind = _KINDS.get(error.value, DriverErrorKind.UNKNOWN)
            raise DriverError(kind, name, detail=str(error), gpu_index=gpu) from error
        except pynvml.NVMLLibraryMismatchError as error:
            kind = DriverErrorKind.NOT_SUPPORTED
            raise DriverError(kind, name, detail="the driver is too old for this call", gpu_index=gpu) from error
        finally:
            if self._on_call is not None:
                self._on_call(name, time.perf_counter() - start, kind)

    # Machine and GPUs

    def driver_version(self) -> str:
        """Return the driver's version: `580.95.05`."""
        return _text(self._call("nvmlSystemGetDriverVersion"))

    def library_version(self) -> str:
        """Return the version of the NVML library: `13.580.95.05`."""
        return _text(self._call("nvmlSystemGetNVMLVersion"))

    def gpu_count(self) -> int:
        """Return the number of GPUs that the driver knows, lost ones included."""
        return int(self._call("nvmlDeviceGetCount"))

    def gpu(self, index: int) -> GpuHandle:
        """Return the handle of a GPU; it stays valid across changes of its MIG configuration."""
        return GpuHandle(self._call("nvmlDeviceGetHandleByIndex", index, gpu=index))

    def name(self, gpu: GpuHandle, index: int) -> str:
        """Return the product name."""
        return _text(self._call("nvmlDeviceGetName", gpu, gpu=index))

    def uuid(self, device: GpuHandle | MigHandle, index: int) -> str:
        """Return `GPU-...` or `MIG-...`."""
        return _text(self._call("nvmlDeviceGetUUID", device, gpu=index))

    def minor(self, gpu: GpuHandle, index: int) -> int:
        """Return the N of /dev/nvidiaN, which may change with the MIG mode."""
        return int(self._call("nvmlDeviceGetMinorNumber", gpu, gpu=index))

    def memory(self, device: GpuHandle | MigHandle, index: int) -> MemoryAnswer:
        """Return total and used memory."""
        answer = self._call("nvmlDeviceGetMemoryInfo", device, gpu=index)
        return MemoryAnswer(total=int(answer.total), used=int(answer.used))

    def reserved_bytes(self, gpu: GpuHandle, index: int) -> int:
        """Return the memory that the driver keeps for itself."""
        return int(self._call("nvmlDeviceGetMemoryInfo", gpu, pynvml.nvmlMemory_v2, gpu=index).reserved)

    def compute_mode(self, gpu: GpuHandle, index: int) -> int:
        """Return the compute mode, one of the NVML_COMPUTEMODE_ constants."""
        return int(self._call("nvmlDeviceGetComputeMode", gpu, gpu=index))

    def utilization_percent(self, gpu: GpuHandle, index: int) -> int:
        """Return the utilization of the multiprocessors in percent. Raises NOT_SUPPORTED in MIG mode."""
        return int(self._call("nvmlDeviceGetUtilizationRates", gpu, gpu=index).gpu)

    def compute_processes(self, device: GpuHandle | MigHandle, index: int) -> tuple[ProcessAnswer, ...]:
        """Return the processes with a compute context on a device."""
        return self._processes("nvmlDeviceGetComputeRunningProcesses", device, index)

    def _processes(self, name: str, device: GpuHandle | MigHandle, index: int) -> tuple[ProcessAnswer, ...]:
        answers = self._call(name, device, gpu=index)
        return tuple(
            ProcessAnswer(pid=int(each.pid), used=None if each.usedGpuMemory is None else int(each.usedGpuMemory))
            for each in answers
        )

    def processes(self, device: GpuHandle | MigHandle, index: int) -> tuple[ProcessAnswer, ...]:
        """Return the processes with a compute or graphics context on a device, or running there under MPS."""
        found = {answer.pid: answer for answer in self.compute_processes(device, index)}
        for name in ("nvmlDeviceGetGraphicsRunningProcesses", "nvmlDeviceGetMPSComputeRunningProcesses"):
            try:
                answers = self._processes(name, device, index)
            except DriverError as error:
                if error.kind is not DriverErrorKind.NOT_SUPPORTED:
                    raise
                continue
            for answer in answers:
                found.setdefault(answer.pid, answer)
        return tuple(found[pid] for pid in sorted(found))

    # Memory limits of cgroups, from driver r615 on

    def memory_limits(self, gpu: GpuHandle, cgroup: str, index: int) -> MemoryLimitsAnswer:
        """Return the limits of a cgroup, named by the full path of its folder.

        Raises NOT_FOUND if it has none, and NOT_SUPPORTED in MIG mode and by drivers before r615.
        """
        answer = pynvml.c_nvmlGetMemoryLimits_v1_t(nameSpace=os.fsencode(cgroup))
        self._call("nvmlDeviceGetMemoryLimits_v1", gpu, answer, gpu=index)
        return MemoryLimitsAnswer(soft=int(answer.softLimit), hard=int(answer.hardLimit))

    def set_memory_limits(self, gpu: GpuHandle, cgroup: str, *, soft: int, hard: int, index: int) -> None:
        """Set the limits of a cgroup, in bytes; 0 and NO_MEMORY_LIMIT remove them."""
        limits = pynvml.c_nvmlSetMemoryLimits_v1_t(nameSpace=os.fsencode(cgroup), softLimit=soft, hardLimit=hard)
        self._call("nvmlDeviceSetMemoryLimits_v1", gpu, limits, gpu=index)

    # MIG mode

    def mig_mode(self, gpu: GpuHandle, index: int) -> tuple[bool, bool]:
        """Return the current and the pending MIG mode. Raises NOT_SUPPORTED if the GPU has no MIG mode."""
        current, pending = self._call("nvmlDeviceGetMigMode", gpu, gpu=index)
        return bool(current), bool(pending)

    def set_mig_mode(self, gpu: GpuHandle, index: int, *, on: bool) -> DriverErrorKind | None:
        """Request a MIG mode and return what keeps it from taking effect, or None.

        pynvml returns that activation status and does not raise it.
        """
        status = int(self._call("nvmlDeviceSetMigMode", gpu, int(on), gpu=index))
        return None if status == pynvml.NVML_SUCCESS else _KINDS.get(status, DriverErrorKind.UNKNOWN)

    # Profiles

    def profile(self, gpu: GpuHandle, enum: int, index: int) -> ProfileAnswer:
        """Return a profile by its enum (not id).

        Raises NOT_SUPPORTED if the GPU lacks it, INVALID_ARGUMENT past the last enum.
        """
        try:
            answer = self._call("nvmlDeviceGetGpuInstanceProfileInfo", gpu, enum, gpu=index)
            name = _text(answer.name).removeprefix("MIG ")
        except DriverError as error:
            # An old driver has no second version; one that has it answers the same again for an absent profile.
            if error.kind not in {DriverErrorKind.NOT_SUPPORTED, DriverErrorKind.INVALID_ARGUMENT}:
                raise
            answer = self._call("nvmlDeviceGetGpuInstanceProfileInfo", gpu, enum, 1, gpu=index)
            name = ""
        return ProfileAnswer(
            id=int(answer.id),
            name=name,
            slices=int(answer.sliceCount),
            memory_mib=int(answer.memorySizeMB),
            multiprocessors=int(answer.multiprocessorCount),
            copy_engines=int(answer.copyEngineCount),
            decoders=int(answer.decoderCount),
            encoders=int(answer.encoderCount),
            jpeg=int(answer.jpegCount),
            ofa=int(answer.ofaCount),
        )

    def placements(self, gpu: GpuHandle, profile_id: int, index: int) -> tuple[Placement, ...]:
        """Return all placements of a profile, whatever is occupied."""
        count = c_uint()
        self._call("nvmlDeviceGetGpuInstancePossiblePlacements", gpu, profile_id, None, byref(count), gpu=index)
        # NVML does not get the buffer's length: it is as many entries as NVML just counted, and never fewer than 16.
        buffer = (pynvml.c_nvmlGpuInstancePlacement_t * max(count.value, _MIN_BUFFER))()
        self._call("nvmlDeviceGetGpuInstancePossiblePlacements", gpu, profile_id, buffer, byref(count), gpu=index)
        return tuple(sorted(Placement(int(each.start), int(each.size)) for each in buffer[: count.value]))

    # GPU instances

    def create_gpu_instance(
        self, gpu: GpuHandle, profile_id: int, placement: Placement, index: int
    ) -> GpuInstanceHandle:
        """Create a GPU instance of this profile at exactly this placement."""
        where = pynvml.c_nvmlGpuInstancePlacement_t(placement.start, placement.size)
        name = "nvmlDeviceCreateGpuInstanceWithPlacement"
        return GpuInstanceHandle(self._call(name, gpu, profile_id, byref(where), gpu=index))

    def destroy_gpu_instance(self, instance: GpuInstanceHandle, index: int) -> None:
        """Destroy a GPU instance. Raises IN_USE while compute instances or processes remain."""
        self._call("nvmlGpuInstanceDestroy", instance, gpu=index)

    def gpu_instance(self, gpu: GpuHandle, gpu_instance_id: int, index: int) -> GpuInstanceHandle:
        """Return the GPU instance with this id. Raises NOT_FOUND if there is none."""
        return GpuInstanceHandle(self._call("nvmlDeviceGetGpuInstanceById", gpu, gpu_instance_id, gpu=index))

    def gpu_instances(self, gpu: GpuHandle, profile_id: int, most: int, index: int) -> tuple[GpuInstanceHandle, ...]:
        """Return all GPU instances of one profile.

        `most` is the number of the profile's placements (NVML's instanceCount is wrong on A30).
        """
        count = c_uint()
        buffer = (pynvml.c_nvmlGpuInstance_t * max(most, _MIN_BUFFER))()
        self._call("nvmlDeviceGetGpuInstances", gpu, profile_id, buffer, byref(count), gpu=index)
        return tuple(GpuInstanceHandle(each) for each in buffer[: count.value])

    def gpu_instance_info(self, instance: GpuInstanceHandle, index: int) -> InstanceAnswer:
        """Return id, profile and placement of a GPU instance.

        NVML reports the placement nowhere else, and which ids belong to which placement differs between boards.
        """
        answer = self._call("nvmlGpuInstanceGetInfo", instance, gpu=index)
        placement = Placement(int(answer.placement.start), int(answer.placement.size))
        return InstanceAnswer(id=int(answer.id), profile_id=int(answer.profileId), placement=placement)

    # Compute instances

    def compute_profile_id(self, instance: GpuInstanceHandle, enum: int, index: int) -> int:
        """Return the id of a compute-instance profile by its enum. Raises NOT_SUPPORTED if this instance lacks it."""
        shared = pynvml.NVML_COMPUTE_INSTANCE_ENGINE_PROFILE_SHARED
        name = "nvmlGpuInstanceGetComputeInstanceProfileInfo"
        # Version 1 has all that is needed and every driver knows it.
        return int(self._call(name, instance, enum, shared, 1, gpu=index).id)

    def create_compute_instance(
        self, instance: GpuInstanceHandle, profile_id: int, index: int
    ) -> ComputeInstanceHandle:
        """Create a compute instance; the full profile fits in only one place."""
        name = "nvmlGpuInstanceCreateComputeInstance"
        return ComputeInstanceHandle(self._call(name, instance, profile_id, gpu=index))

    def destroy_compute_instance(self, compute: ComputeInstanceHandle, index: int) -> None:
        """Destroy a compute instance. Raises IN_USE while a process runs on it or holds it."""
        self._call("nvmlComputeInstanceDestroy", compute, gpu=index)

    def compute_instances(
        self, instance: GpuInstanceHandle, profile_id: int, index: int
    ) -> tuple[ComputeInstanceHandle, ...]:
        """Return all compute instances of one profile."""
        count = c_uint()
        buffer = (pynvml.c_nvmlComputeInstance_t * _MIN_BUFFER)()
        self._call("nvmlGpuInstanceGetComputeInstances", instance, profile_id, buffer, byref(count), gpu=index)
        return tuple(ComputeInstanceHandle(each) for each in buffer[: count.value])

    def compute_instance_id(self, compute: ComputeInstanceHandle, index: int) -> int:
        """Return the id of a compute instance, unique within its GPU instance."""
        return int(self._call("nvmlComputeInstanceGetInfo", compute, gpu=index).id)

    # MIG devices

    def mig_devices(self, gpu: GpuHandle, index: int) -> tuple[MigHandle, ...]:
        """Return all MIG devices of a GPU; their indices have gaps."""
        most = int(self._call("nvmlDeviceGetMaxMigDeviceCount", gpu, gpu=index))
        found = []
        for number in range(most):
            try:
                found.append(MigHandle(self._call("nvmlDeviceGetMigDeviceHandleByIndex", gpu, number, gpu=index)))
            except DriverError as error:
                # A gap; which of the two codes it answers depends on the driver.
                if error.kind not in {DriverErrorKind.NOT_FOUND, DriverErrorKind.INVALID_ARGUMENT}:
                    raise
        return tuple(found)

    def mig_device(self, uuid: str, index: int) -> MigHandle:
        """Return the MIG device with this UUID. Raises NOT_FOUND if there is none."""
        return MigHandle(self._call("nvmlDeviceGetHandleByUUID", uuid, gpu=index))

    def mig_device_ids(self, device: MigHandle, index: int) -> tuple[int, int]:
        """Return the GPU-instance id and the compute-instance id of a MIG device."""
        gpu_instance = int(self._call("nvmlDeviceGetGpuInstanceId", device, gpu=index))
        return gpu_instance, int(self._call("nvmlDeviceGetComputeInstanceId", device, gpu=index))

    # Performance counters

    def has_counters(self, gpu: GpuHandle, index: int) -> bool:
        """Return whether the GPU has performance counters that NVML reads (GPM): Hopper and later."""
        return bool(self._call("nvmlGpmQueryDeviceSupport", gpu, gpu=index).isSupportedDevice)

    def sample_counters(self, gpu: GpuHandle, gpu_instance_id: int, index: int) -> CounterSample:
        """Return a sample of the counters of a GPU instance. Free it; the end of the session frees what is left."""
        # The session is held throughout, so that it does not end, and its library go, between these calls.
        with self._session.held("nvmlGpmSampleAlloc", index):
            sample = CounterSample(self._invoke("nvmlGpmSampleAlloc", (), index))
            self._samples.add(sample)
            try:
                self._invoke("nvmlGpmMigSampleGet", (gpu, gpu_instance_id, sample.handle), index)
            except DriverError:
                self._samples.discard(sample)
                with contextlib.suppress(DriverError):
                    self._free(sample)
                raise
        return sample

    def counter_metrics(
        self, first: CounterSample, second: CounterSample, metrics: Sequence[int], index: int
    ) -> tuple[float | None, ...]:
        """Return metrics between two samples of one instance, in percent; None for what the driver does not report.

        Raises DriverError of kind LIBRARY for a sample that is freed or of an earlier session.
        """
        query = pynvml.c_nvmlGpmMetricsGet_t()
        query.version, query.numMetrics = pynvml.NVML_GPM_METRICS_GET_VERSION, len(metrics)
        for number, metric in enumerate(metrics):
            query.metrics[number].metricId = metric
        with self._session.held("nvmlGpmMetricsGet", index):
            if not {first, second} <= self._samples:
                detail = "a sample is freed, or of an earlier session"
                raise DriverError(DriverErrorKind.LIBRARY, "nvmlGpmMetricsGet", detail=detail, gpu_index=index)
            query.sample1, query.sample2 = first.handle, second.handle
            self._invoke("nvmlGpmMetricsGet", (query,), index)
        return tuple(
            float(each.value) if each.nvmlReturn == pynvml.NVML_SUCCESS else None
            for each in query.metrics[: len(metrics)]
        )

    def free_sample(self, sample: CounterSample) -> None:
        """Free a sample; harmless for one of an earlier session, which the end of that session has freed."""
        with contextlib.suppress(DriverError), self._session.held("nvmlGpmSampleFree", None):
            if sample in self._samples:
                self._samples.discard(sample)
                self._free(sample)

    def _free(self, sample: CounterSample) -> None:
        self._invoke("nvmlGpmSampleFree", (sample.handle,), None)

    # Events

    def event_set(self) -> EventSetHandle:
        """Return a new event set, which the caller must free."""
        return EventSetHandle(self._call("nvmlEventSetCreate"))

    def register_mig_changes(self, gpu: GpuHandle, events: EventSetHandle, index: int) -> None:
        """Add changes of a GPU's MIG configuration to the set. Raises NOT_SUPPORTED if the driver reports none."""
        self._call("nvmlDeviceRegisterEvents", gpu, pynvml.nvmlEventMigConfigChange, events, gpu=index)

    def wait_for_event(self, events: EventSetHandle, milliseconds: int) -> bool:
        """Wait for an event and return True if one came within the time."""
        try:
            self._call("nvmlEventSetWait_v2", events, milliseconds)
        except DriverError as error:
            if error.kind is DriverErrorKind.TIMEOUT:
                return False
            raise
        return True

    def free_event_set(self, events: EventSetHandle) -> None:
        """Free an event set."""
        self._call("nvmlEventSetFree", events)


def _text(value: str | bytes) -> str:
    return visible(value.decode(errors="replace") if isinstance(value, bytes) else str(value))

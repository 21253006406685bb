"""Reads the instances of one GPU: profiles, placements, MIG devices and processes."""

from __future__ import annotations

from collections.abc import Sequence

from mig_agent.adapters.nvml.calls import (
    COMPUTE_PROFILE_ENUMS,
    ComputeInstanceHandle,
    GpuHandle,
    GpuInstanceHandle,
    MemoryAnswer,
    MigHandle,
    Nvml,
)
from mig_agent.adapters.nvml.inventory import KnownGpu
from mig_agent.core.errors import DriverError, DriverErrorKind
from mig_agent.core.model import Layout, Placement
from mig_agent.core.observation import ObservedInstance, ProcessUsage

_MIB = 1 << 20

GONE = frozenset({DriverErrorKind.NOT_FOUND, DriverErrorKind.INVALID_ARGUMENT})
"""Error kinds that the driver returns for an instance that no longer exists."""
ABSENT = frozenset({DriverErrorKind.NOT_SUPPORTED, DriverErrorKind.INVALID_ARGUMENT})
"""Error kinds that the driver returns for a profile that this GPU or this driver does not have."""

MigDevices = dict[tuple[int, int], tuple[MigHandle, ...]]
"""MIG devices by GPU-instance and compute-instance id.

Mostly one each. Some drivers go on listing deleted MIG devices, so a live device may have the stale handle of its
predecessor beside it.
"""


class InstanceReader:
    """Reads instances from the driver; changes nothing and keeps no handles. Every method may raise DriverError."""

    def __init__(self, nvml: Nvml) -> None:
        self._nvml = nvml

    def observe_all(self, known: KnownGpu, layout: Layout) -> tuple[ObservedInstance, ...]:
        """Return all instances of a GPU in MIG mode, sorted by start."""
        devices = self.mig_devices(known)
        found = [
            self.observe(known, handle, devices)
            for profile in layout.profiles
            for handle in self._nvml.gpu_instances(known.handle, profile.id, len(profile.placements), known.index)
        ]
        return tuple(sorted(found, key=lambda instance: instance.placement))

    def placements(self, known: KnownGpu, layout: Layout) -> dict[int, Placement]:
        """Return the placement of every GPU instance by its id."""
        infos = (
            self._nvml.gpu_instance_info(handle, known.index)
            for profile in layout.profiles
            for handle in self._nvml.gpu_instances(known.handle, profile.id, len(profile.placements), known.index)
        )
        return {info.id: info.placement for info in infos}

    def observe(
        self, known: KnownGpu, handle: GpuInstanceHandle, devices: MigDevices | None = None
    ) -> ObservedInstance:
        """Read one instance; pass `devices` if they are known already."""
        if devices is None:
            devices = self.mig_devices(known)
        info = self._nvml.gpu_instance_info(handle, known.index)
        compute_ids = tuple(sorted(self.compute_instances(known, handle)))
        live = [devices[info.id, each] for each in compute_ids if (info.id, each) in devices]
        pids = {process.pid for handles in live for process in self._processes_on_any(known, handles)}
        return ObservedInstance(
            gpu_instance_id=info.id,
            profile_id=info.profile_id,
            placement=info.placement,
            compute_instances=compute_ids,
            uuid=self._nvml.uuid(live[0][0], known.index) if live else "",
            processes=tuple(sorted(pids)),
        )

    def find(self, known: KnownGpu, gpu_instance_id: int) -> GpuInstanceHandle | None:
        """Return the GPU instance with this id; None if there is none."""
        try:
            return self._nvml.gpu_instance(known.handle, gpu_instance_id, known.index)
        except DriverError as error:
            if error.kind is DriverErrorKind.NOT_FOUND:
                return None
            raise

    def compute_instances(self, known: KnownGpu, handle: GpuInstanceHandle) -> dict[int, ComputeInstanceHandle]:
        """Return the compute instances of a GPU instance by id, of any creator and any profile."""
        found: dict[int, ComputeInstanceHandle] = {}
        absent: list[DriverError] = []
        for enum in COMPUTE_PROFILE_ENUMS:
            try:
                profile_id = self._nvml.compute_profile_id(handle, enum, known.index)
                handles = self._nvml.compute_instances(handle, profile_id, known.index)
            except DriverError as error:
                if error.kind not in ABSENT:
                    raise
                absent.append(error)
                continue
            for each in handles:
                found[self._nvml.compute_instance_id(each, known.index)] = each
        if len(absent) == len(COMPUTE_PROFILE_ENUMS):
            # Every instance has a profile that fills it, so the driver withholds the answer; that must not read as
            # "none".
            raise absent[0]
        return found

    def mig_devices(self, known: KnownGpu) -> MigDevices:
        """Return the MIG devices that the driver lists now."""
        found: MigDevices = {}
        for device in self._nvml.mig_devices(known.handle, known.index):
            try:
                ids = self._nvml.mig_device_ids(device, known.index)
            except DriverError as error:
                if error.kind in GONE:
                    continue  # removed between the two calls
                raise
            found[ids] = (*found.get(ids, ()), device)
        return found

    def live_devices(self, known: KnownGpu, gpu_instance_id: int) -> tuple[tuple[MigHandle, ...], ...]:
        """Return the handles of each MIG device of one instance, by compute instance; empty if the instance is gone."""
        handle = self.find(known, gpu_instance_id)
        if handle is None:
            return ()
        devices = self.mig_devices(known)
        compute_ids = sorted(self.compute_instances(known, handle))
        return tuple(devices[gpu_instance_id, each] for each in compute_ids if (gpu_instance_id, each) in devices)

    def processes(self, known: KnownGpu, gpu_instance_id: int | None) -> tuple[ProcessUsage, ...]:
        """Return the processes on one instance, or on the GPU itself if no id is given."""
        if gpu_instance_id is None:
            return self._processes_on(known, known.handle)
        found: dict[int, ProcessUsage] = {}
        for handles in self.live_devices(known, gpu_instance_id):
            found.update({process.pid: process for process in self._processes_on_any(known, handles)})
        return tuple(found[pid] for pid in sorted(found))

    def memory(self, known: KnownGpu, handles: Sequence[MigHandle]) -> MemoryAnswer:
        """Return the memory of a MIG device from the first of its handles that answers."""
        for handle in handles[:-1]:
            try:
                return self._nvml.memory(handle, known.index)
            except DriverError as error:
                if error.kind not in GONE:
                    raise
        return self._nvml.memory(handles[-1], known.index)

    def _processes_on_any(self, known: KnownGpu, handles: Sequence[MigHandle]) -> tuple[ProcessUsage, ...]:
        """Return the processes that the handles of a MIG device report. Raises DriverError if all are stale."""
        found: dict[int, ProcessUsage] = {}
        failed: list[DriverError] = []
        for handle in handles:
            try:
                found.update({process.pid: process for process in self._processes_on(known, handle)})
            except DriverError as error:
                if error.kind not in GONE:
                    raise
                failed.append(error)
        if len(failed) == len(handles):
            raise failed[0]
        return tuple(found.values())

    def _processes_on(self, known: KnownGpu, device: GpuHandle | MigHandle) -> tuple[ProcessUsage, ...]:
        return tuple(
            ProcessUsage(pid=each.pid, used_mib=None if each.used is None else each.used // _MIB)
            for each in self._nvml.processes(device, known.index)
        )

"""The devices that CUDA shows a process, and the processes on them."""

from __future__ import annotations

from dataclasses import dataclass

from mig_agent.simulator import memory
from mig_agent.simulator.state import Gpu, Machine, Process, mig_uuid, profile_of

_IDLE_MIG_MIB = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """A GPU without MIG mode, or a MIG device, as it is in one state of the machine."""

    uuid: str
    gpu: Gpu
    processes: list[Process]
    total_bytes: int

    @property
    def is_mig(self) -> bool:
        """True for a MIG device."""
        return self.uuid != self.gpu["uuid"]

    @property
    def free_bytes(self) -> int:
        """Memory that no process uses, in bytes."""
        if not self.is_mig:
            return memory.free_bytes(self.gpu)
        used = _IDLE_MIG_MIB + sum(each["used_mib"] or 0 for each in self.processes)
        return max(self.total_bytes - used * memory.MIB, 0)


def devices(machine: Machine) -> list[Device]:
    """Return all devices: the GPUs that are not in MIG mode, then the MIG devices. Lost GPUs have none."""
    found, partitioned = [], []
    for gpu in machine["gpus"]:
        if gpu["lost"]:
            continue
        if not gpu["mig_current"]:
            total = memory.total_bytes(gpu)
            found.append(Device(uuid=gpu["uuid"], gpu=gpu, processes=gpu["processes"], total_bytes=total))
            continue
        for instance in gpu["instances"]:
            total = profile_of(gpu, instance).memory_mib * memory.MIB
            for compute in instance["compute"]:
                uuid = mig_uuid(gpu, instance["id"], compute["id"])
                partitioned.append(Device(uuid=uuid, gpu=gpu, processes=compute["processes"], total_bytes=total))
    return found + partitioned


def visible(all_devices: list[Device], variable: str | None) -> list[Device]:
    """Return the devices that `CUDA_VISIBLE_DEVICES` leaves, up to the first entry that names none.

    Without the variable MIG devices are not visible, as on a machine that has other GPUs.
    """
    whole = [each for each in all_devices if not each.is_mig]
    if variable is None:
        return whole
    found: list[Device] = []
    for entry in variable.split(","):
        name = entry.strip()
        if name.isdigit():
            matching = whole[int(name) : int(name) + 1]
        else:
            matching = [each for each in all_devices if name and each.uuid.startswith(name)]
        if len(matching) != 1 or matching[0] in found:
            break
        found += matching
    return found

"""The library's functions about memory limits of cgroups, which drivers before r615 do not have."""

from __future__ import annotations

from ctypes import c_void_p

from mig_agent.simulator import handles, memory, structs
from mig_agent.simulator.cgroupfs import DMEM_FILES, CgroupFs, lineage
from mig_agent.simulator.codes import Code, Failure
from mig_agent.simulator.library import Library, symbol
from mig_agent.simulator.pointers import Address, at
from mig_agent.simulator.state import Gpu, Machine, has_dmem


@symbol("nvmlDeviceSetMemoryLimits_v1", c_void_p, c_void_p)
def set_memory_limits(library: Library, device: Address, limits: Address) -> None:
    with library.change("nvmlDeviceSetMemoryLimits") as machine:
        gpu, asked = _without_mig(machine, device), at(structs.SetMemoryLimits, limits)
        cgroup, dmem = _cgroup(library.cgroups, machine, asked.nameSpace), has_dmem(machine)
        memory.set_limits(gpu, cgroup, soft=asked.softLimit, hard=asked.hardLimit, dmem=dmem)
        if dmem:
            for each in lineage(cgroup):
                library.cgroups.show(each, _dmem_files(machine, each))


@symbol("nvmlDeviceGetMemoryLimits_v1", c_void_p, c_void_p)
def get_memory_limits(library: Library, device: Address, out: Address) -> None:
    library.forget_ended_processes()
    with library.change("nvmlDeviceGetMemoryLimits") as machine:
        gpu, answer = _without_mig(machine, device), at(structs.GetMemoryLimits, out)
        cgroup = _cgroup(library.cgroups, machine, answer.nameSpace)
        limit = memory.limit_of(gpu, cgroup)
        if limit is None:
            raise Failure(Code.NOT_FOUND)
        answer.softLimit, answer.hardLimit = limit["soft"], limit["hard"]
        answer.currentUsed = memory.charged_bytes(gpu, cgroup, dmem=has_dmem(machine))


def _without_mig(machine: Machine, device: Address) -> Gpu:
    gpu = handles.gpu(machine, device)
    if gpu["mig_current"]:
        raise Failure(Code.NOT_SUPPORTED)
    return gpu


def _cgroup(cgroups: CgroupFs, machine: Machine, name_space: bytes | None) -> str:
    """Return the cgroup of a folder that can have limits; forget the limits of removed ones."""
    if not name_space:
        raise Failure(Code.INVALID_ARGUMENT)
    for gpu in machine["gpus"]:
        memory.forget_removed(gpu, cgroups.exists)
    cgroups.settle(dmem=has_dmem(machine))
    cgroup = cgroups.name_of(name_space.decode())
    if has_dmem(machine) and not cgroups.can_limit_memory(cgroup):
        raise Failure(Code.OPERATING_SYSTEM)  # the kernel has made no dmem files there
    return cgroup


def _dmem_files(machine: Machine, cgroup: str) -> dict[str, dict[str, int]]:
    files: dict[str, dict[str, int]] = {name: {} for name in DMEM_FILES}
    for gpu in machine["gpus"]:
        limit = memory.limit_of(gpu, cgroup)
        files["dmem.min"][gpu["uuid"]] = gpu.get("guaranteed", {}).get(cgroup, 0)
        files["dmem.max"][gpu["uuid"]] = limit["hard"] if limit else structs.MEMORY_LIMIT_MAX
        files["dmem.current"][gpu["uuid"]] = memory.charged_bytes(gpu, cgroup, dmem=True)
    return files

"""The memory of a simulated GPU: what is used, and the limits of cgroups with the sums that the kernel keeps of them.

With the controller dmem a soft limit is added to the `dmem.min` of the cgroup and of all its ancestors, and a hard
limit holds for the whole subtree. Without it the driver keeps the accounts itself, of single cgroups.
"""

from __future__ import annotations

from collections.abc import Callable

from mig_agent.simulator.cgroupfs import lineage
from mig_agent.simulator.codes import Code, Failure
from mig_agent.simulator.state import Gpu, MemoryLimit, model_of
from mig_agent.simulator.structs import MEMORY_LIMIT_MAX

MIB = 1 << 20
RESERVED_MIB = 512
"""Memory that the driver keeps of each GPU."""
CONTEXT_MIB = 512
"""Memory that a CUDA context takes, which counts against its limits: 10 GiB were measured to leave 9,728 MiB."""
SERVER_MIB = 60
"""Memory that an MPS server takes on each GPU."""


def total_bytes(gpu: Gpu) -> int:
    """Return a GPU's memory."""
    return model_of(gpu).memory_mib * MIB


def free_bytes(gpu: Gpu) -> int:
    """Return what no process uses of a GPU without MIG mode."""
    used = sum(each["used_mib"] or 0 for each in gpu["processes"])
    return max(total_bytes(gpu) - (RESERVED_MIB + used) * MIB, 0)


def limit_of(gpu: Gpu, cgroup: str) -> MemoryLimit | None:
    """Return the limits of a cgroup; None if it has none."""
    return next((each for each in gpu.get("memory_limits", ()) if each["cgroup"] == cgroup), None)


def charged_bytes(gpu: Gpu, cgroup: str, *, dmem: bool) -> int:
    """Return the GPU memory of a cgroup's processes, with dmem also of those of its descendants."""

    def counts(process_cgroup: str) -> bool:
        return process_cgroup == cgroup or (dmem and cgroup in lineage(process_cgroup))

    return MIB * sum(each["used_mib"] or 0 for each in gpu["processes"] if counts(each.get("cgroup", "")))


def left_in_cgroup(gpu: Gpu, cgroup: str, *, dmem: bool) -> int | None:
    """Return how many bytes the hard limits still allow the processes of a cgroup; None if there is no limit."""
    left = None
    for each in lineage(cgroup) if dmem else (cgroup,):
        limit = limit_of(gpu, each)
        if limit is not None and limit["hard"] != MEMORY_LIMIT_MAX:
            here = max(limit["hard"] - charged_bytes(gpu, each, dmem=dmem), 0)
            left = here if left is None else min(left, here)
    return left


def set_limits(gpu: Gpu, cgroup: str, *, soft: int, hard: int, dmem: bool) -> None:
    """Set the limits of a cgroup in bytes; 0 and MEMORY_LIMIT_MAX remove them. Raises Failure."""
    total = total_bytes(gpu)
    if soft > hard or soft > total or (hard > total and hard != MEMORY_LIMIT_MAX):
        raise Failure(Code.INVALID_ARGUMENT)
    before = limit_of(gpu, cgroup)
    limits = [each for each in gpu.get("memory_limits", ()) if each["cgroup"] != cgroup]
    if (soft, hard) != (0, MEMORY_LIMIT_MAX):
        limits.append(MemoryLimit(cgroup=cgroup, soft=soft, hard=hard))
    gpu["memory_limits"] = limits
    if dmem:
        guaranteed = gpu.get("guaranteed", {})
        change = soft - (before["soft"] if before else 0)
        for each in lineage(cgroup):
            guaranteed[each] = guaranteed.get(each, 0) + change
        gpu["guaranteed"] = {each: number for each, number in guaranteed.items() if number}


def forget_removed(gpu: Gpu, exists: Callable[[str], bool]) -> None:
    """Forget cgroups that have been removed. Their soft limits remain in the sums of their ancestors, as with dmem."""
    gpu["memory_limits"] = [each for each in gpu.get("memory_limits", ()) if exists(each["cgroup"])]
    gpu["guaranteed"] = {each: number for each, number in gpu.get("guaranteed", {}).items() if exists(each)}


def leaked_guarantees(gpu: Gpu) -> dict[str, int]:
    """Return what the sums of cgroups hold for cgroups that are gone: their soft limit was not set to 0 before."""
    leaked = dict(gpu.get("guaranteed", {}))
    for limit in gpu.get("memory_limits", ()):
        for each in lineage(limit["cgroup"]):
            leaked[each] = leaked.get(each, 0) - limit["soft"]
    return {cgroup: number for cgroup, number in leaked.items() if number}

"""What the driver tells of a GPU at one reading: the input of recovery, made by the NVML adapter."""

from __future__ import annotations

from dataclasses import dataclass

from mig_agent.core.errors import DriverErrorKind
from mig_agent.core.model import GpuUuid, Layout, MigMode, Placement


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedInstance:
    """A GPU instance as the driver lists it."""

    gpu_instance_id: int
    profile_id: int
    placement: Placement
    compute_instances: tuple[int, ...]
    """Ids of its compute instances; empty for a half-made instance."""
    uuid: str = ""
    """Of the MIG device of its first compute instance; empty without one."""
    processes: tuple[int, ...] = ()
    """Pids with a compute context on it, where the driver tells."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedGpu:
    """A GPU as the driver describes it."""

    index: int
    uuid: GpuUuid
    minor: int
    model: str
    memory_mib: int
    mode: MigMode
    layout: Layout | None
    """From the driver's own answers; None where it lists no profiles (MIG off on an old driver, or not capable)."""
    instances: tuple[ObservedInstance, ...] = ()
    processes: tuple[int, ...] = ()
    """Pids on the GPU itself, without MIG mode."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceUsage:
    """What is used on one instance (or whole GPU); None where the driver does not tell."""

    memory_used_mib: int | None
    memory_total_mib: int | None
    utilization_percent: int | None = None
    processes: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessUsage:
    """A process on an instance or GPU; the memory that it uses is None where the driver does not tell."""

    pid: int
    used_mib: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModeChange:
    """How asking for MIG mode on or off went."""

    mode: MigMode
    """As read back afterwards."""
    problem: DriverErrorKind | None
    """Why the mode is not in effect: IN_USE (somebody uses the GPU), RESET_REQUIRED, or another; None when it is."""

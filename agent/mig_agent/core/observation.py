"""The driver's report on a GPU at one reading: the input of recovery, made by the NVML adapter."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from mig_agent.core.errors import DriverErrorKind
from mig_agent.core.model import Generation, GpuUuid, Layout, LeaseId, MigMode, Placement
from mig_agent.core.shares import ShareTerms


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedInstance:
    """A GPU instance as the driver lists it."""

    gpu_instance_id: int
    profile_id: int
    placement: Placement
    compute_instances: tuple[int, ...]
    """Ids of its compute instances; empty for a half-made instance."""
    uuid: str = ""
    """The UUID of the MIG device of its first compute instance; empty without one."""
    processes: tuple[int, ...] = ()
    """Pids with a compute context on it, where the driver reports them."""


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
    sharing: ObservedSharing | None = None
    """The result of looking how the GPU can be shared; None where that was not looked at."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedSharing:
    """The terms on which a GPU without MIG mode can be shared, and its shares, found beside one reading of it."""

    terms: ShareTerms | None
    """The terms of new shares; None if there can be none now."""
    why_not: str = ""
    """Why there can be no new shares, as a phrase; empty if there can."""
    lost: Mapping[Generation, str] = field(default_factory=dict)
    """The leased shares whose limit does not hold any more, each with the reason as a phrase."""
    users: Mapping[Generation, tuple[ProcessUsage, ...]] = field(default_factory=dict)
    """The processes on the GPU that use each of its leased shares."""
    others: tuple[ProcessUsage, ...] = ()
    """The processes on the GPU that use no share of the agent."""


SM_PERCENT_OF: Final = "the instance"
"""Whose multiprocessors are 100 % in the driver's SM_UTIL of a MIG sample: an assumption, not tried on hardware.

nvml.h says only "percentage of SMs that were busy (0.0 - 100.0)". That these are the instance's own follows from DCGM:
it reads the same metric from nvmlGpmMigSampleGet, and passes it on unscaled for a GPU instance (DcgmGpmManager.cpp in
github.com/NVIDIA/DCGM). `pytest -m gpu tests/adapters/test_nvml_gpu.py` shows it on a GPU with an idle instance.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeUsage:
    """Compute use of one instance between two readings, in percent; None where the driver does not report it."""

    seconds: float
    """The time between the readings."""
    sm_percent: float
    """The mean share of the multiprocessors (SMs) that were busy, of those that SM_PERCENT_OF says."""
    tensor_percent: float | None = None
    """The share of the time in which its multiprocessors did tensor operations."""
    memory_bandwidth_percent: float | None = None
    """Memory bandwidth used, of the most that is possible."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeReading:
    """The last reading of how busy an instance was, under the lease that it had then."""

    lease: LeaseId | None
    fresh_until: float
    """Time until which the figure is current, in seconds since the epoch."""
    usage: ComputeUsage


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceUsage:
    """Memory and processor use of one instance or whole GPU; None where the driver does not report it."""

    memory_used_mib: int | None
    memory_total_mib: int | None
    utilization_percent: int | None = None
    """Share of the time in which a kernel ran, for a whole GPU."""
    compute: ComputeUsage | None = None
    """Compute use of a MIG instance's multiprocessors."""
    processes: tuple[ProcessUsage, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessUsage:
    """A process on an instance or GPU. Its memory in MiB is None where the driver does not report it."""

    pid: int
    used_mib: int | None
    uid: int | None = None
    """Its user on this machine; None where the process cannot be looked at."""
    command: str = ""
    """Its command line; empty where it cannot be read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModeChange:
    """The result of switching MIG mode on or off."""

    mode: MigMode
    """As read back afterwards."""
    problem: DriverErrorKind | None
    """Why the mode is not in effect: IN_USE (a process uses the GPU), RESET_REQUIRED, or another; None if it is."""

"""What NVML answers, as plain values."""

from __future__ import annotations

from dataclasses import dataclass

from mig_agent.core.model import Placement


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileAnswer:
    """What NVML tells of a profile of GPU instances; memory in MiB."""

    id: int
    name: str
    """NVML's own string; empty from a driver that tells none."""
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
    """What NVML tells of a GPU instance."""

    id: int
    profile_id: int
    placement: Placement


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryAnswer:
    """Bytes."""

    total: int
    used: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessAnswer:
    """A process with a context on a device; bytes used, or None where the driver does not tell."""

    pid: int
    used: int | None

"""Shares of a GPU without MIG mode: who enforces their memory limit, and how much memory a GPU can share."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from mig_agent.core.strenum import StrEnum

_ROUNDING = 1e-9
"""Rounding error: a fraction such as 0.1 + 0.2 in a float must not cost a MiB."""
_MIB = 1 << 20


class Enforcement(StrEnum):
    """The ways to enforce the memory limit of a share."""

    CGROUP = "cgroup"
    """The driver limits all processes of the lease's cgroup together; NVML's memory limits, from driver r615 on."""
    MPS = "mps"
    """An MPS control daemon of the lease limits each of its processes."""
    PRELOAD = "preload"
    """A library that an administrator named is preloaded into the lease's processes."""

    @property
    def promise(self) -> str:
        """Return what a share isolates, and what not, in one line for people."""
        return _PROMISES[self]

    @property
    def limits_compute(self) -> bool:
        """True if a share can have a part of the multiprocessors alone."""
        return self is Enforcement.MPS


_PROMISES: Final[Mapping[Enforcement, str]] = MappingProxyType(
    {
        Enforcement.CGROUP: "enforced by the driver: all processes together are limited, not faults or bandwidth",
        Enforcement.MPS: "enforced by MPS: each process is limited, not faults or bandwidth",
        Enforcement.PRELOAD: "enforced by a preloaded library: what does not load it is not limited, nor are faults or "
        "bandwidth",
    }
)


class Fractions(StrEnum):
    """The setting of how a GPU without MIG mode may be shared. The values are those of the configuration."""

    AUTO = "auto"
    """Sharing by the first way that works on it: `cgroup`, then `mps`."""
    CGROUP = "cgroup"
    MPS = "mps"
    PRELOAD = "preload"
    OFF = "off"
    """No sharing: the GPU is leased whole only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShareRules:
    """The administrator's rules for sharing one GPU. Amounts are MiB."""

    ways: tuple[Enforcement, ...]
    """The ways in which limits may be enforced, the preferred one first; empty: the GPU is leased whole only."""
    headroom_mib: int
    """Memory that stays free, beside what the driver reserves."""
    least_mib: int
    """The smallest limit of a share."""


WAYS: Final = MappingProxyType(
    {
        Fractions.AUTO: (Enforcement.CGROUP, Enforcement.MPS),
        Fractions.CGROUP: (Enforcement.CGROUP,),
        Fractions.MPS: (Enforcement.MPS,),
        Fractions.PRELOAD: (Enforcement.PRELOAD,),
        Fractions.OFF: (),
    }
)
"""The ways in which each setting allows limits to be enforced, the preferred one first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShareTerms:
    """The terms on which one GPU is shared. Amounts are MiB."""

    enforced_by: Enforcement
    usable_mib: int
    """The GPU's memory without what the driver reserves and the headroom that stays free."""
    overhead_mib: int = 0
    """Memory that one share takes beside its limit: that of its MPS server."""
    least_mib: int = 1024
    """The smallest limit: a CUDA context alone takes up to 0.8 GiB of it."""
    needs_process: bool = False
    """True if only a request that hands over a process gets a share that is enforced so."""
    otherwise: Enforcement | None = None
    """The way that, with `needs_process`, enforces the limit of other requests; None: they get no share."""
    others_mib: int = 0
    """Memory in use by processes outside the agent's shares: less is left for new shares, while it is in use."""

    def limit_of_memory(self, memory_bytes: int) -> int | None:
        """Return the limit, in MiB, of a share with this memory: rounded up, at least the least one.

        None if the GPU could not give it with nothing else on it.
        """
        return self._possible(max(math.ceil(memory_bytes / _MIB), self.least_mib))

    def limit_of_fraction(self, fraction: float) -> int | None:
        """Return the limit, in MiB, of this fraction of the GPU, rounded down; None if it is below the least one.

        It is a fraction of what can be shared, overhead included, so four quarters always fit.
        """
        limit = math.floor(fraction * self.usable_mib + _ROUNDING) - self.overhead_mib
        return self._possible(limit) if limit >= self.least_mib else None

    def way(self, *, has_process: bool, limits_compute: bool = False) -> Enforcement | None:
        """Return who enforces the limit of a request with or without a process; None if it gets no share.

        `limits_compute`: the share has a part of the multiprocessors alone.
        """
        first = self.enforced_by if has_process or not self.needs_process else self.otherwise
        ways = (first, self.otherwise) if limits_compute else (first,)
        return next((each for each in ways if each is not None and (each.limits_compute or not limits_compute)), None)

    def taken(self, limit_mib: int) -> int:
        """Return what a share with this limit takes of the usable memory, in MiB."""
        return limit_mib + self.overhead_mib

    def _possible(self, limit_mib: int) -> int | None:
        return limit_mib if self.taken(limit_mib) <= self.usable_mib else None

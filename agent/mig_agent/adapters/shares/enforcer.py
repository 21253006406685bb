"""The interface of the ways to enforce the memory limits of shares."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from mig_agent.core.model import Generation, GpuUuid
from mig_agent.core.shares import Enforcement


@dataclass(frozen=True, slots=True, kw_only=True)
class HolderProcess:
    """A process that is handed over to a share before it uses the GPU. Its pid alone may mean another process later."""

    pid: int
    started: int
    """The start of the process, in clock ticks from boot."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """A part of one GPU's memory whose limit is to be enforced."""

    generation: Generation
    """Identifies the share on this machine, also to the next agent."""
    gpu: GpuUuid
    limit_mib: int
    uid: int | None = None
    """The user whose processes may use it; None: everybody's."""
    process: HolderProcess | None = None
    """The process that uses it, with its children; None: any of the user's."""
    thread_percentage: int | None = None
    """The most of the GPU's multiprocessors that a process uses, in per cent; None: all."""


class Enforcer(Protocol):
    """Enforces the memory limits of shares in one way. Blocking and thread-safe for different shares.

    What it sets up outlives the agent. Each method ends within a deadline and may raise DriverError. `begin` and `end`
    may be called again after a crash at any point of them.
    """

    enforcement: Enforcement
    overhead_mib: int
    """Memory that one share takes beside its limit."""
    needs_process: bool
    """True if a share needs a `process`."""

    def why_not(self, gpu: GpuUuid) -> str:
        """Return why limits cannot be enforced on a GPU, as a phrase with its hint; empty if they can."""

    def begin(self, share: Share) -> None:
        """Set the limit, read it back, and only then let the user's processes, or the process, use the share.

        The error's `left_behind` is True where `end` has to be called.
        """

    def check(self, share: Share) -> None:
        """Check that the limit holds. Raises DriverError (NOT_FOUND, READ_BACK) if it was lost."""

    def environment(self, share: Share) -> Mapping[str, str]:
        """Return the variables with which a process uses the share, beside those that make the GPU visible."""

    def processes(self, share: Share) -> tuple[int, ...]:
        """Return the ids of the processes that use the share, as far as it can be known."""

    def end(self, gpu: GpuUuid, generation: Generation) -> None:
        """End the processes that still use a share and remove all that `begin` set up; nothing if there is none."""

    def existing(self) -> tuple[tuple[GpuUuid | None, Generation], ...]:
        """Return the shares of which anything is left on this machine; the GPU is None where it is not known."""


@runtime_checkable
class EndsProcesses(Protocol):
    """An enforcer whose limit holds for each process of a share alone, and that can take the GPU from one of them."""

    def end_process(self, generation: Generation, pid: int) -> None:
        """Take the GPU from a process without disturbing the others. Raises DriverError."""

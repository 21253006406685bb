"""Checks that a process stays the same over a long run: its memory, its files, its threads."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

_MIB = 1 << 20
REMEMBERED = 10_000
"""How many ended leases the agent keeps in memory (`adapters.ledger.MOST_ENDED_IN_MEMORY`).

Until there are so many its memory grows by design.
"""
_KIB_EACH = 4.0
_SLACK_MIB = 6.0
"""What the allocator may take or return without a cause in the agent."""
_SLACK_FILES = 8
"""Connections that open and close."""
_FEWEST_SAMPLES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """The agent at one moment."""

    seconds: float
    """Since the beginning of the run."""
    pairs: int
    memory_mib: float
    files: int
    threads: int
    ledger_mib: float

    def describe(self) -> str:
        """Return a line of progress."""
        return (
            f"{self.seconds:8.0f} s {self.pairs:9} pairs {self.pairs / max(self.seconds, 0.001):7.0f} pairs/s "
            f"{self.memory_mib:7.1f} MiB {self.files:4} files {self.threads:3} threads "
            f"{self.ledger_mib:7.1f} MiB of ledger"
        )


def sample_of(pid: int, state_dir: Path, began: float, pairs: int) -> Sample:
    """Return a sample of the agent with this pid. `began` is of the monotonic clock."""
    process = psutil.Process(pid)
    with process.oneshot():
        return Sample(
            seconds=time.monotonic() - began,
            pairs=pairs,
            memory_mib=process.memory_info().rss / _MIB,
            files=process.num_fds(),
            threads=process.num_threads(),
            ledger_mib=sum(each.stat().st_size for each in state_dir.glob("ledger.sqlite3*")) / _MIB,
        )


def verdict(samples: Sequence[Sample]) -> list[str]:
    """Return texts that say what grew: the last third of the samples against the third before it."""
    if len(samples) < _FEWEST_SAMPLES:
        return []
    third = max(len(samples) // 3, 1)
    before, after = samples[-2 * third : -third], samples[-third:]
    found = []
    new = min(after[-1].pairs, REMEMBERED) - min(before[0].pairs, REMEMBERED)
    allowed = _SLACK_MIB + new * _KIB_EACH / 1024
    grown = _middle([each.memory_mib for each in after]) - _middle([each.memory_mib for each in before])
    if grown > allowed:
        found.append(f"memory grew by {grown:.1f} MiB between the last two thirds of the run")
    for what in ("files", "threads"):
        more = max(getattr(each, what) for each in after) - max(getattr(each, what) for each in before)
        if more > _SLACK_FILES:
            found.append(f"{what} grew by {more} between the last two thirds of the run")
    return found


def _middle(values: Sequence[float]) -> float:
    return statistics.median(values)

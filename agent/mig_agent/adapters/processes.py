"""Finds out whether a process lives and reports its end. For this machine's processes, as seen by this process."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path

_POLL_SECONDS = 2.0
_INEXACT_SECONDS = 2.0
"""Tolerance between the wall clock and a process's start time, which is counted from boot."""


def started(pid: int) -> int | None:
    """Return when a process started, in clock ticks from boot; None if there is none (a zombie counts as none).

    Together with the pid it identifies a process for good: pids are reused.
    """
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        fields = text.rpartition(")")[2].split()
        # Fields 3 (state) and 22 (start time) of proc_pid_stat(5).
        return None if fields[0] in {"Z", "X"} else int(fields[19])
    except (OSError, IndexError, ValueError):
        return None


def lives_since(pid: int, moment: float) -> bool:
    """Return True if the process with this pid existed at `moment` (seconds since the epoch) and is the same one."""
    ticks = started(pid)
    if ticks is None:
        return False
    booted = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
    return booted + ticks / os.sysconf("SC_CLK_TCK") <= moment + _INEXACT_SECONDS


class ProcessWatch:
    """Calls back once, on the event loop, when a process has ended; soon if it has ended already."""

    def __init__(self, pid: int, started_at: int | None, on_end: Callable[[], None]) -> None:
        self._pid = pid
        self._started = started_at
        self._on_end = on_end
        self._loop = asyncio.get_running_loop()
        self._descriptor: int | None = None
        self._timer: asyncio.TimerHandle | None = None
        with contextlib.suppress(OSError):  # no such process, or a kernel without pidfd: decided below
            self._descriptor = os.pidfd_open(pid)
        if started_at is None or started(pid) != started_at:
            self._timer = self._loop.call_later(0, self._ended)
        elif self._descriptor is not None:
            self._loop.add_reader(self._descriptor, self._ended)
        else:
            self._timer = self._loop.call_later(_POLL_SECONDS, self._poll)

    def close(self) -> None:
        """Stop watching; no callback follows."""
        if self._timer is not None:
            self._timer.cancel()
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            self._loop.remove_reader(descriptor)
            os.close(descriptor)

    def _poll(self) -> None:
        if started(self._pid) != self._started:
            self._ended()
        else:
            self._timer = self._loop.call_later(_POLL_SECONDS, self._poll)

    def _ended(self) -> None:
        self.close()
        self._on_end()

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
    return _number(pid, 19)  # field 22 of proc_pid_stat(5)


def uid(pid: int) -> int | None:
    """Return the user of a process; None if there is none."""
    try:
        return Path(f"/proc/{pid}").stat().st_uid
    except OSError:
        return None


def is_below(pid: int, ancestor: int) -> bool:
    """Return True if a living process was started by another one, at any depth; False for that process itself."""
    parent = _parent(pid)
    while parent is not None and parent not in {0, ancestor}:
        parent = _parent(parent)
    return parent == ancestor


def descendants(pid: int) -> tuple[int, ...]:
    """Return the living processes below one, as this process may see them, parents before their children."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):  # noqa: PTH208 -- names are all that is needed
        if name.isdigit() and (parent := _parent(int(name))) is not None:
            children.setdefault(parent, []).append(int(name))
    below = children.get(pid, [])
    for each in below:  # which grows meanwhile
        below += children.get(each, [])
    return tuple(below)


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


def _parent(pid: int) -> int | None:
    return _number(pid, 1)  # field 4 of proc_pid_stat(5)


def _number(pid: int, index: int) -> int | None:
    """Return a number of a living process's status by its index after the process's name."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        fields = text.rpartition(")")[2].split()
        return None if fields[0] in {"Z", "X"} else int(fields[index])
    except (OSError, IndexError, ValueError):
        return None

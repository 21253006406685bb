"""Processes that hold a flock(2) lock on a file, and whether they had the right to write to it.

The lock itself does not identify them: the pid in /proc/locks may be of a process that has ended and left the open file
to a child. What counts is who has the file open. Scanning a process's open files takes time, and any user can have
many, with many locks: other users' processes are scanned only on request, and the whole search is bounded.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_ACCESS = os.O_RDONLY | os.O_WRONLY | os.O_RDWR
_ROOT: Final = 0
_MOST_BYTES: Final = 4096
"""How much of an fdinfo file is read: an open file's flags come first, then its flock(2) locks, then all others."""
SEARCH_SECONDS: Final = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LockHolder:
    """A process that has a locked file open."""

    pid: int
    uid: int
    writes: bool
    """True if it opened the file for writing, which only root and the file's owner could; anyone can lock it."""


class HolderSearch:
    """Searches for lock holders, all searches together within a bounded time."""

    def __init__(self, seconds: float = SEARCH_SECONDS) -> None:
        self._seconds = seconds
        """Seconds left."""

    def trusted(self, descriptor: int) -> tuple[LockHolder, ...]:
        """Find holders of a lock on the descriptor's file among processes of root and of this process's user.

        An agent runs as one of these, since only they can write to the file.
        """
        return self._search(descriptor, strangers=False)

    def everybody(self, descriptor: int) -> tuple[LockHolder, ...]:
        """Find holders of a lock on the descriptor's file; processes of other users come last."""
        return self._search(descriptor, strangers=False) or self._search(descriptor, strangers=True)

    def _search(self, descriptor: int, *, strangers: bool) -> tuple[LockHolder, ...]:
        began = time.monotonic()
        try:
            return tuple(_holders(descriptor, began + self._seconds, strangers=strangers))
        finally:
            self._seconds = max(0.0, self._seconds - (time.monotonic() - began))


def lock_holders(descriptor: int) -> tuple[LockHolder, ...]:
    """Find holders of a lock on the descriptor's file, that descriptor itself left out.

    Finds only processes of this PID namespace whose open files this process may see: as root all. The search ends after
    a second.
    """
    return HolderSearch().everybody(descriptor)


def _holders(descriptor: int, until: float, *, strangers: bool) -> Iterator[LockHolder]:
    there = os.fstat(descriptor)
    trusted = {_ROOT, os.geteuid()}
    for pid in _pids():
        if time.monotonic() >= until:
            return
        try:
            users = _users(pid)
        except (OSError, ValueError):
            continue  # it has ended
        # Of a program like su only some uids are root, and its open files may be those of the user who started it.
        if (not trusted.issuperset(users)) != strangers:
            continue
        for name in _names(f"/proc/{pid}/fdinfo"):
            if time.monotonic() >= until:
                return
            if (pid, name) == (os.getpid(), str(descriptor)):
                continue
            with contextlib.suppress(OSError, ValueError, KeyError):  # it has ended, or closed the file
                lines = _beginning(f"/proc/{pid}/fdinfo/{name}").splitlines()
                if not any(line.startswith("lock:") and "FLOCK" in line for line in lines):
                    continue
                # Only now: stat of a file on a server that does not answer would block for ever.
                file = Path(f"/proc/{pid}/fd/{name}").stat()
                if (file.st_dev, file.st_ino) == (there.st_dev, there.st_ino):
                    flags = int(dict(line.split(":", 1) for line in lines if ":" in line)["flags"], 8)
                    yield LockHolder(pid=pid, uid=users[1], writes=flags & _ACCESS != os.O_RDONLY)


def _beginning(path: str) -> str:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(descriptor, _MOST_BYTES).decode("ascii")
    finally:
        os.close(descriptor)


def _pids() -> list[int]:
    return sorted(int(name) for name in _names("/proc") if name.isdigit())


def _names(folder: str) -> list[str]:
    try:
        return os.listdir(folder)  # noqa: PTH208 -- a Path for each open file of the machine is waste
    except OSError:
        return []


def _users(pid: int) -> tuple[int, ...]:
    """Return a process's uids: real, effective, saved, and of the file system.

    The owner of its /proc folder is no substitute: that is root for every process that is not dumpable, whoever runs
    it.
    """
    for line in _beginning(f"/proc/{pid}/status").splitlines():
        if line.startswith("Uid:"):
            return tuple(map(int, line.split()[1:5]))
    raise ValueError(f"no Uid of process {pid}")

"""Which processes hold a lock of flock(2) on a file, and whether they had the right to write to it.

The lock itself tells nobody: its number in /proc/locks may be that of a process which has ended and left the open file
to a child. What counts is who has it open.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

_ACCESS = os.O_RDONLY | os.O_WRONLY | os.O_RDWR


@dataclass(frozen=True, slots=True, kw_only=True)
class LockHolder:
    """A process that has a locked file open."""

    pid: int
    uid: int
    writes: bool
    """Whether it has opened the file for writing: only root and the file's owner could, whoever locks it."""


def lock_holders(descriptor: int) -> tuple[LockHolder, ...]:
    """Find who holds a lock on the file of a descriptor, that descriptor itself left out.

    Only processes of this PID namespace are found, and only those whose open files this one may see: as root all.
    """
    there = os.fstat(descriptor)
    found = []
    for pid in _pids():
        for name in _names(f"/proc/{pid}/fdinfo"):
            if (pid, name) == (os.getpid(), str(descriptor)):
                continue
            with contextlib.suppress(OSError, ValueError, KeyError):  # it has ended, or closed the file
                lines = Path(f"/proc/{pid}/fdinfo/{name}").read_text(encoding="ascii").splitlines()
                if not any(line.startswith("lock:") and "FLOCK" in line for line in lines):
                    continue
                # Only now: asking for a file on a server that does not answer would take for ever.
                file = Path(f"/proc/{pid}/fd/{name}").stat()
                if (file.st_dev, file.st_ino) == (there.st_dev, there.st_ino):
                    flags = int(dict(line.split(":", 1) for line in lines)["flags"], 8)
                    found.append(LockHolder(pid=pid, uid=_uid(pid), writes=flags & _ACCESS != os.O_RDONLY))
    return tuple(found)


def _pids() -> list[int]:
    return sorted(int(name) for name in _names("/proc") if name.isdigit())


def _names(folder: str) -> list[str]:
    try:
        return os.listdir(folder)  # noqa: PTH208 -- a Path for each open file of the machine is waste
    except OSError:
        return []


def _uid(pid: int) -> int:
    """Return the user that a process acts as. Not the owner of its folder: that is root where others may not look."""
    for line in Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace").splitlines():
        if line.startswith("Uid:"):
            return int(line.split()[2])
    raise ValueError(f"no Uid of process {pid}")

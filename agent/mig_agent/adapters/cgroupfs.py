"""Folders of cgroup v2: cgroups of one kind, the processes in them, and the controller that limits GPU memory.

Methods raise OSError with the file's name, as the kernel refuses. Everything is blocking.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

from mig_agent.adapters import processes
from mig_agent.adapters.failpoints import FAILPOINTS

MOUNT = "sys/fs/cgroup"
"""The place of the file system below the root of a machine."""
MEMORY_CONTROLLER = "dmem"
"""The controller of device memory, in Linux 6.14 and later."""
_CONTROLLERS, _SUBTREE, _MEMBERS, _KILL = (
    "cgroup.controllers",
    "cgroup.subtree_control",
    "cgroup.procs",
    "cgroup.kill",
)
_POLL_SECONDS = 0.02


class Cgroups:
    """The cgroups in one folder of the hierarchy, which has no processes of its own. Thread-safe for different names.

    The folder is directly below the hierarchy's root. A folder of files that plays cgroup v2 may be used in place of
    the kernel's: files are made where they are missing, and removed before their folder is.
    """

    def __init__(self, mount: Path, folder: str) -> None:
        """Use `folder` below the root of the hierarchy at `mount`."""
        self._mount = mount
        self._folder = mount / folder

    def why_not(self) -> str:
        """Return why cgroups cannot be made here, as a phrase with its hint; empty if they can."""
        if not (self._mount / _CONTROLLERS).exists():
            hint = "boot with systemd.unified_cgroup_hierarchy=1"
            if (self._mount / "unified" / _CONTROLLERS).exists():
                return f"{self._mount} has cgroup v1 beside v2; {hint}"
            if self._mount.is_dir() and any(self._mount.iterdir()):
                return f"{self._mount} has cgroup v1; {hint}"
            return f"no cgroup v2 is mounted at {self._mount}; mount it there"
        place = self._folder if self._folder.is_dir() else self._mount
        if not os.access(place, os.W_OK):
            return f"{place} cannot be written to; run the agent as root, in a unit with ProtectControlGroups=no"
        return ""

    def names(self) -> tuple[str, ...]:
        """Return the names of the cgroups."""
        with contextlib.suppress(FileNotFoundError):
            return tuple(sorted(each.name for each in self._folder.iterdir() if each.is_dir()))
        return ()

    def path(self, name: str) -> Path:
        """Return the folder of a cgroup, whether or not there is one."""
        return self._folder / name

    def make(self, name: str) -> Path:
        """Make a cgroup that can have memory limits, unless it is there, and return its folder.

        A kernel without the controller is no error: the driver keeps its own accounts there.
        """
        has_controller = MEMORY_CONTROLLER in _words(self._mount / _CONTROLLERS)
        for parent, folder in ((self._mount, self._folder), (self._folder, self.path(name))):
            if has_controller and MEMORY_CONTROLLER not in _words(parent / _SUBTREE):
                with FAILPOINTS.around("cgroup-controller"):
                    _write(parent / _SUBTREE, f" +{MEMORY_CONTROLLER}")
            with FAILPOINTS.around("cgroup-folder"):
                folder.mkdir(exist_ok=True)
        return self.path(name)

    def members(self, name: str) -> tuple[int, ...]:
        """Return the ids of the living processes in a cgroup and its descendants; empty if it is gone."""
        found = {int(word) for folder in self._below(name) for word in _words(folder / _MEMBERS)}
        return tuple(sorted(pid for pid in found if processes.started(pid) is not None))

    def join(self, name: str, pid: int, started: int) -> None:
        """Move a process into a cgroup, with the children that it has; those that it starts later are born there.

        `started` is in clock ticks from boot. Raises ProcessLookupError if the process has ended.
        """
        # The kernel moves what has this number. What has ended in between is noticed afterwards: its number is given
        # to another process only after all others were.
        _check_lives(pid, started)
        with FAILPOINTS.around("cgroup-join"):
            self._move(name, pid)
        _check_lives(pid, started)
        moved: set[int] = set()
        while left := [each for each in processes.descendants(pid) if each not in moved]:
            moved.update(left)
            for child in left:
                with contextlib.suppress(ProcessLookupError), FAILPOINTS.around("cgroup-join"):
                    self._move(name, child)

    def remove(self, name: str, seconds: float) -> None:
        """Remove a cgroup in which no process is left, with its descendants; nothing if there is none.

        Raises TimeoutError if the kernel still holds one after `seconds`.
        """
        for folder in sorted(self._below(name), reverse=True):
            until = time.monotonic() + seconds
            while True:
                try:
                    with FAILPOINTS.around("cgroup-removal"):
                        _remove(folder)
                    break
                except OSError as error:
                    if error.errno != errno.EBUSY:
                        raise
                    if time.monotonic() > until:
                        raise TimeoutError(errno.ETIMEDOUT, "it is still in use", str(folder)) from error
                time.sleep(_POLL_SECONDS)

    def kill(self, name: str) -> None:
        """Send SIGKILL to all that is in a cgroup and its descendants; does not wait for the end."""
        killer = self.path(name) / _KILL  # from Linux 5.14 on: what forks meanwhile is killed, too
        with FAILPOINTS.around("cgroup-kill"):
            if killer.exists():
                _write(killer, "1")
                return
            for pid in self.members(name):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def _below(self, name: str) -> Iterator[Path]:
        """Yield the folder of a cgroup, and of each descendant after its parent."""
        for text, _, _ in os.walk(self.path(name)):
            yield Path(text)

    def _move(self, name: str, pid: int) -> None:
        _write(self.path(name) / _MEMBERS, f"{pid}\n")


def _check_lives(pid: int, started: int) -> None:
    if processes.started(pid) != started:
        raise ProcessLookupError(errno.ESRCH, "it has ended", f"process {pid}")


def _write(file: Path, text: str) -> None:
    """Write in one call, as the kernel wants it; a folder that plays cgroup v2 has what was written before, too."""
    descriptor = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        os.write(descriptor, text.encode())
    finally:
        os.close(descriptor)


def _remove(folder: Path) -> None:
    try:
        folder.rmdir()
    except FileNotFoundError:
        return
    except OSError as error:
        if error.errno != errno.ENOTEMPTY:
            raise
        for file in folder.iterdir():
            file.unlink()
        folder.rmdir()


def _words(file: Path) -> frozenset[str]:
    """Return the words of a file; none if its cgroup is gone."""
    try:
        return frozenset(file.read_text(encoding="ascii").split())
    except OSError as error:
        if error.errno not in {errno.ENOENT, errno.ENODEV}:
            raise
        return frozenset()

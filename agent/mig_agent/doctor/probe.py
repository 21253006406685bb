"""What the checks read of the machine: files under a root, programs, processes, and who asks.

Nothing here writes. The root is `/` except in tests, which make a tree; programs are then not run.
"""

from __future__ import annotations

import grp
import os
import pwd
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from mig_agent.adapters.plain_files import read_plain

RUN_SECONDS = 5.0
"""Longest time that a program may take before its answer counts as missing."""
SUDO_HINT = "run it with sudo: sudo migctl doctor"
_FOLDERS_OF_PROGRAMS = ("usr/local/bin", "usr/bin", "bin", "usr/local/sbin", "usr/sbin", "sbin", "opt/bin")
_MOST_BYTES = 4 << 20
"""The most of a file that is read."""
_LONGEST_COMM = 15
"""The kernel cuts names of programs in /proc/PID/comm at this length."""


class DeniedError(Exception):
    """This user may not read something that a check needs."""

    def __init__(self, path: Path) -> None:
        super().__init__(f"cannot read {path}: permission denied")
        self.path = path


@dataclass(frozen=True, slots=True, kw_only=True)
class Person:
    """The user who runs the checks."""

    uid: int
    name: str
    groups: frozenset[int]
    """The groups of this process."""
    database_groups: frozenset[int] = frozenset()
    """The groups that a new login would have; a login from before a change has the former ones."""

    @property
    def is_root(self) -> bool:
        """True for root, who may read everything."""
        return self.uid == 0

    @classmethod
    def current(cls) -> Person:
        """Return the user of this process."""
        uid = os.geteuid()
        try:
            entry = pwd.getpwuid(uid)
            name, database = entry.pw_name, frozenset(os.getgrouplist(entry.pw_name, entry.pw_gid))
        except (KeyError, OSError):
            name, database = str(uid), frozenset()
        groups = frozenset((os.getegid(), *os.getgroups()))
        return cls(uid=uid, name=name, groups=groups, database_groups=database)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningProgram:
    """A process of the machine, without its arguments, which may hold secrets."""

    pid: int
    name: str

    def __str__(self) -> str:
        """Return the text for messages: `nv-hostengine (pid 4711)`."""
        return f"{self.name} (pid {self.pid})"


def run_program(command: Sequence[str]) -> str | None:
    """Return what a program prints on stdout, whatever its exit code; None if it is missing or takes too long."""
    program = shutil.which(command[0])
    if program is None:
        return None
    try:
        done = subprocess.run(  # noqa: S603 -- fixed programs that only print, with arguments of our own
            [program, *command[1:]],
            check=False,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=RUN_SECONDS,
            env={**os.environ, "LC_ALL": "C", "SYSTEMD_PAGER": ""},
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """One machine as one user sees it."""

    root: Path = Path("/")
    person: Person = field(default_factory=Person.current)
    run: Callable[[Sequence[str]], str | None] = run_program
    environment: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))

    def read(self, path: str) -> str | None:
        """Return a file's text; None if there is no such file. Raises DeniedError, OSError."""
        file = self.root / path.lstrip("/")
        try:
            return read_plain(file, _MOST_BYTES).decode(errors="replace")
        except (FileNotFoundError, NotADirectoryError):
            return None
        except PermissionError as error:
            raise DeniedError(file) from error

    def stat(self, path: str) -> os.stat_result | None:
        """Return a file's status; None if there is no such file. Raises DeniedError, OSError."""
        file = self.root / path.lstrip("/")
        try:
            return file.stat()
        except (FileNotFoundError, NotADirectoryError):
            return None
        except PermissionError as error:
            raise DeniedError(file) from error

    def exists(self, path: str) -> bool:
        """Return True if there is such a file. Raises DeniedError, OSError."""
        return self.stat(path) is not None

    def names(self, folder: str) -> list[str]:
        """Return the names in a folder, sorted; none if there is no such folder. Raises DeniedError, OSError."""
        path = self.root / folder.lstrip("/")
        try:
            return sorted(each.name for each in path.iterdir())
        except (FileNotFoundError, NotADirectoryError):
            return []
        except PermissionError as error:
            raise DeniedError(path) from error

    def program(self, name: str) -> str | None:
        """Return the path of an installed program; None if it is not installed."""
        for folder in _FOLDERS_OF_PROGRAMS:
            path = self.root / folder / name
            if path.is_file():
                return f"/{folder}/{name}"
        return shutil.which(name) if self.root == Path("/") else None

    def processes(self) -> Iterator[RunningProgram]:
        """Yield the processes of the machine whose name may be read, by pid."""
        for pid in sorted(int(name) for name in self.names("proc") if name.isdigit()):
            try:
                comm = self.read(f"proc/{pid}/comm")
                words = (self.read(f"proc/{pid}/cmdline") or "").split("\0")
            except (DeniedError, OSError):
                continue  # it has ended, or is hidden from other users
            name = (comm or "").strip()
            whole = words[0].rsplit("/", 1)[-1] if words[0] else ""
            if len(name) == _LONGEST_COMM and whole.startswith(name):
                name = whole
            if name:
                yield RunningProgram(pid=pid, name=name)


def group_name(gid: int) -> str:
    """Return a group's name, its number if it has none."""
    try:
        return grp.getgrgid(gid).gr_name
    except KeyError:
        return str(gid)


def user_name(uid: int) -> str:
    """Return a user's name, the number if there is none."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)

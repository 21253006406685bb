"""The state file: many readers, one writer at a time, across threads and processes."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, cast

from mig_agent.simulator.cgroupfs import CgroupFs
from mig_agent.simulator.codes import Failure, SimulatorError
from mig_agent.simulator.hostroot import HostRoot, Summary, summarise
from mig_agent.simulator.state import FORMAT, Machine


class _Reading(NamedTuple):
    """A parsed file, which is kept open."""

    fd: int
    inode: int
    machine: Machine


class Store:
    """Reads and replaces the state file.

    A change is written to a second file and renamed over it, so a reader sees the state before or after and needs no
    lock. A reader parses only when the file has been replaced. It keeps the file that it parsed open: an inode in use
    cannot be given to a new file, so the inode's number alone tells old from new, whatever the resolution of the file
    system's clock.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._path_text = str(path)
        self.host = HostRoot(path.parent / "host")
        self.cgroups = CgroupFs(self.host.root / "sys/fs/cgroup")
        self._lock_path = path.with_name(path.name + ".lock")
        self._mutex = threading.Lock()
        self._last: _Reading | None = None

    def read(self) -> Machine:
        """Return the state, shared between all readers: never change it. Raises SimulatorError if there is none."""
        try:
            now = os.stat(self._path_text)  # noqa: PTH116 -- every simulated call does this; a Path's stat is slower
        except FileNotFoundError:
            raise SimulatorError(f"cannot find simulated GPUs in {self.path}: make some first") from None
        last = self._last  # read after the stat: what replaces it later is newer than the file that was looked at
        if last is not None and last.inode == now.st_ino:
            return last.machine
        with self._mutex:
            return self._load()

    @contextlib.contextmanager
    def edit(self) -> Iterator[Machine]:
        """Yield a copy of the state for changes, and write it at the end, even if the call raises Failure."""
        with self._exclusive(), self._mutex:
            machine = _parse(self.path.read_bytes(), self.path)
            before = summarise(machine)
            try:
                yield machine
            except Failure:
                self._write(machine, before)
                raise
            self._write(machine, before)

    def create(self, machine: Machine) -> None:
        """Write the first state. Raises SimulatorError if there is one already."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self._exclusive(), self._mutex:
            if self.path.exists():
                raise SimulatorError(f"cannot make simulated GPUs in {self.path}: there are some already")
            self.host.create(machine)
            self._write(machine)

    def mend(self) -> None:
        """Rewrite the host's files, in case a process died after writing the state and before writing them."""
        with self._exclusive(), self._mutex:
            self.host.sync(_parse(self.path.read_bytes(), self.path))

    @contextlib.contextmanager
    def _exclusive(self) -> Iterator[None]:
        try:
            fd = os.open(self._lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except FileNotFoundError:
            raise SimulatorError(f"cannot find simulated GPUs in {self.path}: make some first") from None
        try:
            # A lock of the open file, so it also excludes another Store of this process, and ends with the process.
            fcntl.flock(fd, fcntl.LOCK_EX)
            yield
        finally:
            os.close(fd)

    def _write(self, machine: Machine, before: Summary | None = None) -> None:
        machine["revision"] += 1
        temporary = self.path.with_name(self.path.name + ".new")
        temporary.write_text(json.dumps(machine), encoding="utf-8")
        temporary.replace(self.path)
        self.host.sync(machine, before)

    def _load(self) -> Machine:
        fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            stat = os.fstat(fd)
            machine = _parse(os.pread(fd, stat.st_size, 0), self.path)
        except BaseException:
            os.close(fd)
            raise
        self._replace(_Reading(fd, stat.st_ino, machine))
        return machine

    def _replace(self, reading: _Reading | None) -> None:
        last, self._last = self._last, reading
        if last is not None:
            os.close(last.fd)

    def close(self) -> None:
        """Close the file."""
        with self._mutex:
            self._replace(None)

    def __del__(self) -> None:
        if getattr(self, "_last", None) is not None:
            self._replace(None)


def _parse(text: bytes, path: Path) -> Machine:
    machine = json.loads(text)
    if machine.get("format") != FORMAT:
        raise SimulatorError(f"cannot read {path}: its format is {machine.get('format')}, this version knows {FORMAT}")
    return cast("Machine", machine)

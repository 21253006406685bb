"""Locks that end with their process: of a state directory, and of each GPU on the whole machine."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

from mig_agent.adapters.crashpoints import CRASH_POINTS
from mig_agent.core.errors import MigAgentError
from mig_agent.core.model import GpuUuid


class LockedError(MigAgentError):
    """Somebody else has it; the message names them."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class FileLock:
    """A file that is locked as long as this object, or the process, lives."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self._descriptor: int | None = descriptor

    @classmethod
    def take(cls, path: Path, what: str, hint: str = "") -> FileLock:
        """Locks a file, made where it is not there; `what` is being locked, in words.

        Raises LockedError at once where another process has it, naming its pid.
        """
        try:
            with CRASH_POINTS.around("lock-file"):
                path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
                descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
        except OSError as error:
            raise LockedError(f"cannot lock {what}: {path}: {error.strerror}", hint) from error
        try:
            # A lock of the open file: it also excludes a second one in this process, and no child inherits it.
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with CRASH_POINTS.around("lock-owner"):
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        except BlockingIOError:
            pid = os.pread(descriptor, 32, 0).decode(errors="replace").strip()
            os.close(descriptor)
            holder = f"the agent with pid {pid}" if pid.isdigit() else "another process"
            raise LockedError(f"cannot use {what}: {holder} uses it already", hint) from None
        except OSError as error:
            os.close(descriptor)
            raise LockedError(f"cannot lock {what}: {path}: {error.strerror}", hint) from error
        return cls(path, descriptor)

    def release(self) -> None:
        """Lets others have it. The file stays: removing it could take the lock of whoever opened it meanwhile."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


def lock_state_directory(folder: Path) -> FileLock:
    """Raises LockedError where another agent keeps its state there."""
    return FileLock.take(
        folder / "lock", f"the state directory {folder}", "stop that agent, or give another --state-dir"
    )


def lock_gpus(folder: Path, gpus: Iterable[tuple[int, GpuUuid]]) -> ExitStack:
    """Locks all of them (index, UUID), or raises LockedError and has none; closing the stack unlocks them."""
    with ExitStack() as taken:
        for index, uuid in gpus:
            hint = "stop that agent, or leave the GPU to it with --gpus"
            taken.enter_context(FileLock.take(folder / f"{uuid}.lock", f"GPU {index} ({uuid})", hint))
        return taken.pop_all()

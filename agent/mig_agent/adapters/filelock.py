"""Locks that end with their process: of a state directory, of a socket, and of each GPU on the whole machine.

flock(2) needs only an open file, so any user who can open a lock's file can hold it. The file therefore has mode 0600
in a folder of mode 0700 that the agent creates: no other user has ever been able to open it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

import structlog

from mig_agent.adapters.failpoints import FAILPOINTS
from mig_agent.adapters.lock_holders import HolderSearch, lock_holders
from mig_agent.adapters.private_dir import PrivateDir, user_words
from mig_agent.core.errors import ConfigError, MigAgentError
from mig_agent.core.model import GpuUuid

_MODE = 0o600
_OTHERS = 0o077
_OTHERS_WRITE = 0o022
_FLAGS = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK  # opening a pipe must not block

_log = structlog.get_logger(__name__)


class LockedError(MigAgentError):
    """Another process holds the lock; the message names it."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class FileLock:
    """A file that is locked until `release` or the end of the process."""

    def __init__(self, path: Path, descriptors: Sequence[int], what: str = "", hint: str = "") -> None:
        """Own locked descriptors, the first of which is of `path`; `what` names the locked thing in messages."""
        self.path = path
        self._what = what
        self._hint = hint
        self._descriptors = tuple(descriptors)

    @classmethod
    def take(
        cls,
        path: Path,
        what: str,
        hint: str = "",
        *,
        former: Path | None = None,
        search: HolderSearch | None = None,
    ) -> FileLock:
        """Lock a file, creating it and its folder, which holds only locks; `what` names the locked thing.

        `former` is the file that earlier versions lock for the same thing, where everybody could open it: it is held as
        well, so that such an agent and this one exclude each other. A holder without the right to write to it is no
        agent and is ignored. `search` bounds the time for finding the holder. Raises LockedError if another agent has
        either, naming its pid.
        """
        with ExitStack() as undo:
            descriptor = _take(path, what, hint)
            undo.callback(os.close, descriptor)
            also = None if former is None else _take_former(former, what, hint, search or HolderSearch())
            undo.pop_all()
        return cls(path, [each for each in (descriptor, also) if each is not None], what, hint)

    def is_in_place(self) -> bool:
        """Return True if the path still names the locked file: any process could lock another file there."""
        try:
            return bool(self._descriptors) and os.path.samestat(os.fstat(self._descriptors[0]), self.path.stat())
        except OSError:
            return False

    def keep(self) -> None:
        """Make sure that the lock's file is in place and locked by this process.

        A removed file locks nothing, so it is created and locked again. Raises LockedError if another process has
        locked the current file.
        """
        if self.is_in_place():
            return
        replacement = _take(self.path, self._what, self._hint)
        self._descriptors = (replacement, *self._descriptors)

    def release(self) -> None:
        """Release the lock. The file stays: removing it could void the lock of a process that opened it meanwhile."""
        descriptors, self._descriptors = self._descriptors, ()
        for descriptor in descriptors:
            os.close(descriptor)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


def lock_state_directory(folder: Path, search: HolderSearch | None = None) -> FileLock:
    """Lock a state directory. Raises LockedError if another agent uses it."""
    return FileLock.take(
        folder / "locks/state.lock",
        f"the state directory {folder}",
        "stop that agent, or give another --state-dir",
        former=folder / "lock",
        search=search,
    )


def lock_gpus(folder: Path, gpus: Iterable[tuple[int, GpuUuid]], search: HolderSearch | None = None) -> ExitStack:
    """Lock all GPUs (index, UUID) or, raising LockedError, none; closing the stack unlocks them."""
    search = search or HolderSearch()
    with ExitStack() as taken:
        for index, uuid in gpus:
            name = f"{uuid}.lock"
            lock = FileLock.take(
                folder / "private" / name,
                f"GPU {index} ({uuid})",
                "stop that agent, or leave the GPU to it with --gpus",
                former=folder / name,
                search=search,
            )
            taken.enter_context(lock)
        return taken.pop_all()


def _take(path: Path, what: str, hint: str) -> int:
    """Lock the file and return its descriptor."""
    try:
        folder = PrivateDir.open(path.parent)
    except ConfigError as error:
        raise LockedError(f"cannot lock {what}: {error.message}", error.hint) from error
    try:
        with contextlib.closing(folder), FAILPOINTS.around("lock-file"):
            descriptor = folder.open_file(path.name, _FLAGS, _MODE)
    except OSError as error:
        raise LockedError(f"cannot lock {what}: {path}: {error.strerror}", hint) from error
    with ExitStack() as undo:
        undo.callback(os.close, descriptor)
        try:
            _check_own(descriptor, path, what)
            _lock(descriptor)
        except BlockingIOError:
            raise LockedError(_held(descriptor, path, what), hint) from None
        except OSError as error:
            raise LockedError(f"cannot lock {what}: {path}: {error.strerror}", hint) from error
        undo.pop_all()
    return descriptor


def _take_former(path: Path, what: str, hint: str, search: HolderSearch) -> int | None:
    """Lock the file of earlier versions; None if no agent could hold it, or if the holder is no agent."""
    try:
        with FAILPOINTS.around("lock-file"):
            descriptor = os.open(path, _FLAGS, _MODE)
    except OSError:
        return None  # a link, a folder: no agent made it, and none locks it
    with ExitStack() as undo:
        undo.callback(os.close, descriptor)
        there = os.fstat(descriptor)
        if not stat.S_ISREG(there.st_mode) or there.st_uid != os.geteuid() or there.st_mode & _OTHERS_WRITE:
            return None
        try:
            _lock(descriptor)
        except BlockingIOError:
            # Search root's and this user's processes: another user's can be no agent, and may have any number of files.
            for holder in search.trusted(descriptor):
                if holder.writes:
                    raise LockedError(_used_by(what, holder.pid), hint) from None
            _log.warning(
                "a process that is no agent holds the lock of earlier versions, and is ignored", path=str(path)
            )
            return None
        except OSError:
            return None
        undo.pop_all()
    return descriptor


def _lock(descriptor: int) -> None:
    """Lock an open file, restrict it to its owner, and write this pid into it for people. Raises OSError."""
    # A lock of the open file: it also excludes a second one in this process, and no child inherits it.
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        if stat.S_IMODE(os.fstat(descriptor).st_mode) != _MODE:
            with FAILPOINTS.around("lock-mode"):
                os.fchmod(descriptor, _MODE)
    with FAILPOINTS.around("lock-owner"):
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)


def _check_own(descriptor: int, path: Path, what: str) -> None:
    """Raise LockedError for a file that another user must have put into the agent's own folder."""
    there = os.fstat(descriptor)
    if not stat.S_ISREG(there.st_mode) or there.st_uid != os.geteuid() or there.st_nlink != 1:
        raise LockedError(
            f"cannot lock {what}: {path} is not a file of the agent's own", "remove it while no agent runs"
        )


def _held(descriptor: int, path: Path, what: str) -> str:
    """Return a message that names the holder of the lock, if it can be found."""
    holders = lock_holders(descriptor)
    for holder in holders:
        if holder.writes:
            return _used_by(what, holder.pid)
    for holder in holders:
        return (
            f"cannot lock {what}: the process with pid {holder.pid} of {user_words(holder.uid)} holds {path}, which "
            "others could open once; end it"
        )
    return f"cannot use {what}: another process, which cannot be seen from here, uses it already"


def _used_by(what: str, pid: int) -> str:
    return f"cannot use {what}: the agent with pid {pid} uses it already"

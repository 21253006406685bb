"""Unix sockets of one agent: locked, taken over from a dead agent, never more accessible than configured."""

from __future__ import annotations

import contextlib
import errno
import grp
import os
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

from mig_agent.adapters.failpoints import FAILPOINTS
from mig_agent.adapters.filelock import FileLock, LockedError
from mig_agent.adapters.lock_holders import HolderSearch
from mig_agent.adapters.private_dir import PrivateDir, refuse_if_replaceable, user_words
from mig_agent.adapters.transport.peer_credentials import peer_of
from mig_agent.core.errors import ConfigError

_LOCK_HINT = "stop that agent, or give other addresses with --listen and --admin-listen"
_OTHER_ADDRESS = "give another address with --listen unix:///path"
_NARROW_UMASK = 0o177
"""Creates a socket readable and writable by its owner alone."""
_NARROWEST = 0o600
_FOLDER_MODE = 0o755
_FRESH = "fresh"
"""Name of a socket in the private folder, before it is linked to its path."""
_KINDS = {stat.S_IFREG: "a file", stat.S_IFDIR: "a folder", stat.S_IFLNK: "a link", stat.S_IFIFO: "a pipe"}
_BACKLOG = 4096
"""Connections that the kernel queues for accept; the kernel may allow fewer."""


class OwnedSocket:
    """The right to a socket's path on this machine, until it is closed or the process ends."""

    def __init__(self, path: Path, lock: FileLock) -> None:
        self.path = path
        self._lock = lock
        self._identity: tuple[int, int] | None = None
        """Device and inode of the socket that was bound at the path."""

    @classmethod
    def own(cls, path: Path, search: HolderSearch | None = None) -> OwnedSocket:
        """Lock the path and remove the socket of an agent that died.

        Raises LockedError if another agent has the path or another program listens there, and ConfigError if the path
        is not a socket, or if other users could replace it.
        """
        try:
            with FAILPOINTS.around("socket-folder"):
                path.parent.mkdir(mode=_FOLDER_MODE, parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"cannot make the folder {path.parent} of the socket: {error.strerror}",
                f"run as root, or {_OTHER_ADDRESS}",
            ) from error
        refuse_if_replaceable(path, "the socket", _OTHER_ADDRESS)
        lock = _take_lock(path, search)
        with contextlib.ExitStack() as undo:
            undo.callback(lock.release)
            _remove_stale(path)
            undo.pop_all()
        return cls(path, lock)

    @contextlib.contextmanager
    def being_bound(self, mode: int, group: str = "") -> Iterator[None]:
        """Give the socket that is bound within this context these permissions; it never has wider ones.

        Raises ConfigError for a group that is unknown or may not be set.
        """
        group_id = group_id_of(group) if group else None
        # The umask applies to the whole process: nothing else creates files while the agent starts.
        before = os.umask(_NARROW_UMASK)
        try:
            yield
        finally:
            os.umask(before)
        try:
            with FAILPOINTS.around("socket-mode"):
                if group_id is not None:
                    os.chown(self.path, -1, group_id, follow_symlinks=False)
                self.path.chmod(mode)
        except PermissionError as error:
            raise ConfigError(
                f"cannot give the socket {self.path} to the group {group}: {error.strerror}",
                "run as root or as a member of the group, or leave socket_group out",
            ) from error

    def listen(self, mode: int, group: str = "") -> socket.socket:
        """Return a socket that listens at the path with these permissions. Raises ConfigError if that fails."""
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            with self.being_bound(mode, group):
                listener.bind(str(self.path))
            self.check(mode, group)
            self._identity = _identity(self.path)
            # Only now: no client may connect before the permissions were checked.
            listener.listen(_BACKLOG)
        except OSError as error:
            listener.close()
            raise ConfigError(f"cannot listen on {self.path}: {error.strerror}", _OTHER_ADDRESS) from error
        except BaseException:
            listener.close()
            raise
        return listener

    def change_access(self, mode: int, group: str = "") -> None:
        """Give the socket at the path these permissions; on the way it never has wider ones than before or after.

        Raises ConfigError for a group that is unknown or may not be set, and if the socket is not there.
        """
        group_id = group_id_of(group) if group else os.getegid()
        try:
            # A crash in between leaves a socket without a listener.
            self.path.chmod(_NARROWEST)
            os.chown(self.path, -1, group_id, follow_symlinks=False)
            self.path.chmod(mode)
            self.check(mode, group)
        except OSError as error:
            raise ConfigError(
                f"cannot give the socket {self.path} to the group {group or group_id}: {error.strerror}",
                "run as root or as a member of the group, or leave socket_group out",
            ) from error

    def missing(self) -> str:
        """Return what happened to the socket at the path as a message; empty while it is the one that was bound."""
        try:
            if _identity(self.path) == self._identity:
                return ""
            return f"{self.path} was replaced by {_what_is_at(self.path)}"
        except FileNotFoundError:
            return f"{self.path} was removed"
        except OSError as error:
            return f"{self.path} cannot be reached: {error.strerror}"

    def listen_again(self, mode: int, group: str = "") -> socket.socket:
        """Bind the path again after its socket was removed; return the listening socket.

        The socket is made in the private folder beside the path, where no other user can open it, and linked to the
        path once its permissions are right: never over something that was put there meanwhile. Raises LockedError if
        another agent has taken the path, ConfigError and OSError.
        """
        with FAILPOINTS.around("socket-folder"):
            self.path.parent.mkdir(mode=_FOLDER_MODE, parents=True, exist_ok=True)
        refuse_if_replaceable(self.path, "the socket", _OTHER_ADDRESS)
        if not self._lock.is_in_place():
            self._lock.release()  # the lock file was removed with the folder: the one there now counts
            self._lock = _take_lock(self.path)
        private = self._lock.path.parent
        fresh = private / _FRESH
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            with contextlib.closing(PrivateDir.open(private)) as folder, FAILPOINTS.around("socket-again"):
                fresh.unlink(missing_ok=True)
                listener.bind(folder.path_of(_FRESH))  # that path is short enough, wherever the folder is
                if group:
                    os.chown(fresh, -1, group_id_of(group), follow_symlinks=False)
                fresh.chmod(mode)
                listener.listen(_BACKLOG)
                os.link(fresh, self.path, follow_symlinks=False)
                self._identity = _identity(self.path)
                fresh.unlink()
        except BaseException:
            listener.close()
            raise
        return listener

    def check(self, mode: int, group: str = "") -> None:
        """Raise ConfigError if the socket's permissions differ, as on a file system that keeps none."""
        there = self.path.lstat()
        if stat.S_IMODE(there.st_mode) != mode or (group and there.st_gid != group_id_of(group)):
            raise ConfigError(
                f"cannot protect the socket {self.path}: its mode is {stat.S_IMODE(there.st_mode):04o} and its group "
                f"{there.st_gid}, though {mode:04o}{f' and {group}' if group else ''} were set",
                "put it on a file system that keeps permissions, such as /run",
            )

    def close(self) -> None:
        """Remove the socket and release the path."""
        with contextlib.suppress(OSError), FAILPOINTS.around("socket-removal"):
            if self._identity is None or _identity(self.path) == self._identity:
                self.path.unlink(missing_ok=True)
        self._lock.release()


def _take_lock(path: Path, search: HolderSearch | None = None) -> FileLock:
    return FileLock.take(
        path.with_name(f"{path.name}.private") / "socket.lock",
        f"the socket {path}",
        _LOCK_HINT,
        former=path.with_name(f"{path.name}.lock"),
        search=search,
    )


def _identity(path: Path) -> tuple[int, int]:
    found = path.lstat()
    return found.st_dev, found.st_ino


def _what_is_at(path: Path) -> str:
    """Return what is at the path and which user owns it. Raises OSError."""
    there = path.lstat()
    owner = user_words(there.st_uid)
    if not stat.S_ISSOCK(there.st_mode):
        return f"{_KINDS.get(stat.S_IFMT(there.st_mode), 'something')} of {owner}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        if probe.connect_ex(str(path)) == 0:
            return f"another socket of {owner}, on which pid {peer_of(probe).pid} listens"
    return f"another socket of {owner}"


def group_id_of(group: str) -> int:
    """Return the id of a group of this machine, by name or number. Raises ConfigError if there is none."""
    if group.isdigit():
        return int(group)
    try:
        return grp.getgrnam(group).gr_gid
    except KeyError:
        raise ConfigError(
            f"cannot give the sockets to the group {group}: there is no such group",
            f"groupadd --system {group}, or set socket_group to one that exists",
        ) from None


def _remove_stale(path: Path) -> None:
    try:
        there = path.lstat()
    except FileNotFoundError:
        return
    except OSError as error:
        raise ConfigError(f"cannot use the socket {path}: {error.strerror}", "give another address") from error
    if not stat.S_ISSOCK(there.st_mode):
        raise ConfigError(
            f"cannot listen on {path}: there is a file that is no socket", "remove it, or give another address"
        )
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        answer = probe.connect_ex(str(path))
    if answer == errno.ECONNREFUSED:
        # Its agent is dead: the lock is ours.
        with contextlib.suppress(FileNotFoundError), FAILPOINTS.around("socket-take-over"):
            path.unlink()
    elif answer != errno.ENOENT:
        raise LockedError(f"cannot use the socket {path}: another program listens there", _LOCK_HINT)

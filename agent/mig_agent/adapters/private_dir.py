"""Folders that only this process's user can enter, so that no other user reaches the files in them."""

from __future__ import annotations

import grp
import os
import pwd
import stat
from collections.abc import Container
from pathlib import Path

from mig_agent.adapters.failpoints import FAILPOINTS
from mig_agent.core.errors import ConfigError

_MODE = 0o700
_OTHERS = 0o077
_OTHERS_WRITE = 0o022
_ROOT = 0
_OF_FILE_SYSTEMS = frozenset({"lost+found"})
"""Names in an otherwise empty folder that is the root of a file system."""


class PrivateDir:
    """A folder of the agent's own user with mode 0700, held open, so that its path may change meanwhile."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    @classmethod
    def open(cls, path: Path, purpose: str = "use the folder", known: Container[str] | None = None) -> PrivateDir:
        """Open the folder, creating it if missing, and deny others access to it.

        An existing folder is closed to others only if it certainly is the agent's: it is empty, or contains one of the
        `known` names (without `known`: always, except one in which everybody creates files, as /tmp). A link is not
        followed. `purpose` completes "cannot ... PATH". Raises ConfigError if the folder cannot be created, belongs to
        another user, or if others could have created the files in it.
        """
        try:
            with FAILPOINTS.around("private-folder"):
                path.mkdir(mode=_MODE, parents=True, exist_ok=True)
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError as error:
            if os.path.islink(path):  # noqa: PTH114 -- the other one raises where it may not look
                raise ConfigError(
                    f"cannot {purpose} {path}: it is a link, and links are not followed",
                    f"name the folder itself: {path.resolve()}",
                ) from error
            raise ConfigError(
                f"cannot {purpose} {path}: {error.strerror}", "run as root, or see who made it or what is in its place"
            ) from error
        try:
            _close_to_others(descriptor, path, purpose, known)
        except OSError as error:
            os.close(descriptor)
            raise ConfigError(
                f"cannot close {path} to others: {error.strerror}", f"chmod {_MODE:04o} {path}"
            ) from error
        except BaseException:
            os.close(descriptor)
            raise
        return cls(descriptor)

    def path_of(self, name: str) -> str:
        """Return the path of an entry for this process: short enough for sockets, wherever the folder is."""
        return f"/proc/self/fd/{self._descriptor}/{name}"

    def open_file(self, name: str, flags: int, mode: int) -> int:
        """Open an entry as os.open does and return the descriptor. Raises OSError."""
        return os.open(name, flags, mode, dir_fd=self._descriptor)

    def close(self) -> None:
        """Close the folder; open files in it stay open."""
        os.close(self._descriptor)


def refuse_if_replaceable(path: Path, thing: str, hint: str) -> None:
    """Raise ConfigError if other users than root and the agent's could replace what is at the path.

    They could by renaming any of the folders above it. Both the folders of the path as written and those behind links
    are checked.
    """
    written = path.absolute()
    for folder in dict.fromkeys((*written.parents, *written.resolve().parents)):
        _refuse_if_others_rename(folder, folder.stat(), f"cannot protect {thing} {path}:", hint)


def _refuse_if_others_rename(folder: Path, there: os.stat_result, what: str, hint: str) -> None:
    if there.st_uid not in {_ROOT, os.geteuid()}:
        raise ConfigError(
            f"{what} {folder} belongs to {user_words(there.st_uid)}, who may rename files in it",
            f"chown {folder} to root or the agent's user, or {hint}",
        )
    if there.st_mode & stat.S_ISVTX:
        return  # as in /tmp: only an owner renames its files
    if there.st_mode & stat.S_IWOTH:
        raise ConfigError(f"{what} everybody may rename files in {folder}", f"chmod o-w {folder}, or {hint}")
    if there.st_mode & stat.S_IWGRP and there.st_gid not in {_ROOT, os.getegid()}:
        raise ConfigError(
            f"{what} the group {_group_words(there.st_gid)} may rename files in {folder}",
            f"chmod g-w {folder}, or {hint}",
        )


def user_words(uid: int) -> str:
    """Return a user's name and number for messages: `alice (uid 1000)`."""
    try:
        return f"{pwd.getpwuid(uid).pw_name} (uid {uid})"
    except KeyError:
        return f"uid {uid}"


def _group_words(gid: int) -> str:
    try:
        return f"{grp.getgrgid(gid).gr_name} (gid {gid})"
    except KeyError:
        return f"gid {gid}"


def _close_to_others(descriptor: int, path: Path, purpose: str, known: Container[str] | None) -> None:
    there = os.fstat(descriptor)
    mode = stat.S_IMODE(there.st_mode)
    if there.st_uid != os.geteuid():
        raise ConfigError(
            f"cannot {purpose} {path}: it belongs to {user_words(there.st_uid)}, and the agent runs as "
            f"{user_words(os.geteuid())}",
            "name another one; or, if you trust what is in it, chown it",
        )
    if not mode & _OTHERS:
        return
    inside = set(os.listdir(descriptor)) - _OF_FILE_SYSTEMS
    if mode & stat.S_ISVTX or (mode & _OTHERS_WRITE and inside):
        raise ConfigError(
            f"cannot {purpose} {path}: others than the agent's own user may write in it (mode {mode:04o})",
            f"name another one; or, if you trust what is in it, chmod {_MODE:04o} {path}",
        )
    if inside and known is not None and not any(name in known for name in inside):
        raise ConfigError(
            f"cannot {purpose} {path}: others may enter it (mode {mode:04o}), and there are files in it that are not "
            "the agent's",
            f"name one of the agent's own; or chmod {_MODE:04o} {path} if nobody else needs it",
        )
    with FAILPOINTS.around("private-folder-mode"):
        os.fchmod(descriptor, _MODE)
    if mode & _OTHERS_WRITE and set(os.listdir(descriptor)) - _OF_FILE_SYSTEMS:
        raise ConfigError(
            f"cannot {purpose} {path}: somebody else made files in it while the agent started",
            "see what is in it, remove it, and start the agent again",
        )

"""Files that hold a key: regular ones, owned by the agent's user or root, that no other user may read or write."""

from __future__ import annotations

import errno
import os
import stat
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from mig_agent.adapters.private_dir import user_words
from mig_agent.core.errors import ConfigError

_ROOT = 0
_OTHERS = 0o077
_GROUP_READS = 0o040


def read_secret(path: Path, *, follow_links: bool, group_of_root: bool) -> BinaryIO:
    """Open a file with a key for reading, if no other user can read it; the caller closes it.

    `group_of_root`: whether the group of a file owned by root may read it, as with keys for `ssl-cert`. If links are
    followed, the file behind them is checked. Raises FileNotFoundError if there is none, and ConfigError for a link
    that is not followed, a folder, a pipe, a file of another user, and one that others may read or write.
    """
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK  # opening a pipe must not block
    try:
        descriptor = os.open(path, flags if follow_links else flags | os.O_NOFOLLOW)
    except FileNotFoundError:
        raise
    except OSError as error:
        if error.errno == errno.ELOOP and not follow_links:
            raise ConfigError(
                f"cannot use {path}: it is a link, and links to keys are not followed", "put the key itself there"
            ) from error
        raise ConfigError(f"cannot read {path}: {error.strerror}", "see who owns it, and what it is") from error
    try:
        _check(os.fstat(descriptor), path, group_of_root=group_of_root)
        return os.fdopen(descriptor, "rb")
    except BaseException:
        with suppress(OSError):
            os.close(descriptor)
        raise


def _check(there: os.stat_result, path: Path, *, group_of_root: bool) -> None:
    if not stat.S_ISREG(there.st_mode):
        kind = "a folder" if stat.S_ISDIR(there.st_mode) else "no regular file"
        raise ConfigError(f"cannot use {path}: it is {kind}", "a key is a file of its own")
    if there.st_uid not in {_ROOT, os.geteuid()}:
        raise ConfigError(
            f"cannot use {path}: it belongs to {user_words(there.st_uid)}, who can read it and change it",
            f"if you trust what is in it: chown {os.geteuid()} {path}",
        )
    mode = stat.S_IMODE(there.st_mode)
    allowed = _GROUP_READS if group_of_root and there.st_uid == _ROOT else 0
    if mode & _OTHERS & ~allowed:
        raise ConfigError(
            f"cannot use {path}: others than its owner may read or write it (mode {mode:04o})", f"chmod 600 {path}"
        )

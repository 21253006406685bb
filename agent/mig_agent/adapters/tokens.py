"""Tokens of leases: HMAC-SHA256 of the lease id, so that they are never stored and the same again for a retry."""

from __future__ import annotations

import hmac
import os
import secrets
from pathlib import Path

from mig_agent.adapters.crashpoints import CRASH_POINTS
from mig_agent.core.errors import ConfigError
from mig_agent.core.model import LeaseId

KEY_FILE = "token.key"
_KEY_BYTES = 32
_OTHERS = 0o077


class Tokens:
    """Makes tokens and checks them, in constant time."""

    def __init__(self, key: bytes) -> None:
        self._key = key

    @classmethod
    def load_or_make(cls, path: Path) -> Tokens:
        """With the key in this file, which is made when it is not there, readable by its owner alone.

        Two processes that make it at once end with one key, and a crash leaves a whole one or none. Raises ConfigError
        for a file that is no key or that others may read, and OSError where it cannot be made.
        """
        try:
            return cls(_read(path))
        except FileNotFoundError:
            with CRASH_POINTS.around("token-key"):
                _make(path)
            return cls(_read(path))

    def token(self, lease: LeaseId) -> str:
        """64 hexadecimal digits."""
        return hmac.digest(self._key, lease.encode(), "sha256").hex()

    def matches(self, lease: LeaseId, token: str) -> bool:
        """Whether this is the lease's token."""
        return hmac.compare_digest(self.token(lease).encode(), token.encode(errors="replace"))


def _read(path: Path) -> bytes:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    with os.fdopen(descriptor, "rb") as file:
        mode = os.fstat(descriptor).st_mode
        key = file.read(_KEY_BYTES + 1)
    if mode & _OTHERS:
        raise ConfigError(f"cannot use {path}: others than its owner may read or write it", f"chmod 600 {path}")
    if len(key) != _KEY_BYTES:
        raise ConfigError(
            f"cannot use {path}: it is not a key of {_KEY_BYTES} bytes",
            "remove it to have a new one made; tokens given out before are void then",
        )
    return key


def _make(path: Path) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(secrets.token_bytes(_KEY_BYTES))
            file.flush()
            os.fsync(file.fileno())
        try:
            os.link(temporary, path)  # unlike a rename, never replaces the key that another has just made
        except FileExistsError:
            return
    finally:
        temporary.unlink()
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)

"""Lease tokens: HMAC-SHA256 of the lease id, so that they need no storage and a retry gets the same one."""

from __future__ import annotations

import hmac
import os
import secrets
from pathlib import Path

from mig_agent.adapters.failpoints import FAILPOINTS
from mig_agent.adapters.secret_files import read_secret
from mig_agent.core.errors import ConfigError
from mig_agent.core.model import LeaseId

KEY_FILE = "token.key"
_KEY_BYTES = 32


class Tokens:
    """Makes tokens and checks them in constant time."""

    def __init__(self, key: bytes) -> None:
        self._mac = hmac.new(key, digestmod="sha256")
        """The key, already hashed in: a copy of it hashes one id without another thread running in between."""

    @classmethod
    def load_or_make(cls, path: Path) -> Tokens:
        """Use the key in this file; create it, readable by its owner alone, if it is missing.

        Two processes that create it at once end with one key, and a crash leaves a whole one or none. Raises
        ConfigError if it cannot be created, if it is no key (a link, a folder), and if others may read or own it: its
        owner knows every token.
        """
        try:
            return cls(_read(path))
        except FileNotFoundError:
            pass
        try:
            with FAILPOINTS.around("token-key"):
                _make(path)
        except OSError as error:
            raise ConfigError(
                f"cannot make the key of the tokens, {path}: {error.strerror}", "see that its folder can be written"
            ) from error
        return cls(_read(path))

    def token(self, lease: LeaseId) -> str:
        """Return the lease's token, 64 hexadecimal digits."""
        return self.named(lease)

    def named(self, name: str) -> str:
        """Return the token of what has this name under this key, 64 hexadecimal digits."""
        mac = self._mac.copy()
        mac.update(name.encode())
        return mac.hexdigest()

    def matches(self, lease: LeaseId, token: str) -> bool:
        """Return True if this is the lease's token."""
        return hmac.compare_digest(self.token(lease).encode(), token.encode(errors="replace"))


def _read(path: Path) -> bytes:
    """Return the key. Raises FileNotFoundError if there is no file, and ConfigError for what is no key."""
    with read_secret(path, follow_links=False, group_of_root=False) as file:
        key = file.read(_KEY_BYTES + 1)
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
            os.link(temporary, path)  # unlike a rename, never replaces a key that another process has just made
        except FileExistsError:
            return
    finally:
        temporary.unlink()
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)

"""Remembered tokens of this user's leases, so that `migctl release LEASE` needs no token.

One JSON file under the user's own state folder ($XDG_STATE_HOME, else ~/.local/state), mode 0600, replaced by rename
under a lock. It is a convenience: an unreadable file counts as empty, and leases are not affected.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TypeAlias

MOST_REMEMBERED = 1000
"""Limit of remembered tokens; the oldest are forgotten first."""
_Tokens: TypeAlias = dict[str, dict[str, str | float]]


class RememberedTokens:
    """The remembered tokens in one folder."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "tokens.json"

    @classmethod
    def of_this_person(cls, environment: Mapping[str, str] = os.environ) -> RememberedTokens:
        """Return the tokens in this user's state folder, which is created with the first token."""
        state = environment.get("XDG_STATE_HOME", "")
        # The XDG specification says to ignore relative paths.
        folder = Path(state) if state.startswith("/") else Path.home() / ".local" / "state"
        return cls(folder / "mig-agent")

    def remember(self, lease: str, token: str, address: str, name: str = "") -> None:
        """Store a token, and the name under which the lease was requested. Raises OSError if it cannot be written."""
        with self._locked():
            tokens = self._read()
            tokens.pop(lease, None)
            tokens[lease] = {"token": token, "address": address, "at": time.time(), "name": name}
            newest = list(tokens)[-MOST_REMEMBERED:]  # in the order in which they were stored
            self._write({each: tokens[each] for each in newest})

    def token(self, lease: str) -> str:
        """Return the lease's token; empty if none is stored."""
        return str(self._read().get(lease, {}).get("token", ""))

    def leases(self, address: str) -> tuple[str, ...]:
        """Return the leases whose tokens came from the agent at this address, oldest first."""
        return tuple(self.names(address))

    def names(self, address: str) -> dict[str, str]:
        """Return these leases, each with the name under which it was requested; empty where it had none."""
        entries = self._read().items()
        return {lease: str(entry.get("name", "")) for lease, entry in entries if entry.get("address") == address}

    def forget(self, lease: str) -> None:
        """Remove a token; a missing token or a failing write is no error."""
        if not self.token(lease):
            return
        try:
            with self._locked():
                tokens = self._read()
                tokens.pop(lease, None)
                self._write(tokens)
        except OSError:
            return

    @contextmanager
    def _locked(self) -> Iterator[None]:
        self._file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(self._file.with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    def _read(self) -> _Tokens:
        try:
            found = json.loads(self._file.read_bytes())
        except (OSError, ValueError):
            return {}
        if not isinstance(found, dict):
            return {}
        return {lease: entry for lease, entry in found.items() if isinstance(entry, dict)}

    def _write(self, tokens: _Tokens) -> None:
        fresh = self._file.with_suffix(f".{os.getpid()}")
        descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            json.dump(tokens, file)
        fresh.replace(self._file)

"""Names of this machine's users, looked up in threads: a directory service may be slow or hang."""

from __future__ import annotations

import asyncio
import pwd
import threading
import time
from collections.abc import Callable

from mig_agent.core.texts import visible

_FRESH_SECONDS = 600.0
_LOOKUP_WAIT_SECONDS = 1.0
_NO_ANSWER_SECONDS = 30.0
_MAX_NAMES = 10_000
_MAX_LOOKUPS = 16
"""Limit of concurrent lookups."""
_LONGEST_NAME = 64


class Users:
    """Caches user names. Not thread-safe; use from the event loop."""

    def __init__(self, find: Callable[[int], str] | None = None) -> None:
        """`find` returns a user's name or raises KeyError; the machine's own directory by default."""
        self._find = find or _from_directory
        self._names: dict[int, str] = {}
        self._looked_up_at: dict[int, float] = {}
        self._lookups: dict[int, asyncio.Future[None]] = {}

    def name(self, uid: int) -> str:
        """Return the user's name as far as known; `uid 1000` for a user without one."""
        return self._names.get(uid) or f"uid {uid}"

    def is_fresh(self, uid: int) -> bool:
        """Return True if no lookup is due: the name was found, or a lookup timed out, a short while ago."""
        looked_up_at = self._looked_up_at.get(uid)
        return looked_up_at is not None and time.monotonic() - looked_up_at < _FRESH_SECONDS

    async def learn(self, uid: int) -> None:
        """Look the name up and wait for it briefly; it may arrive later."""
        lookup = self._lookups.get(uid)
        if lookup is None:
            if len(self._lookups) >= _MAX_LOOKUPS:
                return  # the directory hangs; the next connection asks again
            loop = asyncio.get_running_loop()
            lookup = loop.create_future()
            # A daemonic thread: if a directory service hangs, the agent must still be able to exit.
            try:
                threading.Thread(target=self._look_up, args=(uid, loop), name=f"name-of-{uid}", daemon=True).start()
            except RuntimeError:
                return  # no thread can be started now
            self._lookups[uid] = lookup
        await asyncio.wait((lookup,), timeout=_LOOKUP_WAIT_SECONDS)
        if not lookup.done():
            # No other connection waits for a hanging directory, for a while.
            self._looked_up_at[uid] = time.monotonic() - _FRESH_SECONDS + _NO_ANSWER_SECONDS

    def _look_up(self, uid: int, loop: asyncio.AbstractEventLoop) -> None:
        try:
            name = self._find(uid)
        except (KeyError, OSError, OverflowError, ValueError):
            name = ""
        if visible(name) != name or len(name) > _LONGEST_NAME:
            name = ""
        try:
            loop.call_soon_threadsafe(self._store, uid, name)
        except RuntimeError:
            return  # the loop is closed

    def _store(self, uid: int, name: str) -> None:
        if len(self._names) >= _MAX_NAMES:
            oldest = next(iter(self._names))
            del self._names[oldest]
            self._looked_up_at.pop(oldest, None)
        if name or uid not in self._names:  # a failing directory removes no name
            self._names[uid] = name
        self._looked_up_at[uid] = time.monotonic()
        lookup = self._lookups.pop(uid, None)
        if lookup is not None and not lookup.done():
            lookup.set_result(None)


def _from_directory(uid: int) -> str:
    return pwd.getpwuid(uid).pw_name


def uid_named(name: str) -> int | None:
    """Return the uid of a user given by name or number; None if there is no such user. May be slow."""
    if name.isascii() and name.isdigit():
        return int(name)
    try:
        return pwd.getpwnam(name).pw_uid
    except KeyError:
        return None

"""Names of this machine's users. A directory service may take its time, so nobody waits for it on the event loop."""

from __future__ import annotations

import asyncio
import pwd
import threading
import time
from collections.abc import Callable

from mig_agent.core.texts import visible

_FRESH_SECONDS = 600.0
_PATIENCE_SECONDS = 1.0
_NO_ANSWER_SECONDS = 30.0
_MOST_KNOWN = 10_000
_MOST_ASKED = 16
"""Names that are looked up at once."""
_LONGEST_NAME = 64


class Users:
    """What users are called, remembered. Belongs to the event loop."""

    def __init__(self, find: Callable[[int], str] | None = None) -> None:
        """`find` gives a user's name, or raises KeyError; the machine's own directory unless given."""
        self._find = find or _from_directory
        self._names: dict[int, str] = {}
        self._learned: dict[int, float] = {}
        self._asked: dict[int, asyncio.Future[None]] = {}

    def name(self, uid: int) -> str:
        """What the user is called, as far as it was learned; `uid 1000` for one without a name."""
        return self._names.get(uid) or f"uid {uid}"

    def is_fresh(self, uid: int) -> bool:
        """Whether the name was learned a short while ago."""
        learned = self._learned.get(uid)
        return learned is not None and time.monotonic() - learned < _FRESH_SECONDS

    async def learn(self, uid: int) -> None:
        """Asks for the name, and waits for it, but not for long: it may come later."""
        asked = self._asked.get(uid)
        if asked is None:
            if len(self._asked) >= _MOST_ASKED:
                return  # a directory that hangs; the next connection asks again
            loop = asyncio.get_running_loop()
            asked = loop.create_future()
            # A daemonic thread: where a directory service hangs, the agent must still be able to end.
            try:
                threading.Thread(target=self._ask, args=(uid, loop), name=f"name-of-{uid}", daemon=True).start()
            except RuntimeError:
                return  # no thread can be started now
            self._asked[uid] = asked
        await asyncio.wait((asked,), timeout=_PATIENCE_SECONDS)
        if not asked.done():
            # Nobody else waits for a directory that hangs, for a while.
            self._learned[uid] = time.monotonic() - _FRESH_SECONDS + _NO_ANSWER_SECONDS

    def _ask(self, uid: int, loop: asyncio.AbstractEventLoop) -> None:
        try:
            name = self._find(uid)
        except (KeyError, OSError, OverflowError, ValueError):
            name = ""
        if visible(name) != name or len(name) > _LONGEST_NAME:
            name = ""
        try:
            loop.call_soon_threadsafe(self._learn, uid, name)
        except RuntimeError:
            return  # the loop is closed: nobody waits any more

    def _learn(self, uid: int, name: str) -> None:
        if len(self._names) >= _MOST_KNOWN:
            oldest = next(iter(self._names))
            del self._names[oldest]
            self._learned.pop(oldest, None)
        if name or uid not in self._names:  # a directory that fails takes no name away
            self._names[uid] = name
        self._learned[uid] = time.monotonic()
        asked = self._asked.pop(uid, None)
        if asked is not None and not asked.done():
            asked.set_result(None)


def _from_directory(uid: int) -> str:
    return pwd.getpwuid(uid).pw_name


def uid_named(name: str) -> int | None:
    """The number of a user given by name or number; None where there is none of that name. May be slow."""
    if name.isascii() and name.isdigit():
        return int(name)
    try:
        return pwd.getpwnam(name).pw_uid
    except KeyError:
        return None

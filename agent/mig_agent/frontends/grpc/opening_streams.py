"""Limits the streams of a user on which no request has arrived yet: a new stream evicts the oldest one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Final

from mig_agent.core.errors import Reason, UsageError, refuse

FIRST_MESSAGE_SECONDS = 60.0
"""How long a client may leave a stream open before it sends its request; in a burst it may be behind many others."""
EXTRA_STREAMS: Final = 1000
"""How many streams of a user may wait for their first message even when the user's call limit is used up."""

User = int | str | None
"""A uid on Unix sockets, the name of a connection over TCP, or None if the caller is not known."""


class OpeningStreams:
    """Bounds the streams of each user on which no request has arrived yet. Not thread-safe; use from the event loop.

    In a burst a request may be behind the headers of thousands of other streams, which gRPC does not read while the
    maximum number of calls is open. Unless the oldest stream is refused then, all would wait for each other.
    """

    def __init__(self, most: Callable[[User], float]) -> None:
        """Limit by `most`, which returns how many streams a user may have open now: at least one."""
        self._most = most
        self._waiting: dict[User, dict[asyncio.Timeout, None]] = {}
        """Per user the timeout of each stream that waits, the oldest first."""

    def __len__(self) -> int:
        """Return the number of streams that wait, of all users."""
        return sum(map(len, self._waiting.values()))

    @asynccontextmanager
    async def waiting(self, user: User) -> AsyncIterator[None]:
        """Limit the time for which the block may wait for the first message of a stream.

        Raises UsageError if none arrives within FIRST_MESSAGE_SECONDS, and RefusedError (QUEUE_FULL) if this stream is
        evicted because the user has opened too many newer ones.
        """
        self._evict_oldest(user)
        limit = asyncio.timeout(FIRST_MESSAGE_SECONDS)
        try:
            async with limit:
                self._waiting.setdefault(user, {})[limit] = None
                yield
        except TimeoutError:
            if limit not in self._waiting.get(user, {}):
                raise refuse(
                    Reason.QUEUE_FULL,
                    "cannot wait longer for a request: this user has opened too many other streams without one",
                    "try again later; the administrator sets the limit with max_calls",
                ) from None
            raise UsageError(
                f"cannot wait longer for a request: none came in {FIRST_MESSAGE_SECONDS:g} s",
                "send `request` as the first message of the stream",
            ) from None
        finally:
            self._forget(user, limit)

    def _evict_oldest(self, user: User) -> None:
        """End the wait of the user's oldest stream if the user is at the limit."""
        streams = self._waiting.get(user, {})
        if len(streams) >= self._most(user):
            oldest = next(iter(streams), None)
            if oldest is not None:
                self._forget(user, oldest)
                if not oldest.expired():
                    oldest.reschedule(asyncio.get_running_loop().time())

    def _forget(self, user: User, limit: asyncio.Timeout) -> None:
        streams = self._waiting.get(user, {})
        streams.pop(limit, None)
        if not streams:
            self._waiting.pop(user, None)

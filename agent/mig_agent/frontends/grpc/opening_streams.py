"""Streams on which no request has come yet: each user may have so many, and its oldest makes place for its newest."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Final

from mig_agent.core.errors import Reason, UsageError, refuse

FIRST_MESSAGE_SECONDS = 60.0
"""How long a client may leave a stream open before it sends its request; in a burst it may be behind many others."""
SPARE: Final = 1000
"""Streams of one user that may wait for their requests when those of its requests take all that they may."""

User = int | str | None


class OpeningStreams:
    """Bounds the streams of one user on which no request has come yet. Belongs to the event loop.

    In a burst a request may be behind the beginnings of thousands of other streams, which are not read while as many
    calls are open as may be: somebody has to be refused unheard then, or all would wait for each other.
    """

    def __init__(self, most: Callable[[User], float]) -> None:
        """`most` tells how many streams a user may open now, which is at least one."""
        self._most = most
        self._waiting: dict[User, dict[asyncio.Timeout, None]] = {}
        """Each with the time that it has, the oldest first."""

    def __len__(self) -> int:
        """Count the streams that wait."""
        return sum(map(len, self._waiting.values()))

    @asynccontextmanager
    async def waiting(self, who: User) -> AsyncIterator[None]:
        """Wait in the block for the request of a stream.

        Raises UsageError when none has come in time, RefusedError (QUEUE_FULL) where the user has opened too many more.
        """
        self._make_place(who)
        limit = asyncio.timeout(FIRST_MESSAGE_SECONDS)
        try:
            async with limit:
                self._waiting.setdefault(who, {})[limit] = None
                yield
        except TimeoutError:
            if limit not in self._waiting.get(who, {}):
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
            self._forget(who, limit)

    def _make_place(self, who: User) -> None:
        """End the wait of the oldest where the user has as many as may be."""
        of_one = self._waiting.get(who, {})
        if len(of_one) >= self._most(who):
            oldest = next(iter(of_one), None)
            if oldest is not None:
                self._forget(who, oldest)
                if not oldest.expired():
                    oldest.reschedule(asyncio.get_running_loop().time())

    def _forget(self, who: User, limit: asyncio.Timeout) -> None:
        of_one = self._waiting.get(who, {})
        of_one.pop(limit, None)
        if not of_one:
            self._waiting.pop(who, None)

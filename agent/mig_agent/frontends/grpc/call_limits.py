"""Limits on what one user may have open on a socket: calls, streams without a request, and answers not read."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Final

from mig_agent.adapters.transport.peer_credentials import own_uid
from mig_agent.core.errors import Reason, RefusedError, UsageError, refuse

User = int | str | None
"""Whose calls share one limit: a uid, or over TCP the address of a connection."""
_ROOT: Final = 0
FIRST_MESSAGE_SECONDS = 60.0
"""How long a client may leave a stream open before it sends its request; in a burst it may be behind many others."""
EXTRA_STREAMS: Final = 1000
"""How many streams of a user may wait for their first message even when the user's call limit is used up."""
_ALWAYS_TAKEN: Final = frozenset({"Release", "Renew"})


class CallLimit:
    """Limits the concurrent calls of one kind, in total and per user. Not thread-safe; use from the event loop."""

    def __init__(
        self, most: float, what: str, *, most_per_user: float = math.inf, unbounded: Collection[int] = ()
    ) -> None:
        """Allow `most` calls in total and `most_per_user` for each user.

        `what` names the calls in messages: "requests and watches". `unbounded` are uids to which only the total
        applies.
        """
        self._most = most
        self._most_per_user = most_per_user
        self._unbounded = frozenset(unbounded)
        self._what = what
        self._by_user: Counter[User] = Counter()
        self._in_use = 0

    def remaining(self, user: User) -> float:
        """Return how many more calls this user could make if there were no other users."""
        share = self._most if user in self._unbounded else min(self._most, self._most_per_user)
        return share - self._by_user[user]

    @contextmanager
    def slot(self, user: User = None) -> Iterator[None]:
        """Occupy the slot of one call while the block runs. Raises RefusedError (QUEUE_FULL) if no slot is free."""
        if self._in_use >= self._most:
            raise _refusal(f"{self._in_use} {self._what}")
        if self.remaining(user) <= 0:
            raise _refusal(f"{self._by_user[user]} {self._what} of one user")
        self._in_use += 1
        self._by_user[user] += 1
        try:
            yield
        finally:
            self._in_use -= 1
            self._by_user[user] -= 1
            if not self._by_user[user]:
                del self._by_user[user]


def _refusal(what: str) -> RefusedError:
    return refuse(
        Reason.QUEUE_FULL,
        f"cannot take one more call: {what} are open on this socket, which is the limit",
        "try again later; the administrator sets the limit with max_calls",
    )


_SMALL_BYTES = 4096
_MOST_ANSWER_BYTES = 16 << 20
"""As much as five of the largest answers have."""


class UnreadAnswers:
    """Bounds the bytes of answers that one user has requested and not read: HTTP/2 lets a client stop reading.

    Not thread-safe; use from the event loop.
    """

    def __init__(self, most_bytes: int = _MOST_ANSWER_BYTES) -> None:
        self._most_bytes = most_bytes
        self._unread: dict[User, int] = {}

    def add(self, user: User, size: int) -> Callable[[], None] | None:
        """Count an answer of `size` bytes, and return the function that ends that; None for a small one, not counted.

        Raises RefusedError (QUEUE_FULL) if the user has too many bytes unread.
        """
        if size <= _SMALL_BYTES:
            return None
        unread = self._unread.get(user, 0)
        if unread + size > self._most_bytes:
            raise refuse(
                Reason.QUEUE_FULL,
                f"cannot answer one more call: {unread} bytes of answers to this user are not taken yet",
                "read the answers, or try again later",
            )
        self._unread[user] = unread + size

        def release() -> None:
            left = self._unread[user] - size
            if left:
                self._unread[user] = left
            else:
                del self._unread[user]

        return release


class CallLimits:
    """The call limits of one socket, one for each kind of call."""

    def __init__(self, most: int) -> None:
        """Allow `most` streams (requests and watches) and as many other calls; of each, one user may have half."""
        half = (most + 1) // 2
        # Root and the agent's own user could stop it anyway.
        self._streams = CallLimit(most, "requests and watches", most_per_user=half, unbounded=(_ROOT, own_uid()))
        self._others = CallLimit(most, "other calls", most_per_user=half)
        self._always = CallLimit(math.inf, "calls that end or renew a lease")

    def of(self, method: str, *, streams: bool) -> CallLimit:
        """Return the limit that applies to a method; `streams`: whether its answers are a stream."""
        if method in _ALWAYS_TAKEN:
            return self._always
        return self._streams if streams else self._others


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


def most_open(most: int) -> int:
    """Return how many calls one user can have open under `CallLimits(most)`, streams without a request included."""
    return most + EXTRA_STREAMS + (most + 1) // 2

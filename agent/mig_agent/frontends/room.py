"""How many calls may be under way at once: more are refused in words, before anything is done for them.

Streams (requests that wait, leases that are held, watches) may stay for days, other calls end by themselves. Each kind
has room of its own, so that streams without end never keep anybody from reading the status. Release and Renew are never
refused here: whoever has a lease can always give it back. Of the other calls one user may have half.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from mig_agent.core.errors import Reason, RefusedError, refuse

_ALWAYS_TAKEN: Final = frozenset({"Release", "Renew"})


class Room:
    """Room for so many calls of one kind. Belongs to the event loop."""

    def __init__(self, most: float, what: str, *, most_of_one: float = math.inf) -> None:
        """`what` names them in messages: "requests and watches"; `most_of_one` is how many one user may have."""
        self._most = most
        self._most_of_one = most_of_one
        self._what = what
        self._of_one: Counter[int | str | None] = Counter()
        self.taken = 0

    @property
    def is_full(self) -> bool:
        """Whether one more call would be refused."""
        return self.taken >= self._most

    def refusal(self) -> RefusedError:
        """Why one more call is not taken."""
        return _refusal(f"{self.taken} {self._what}")

    @contextmanager
    def place(self, who: int | str | None = None) -> Iterator[None]:
        """A place for one call as long as the block lasts. Raises RefusedError (QUEUE_FULL) where there is none."""
        if self.is_full:
            raise self.refusal()
        if self._of_one[who] >= self._most_of_one:
            raise _refusal(f"{self._of_one[who]} {self._what} of one user")
        self.taken += 1
        self._of_one[who] += 1
        try:
            yield
        finally:
            self.taken -= 1
            self._of_one[who] -= 1
            if not self._of_one[who]:
                del self._of_one[who]


def _refusal(what: str) -> RefusedError:
    return refuse(
        Reason.QUEUE_FULL,
        f"cannot take one more call: {what} are open on this socket, which is the limit",
        "try again later; the administrator sets the limit with max_calls",
    )


_SMALL_BYTES = 4096
_MOST_ANSWER_BYTES = 16 << 20
"""Five of the largest answers."""


class Answers:
    """Bounds the bytes of answers that one user has asked for and not taken: HTTP/2 lets a client refuse to take them.

    Belongs to the event loop.
    """

    def __init__(self, most_bytes: int = _MOST_ANSWER_BYTES) -> None:
        self._most_bytes = most_bytes
        self._held: dict[int | str | None, int] = {}

    def hold(self, who: int | str | None, size: int) -> Callable[[], None] | None:
        """Counts an answer until what is returned is called; small ones are not counted.

        Raises RefusedError (QUEUE_FULL) where too many are not taken.
        """
        if size <= _SMALL_BYTES:
            return None
        held = self._held.get(who, 0)
        if held + size > self._most_bytes:
            raise refuse(
                Reason.QUEUE_FULL,
                f"cannot answer one more call: {held} bytes of answers to this user are not taken yet",
                "read the answers, or try again later",
            )
        self._held[who] = held + size

        def taken() -> None:
            left = self._held[who] - size
            if left:
                self._held[who] = left
            else:
                del self._held[who]

        return taken


class Rooms:
    """The room of one socket, for so many calls of each kind."""

    def __init__(self, most: int) -> None:
        self._streams = Room(most, "requests and watches")
        self._others = Room(most, "other calls", most_of_one=(most + 1) // 2)
        self._always = Room(math.inf, "calls that end or renew a lease")

    def of(self, method: str, *, streams: bool) -> Room:
        """The room of a method, which streams or does not."""
        if method in _ALWAYS_TAKEN:
            return self._always
        return self._streams if streams else self._others

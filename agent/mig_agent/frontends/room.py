"""How many calls may be under way at once: more are refused in words, before anything is done for them.

Streams (requests that wait, leases that are held, watches) may stay for days, other calls end by themselves. Each kind
has room of its own, so that streams without end never keep anybody from reading the status. Release and Renew are never
refused here: whoever has a lease can always give it back.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from mig_agent.core.errors import Reason, RefusedError, refuse

_ALWAYS_TAKEN: Final = frozenset({"Release", "Renew"})


class Room:
    """Room for so many calls of one kind. Belongs to the event loop."""

    def __init__(self, most: float, what: str) -> None:
        """`what` names them in messages: "requests and watches"."""
        self._most = most
        self._what = what
        self.taken = 0

    @property
    def is_full(self) -> bool:
        """Whether one more call would be refused."""
        return self.taken >= self._most

    def refusal(self) -> RefusedError:
        """Why one more call is not taken."""
        return refuse(
            Reason.QUEUE_FULL,
            f"cannot take one more call: {self.taken} {self._what} are open on this socket, which is the limit",
            "try again later; the administrator sets the limit with max_calls",
        )

    @contextmanager
    def place(self) -> Iterator[None]:
        """A place for one call as long as the block lasts. Raises RefusedError (QUEUE_FULL) where there is none."""
        if self.is_full:
            raise self.refusal()
        self.taken += 1
        try:
            yield
        finally:
            self.taken -= 1


class Rooms:
    """The room of one socket, for so many calls of each kind."""

    def __init__(self, most: int) -> None:
        self._streams = Room(most, "requests and watches")
        self._others = Room(most, "other calls")
        self._always = Room(math.inf, "calls that end or renew a lease")

    def of(self, method: str, *, streams: bool) -> Room:
        """The room of a method, which streams or does not."""
        if method in _ALWAYS_TAKEN:
            return self._always
        return self._streams if streams else self._others

"""How many connections there may be: in all, of one user, from one host. Nobody can keep everybody else out."""

from __future__ import annotations

import resource
from collections.abc import Collection

_FILES_EACH = 3
"""Of one relayed connection: the client's, ours to gRPC, and gRPC's."""
_OTHER_FILES = 256
"""For all that the agent opens beside connections."""
_MOST_FILES = 65_536
"""More are never needed."""


class ConnectionLimits:
    """Counts connections. Belongs to the event loop."""

    def __init__(self, most: int, *, most_of_one: int | None = None, unbounded: Collection[int] = ()) -> None:
        """`unbounded` are users to whom only the total applies: those who could stop the agent anyway."""
        self.most = most
        self.most_of_one = most if most_of_one is None else most_of_one
        self._unbounded = frozenset(unbounded)
        self._taken: dict[int | str | None, int] = {}
        self._total = 0

    def take(self, who: int | str | None) -> str:
        """Takes a place for one connection of this user, or from this host; the reason in words when there is none."""
        mine = self._taken.get(who, 0)
        if self._total >= self.most:
            return f"{self._total} connections are open, which is the limit"
        if who not in self._unbounded and mine >= self.most_of_one:
            one = f"from {who}" if isinstance(who, str) else "of one user"
            return f"{mine} connections {one} are open, which is the limit for one"
        self._taken[who] = mine + 1
        self._total += 1
        return ""

    def give_back(self, who: int | str | None) -> None:
        """A connection that had a place has ended."""
        self._total -= 1
        left = self._taken[who] - 1
        if left:
            self._taken[who] = left
        else:
            del self._taken[who]


def allow_open_files() -> int:
    """Lets this process open as many files as it may; how many connections that is enough for."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, _MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    return max((most - _OTHER_FILES) // _FILES_EACH, 1)

"""Limits on open connections: in all, per user and per host, so that no client can keep the others out."""

from __future__ import annotations

import resource
from collections.abc import Collection

_FILES_EACH = 3
"""Open files per relayed connection: the client's, the relay's to gRPC, and gRPC's."""
_OTHER_FILES = 256
"""Open files reserved for everything but connections."""
_MOST_FILES = 65_536
"""Upper limit of open files; more are never needed."""


class ConnectionLimits:
    """Counts connections against the limits. Not thread-safe; use from the event loop."""

    def __init__(self, most: int, *, most_of_one: int | None = None, unbounded: Collection[int] = ()) -> None:
        """`unbounded` are uids to which only the total applies, since they could stop the agent anyway."""
        self.most = most
        self.most_of_one = most if most_of_one is None else most_of_one
        self._unbounded = frozenset(unbounded)
        self._open: dict[int | str | None, int] = {}
        self._total = 0

    def acquire(self, who: int | str | None) -> str:
        """Take a slot for a connection of this user or host; return why there is none, or an empty string."""
        own = self._open.get(who, 0)
        if self._total >= self.most:
            return f"{self._total} connections are open, which is the limit"
        if who not in self._unbounded and own >= self.most_of_one:
            one = f"from {who}" if isinstance(who, str) else "of one user"
            return f"{own} connections {one} are open, which is the limit for one"
        self._open[who] = own + 1
        self._total += 1
        return ""

    def release(self, who: int | str | None) -> None:
        """Free the slot of a connection that has ended."""
        self._total -= 1
        left = self._open[who] - 1
        if left:
            self._open[who] = left
        else:
            del self._open[who]


def allow_open_files() -> int:
    """Raise this process's limit of open files as far as allowed; return how many connections that permits."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, _MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    return max((most - _OTHER_FILES) // _FILES_EACH, 1)

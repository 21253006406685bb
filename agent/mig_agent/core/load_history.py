"""What a node has seen of late: how long leases lasted, and which requests came how often.

The reservation delay is the mean of the lease times; wait estimates use their distribution, and the requests.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right, insort
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Self

from mig_agent.core.model import Lease, Request

FIRST_GUESS_SECONDS = 300.0
MOST_LEASE_TIMES = 1000
"""Number of lease times kept; older ones are dropped, so that the distribution follows the node's use."""
MOST_REQUESTS = 200
"""Number of requests that are kept."""
FEWEST_REQUESTS = 10
"""With fewer requests nothing is said about how often they come."""


@dataclass(frozen=True, slots=True)
class EndedLease:
    """Time that a lease lasted, and how long it could have lasted by its deadline, in seconds."""

    lasted: float
    allowed: float | None = None
    """None: it had no deadline."""


def ended_lease(lease: Lease, at: float) -> EndedLease:
    """Return what is kept of a lease that ended at a moment."""
    allowed = None if lease.expires_at is None else lease.expires_at - lease.created_at
    return EndedLease(at - lease.created_at, allowed)


@dataclass(frozen=True, slots=True)
class PastLeases:
    """Durations of past leases, in order of size."""

    times: Sequence[float] = ()
    """In seconds."""
    shares: Sequence[float] = ()
    """Of those with a deadline: as a share of the time until then, at most 1."""


def _ns(seconds: float) -> int:
    """Return whole nanoseconds: their sum stays exact, however many are added and subtracted."""
    return round(seconds * 1e9)


class LeaseTimes:
    """Keeps how long the last leases lasted, in seconds, and their mean.

    The first guess, in seconds, counts in the mean as much as one lease.
    """

    def __init__(self, first_guess: float = FIRST_GUESS_SECONDS) -> None:
        self._by_end: deque[float] = deque()
        self._ordered: list[float] = []
        self._shares: deque[float] = deque(maxlen=MOST_LEASE_TIMES)
        self._first_guess: float | None = first_guess
        self._sum_ns = _ns(first_guess)

    @classmethod
    def of(cls, leases: Iterable[EndedLease]) -> Self:
        """Return the times of these leases, given in the order of their ends."""
        times = cls()
        for each in leases:
            times.lease_ended(each)
        return times

    def lease_ended(self, lease: EndedLease) -> None:
        """Add a lease. A negative length, from a clock that was set back, is ignored."""
        seconds = lease.lasted
        if seconds < 0:
            return
        if lease.allowed is not None and lease.allowed > 0:
            self._shares.append(min(seconds / lease.allowed, 1.0))
        self._by_end.append(seconds)
        insort(self._ordered, seconds)
        self._sum_ns += _ns(seconds)
        if len(self._by_end) > MOST_LEASE_TIMES:
            oldest = self._by_end.popleft()
            del self._ordered[bisect_left(self._ordered, oldest)]
            self._sum_ns -= _ns(oldest)
            if self._first_guess is not None:
                self._sum_ns -= _ns(self._first_guess)
                self._first_guess = None

    @property
    def mean(self) -> float:
        """The mean in seconds."""
        return self._sum_ns / 1e9 / (len(self._by_end) + (self._first_guess is not None))

    @property
    def past(self) -> PastLeases:
        """The leases that the times are of; without the first guess."""
        return PastLeases(tuple(self._ordered), tuple(sorted(self._shares)))

    def __len__(self) -> int:
        return len(self._ordered)


class RemainingTimes:
    """The distribution of how long leases go on, given how long they have lasted already.

    It is the Kaplan-Meier estimate: leases that are active count as having lasted at least as long as they have.
    Without it long leases, of which more are active than have ended, would seem rarer than they are.
    """

    def __init__(self, ended: Sequence[float], active: Iterable[float]) -> None:
        """Take how long the ended leases lasted, the shortest first, and the ages of the active ones, in seconds."""
        ages = sorted(active)
        self._times: list[float] = []
        self._ended: list[float] = []
        """For each time, minus the share of leases that last longer: rising, as bisecting needs it."""
        longer = 1.0
        for number, seconds in enumerate(ended):
            at_risk = len(ended) - number + len(ages) - bisect_left(ages, seconds)
            longer *= 1.0 - 1.0 / at_risk
            self._times.append(seconds)
            self._ended.append(-longer)

    def after(self, age: float, share: float) -> float:
        """Return within how many more seconds this share (0 to 1) of the leases of such an age end.

        Infinite where no lease is known to have lasted so long.
        """
        known = bisect_right(self._times, age)
        last_longer = -self._ended[known - 1] if known else 1.0
        place = max(known, bisect_left(self._ended, -last_longer * (1.0 - share)))
        return self._times[place] - age if place < len(self._times) else math.inf


@dataclass(frozen=True, slots=True)
class Demand:
    """Which requests are to be expected."""

    per_second: float
    requests: tuple[Request, ...]
    """Each is as likely as the others."""


NO_DEMAND = Demand(0.0, ())


class RecentRequests:
    """Keeps the last requests, for how often which requests come."""

    def __init__(self, since: float) -> None:
        """Start at a moment, in seconds since the epoch."""
        self._since = since
        self._requests: deque[tuple[float, Request]] = deque()

    def came(self, request: Request, now: float) -> None:
        """Add a request that came now."""
        self._requests.append((now, request))
        if len(self._requests) > MOST_REQUESTS:
            self._since, _ = self._requests.popleft()

    def demand(self, now: float) -> Demand:
        """Return what is to be expected if requests go on to come as they did; nothing while few have come."""
        seconds = now - self._since
        if len(self._requests) < FEWEST_REQUESTS or seconds <= 0:
            return NO_DEMAND
        return Demand(len(self._requests) / seconds, tuple(request for _, request in self._requests))

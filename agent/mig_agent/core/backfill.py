"""Backfilling with a reservation, so that small requests do not starve large ones.

Of the waiting requests that fit now the larger one goes first. The first in the queue that has waited past the
reservation delay reserves the fewest GPUs that can serve it from all behind it. The delay is the mean lease time by
default: `docs/placement.md` has what shorter and longer delays do, `docs/decisions/0010` why it is bounded.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Self

from mig_agent.core.model import Gpu, GpuUuid, NodeView, Request
from mig_agent.core.planning.feasibility import FeasibilityCache, fewest_gpus
from mig_agent.core.planning.profiles import share_of_gpus
from mig_agent.core.planning.search import NOTHING_RESERVED, usable_gpus

_MOST_FEASIBILITY_CACHES = 16
_MOST_CACHED = 10_000
"""Requests about which something is remembered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitingRequest:
    """A request in the queue."""

    request: Request
    seq: int
    """Its number of arrival: of equal priority, lower goes first."""
    since: float
    """When it came, in seconds since the epoch."""

    @property
    def order(self) -> tuple[int, int]:
        """Sorts the queue: higher priority first, then first come."""
        return (-self.request.priority, self.seq)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reservation:
    """GPUs that are kept for one waiting request."""

    waiting: WaitingRequest
    gpus: frozenset[GpuUuid]

    def against(self, other: WaitingRequest) -> frozenset[GpuUuid]:
        """The GPUs that are kept from another waiting request: all for those behind, none for those before it."""
        return self.gpus if other.order > self.waiting.order else NOTHING_RESERVED


class ReservationCache:
    """What was found out about requests that wait, kept as long as the GPUs are as they were: it takes long to find."""

    def __init__(self) -> None:
        self._gpus: tuple[Gpu, ...] = ()
        self._fewest: dict[int, frozenset[GpuUuid]] = {}
        self._shares: dict[int, float] = {}
        self._rooms: dict[int, FeasibilityCache] = {}
        """Of the latest few for whom GPUs were looked for."""

    def fewest(self, view: NodeView, waiting: WaitingRequest) -> frozenset[GpuUuid]:
        """Return the fewest GPUs that could serve it; empty where there are none."""
        self._look_at(view)
        if waiting.seq not in self._fewest:
            request = waiting.request
            rooms = self._rooms.setdefault(waiting.seq, FeasibilityCache(request.wants))
            if len(self._rooms) > _MOST_FEASIBILITY_CACHES:
                del self._rooms[next(iter(self._rooms))]
            self._fewest[waiting.seq] = fewest_gpus(usable_gpus(view, request), request.wants, rooms)
        return self._fewest[waiting.seq]

    def share(self, view: NodeView, waiting: WaitingRequest) -> float:
        """As the function."""
        self._look_at(view)
        found = self._shares.get(waiting.seq)
        if found is None:
            found = self._shares[waiting.seq] = gpu_share(view, waiting.request)
        return found

    def _look_at(self, view: NodeView) -> None:
        # GPUs are frozen: one that has changed is another. Requests come and go also where no GPU changes.
        same = len(view.gpus) == len(self._gpus) and all(map(operator.is_, view.gpus, self._gpus))
        if not same or len(self._shares) > _MOST_CACHED:
            self._gpus = view.gpus
            self._fewest.clear()
            self._shares.clear()


def in_order(waiting: Iterable[WaitingRequest]) -> tuple[WaitingRequest, ...]:
    """By priority, then first come."""
    return tuple(sorted(waiting, key=lambda each: each.order))


def backfill_order(
    view: NodeView, ordered: Sequence[WaitingRequest], kept: Reservation | None, known: ReservationCache | None = None
) -> tuple[WaitingRequest, ...]:
    """Which is tried first: by priority, then who has GPUs kept, then the larger one, then first come."""
    first = None if kept is None else kept.waiting.seq
    known = known or ReservationCache()

    def turn(each: WaitingRequest) -> tuple[int, bool, float, int]:
        return (-each.request.priority, each.seq != first, -known.share(view, each), each.seq)

    return tuple(sorted(ordered, key=turn)) if len(ordered) > 1 else tuple(ordered)


def reservation(
    view: NodeView,
    waiting: Iterable[WaitingRequest],
    now: float,
    limit_seconds: float,
    known: ReservationCache | None = None,
) -> Reservation | None:
    """The GPUs kept for the first in order that has waited past the limit; None when nobody has.

    The GPUs are those that will be free soonest, with least on them that has to end. A request keeps none where all
    that could serve it is cordoned, lost or held by what others made; then the next in order does.
    """
    known = known or ReservationCache()
    for each in in_order(waiting):
        if now - each.since >= limit_seconds:
            gpus = known.fewest(view, each)
            if gpus:
                return Reservation(waiting=each, gpus=gpus)
    return None


def gpu_share(view: NodeView, request: Request) -> float:
    """How many GPUs a request takes, by slices: 0.25 for a 2g.10gb; what it comes to on the model where it is least."""
    return share_of_gpus(view.gpus, request.wants)


FIRST_GUESS_SECONDS = 300.0
SHORTEST_DELAY_SECONDS = 10.0
"""Where leases last moments, so that the queue does not come down to strict first-come."""
LONGEST_DELAY_SECONDS = 24 * 3600.0
"""Where leases last days, so that nobody is passed by for longer."""
_MOST_LEASES_IN_MEAN = 1000
"""Leases after which the oldest begin to fade, so that the mean follows how a node is used."""


class MeanLeaseTime:
    """The running mean of lease lengths. The guess, in seconds, counts as much as one lease."""

    def __init__(self, first_guess: float = FIRST_GUESS_SECONDS) -> None:
        self._mean = first_guess
        self._count = 1

    @classmethod
    def of(cls, lengths: Iterable[float]) -> Self:
        """What came of leases that lasted so many seconds, the first to end first."""
        patience = cls()
        for seconds in lengths:
            patience.lease_ended(seconds)
        return patience

    def lease_ended(self, seconds: float) -> None:
        """Takes a lease into the mean; one of less than 0, from a clock that was set back, counts for nothing."""
        if seconds < 0:
            return
        self._count = min(self._count + 1, _MOST_LEASES_IN_MEAN)
        self._mean += (seconds - self._mean) / self._count

    @property
    def limit_seconds(self) -> float:
        """What the mean says, in seconds."""
        return self._mean

    @property
    def bounded_limit_seconds(self) -> float:
        """The limit that an agent goes by, in seconds: what the mean says, from LEAST_SECONDS to MOST_SECONDS."""
        return min(max(self.limit_seconds, SHORTEST_DELAY_SECONDS), LONGEST_DELAY_SECONDS)

"""Backfilling with a reservation, so that small requests do not starve large ones.

Of the waiting requests that fit now the larger one goes first. The first in the queue that has waited past the
reservation delay reserves the fewest GPUs that can serve it from all behind it. The delay is the mean lease time by
default: `docs/placement.md` has what shorter and longer delays do, `docs/decisions/0010` why it is bounded.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from mig_agent.core.model import Gpu, GpuUuid, NodeView, Request
from mig_agent.core.planning.feasibility import FeasibilityCache, fewest_gpus
from mig_agent.core.planning.profiles import share_of_gpus
from mig_agent.core.planning.search import NOTHING_RESERVED, usable_gpus

_MOST_FEASIBILITY_CACHES = 16
_MOST_CACHED = 10_000
"""The most requests whose share is cached; beyond it the cache is cleared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitingRequest:
    """A request in the queue."""

    request: Request
    seq: int
    """Arrival number: among requests of equal priority the lower one goes first."""
    since: float
    """When it was queued, in seconds since the epoch."""
    rank: float = 0.0
    """With fair share (`core.fairness`): the lower one goes first among requests of equal priority."""

    @property
    def order(self) -> tuple[int, float, int]:
        """The sort key of the queue: higher priority first, then the lower rank, then first come."""
        return (-self.request.priority, self.rank, self.seq)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reservation:
    """GPUs that are reserved for one waiting request."""

    waiting: WaitingRequest
    gpus: frozenset[GpuUuid]

    @property
    def words(self) -> str:
        """Return for whom the GPUs are reserved, to follow "reserved for": `the waiting request of alice (train)`."""
        return f"the waiting request of {self.waiting.request.holder}"

    def against(self, other: WaitingRequest) -> frozenset[GpuUuid]:
        """Return the GPUs that `other` may not use: all of these if it is behind this request, else none."""
        return self.gpus if other.order > self.waiting.order else NOTHING_RESERVED


class ReservationCache:
    """Caches per waiting request the GPUs to reserve and its share of a GPU, which are slow to compute.

    Valid while the GPUs of the view are unchanged; any change clears it.
    """

    def __init__(self) -> None:
        self._gpus: tuple[Gpu, ...] = ()
        self._fewest: dict[int, frozenset[GpuUuid]] = {}
        self._shares: dict[int, float] = {}
        self._caches: dict[int, FeasibilityCache] = {}
        """Feasibility caches of the last few requests that GPUs were searched for, by arrival number."""

    def fewest(self, view: NodeView, waiting: WaitingRequest) -> frozenset[GpuUuid]:
        """Return the fewest GPUs that could serve the request once leases end; empty if none could."""
        self._clear_if_changed(view)
        if waiting.seq not in self._fewest:
            request = waiting.request
            cache = self._caches.setdefault(waiting.seq, FeasibilityCache(request.wants))
            if len(self._caches) > _MOST_FEASIBILITY_CACHES:
                del self._caches[next(iter(self._caches))]
            self._fewest[waiting.seq] = fewest_gpus(usable_gpus(view, request), request.wants, cache)
        return self._fewest[waiting.seq]

    def share(self, view: NodeView, waiting: WaitingRequest) -> float:
        """Return `gpu_share` of the request, cached."""
        self._clear_if_changed(view)
        found = self._shares.get(waiting.seq)
        if found is None:
            found = self._shares[waiting.seq] = gpu_share(view, waiting.request)
        return found

    def _clear_if_changed(self, view: NodeView) -> None:
        # GPUs are frozen: one that has changed is another. Requests come and go also where no GPU changes.
        same = len(view.gpus) == len(self._gpus) and all(map(operator.is_, view.gpus, self._gpus))
        if not same or len(self._shares) > _MOST_CACHED:
            self._gpus = view.gpus
            self._fewest.clear()
            self._shares.clear()


def in_order(waiting: Iterable[WaitingRequest]) -> tuple[WaitingRequest, ...]:
    """Return the requests in queue order: by priority, then rank, then first come."""
    return tuple(sorted(waiting, key=lambda each: each.order))


def backfill_order(
    view: NodeView, ordered: Sequence[WaitingRequest], kept: Reservation | None, known: ReservationCache | None = None
) -> tuple[WaitingRequest, ...]:
    """Return the order to try: by priority, the one with a reservation, rank, the larger first, then first come."""
    first = None if kept is None else kept.waiting.seq
    known = known or ReservationCache()

    def sort_key(each: WaitingRequest) -> tuple[int, bool, float, float, int]:
        return (-each.request.priority, each.seq != first, each.rank, -known.share(view, each), each.seq)

    return tuple(sorted(ordered, key=sort_key)) if len(ordered) > 1 else tuple(ordered)


def reservation(
    view: NodeView,
    waiting: Iterable[WaitingRequest],
    now: float,
    limit_seconds: float,
    known: ReservationCache | None = None,
) -> Reservation | None:
    """Return the reservation for the first request in order that has waited for `limit_seconds`; None if there is none.

    The GPUs are those that will be free soonest, with the least on them that has to end. A request gets no reservation
    where all that could serve it is cordoned, lost or occupied by foreign instances; then the next in order gets one.
    """
    known = known or ReservationCache()
    for each in in_order(waiting):
        if now - each.since >= limit_seconds:
            gpus = known.fewest(view, each)
            if gpus:
                return Reservation(waiting=each, gpus=gpus)
    return None


def gpu_share(view: NodeView, request: Request) -> float:
    """Return how many GPUs a request takes, by slices: 0.25 for a 2g.10gb; on the model where that is least."""
    return share_of_gpus(view.gpus, request.wants)


SHORTEST_DELAY_SECONDS = 10.0
"""The lower bound, where leases last moments: without it the queue would be strictly first-come."""
LONGEST_DELAY_SECONDS = 24 * 3600.0
"""The upper bound, where leases last days: no request is overtaken for longer before it gets a reservation."""


def delay_for(mean_lease_seconds: float) -> float:
    """Return the reservation delay in seconds: the mean, from SHORTEST_DELAY_SECONDS to LONGEST_DELAY_SECONDS."""
    return min(max(mean_lease_seconds, SHORTEST_DELAY_SECONDS), LONGEST_DELAY_SECONDS)

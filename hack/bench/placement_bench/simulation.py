"""Requests that are served at once or lost: which were served, and the creations that it took."""

from __future__ import annotations

import heapq
from dataclasses import dataclass

from placement_bench.arrivals import Arrivals
from placement_bench.clusters import Cluster, HandleT, Made
from placement_bench.mixes import LARGEST, NAMES, sizes


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """Counts of the requests after the warm-up. Shares are between 0 and 1."""

    offered: tuple[int, ...]
    """Requests by kind."""
    accepted: tuple[int, ...]
    made: Made

    @property
    def requests(self) -> float:
        """The share of requests that were served."""
        return sum(self.accepted) / max(1, sum(self.offered))

    @property
    def slices(self) -> float:
        """The share of the requested memory slices that were served.

        Counting requests alone rewards refusing large ones.
        """
        accepted = sum(count * size for count, size in zip(self.accepted, sizes(), strict=True))
        return accepted / max(1, sum(count * size for count, size in zip(self.offered, sizes(), strict=True)))

    @property
    def largest(self) -> float:
        """The share of the 7g that were served."""
        return self.accepted[LARGEST] / max(1, self.offered[LARGEST])

    @property
    def reused(self) -> float:
        """The share of the served requests that needed no creation."""
        return self.made.reused / max(1, sum(self.accepted))


def simulate(cluster: Cluster[HandleT], arrivals: Arrivals, *, warm_up: int) -> Served:
    """Run the arrivals; the first `warm_up` of them are served but not counted."""
    offered = [0] * len(NAMES)
    accepted = [0] * len(NAMES)
    before = Made()
    ending: list[tuple[float, int, HandleT]] = []
    for number, (now, kind, lasts) in enumerate(zip(arrivals.at, arrivals.kind, arrivals.lasts, strict=True)):
        while ending and ending[0][0] <= now:
            ended, _, handle = heapq.heappop(ending)
            cluster.end(handle, ended)
        if number == warm_up:
            before = Made(cluster.made.created, cluster.made.reused, cluster.made.destroyed)
        found = cluster.place(kind, now)
        if found is not None:
            heapq.heappush(ending, (now + lasts, number, found))
        if number >= warm_up:
            offered[kind] += 1
            accepted[kind] += found is not None
    made = cluster.made
    return Served(
        offered=tuple(offered),
        accepted=tuple(accepted),
        made=Made(made.created - before.created, made.reused - before.reused, made.destroyed - before.destroyed),
    )

"""The counters of a GPU: its memory slices and the engines that can become scarce, and what a slot takes of them.

Two slots can exist side by side if and only if the counters suffice for both: that is what the scheduler checks, and
what the planner checks with masks and sums of engines.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from types import MappingProxyType

from mig_agent.core.dra.names import ENGINE_COUNTERS, memory_slice_counter
from mig_agent.core.model import Layout, Placement, Profile, slices_in

Counts = Mapping[str, int]
"""Amounts by name of the counter."""


@dataclass(frozen=True, slots=True)
class CounterSet:
    """The published counters of one GPU; `available` is what all devices of the driver may take together."""

    name: str
    available: tuple[tuple[str, int], ...]
    """(name, amount) of each counter, by name."""


@lru_cache(maxsize=256)
def counters_of(layout: Layout) -> Counts:
    """Return the counters of an empty GPU."""
    totals = layout.engines.as_tuple()
    counts = {memory_slice_counter(number): 1 for number in range(layout.memory_slices)}
    counts |= {ENGINE_COUNTERS[engine]: totals[engine] for engine in scarce_engines(layout)}
    return MappingProxyType(counts)


@lru_cache(maxsize=4096)
def consumption(layout: Layout, profile: Profile, placement: Placement) -> Counts:
    """Return what an instance of the profile takes of the GPU's counters at this placement."""
    taken = profile.engines.as_tuple()
    counts = {memory_slice_counter(number): 1 for number in slices_in(placement.mask)}
    counts |= {ENGINE_COUNTERS[engine]: taken[engine] for engine in scarce_engines(layout) if taken[engine]}
    return MappingProxyType(counts)


@lru_cache(maxsize=256)
def scarce_engines(layout: Layout) -> tuple[int, ...]:
    """Return the engines that need a counter, as indices into the fields of `Engines`.

    An engine is left out if instances that fit by slices and by the other engines never take more of it than there is.
    For most models that leaves one engine, the one which makes a second `+me` instance impossible. An engine whose
    total is 0 has no limit, as in the planner.
    """
    totals = layout.engines.as_tuple()
    kept = [engine for engine, total in enumerate(totals) if total]
    for engine in tuple(kept):
        others = tuple(each for each in kept if each != engine)
        if _most(layout, engine, others) <= totals[engine]:
            kept.remove(engine)
    return tuple(kept)


def _most(layout: Layout, engine: int, limited: tuple[int, ...]) -> int:
    """Return the most of an engine that instances side by side take while none of the limited engines runs out."""
    totals = layout.engines.as_tuple()
    kinds: dict[int, set[tuple[int, int, tuple[int, ...]]]] = {}
    for profile in layout.profiles:
        taken = profile.engines.as_tuple()
        kind = (taken[engine], tuple(taken[each] for each in limited))
        for placement in profile.placements:
            kinds.setdefault(placement.start, set()).add((placement.start + placement.size, *kind))

    @cache
    def most(start: int, left: tuple[int, ...]) -> int:
        if start >= layout.memory_slices:
            return 0
        best = most(start + 1, left)
        for end, amount, taken in kinds.get(start, ()):
            rest = tuple(one - other for one, other in zip(left, taken, strict=True))
            if min(rest, default=0) >= 0:
                best = max(best, amount + most(end, rest))
        return best

    return most(0, tuple(totals[each] for each in limited))

"""The tables of the placement policy: the windows of each profile on a GPU, and their costs.

The policy is RC, remaining capacity: of all the free windows choose the one that leaves the most windows, weighted by
their size, for what may come. Positions are memory slices, masks have bit n for slice n. The tables work for an axis of
any length.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from mig_agent.core.model import Engines, Layout, Placement, Profile

_FREE_SLICE_COST = 1e-3
"""For each slice left free: among equals the fuller GPU is chosen."""
_DRIVER_RANK_COST = 1e-6
"""For each position in the driver's own order: among equals the driver's choice is taken."""

_FIELDS = 6
_FIELD = 24
_GUARD = 1 << (_FIELD - 1)
_COUNT = _GUARD - 1
_GUARDS = sum(_GUARD << _FIELD * place for place in range(_FIELDS))


@dataclass(frozen=True, slots=True)
class Window:
    """One legal placement of one profile."""

    profile: Profile
    placement: Placement
    mask: int
    driver_rank: int
    """How many placements of this profile the driver would use before this one on an empty GPU."""


@dataclass(frozen=True, slots=True)
class RankedWindow:
    """A window that is free under some mask, with what using it costs there."""

    window: Window
    cost: float
    """Capacity lost, with the tie-breakers; without the cost of creating an instance."""


class Tables:
    """Holds what can be computed once for all GPUs of one layout. Deterministic; filled as masks are first used."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self._limit = _limits(layout.engines)
        self._engines = {profile.id: pack_engines(profile.engines) for profile in layout.profiles}
        plain = [profile for profile in layout.profiles if not profile.attributes] or list(layout.profiles)
        # A profile with an attribute fits where a plain one of its size fits: counting it would weigh that size twice.
        self._counted = tuple(place.mask for profile in plain for place in profile.placements)
        self._sizes = tuple(place.size for profile in plain for place in profile.placements)
        self._capacity: dict[int, int] = {}
        self._ranked: dict[tuple[int, int], tuple[RankedWindow, ...]] = {}
        self.windows = {profile.id: self._windows_of(profile) for profile in layout.profiles}
        """The legal windows of each profile, by its id."""

    def capacity(self, mask: int) -> int:
        """Return RC: the sizes of all windows that are free when the slices of `mask` are taken, summed."""
        known = self._capacity.get(mask)
        if known is None:
            pairs = zip(self._counted, self._sizes, strict=True)
            known = sum(size for window, size in pairs if not window & mask)
            self._capacity[mask] = known
        return known

    def ranked(self, profile_id: int, mask: int) -> tuple[RankedWindow, ...]:
        """Return the profile's windows that are free under `mask`, cheapest first."""
        key = (profile_id, mask)
        known = self._ranked.get(key)
        if known is None:
            free = [
                RankedWindow(window, self._cost(window, mask))
                for window in self.windows.get(profile_id, ())
                if not window.mask & mask
            ]
            known = tuple(sorted(free, key=lambda ranked: ranked.cost))
            self._ranked[key] = known
        return known

    def engines_of(self, profile: Profile) -> int:
        """Return the engines that one instance of the profile takes, packed: such numbers may be summed."""
        known = self._engines.get(profile.id)
        return pack_engines(profile.engines) if known is None else known

    def engines_fit(self, taken: int) -> bool:
        """Return True if the GPU has as many engines as `taken` (packed).

        The sums of the engines are what makes the driver refuse a second `+me` instance.
        """
        return (self._limit - taken) & _GUARDS == _GUARDS

    def missing_engines(self, taken: int) -> tuple[int, ...]:
        """Return how many of each engine are taken beyond what the GPU has, in the order of Engines."""
        totals = self.layout.engines.as_tuple()
        return tuple(
            max(0, count - total) if total else 0 for count, total in zip(unpack_engines(taken), totals, strict=True)
        )

    def _cost(self, window: Window, mask: int) -> float:
        after = mask | window.mask
        return (
            self.capacity(mask)
            - self.capacity(after)
            + _FREE_SLICE_COST * (self.layout.memory_slices - after.bit_count())
            + _DRIVER_RANK_COST * window.driver_rank
        )

    def _windows_of(self, profile: Profile) -> tuple[Window, ...]:
        order = self._driver_order(profile)
        return tuple(Window(profile, place, place.mask, order.index(place)) for place in profile.placements)

    def _driver_order(self, profile: Profile) -> list[Placement]:
        """Return the placements in the order in which the driver would use them on an empty GPU.

        It takes the free placement that leaves the most placements of all profiles, the lowest start on a tie: that
        gives every choice printed in NVIDIA's MIG User Guide.
        """
        order: list[Placement] = []
        left = sorted(profile.placements)
        mask = 0
        while left:
            # `max` keeps the first of equals, which is the lowest start. What overlaps an earlier place comes last.
            best = max(left, key=lambda place: (not place.mask & mask, self._windows_left(mask | place.mask)))
            left.remove(best)
            order.append(best)
            mask |= best.mask
        return order

    def _windows_left(self, mask: int) -> int:
        return sum(not window & mask for window in self._counted)


@lru_cache(maxsize=256)
def tables_for(layout: Layout) -> Tables:
    """Return the tables of a layout, made once."""
    return Tables(layout)


def pack_engines(engines: Engines) -> int:
    """Return counts of engines as one number, each in a bit field wide enough to be summed."""
    packed = 0
    for count in engines.as_tuple():
        packed = packed << _FIELD | count
    return packed


def unpack_engines(packed: int) -> tuple[int, ...]:
    """Return the counts in a packed number, in the order of Engines."""
    return tuple(packed >> _FIELD * place & _COUNT for place in reversed(range(_FIELDS)))


def _limits(totals: Engines) -> int:
    """Return the totals with a guard bit above each: subtracting more than there is clears the guard."""
    limit = 0
    for total in totals.as_tuple():
        # 0 means that the driver did not report it, or that nothing uses the engine: no limit.
        limit = limit << _FIELD | _GUARD | (total or _COUNT)
    return limit

"""The other policies, as small as they can be said: a score for each profile and mask, and the place taken there.

A rule looks only at which slices of a GPU are busy. Of all GPUs the one with the lowest score is taken, the first of
equals. These are models of the policies' idea, not of the programs that carry them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt

from mig_agent.core.model import Placement
from placement_bench.mixes import NAMES, SLICES, kinds

MASKS = 1 << SLICES
Score = float | tuple[float, float]
Scorer = Callable[[int, int, Placement], Score]
"""(kind, busy mask, place) -> score; lower is better."""


@dataclass(frozen=True, slots=True, eq=False)
class Rule:
    """A policy as two tables over (kind, busy mask)."""

    name: str
    scores: npt.NDArray[np.float64]
    """What the best place costs there; infinite where none is free."""
    places: tuple[tuple[Placement | None, ...], ...]
    """The best place."""

    def choose(self, kind: int, mask: int) -> Placement | None:
        """The place on one GPU; None where none is free."""
        return self.places[kind][mask]


def make_rule(name: str, within: Scorer, among: Callable[[int, int], float]) -> Rule:
    """A rule that takes the place with the least `within` on a GPU, and of the GPUs that with the least `among`.

    `within` is asked with the mask before; `among` with the masks before and after the place is taken. Of equal places
    the one with the lowest start is taken.
    """
    scores = np.full((len(NAMES), MASKS), np.inf)
    places: list[tuple[Placement | None, ...]] = []
    for kind, profile in enumerate(kinds()):
        row: list[Placement | None] = [None] * MASKS
        for mask in range(MASKS):
            free = [(within(kind, mask, place), place) for place in profile.placements if not place.mask & mask]
            if free:
                _, best = min(free)
                row[mask] = best
                scores[kind, mask] = among(mask, mask | best.mask)
        places.append(tuple(row))
    return Rule(name, scores, tuple(places))


def lowest_start(_kind: int, _mask: int, place: Placement) -> Score:
    """The lowest start."""
    return place.start


def most_kinds_left(_kind: int, mask: int, place: Placement) -> Score:
    """Leave room for as many different profiles as can be."""
    after = mask | place.mask
    return -sum(any(not other.mask & after for other in profile.placements) for profile in kinds())


def driver_order(kind: int, _mask: int, place: Placement) -> Score:
    """The order in which the driver fills an empty GPU with one profile."""
    return _driver_orders()[kind].index(place)


def fragmentation_increase(_kind: int, mask: int, place: Placement) -> Score:
    """MFI: how much the GPU's fragmentation rises."""
    return more_fragmented(mask, mask | place.mask)


def first_gpu(_before: int, _after: int) -> float:
    """The first GPU that has room."""
    return 0


def emptiest_gpu(before: int, _after: int) -> float:
    """The GPU with the fewest busy slices: spread."""
    return before.bit_count()


def fullest_gpu(before: int, _after: int) -> float:
    """The GPU with the most busy slices: binpack, best fit."""
    return -before.bit_count()


def more_fragmented(before: int, after: int) -> float:
    """The GPU whose fragmentation rises least."""
    return _fragmentation(after) - _fragmentation(before)


@cache
def _driver_orders() -> tuple[tuple[Placement, ...], ...]:
    """By kind: the places one after the other, each leaving the most windows of all profiles, the lowest of equals.

    That gives what captures show: 6, 4, 5, 0, 1, 2, 3 for the 1g.
    """
    windows = [place for profile in kinds() for place in profile.placements]
    orders = []
    for profile in kinds():
        left, order, mask = sorted(profile.placements), list[Placement](), 0
        while left:
            best = min(
                left,
                key=lambda place: (
                    bool(place.mask & mask),
                    -sum(not other.mask & (mask | place.mask) for other in windows),
                ),
            )
            left.remove(best)
            order.append(best)
            mask |= best.mask
        orders.append(tuple(order))
    return tuple(orders)


@cache
def _fragmentation(mask: int) -> int:
    """The sizes of all windows that are blocked although their profile is no larger than what is free, summed."""
    free = SLICES - mask.bit_count()
    return sum(
        place.size for profile in kinds() for place in profile.placements if place.size <= free and place.mask & mask
    )


@cache
def first_fit() -> Rule:
    """The first GPU, the lowest start: InstaSlice-like."""
    return make_rule("first fit, lowest start", lowest_start, first_gpu)


@cache
def hami_spread() -> Rule:
    """HAMi's node policy `spread`."""
    return make_rule("HAMi-like spread", most_kinds_left, emptiest_gpu)


@cache
def hami_binpack() -> Rule:
    """HAMi's node policy `binpack`."""
    return make_rule("HAMi-like binpack", most_kinds_left, fullest_gpu)


@cache
def driver() -> Rule:
    """The fullest GPU, and there what the driver would choose."""
    return make_rule("best fit, driver order", driver_order, fullest_gpu)


@cache
def mfi() -> Rule:
    """The least increase of fragmentation, on a GPU and among GPUs."""
    return make_rule("MFI-like", fragmentation_increase, more_fragmented)

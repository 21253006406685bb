"""The other policies, in minimal form: a score for each profile and mask, and the slot taken there.

A rule sees only which slices of a GPU are busy. Of all GPUs the one with the lowest score is taken, the first of
equals. These are models of the policies' idea, not of the programs that implement them. Each is made for one GPU model,
by default the benchmark's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt

from mig_agent.core.model import Layout, Placement, Profile
from mig_agent.core.planning.profiles import order_of_size
from placement_bench.mixes import SLICES, layout

MASKS = 1 << SLICES
Score = float | tuple[float, float]
Scorer = Callable[[Layout, int, int, Placement], Score]
"""Maps (model, kind, busy mask, placement) to a score; lower is better. A kind is an index into `plain(model)`."""
Among = Callable[[Layout, int, int], float]
"""Maps (model, busy mask before, busy mask after) to the score of a GPU; lower is better."""


@cache
def plain(model: Layout) -> tuple[Profile, ...]:
    """Return the profiles of a model that need no media engine of their own, smallest first: its kinds of request."""
    return tuple(sorted((each for each in model.profiles if not each.attributes), key=order_of_size))


@dataclass(frozen=True, slots=True, eq=False)
class Rule:
    """A policy as two tables over (kind, busy mask)."""

    name: str
    scores: npt.NDArray[np.float64]
    """The score of the best placement; infinite where none is free."""
    places: tuple[tuple[Placement | None, ...], ...]
    """The best placement."""

    def choose(self, kind: int, mask: int) -> Placement | None:
        """Return the placement on one GPU; None where none is free."""
        return self.places[kind][mask]


def make_rule(name: str, within: Scorer, among: Among, of: Layout | None) -> Rule:
    """Make a rule that takes the placement with the least `within` on a GPU.

    Of the GPUs it takes the one whose placement has the least `among`. `within` is called with the mask before; `among`
    with the masks before and after the placement is taken. Of equal placements the one with the lowest start is taken.
    None for `of` is the benchmark's model.
    """
    model = of or layout()
    masks = 1 << model.memory_slices
    scores = np.full((len(plain(model)), masks), np.inf)
    places: list[tuple[Placement | None, ...]] = []
    for kind, profile in enumerate(plain(model)):
        row: list[Placement | None] = [None] * masks
        for mask in range(masks):
            free = [(within(model, kind, mask, place), place) for place in profile.placements if not place.mask & mask]
            if free:
                _, best = min(free)
                row[mask] = best
                scores[kind, mask] = among(model, mask, mask | best.mask)
        places.append(tuple(row))
    return Rule(name, scores, tuple(places))


def lowest_start(_model: Layout, _kind: int, _mask: int, place: Placement) -> Score:
    """Prefer the lowest start."""
    return place.start


def most_kinds_left(model: Layout, _kind: int, mask: int, place: Placement) -> Score:
    """Prefer what leaves windows for as many different profiles as possible."""
    after = mask | place.mask
    return -sum(any(not other.mask & after for other in profile.placements) for profile in plain(model))


def driver_order(model: Layout, kind: int, _mask: int, place: Placement) -> Score:
    """Prefer the order in which the driver fills an empty GPU with one profile."""
    return _driver_orders(model)[kind].index(place)


def fragmentation_increase(model: Layout, _kind: int, mask: int, place: Placement) -> Score:
    """Prefer the least increase of the GPU's fragmentation (MFI)."""
    return more_fragmented(model, mask, mask | place.mask)


def first_gpu(_model: Layout, _before: int, _after: int) -> float:
    """Prefer the first GPU on which the request fits."""
    return 0


def emptiest_gpu(_model: Layout, before: int, _after: int) -> float:
    """Prefer the GPU with the fewest busy slices: spread."""
    return before.bit_count()


def fullest_gpu(_model: Layout, before: int, _after: int) -> float:
    """Prefer the GPU with the most busy slices: binpack, best fit."""
    return -before.bit_count()


def more_fragmented(model: Layout, before: int, after: int) -> float:
    """Prefer the GPU whose fragmentation rises least."""
    return _fragmentation(model, after) - _fragmentation(model, before)


@cache
def _driver_orders(model: Layout) -> tuple[tuple[Placement, ...], ...]:
    """Return by kind the placements in order, each leaving the most windows of all profiles, the lowest of equals.

    That gives what captures show: 6, 4, 5, 0, 1, 2, 3 for the 1g.
    """
    windows = [place for profile in plain(model) for place in profile.placements]
    orders = []
    for profile in plain(model):
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
def _fragmentation(model: Layout, mask: int) -> int:
    """Return the summed sizes of all windows that are blocked although as many slices as they need are free."""
    free = model.memory_slices - mask.bit_count()
    return sum(
        place.size
        for profile in plain(model)
        for place in profile.placements
        if place.size <= free and place.mask & mask
    )


@cache
def first_fit(of: Layout | None = None) -> Rule:
    """Return InstaSlice's idea: the first GPU, the lowest start."""
    return make_rule("first fit, lowest start", lowest_start, first_gpu, of)


@cache
def hami_spread(of: Layout | None = None) -> Rule:
    """Return HAMi's node policy `spread`."""
    return make_rule("HAMi-like spread", most_kinds_left, emptiest_gpu, of)


@cache
def hami_binpack(of: Layout | None = None) -> Rule:
    """Return HAMi's node policy `binpack`."""
    return make_rule("HAMi-like binpack", most_kinds_left, fullest_gpu, of)


@cache
def driver(of: Layout | None = None) -> Rule:
    """Return the rule of the fullest GPU, and there the driver's choice."""
    return make_rule("best fit, driver order", driver_order, fullest_gpu, of)


@cache
def mfi(of: Layout | None = None) -> Rule:
    """Return the rule of the least increase of fragmentation, on a GPU and among GPUs."""
    return make_rule("MFI-like", fragmentation_increase, more_fragmented, of)

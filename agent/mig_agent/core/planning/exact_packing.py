"""Bin packing: whether several devices fit together at all, by an exact search over any mix of GPU models and devices.

For each GPU (bin) the sets of windows that can be used side by side are enumerated once and reduced to the maximal
ones; the search then gives every GPU one such set. Wants that every model serves with the same profiles are
interchangeable, so the search counts classes of wants (items). None means that there is no way.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import product

from mig_agent.core.model import Layout, Profile, Slot, Want
from mig_agent.core.planning.occupancy import Occupancy
from mig_agent.core.planning.pinning import pin
from mig_agent.core.planning.placement import Window
from mig_agent.core.planning.profiles import smallest_profile
from mig_agent.core.planning.shares import without_shares

Counts = tuple[int, ...]
"""A count of devices for each class."""


class ItemClasses:
    """The wants grouped by which profile each layout would serve them with."""

    def __init__(self, occupancies: Sequence[Occupancy], wants: Sequence[Want]) -> None:
        layouts: dict[Layout, int] = {}
        for occupancy in occupancies:
            layouts.setdefault(occupancy.gpu.layout, len(layouts))
        self.layouts = layouts
        groups: dict[tuple[Profile | None, ...], list[int]] = {}
        known: dict[Want, tuple[Profile | None, ...]] = {}
        for number, want in enumerate(wants):
            served = known.get(want)
            if served is None:
                served = known[want] = tuple(smallest_profile(want, layout) for layout in layouts)
            groups.setdefault(served, []).append(number)
        # The hardest first: those that take most of a GPU.
        ordered = sorted(groups.items(), key=lambda item: self._hardness(item[0]), reverse=True)
        self.profiles = [served for served, _ in ordered]
        """For each class, the profile by layout."""
        self.members = [tuple(members) for _, members in ordered]
        """For each class, the wants in it."""
        self.shares = [self._share(served) for served in self.profiles]
        """For each class, the least part of a GPU that a device takes on any layout."""
        count = range(len(self.profiles))
        self.harder = [[other for other in range(item) if self._at_least_as_hard(other, item)] for item in count]
        """For each class, those before it that are at least as hard: whatever slot serves them would serve it, too."""

    @property
    def demand(self) -> Counts:
        """The number of devices wanted of each class."""
        return tuple(len(members) for members in self.members)

    def _at_least_as_hard(self, hard: int, easy: int) -> bool:
        return all(
            one is None or (other is not None and _contains(one, other))
            for one, other in zip(self.profiles[hard], self.profiles[easy], strict=True)
        )

    def _hardness(self, served: tuple[Profile | None, ...]) -> tuple[float, int, int]:
        """Return a sort key that puts what is harder in every respect after what is easier."""
        profiles = [profile for profile in served if profile is not None]
        return (self._share(served), -len(profiles), sum(profile.memory_slices for profile in profiles))

    def _share(self, served: tuple[Profile | None, ...]) -> float:
        parts = [
            profile.memory_slices / layout.memory_slices
            for profile, layout in zip(served, self.layouts, strict=True)
            if profile is not None
        ]
        return min(parts, default=0.0)


class Bin:
    """One GPU in the search: what it can take, in classes."""

    def __init__(self, occupancy: Occupancy, classes: ItemClasses, exclude: frozenset[Slot]) -> None:
        column = classes.layouts[occupancy.gpu.layout]
        self._classes_of: dict[int, list[int]] = {}
        demand: dict[int, int] = {}
        for item, served in enumerate(classes.profiles):
            profile = served[column]
            if profile is not None:
                self._classes_of.setdefault(profile.id, []).append(item)
                demand[profile.id] = demand.get(profile.id, 0) + len(classes.members[item])
        self.sets = _maximal_sets(occupancy, demand, exclude)
        """For each maximal set of profiles (counts by id), windows for it."""
        self._class_count = len(classes.profiles)
        # An excluded slot could lie inside a window of something harder, so then nothing is known to be easier.
        self._harder = [set() if exclude else set(harder) for harder in classes.harder]

    def most(self, weights: Sequence[float]) -> float:
        """Return the greatest weight of classes that it can take at once."""
        return self.fullest(weights)[0]

    def fullest(self, weights: Sequence[float]) -> tuple[float, Mapping[int, int]]:
        """Return the greatest weight of classes that it can take at once, and how many of each class that is."""
        heaviest = {
            profile: max((weights[item], item) for item in classes) for profile, classes in self._classes_of.items()
        }
        weight = 0.0
        chosen: tuple[tuple[int, int], ...] = ()
        for each in self.sets:
            found = sum(heaviest[profile][0] * count for profile, count in each)
            if found > weight:
                weight, chosen = found, each
        counts: dict[int, int] = {}
        for profile, count in chosen:
            item = heaviest[profile][1]
            counts[item] = counts.get(item, 0) + count
        return weight, counts

    def fill_options(self, left: Counts) -> list[Counts]:
        """Return what it can take of what is left, only maximal choices; those with the most devices first."""
        found: set[Counts] = set()
        for each in self.sets:
            per_profile = [self._profile_options(profile, count, left) for profile, count in each]
            for parts in product(*per_profile):
                counts = [0] * self._class_count
                for part in parts:
                    for item, count in part.items():
                        counts[item] += count
                found.add(tuple(counts))
        return sorted(_maximal(found), key=lambda counts: (-sum(counts), counts))

    def _profile_options(self, profile: int, slots: int, left: Counts) -> list[dict[int, int]]:
        """Return the fullest ways to fill `slots` instances of a profile with the classes that it serves."""
        classes = [item for item in self._classes_of[profile] if left[item]]
        total = min(slots, sum(left[item] for item in classes))
        return list(self._compositions(classes, total, left))

    def _compositions(self, classes: Sequence[int], total: int, left: Counts) -> Iterator[dict[int, int]]:
        """Yield the ways to take `total` devices from the classes, at most what is left of each, as far as they matter.

        What is harder goes before what is easier: to leave the easier one for another GPU is never worse.
        """
        if total == 0:
            yield {}
            return
        if not classes:
            return
        first, rest = classes[0], classes[1:]
        for count in range(min(total, left[first]), -1, -1):
            others = rest if count == left[first] else [item for item in rest if first not in self._harder[item]]
            for more in self._compositions(others, total - count, left):
                yield {first: count, **more}

    def windows_for(self, counts: Counts) -> Iterator[tuple[int, Window]]:
        """Yield a window for each device in `counts`, which came from `fill_options`, with its class."""
        wanted: dict[int, list[int]] = {}
        for profile, classes in self._classes_of.items():
            wanted[profile] = [item for item in classes for _ in range(counts[item])]
        for each, windows in self.sets.items():
            offered = dict(each)
            if all(len(classes) <= offered.get(profile, 0) for profile, classes in wanted.items()):
                for window in windows:
                    if wanted[window.profile.id]:
                        yield wanted[window.profile.id].pop(), window
                return


def _maximal_sets(
    occupancy: Occupancy, demand: Mapping[int, int], exclude: frozenset[Slot]
) -> dict[tuple[tuple[int, int], ...], tuple[Window, ...]]:
    """Return the maximal sets of profiles that fit on the GPU together, each with windows."""
    tables = occupancy.tables
    windows = sorted(
        (
            ranked.window
            for profile in demand
            for ranked in tables.ranked(profile, occupancy.held)
            if Slot(occupancy.gpu.uuid, ranked.window.profile, ranked.window.placement) not in exclude
        ),
        key=lambda window: (window.placement.start, window.placement.size, window.profile.id),
    )
    ids = sorted(demand)
    found: dict[Counts, tuple[Window, ...]] = {}

    def extend(first: int, mask: int, engines: int, chosen: tuple[Window, ...], counts: Counts) -> None:
        # Of the sets with the same counts the one that leaves most capacity is kept.
        known = found.get(counts)
        if known is None or tables.capacity(mask) > tables.capacity(occupancy.held | _mask(known)):
            found[counts] = chosen
        for number in range(first, len(windows)):
            window = windows[number]
            place = ids.index(window.profile.id)
            taken = engines + tables.engines_of(window.profile)
            if window.mask & mask or counts[place] >= demand[window.profile.id] or not tables.engines_fit(taken):
                continue
            more = (*counts[:place], counts[place] + 1, *counts[place + 1 :])
            extend(number + 1, mask | window.mask, taken, (*chosen, window), more)

    extend(0, occupancy.held, occupancy.engines, (), (0,) * len(ids))
    return {
        tuple((profile, count) for profile, count in zip(ids, counts, strict=True) if count): found[counts]
        for counts in sorted(_maximal(found), reverse=True)
    }


def _mask(windows: Sequence[Window]) -> int:
    mask = 0
    for window in windows:
        mask |= window.mask
    return mask


def _maximal(found: Mapping[Counts, object] | set[Counts]) -> list[Counts]:
    """Return the maximal counts: those for which no other has at least as much of every class."""
    kept: list[Counts] = []
    for counts in sorted(found, key=sum, reverse=True):
        if not any(all(more >= less for more, less in zip(other, counts, strict=True)) for other in kept):
            kept.append(counts)
    return kept


def _contains(hard: Profile, easy: Profile) -> bool:
    """Return True if an instance of `easy` fits wherever one of `hard` does."""
    if hard.id == easy.id:
        return True
    engines = zip(hard.engines.as_tuple(), easy.engines.as_tuple(), strict=True)
    if any(more < less for more, less in engines):
        return False
    inside = [place.mask for place in easy.placements]
    return all(any(mask & ~place.mask == 0 for mask in inside) for place in hard.placements)


_ROUNDS = 150
"""Iterations of the search for prices; most searches need a few."""
_TOLERANCE = 1e-7


def pack(
    occupancies: Sequence[Occupancy],
    wants: Sequence[Want],
    exclude: frozenset[Slot] = frozenset(),
    *,
    most_steps: int | None = None,
) -> tuple[tuple[int, Window], ...] | None:
    """Return for each want the index of a GPU and a free window on it; None if the wants do not fit together.

    A window is a legal placement of a profile; no two overlap. Idle instances are no obstacle, and costs are ignored.
    With `most_steps` the search gives up after this many steps and also returns None.
    """
    if any(want.slot is not None for want in wants):
        return _pack_pinned(occupancies, wants, exclude, most_steps)
    classes = ItemClasses(occupancies, without_shares(wants))
    if not all(any(served) for served in classes.profiles):
        return None
    bins = _bins(occupancies, classes, exclude)
    chosen = _Search(bins, classes, most_steps).run()
    if chosen is None:
        return None
    queues = [list(members) for members in classes.members]
    placed: dict[int, tuple[int, Window]] = {}
    for number, (each, counts) in enumerate(zip(bins, chosen, strict=True)):
        for item, window in each.windows_for(counts):
            placed[queues[item].pop()] = (number, window)
    return tuple(placed[number] for number in range(len(wants)))


def _pack_pinned(
    occupancies: Sequence[Occupancy], wants: Sequence[Want], exclude: frozenset[Slot], most_steps: int | None
) -> tuple[tuple[int, Window], ...] | None:
    pinned = pin(occupancies, wants, 0.0, exclude)
    if pinned is None:
        return None
    others = [wants[number] for number in pinned.rest]
    rest = pack(pinned.boards, others, exclude, most_steps=most_steps) if others else ()
    if rest is None:
        return None
    placed = {number: (board, candidate.window) for number, (board, candidate) in pinned.places.items()}
    placed.update(zip(pinned.rest, rest, strict=True))
    return tuple(placed[number] for number in range(len(wants)))


def _bins(occupancies: Sequence[Occupancy], classes: ItemClasses, exclude: frozenset[Slot]) -> list[Bin]:
    """Return one bin for each GPU; equal GPUs share one, unless slots of single GPUs are excluded."""
    made: dict[tuple[object, ...], Bin] = {}
    bins = []
    for occupancy in occupancies:
        key = (occupancy.gpu.uuid if exclude else None, id(occupancy.gpu.layout), occupancy.held, occupancy.engines)
        if key not in made:
            made[key] = Bin(occupancy, classes, exclude)
        bins.append(made[key])
    return bins


class _Search:
    """Fills bin by bin; what failed once with as much left is not tried again."""

    def __init__(self, bins: Sequence[Bin], classes: ItemClasses, most_steps: int | None) -> None:
        self._bins_by_place = bins
        self._steps_left = most_steps
        self._demand = classes.demand
        self._failed: set[tuple[int, Counts]] = set()
        prices = _prices(bins, classes)
        self._prices = prices
        # The tightest bins first: they leave the fewest ways.
        most = {each: each.most(classes.shares) for each in set(bins)}
        self._order = sorted(range(len(bins)), key=lambda number: (most[bins[number]], number))
        self._weights = [*_weightings(classes), prices]
        self._remaining = [self._remaining_weights(weights) for weights in self._weights]

    def run(self) -> list[Counts] | None:
        """Return what each bin takes, or None if the demand cannot be met."""
        taken: list[Counts] = []
        if not self._descend(0, self._demand, taken):
            return None
        nothing = (0,) * len(self._demand)
        result = [nothing] * len(self._bins_by_place)
        for number, counts in zip(self._order, taken, strict=False):
            result[number] = counts
        return result

    def _descend(self, depth: int, left: Counts, taken: list[Counts]) -> bool:
        if not any(left):
            return True
        if depth == len(self._order) or (depth, left) in self._failed or not self._may_suffice(depth, left):
            return False
        if self._steps_left is not None:
            if self._steps_left <= 0:
                return False
            self._steps_left -= 1
        options = self._bins_by_place[self._order[depth]].fill_options(left)
        # By the prices, which say how scarce the slots of each class are.
        for counts in sorted(options, key=lambda counts: -_weighed(counts, self._prices)):
            taken.append(counts)
            if self._descend(depth + 1, tuple(a - b for a, b in zip(left, counts, strict=True)), taken):
                return True
            taken.pop()
        self._failed.add((depth, left))
        return False

    def _may_suffice(self, depth: int, left: Counts) -> bool:
        """Return True if the bins that are left suffice by every way of weighing; no proof that the demand fits."""
        return all(
            _weighed(left, weights) <= capacity[depth] + _TOLERANCE
            for weights, capacity in zip(self._weights, self._remaining, strict=True)
        )

    def _remaining_weights(self, weights: Sequence[float]) -> list[float]:
        most = {each: each.most(weights) for each in set(self._bins_by_place)}
        capacity = [0.0]
        for number in reversed(self._order):
            capacity.append(capacity[-1] + most[self._bins_by_place[number]])
        return capacity[::-1]


def _weighed(counts: Counts, weights: Sequence[float]) -> float:
    return sum(count * weight for count, weight in zip(counts, weights, strict=True))


def _prices(bins: Sequence[Bin], classes: ItemClasses) -> list[float]:
    """Return a price for each class of wants: the scarcer its slots, the higher.

    If the fullest bins together are worth less than the demand, it cannot fit. These prices come nearest to showing
    that: they are the multipliers of the Lagrangian relaxation, found by subgradients.
    """
    demand = classes.demand
    shared = Counter(bins)
    prices = list(classes.shares)
    best, least = prices, float("inf")
    for _ in range(_ROUNDS):
        capacity = 0.0
        held = [0] * len(demand)
        for each, alike in shared.items():
            weight, counts = each.fullest(prices)
            capacity += alike * weight
            for item, count in counts.items():
                held[item] += alike * count
        total = sum(prices)
        slack = capacity - _weighed(demand, prices)
        if slack / total < least:
            best, least = prices, slack / total
        lacking = [wanted - have for wanted, have in zip(demand, held, strict=True)]
        length = sum(each * each for each in lacking)
        if slack < -_TOLERANCE or length == 0:
            break
        step = (slack + total / 20) / length
        prices = [max(0.0, price + step * each) for price, each in zip(prices, lacking, strict=True)]
        if not any(prices):
            break
    return best


def _weightings(classes: ItemClasses) -> list[Sequence[float]]:
    """Return ways to weigh classes: by their share of a GPU, each alone, and the hardest few together."""
    count = len(classes.profiles)
    alone = [[1.0 if item == only else 0.0 for item in range(count)] for only in range(count)]
    hardest = [[1.0 if item <= last else 0.0 for item in range(count)] for last in range(count)]
    return [classes.shares, *alone, *hardest]

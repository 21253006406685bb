"""Bin packing: whether several devices fit together at all, by an exact search over any mix of GPU models and devices.

For each GPU (bin) the sets of windows that can stand side by side are enumerated once and reduced to those that no
other set surpasses; the search then hands every GPU one such set. Wants that every model serves with the same profiles
are interchangeable, so it counts classes of wants (items) instead of telling them apart. An answer of None means that
there is no way.
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

Counts = tuple[int, ...]
"""So many devices of each kind."""


class ItemClasses:
    """The wants grouped by which profile each layout would serve them with."""

    def __init__(self, boards: Sequence[Occupancy], wants: Sequence[Want]) -> None:
        layouts: dict[Layout, int] = {}
        for board in boards:
            layouts.setdefault(board.gpu.layout, len(layouts))
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
        """For each kind, the profile by layout."""
        self.members = [tuple(members) for _, members in ordered]
        """For each kind, the wants of it."""
        self.shares = [self._share(served) for served in self.profiles]
        """For each kind, the least part of a GPU that it takes anywhere."""
        count = range(len(self.profiles))
        self.harder = [[other for other in range(kind) if self._at_least_as_hard(other, kind)] for kind in count]
        """For each kind, those before it that are at least as hard: whatever place serves them would serve it, too."""

    @property
    def demand(self) -> Counts:
        """How many devices of each kind are wanted."""
        return tuple(len(members) for members in self.members)

    def _at_least_as_hard(self, hard: int, easy: int) -> bool:
        return all(
            one is None or (other is not None and _contains(one, other))
            for one, other in zip(self.profiles[hard], self.profiles[easy], strict=True)
        )

    def _hardness(self, served: tuple[Profile | None, ...]) -> tuple[float, int, int]:
        """Sorts the kinds so that whatever is harder in every respect comes before."""
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
    """One GPU in the search: what it can take, in kinds."""

    def __init__(self, board: Occupancy, kinds: ItemClasses, exclude: frozenset[Slot]) -> None:
        column = kinds.layouts[board.gpu.layout]
        self._kinds_of: dict[int, list[int]] = {}
        demand: dict[int, int] = {}
        for kind, served in enumerate(kinds.profiles):
            profile = served[column]
            if profile is not None:
                self._kinds_of.setdefault(profile.id, []).append(kind)
                demand[profile.id] = demand.get(profile.id, 0) + len(kinds.members[kind])
        self.sets = _best_sets(board, demand, exclude)
        """For each set of profiles (counts by id) that no other surpasses: windows for it."""
        self._number_of_kinds = len(kinds.profiles)
        # An excluded slot could lie inside a window of something harder, so then nothing is known to be easier.
        self._harder = [set() if exclude else set(harder) for harder in kinds.harder]

    def most(self, weights: Sequence[float]) -> float:
        """The most weight of kinds that it can take at once."""
        return self.fullest(weights)[0]

    def fullest(self, weights: Sequence[float]) -> tuple[float, Mapping[int, int]]:
        """The most weight of kinds that it can take at once, and how many of each kind that is."""
        heaviest = {profile: max((weights[kind], kind) for kind in kinds) for profile, kinds in self._kinds_of.items()}
        weight = 0.0
        chosen: tuple[tuple[int, int], ...] = ()
        for each in self.sets:
            found = sum(heaviest[profile][0] * count for profile, count in each)
            if found > weight:
                weight, chosen = found, each
        counts: dict[int, int] = {}
        for profile, count in chosen:
            kind = heaviest[profile][1]
            counts[kind] = counts.get(kind, 0) + count
        return weight, counts

    def takes(self, left: Counts) -> list[Counts]:
        """What it can take of what is left, only such that leave nothing possible out; the most first."""
        found: set[Counts] = set()
        for each in self.sets:
            per_profile = [self._shared_out(profile, count, left) for profile, count in each]
            for parts in product(*per_profile):
                counts = [0] * self._number_of_kinds
                for part in parts:
                    for kind, count in part.items():
                        counts[kind] += count
                found.add(tuple(counts))
        return sorted(_unsurpassed(found), key=lambda counts: (-sum(counts), counts))

    def _shared_out(self, profile: int, slots: int, left: Counts) -> list[dict[int, int]]:
        """The ways to fill so many instances of a profile with the kinds that it serves, as full as can be."""
        kinds = [kind for kind in self._kinds_of[profile] if left[kind]]
        total = min(slots, sum(left[kind] for kind in kinds))
        return list(self._compositions(kinds, total, left))

    def _compositions(self, kinds: Sequence[int], total: int, left: Counts) -> Iterator[dict[int, int]]:
        """All ways to take `total` devices from the kinds, of each at most what is left, as far as they matter.

        What is harder goes before what is easier: to leave the easier one for another GPU is never worse.
        """
        if total == 0:
            yield {}
            return
        if not kinds:
            return
        first, rest = kinds[0], kinds[1:]
        for count in range(min(total, left[first]), -1, -1):
            others = rest if count == left[first] else [kind for kind in rest if first not in self._harder[kind]]
            for more in self._compositions(others, total - count, left):
                yield {first: count, **more}

    def windows_for(self, counts: Counts) -> Iterator[tuple[int, Window]]:
        """A window for each device in `counts`, which came from `takes`, with its kind."""
        wanted: dict[int, list[int]] = {}
        for profile, kinds in self._kinds_of.items():
            wanted[profile] = [kind for kind in kinds for _ in range(counts[kind])]
        for each, windows in self.sets.items():
            offered = dict(each)
            if all(len(kinds) <= offered.get(profile, 0) for profile, kinds in wanted.items()):
                for window in windows:
                    if wanted[window.profile.id]:
                        yield wanted[window.profile.id].pop(), window
                return


def _best_sets(
    board: Occupancy, demand: Mapping[int, int], exclude: frozenset[Slot]
) -> dict[tuple[tuple[int, int], ...], tuple[Window, ...]]:
    """The sets of profiles that can stand on the board together and that no other set surpasses, each with windows."""
    tables = board.tables
    windows = sorted(
        (
            ranked.window
            for profile in demand
            for ranked in tables.ranked(profile, board.held)
            if Slot(board.gpu.uuid, ranked.window.profile, ranked.window.placement) not in exclude
        ),
        key=lambda window: (window.placement.start, window.placement.size, window.profile.id),
    )
    ids = sorted(demand)
    found: dict[Counts, tuple[Window, ...]] = {}

    def extend(first: int, mask: int, engines: int, chosen: tuple[Window, ...], counts: Counts) -> None:
        # Of the sets with the same counts the one that leaves most capacity is kept.
        known = found.get(counts)
        if known is None or tables.capacity(mask) > tables.capacity(board.held | _mask(known)):
            found[counts] = chosen
        for number in range(first, len(windows)):
            window = windows[number]
            place = ids.index(window.profile.id)
            taken = engines + tables.engines_of(window.profile)
            if window.mask & mask or counts[place] >= demand[window.profile.id] or not tables.engines_fit(taken):
                continue
            more = (*counts[:place], counts[place] + 1, *counts[place + 1 :])
            extend(number + 1, mask | window.mask, taken, (*chosen, window), more)

    extend(0, board.held, board.engines, (), (0,) * len(ids))
    return {
        tuple((profile, count) for profile, count in zip(ids, counts, strict=True) if count): found[counts]
        for counts in sorted(_unsurpassed(found), reverse=True)
    }


def _mask(windows: Sequence[Window]) -> int:
    mask = 0
    for window in windows:
        mask |= window.mask
    return mask


def _unsurpassed(found: Mapping[Counts, object] | set[Counts]) -> list[Counts]:
    """Those that no other has at least as much as in every place."""
    kept: list[Counts] = []
    for counts in sorted(found, key=sum, reverse=True):
        if not any(all(more >= less for more, less in zip(other, counts, strict=True)) for other in kept):
            kept.append(counts)
    return kept


def _contains(hard: Profile, easy: Profile) -> bool:
    """Whether an instance of `easy` could stand wherever one of `hard` can."""
    if hard.id == easy.id:
        return True
    engines = zip(hard.engines.as_tuple(), easy.engines.as_tuple(), strict=True)
    if any(more < less for more, less in engines):
        return False
    inside = [place.mask for place in easy.placements]
    return all(any(mask & ~place.mask == 0 for mask in inside) for place in hard.placements)


_ROUNDS = 150
"""Of looking for prices; most searches need a few."""
_TOLERANCE = 1e-7


def pack(
    boards: Sequence[Occupancy],
    wants: Sequence[Want],
    exclude: frozenset[Slot] = frozenset(),
    *,
    most_steps: int | None = None,
) -> tuple[tuple[int, Window], ...] | None:
    """A board (by its place in `boards`) and a free window for each want, none overlapping; None when there is no way.

    Idle instances are no obstacle. Costs are not looked at. With `most_steps`, None also when so many steps of the
    search found nothing: only for those who can do without an answer.
    """
    if any(want.slot is not None for want in wants):
        return _pack_pinned(boards, wants, exclude, most_steps)
    kinds = ItemClasses(boards, wants)
    if not all(any(served) for served in kinds.profiles):
        return None
    shelves = _bins(boards, kinds, exclude)
    chosen = _Search(shelves, kinds, most_steps).run()
    if chosen is None:
        return None
    queues = [list(members) for members in kinds.members]
    placed: dict[int, tuple[int, Window]] = {}
    for number, (shelf, counts) in enumerate(zip(shelves, chosen, strict=True)):
        for kind, window in shelf.windows_for(counts):
            placed[queues[kind].pop()] = (number, window)
    return tuple(placed[number] for number in range(len(wants)))


def _pack_pinned(
    boards: Sequence[Occupancy], wants: Sequence[Want], exclude: frozenset[Slot], most_steps: int | None
) -> tuple[tuple[int, Window], ...] | None:
    pinned = pin(boards, wants, 0.0, exclude)
    if pinned is None:
        return None
    others = [wants[number] for number in pinned.rest]
    rest = pack(pinned.boards, others, exclude, most_steps=most_steps) if others else ()
    if rest is None:
        return None
    placed = {number: (board, candidate.window) for number, (board, candidate) in pinned.places.items()}
    placed.update(zip(pinned.rest, rest, strict=True))
    return tuple(placed[number] for number in range(len(wants)))


def _bins(boards: Sequence[Occupancy], kinds: ItemClasses, exclude: frozenset[Slot]) -> list[Bin]:
    """One for each board; boards that look alike share it, unless slots of single GPUs are excluded."""
    made: dict[tuple[object, ...], Bin] = {}
    shelves = []
    for board in boards:
        look = (board.gpu.uuid if exclude else None, id(board.gpu.layout), board.held, board.engines)
        if look not in made:
            made[look] = Bin(board, kinds, exclude)
        shelves.append(made[look])
    return shelves


class _Search:
    """Hands out sets shelf by shelf; what failed once with as much left is not tried again."""

    def __init__(self, shelves: Sequence[Bin], kinds: ItemClasses, most_steps: int | None) -> None:
        self._shelves = shelves
        self._steps_left = most_steps
        self._demand = kinds.demand
        self._failed: set[tuple[int, Counts]] = set()
        prices = _prices(shelves, kinds)
        self._prices = prices
        # The tightest shelves first: they leave the fewest ways.
        most = {shelf: shelf.most(kinds.shares) for shelf in set(shelves)}
        self._order = sorted(range(len(shelves)), key=lambda number: (most[shelves[number]], number))
        self._weights = [*_weightings(kinds), prices]
        self._room = [self._suffix_room(weights) for weights in self._weights]

    def run(self) -> list[Counts] | None:
        """For each shelf what it takes; None when the demand cannot be met."""
        taken: list[Counts] = []
        if not self._descend(0, self._demand, taken):
            return None
        nothing = (0,) * len(self._demand)
        result = [nothing] * len(self._shelves)
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
        options = self._shelves[self._order[depth]].takes(left)
        # By the prices, which say how scarce each kind's places are.
        for counts in sorted(options, key=lambda counts: -_weighed(counts, self._prices)):
            taken.append(counts)
            if self._descend(depth + 1, tuple(a - b for a, b in zip(left, counts, strict=True)), taken):
                return True
            taken.pop()
        self._failed.add((depth, left))
        return False

    def _may_suffice(self, depth: int, left: Counts) -> bool:
        """Whether the shelves that are left have room by every way of weighing; no proof that the demand fits."""
        return all(
            _weighed(left, weights) <= room[depth] + _TOLERANCE
            for weights, room in zip(self._weights, self._room, strict=True)
        )

    def _suffix_room(self, weights: Sequence[float]) -> list[float]:
        most = {shelf: shelf.most(weights) for shelf in set(self._shelves)}
        room = [0.0]
        for number in reversed(self._order):
            room.append(room[-1] + most[self._shelves[number]])
        return room[::-1]


def _weighed(counts: Counts, weights: Sequence[float]) -> float:
    return sum(count * weight for count, weight in zip(counts, weights, strict=True))


def _prices(shelves: Sequence[Bin], kinds: ItemClasses) -> list[float]:
    """A price for each kind that says how scarce its places are.

    Where all shelves together cannot hold the worth of what is wanted, there is no way; the prices are the ones that
    come nearest to showing that. (They are the multipliers of the Lagrangian relaxation, found by subgradients.)
    """
    demand = kinds.demand
    shared = Counter(shelves)
    prices = list(kinds.shares)
    best, least = prices, float("inf")
    for _ in range(_ROUNDS):
        room = 0.0
        held = [0] * len(demand)
        for shelf, alike in shared.items():
            weight, counts = shelf.fullest(prices)
            room += alike * weight
            for kind, count in counts.items():
                held[kind] += alike * count
        total = sum(prices)
        slack = room - _weighed(demand, prices)
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


def _weightings(kinds: ItemClasses) -> list[Sequence[float]]:
    """Ways to weigh kinds: by their share of a GPU, each alone, and the hardest few together."""
    count = len(kinds.profiles)
    alone = [[1.0 if kind == only else 0.0 for kind in range(count)] for only in range(count)]
    hardest = [[1.0 if kind <= last else 0.0 for kind in range(count)] for last in range(count)]
    return [kinds.shares, *alone, *hardest]

"""Places several devices of one request together, all or nothing.

First the devices are placed one after the other, in a few orders; that is nearly always as good as can be. When it
finds no way, the exact search of `packing` decides. Then a bounded search tries to find something cheaper: the bound
limits optimising, never whether a way is found.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from mig_agent.core.model import Gpu, GpuUuid, Layout, Profile, Slot, Want
from mig_agent.core.planning.exact_packing import pack
from mig_agent.core.planning.occupancy import Candidate, Occupancy
from mig_agent.core.planning.pinning import pin
from mig_agent.core.planning.placement import Window
from mig_agent.core.planning.plan import Policy
from mig_agent.core.planning.profiles import smallest_profile, wasted_mib

_WIDTH = 4
"""How many of the cheapest slots are tried for each device when optimising."""

_TRIES = 2
"""How many GPUs the search tries to do without, those with the least on them first."""
_STEPS = 200
"""Steps of the search for a way to do without a GPU."""

Choice = tuple[Profile | None, float]
"""The profile that serves a want on a layout, and the MiB that it wastes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceAssignment:
    """The placements of several devices, in the order of the wants."""

    places: tuple[tuple[Gpu, Candidate], ...]
    waste: float
    cost: float

    @property
    def key(self) -> tuple[float, float]:
        """The sort key: waste, then cost; lower is better."""
        return (self.waste, self.cost)


@dataclass(frozen=True, slots=True)
class _Option:
    """One slot for the next device."""

    waste: float
    candidate: Candidate
    number: int
    """The GPU, by its place in the list."""

    @property
    def key(self) -> tuple[float, float, float, int]:
        return (self.waste, self.candidate.cost, self.candidate.age, self.number)


@dataclass(slots=True)
class _Partial:
    """Some of the devices placed; a step of a search."""

    occupancies: list[Occupancy]
    waste: float = 0.0
    cost: float = 0.0
    places: dict[int, tuple[Gpu, Candidate]] = field(default_factory=dict)

    def place(self, want: int, option: _Option) -> _Partial:
        occupancies = self.occupancies.copy()
        occupancy = occupancies[option.number]
        occupancies[option.number] = occupancy.place(option.candidate)
        return _Partial(
            occupancies,
            self.waste + option.waste,
            self.cost + option.candidate.cost,
            {**self.places, want: (occupancy.gpu, option.candidate)},
        )

    def finished(self) -> DeviceAssignment:
        places = tuple(self.places[number] for number in range(len(self.places)))
        return DeviceAssignment(places=places, waste=self.waste, cost=self.cost)


def place_devices(
    gpus: Sequence[Gpu], wants: Sequence[Want], policy: Policy, exclude: frozenset[Slot] = frozenset()
) -> DeviceAssignment | None:
    """Return the slots of all wants, or None if they do not fit together."""
    pinned = pin([Occupancy.of(gpu, policy) for gpu in gpus], wants, policy.creation_cost, exclude)
    if pinned is None:
        return None
    rest = _place_anywhere(pinned.boards, [wants[number] for number in pinned.rest], policy, exclude)
    if rest is None or not pinned.places:
        return rest
    places = {number: (pinned.boards[board].gpu, candidate) for number, (board, candidate) in pinned.places.items()}
    places.update(zip(pinned.rest, rest.places, strict=True))
    return DeviceAssignment(
        places=tuple(places[number] for number in range(len(wants))),
        waste=rest.waste,
        cost=rest.cost + sum(candidate.cost for _, candidate in pinned.places.values()),
    )


def _place_anywhere(
    occupancies: Sequence[Occupancy], wants: Sequence[Want], policy: Policy, exclude: frozenset[Slot]
) -> DeviceAssignment | None:
    if not wants:
        return DeviceAssignment(places=(), waste=0.0, cost=0.0)
    search = _MultiDeviceSearch(wants, policy, exclude)
    best: DeviceAssignment | None = None
    for order in search.orders(occupancies):
        found = search.one_by_one(occupancies, order)
        if found is not None and (best is None or found.key < best.key):
            best = found
    if best is None:
        packed = pack(occupancies, wants, exclude)
        if packed is None:
            return None
        best = search.as_packed(occupancies, packed)
    best = search.on_fewer_gpus(occupancies, best)
    return search.improved(occupancies, best)


class _MultiDeviceSearch:
    """The ways to place the wants of one request."""

    def __init__(self, wants: Sequence[Want], policy: Policy, exclude: frozenset[Slot]) -> None:
        self._wants = wants
        self._cost = policy.creation_cost
        self._exclude = exclude
        self._effort = policy.search_limit
        self._choices: dict[tuple[Want, Layout], Choice] = {}

    def orders(self, occupancies: Sequence[Occupancy]) -> list[tuple[int, ...]]:
        """Return the orders worth trying: the largest first, as asked for, the smallest first; each once."""
        layouts = {occupancy.gpu.layout for occupancy in occupancies}
        shares = [max((self._share(want, layout) for layout in layouts), default=0.0) for want in self._wants]
        numbers = range(len(self._wants))
        largest_first = tuple(sorted(numbers, key=lambda number: -shares[number]))
        smallest_first = tuple(sorted(numbers, key=lambda number: shares[number]))
        return list(dict.fromkeys((largest_first, tuple(numbers), smallest_first)))

    def one_by_one(self, occupancies: Sequence[Occupancy], order: Sequence[int]) -> DeviceAssignment | None:
        """Place each device at its cheapest slot beside those before it; None if one does not fit."""
        partial = _Partial(list(occupancies))
        for number in order:
            option = self._cheapest(partial.occupancies, self._wants[number])
            if option is None:
                return None
            partial = partial.place(number, option)
        return partial.finished()

    def as_packed(self, occupancies: Sequence[Occupancy], packed: Sequence[tuple[int, Window]]) -> DeviceAssignment:
        """Return the costs and victims of windows that are known to be free and not to overlap."""
        partial = _Partial(list(occupancies))
        # What can be reused goes first, so that nothing placed before takes it for a victim.
        order = sorted(
            range(len(packed)), key=lambda number: not _is_idle(occupancies[packed[number][0]], packed[number][1])
        )
        for number in order:
            gpu_number, window = packed[number]
            occupancy = partial.occupancies[gpu_number]
            candidate = occupancy.candidate_at(window, self._cost)
            if candidate is None:
                raise AssertionError(f"no place for {window} that was packed")
            _, waste = self._choice(self._wants[number], occupancy.gpu.layout)
            partial = partial.place(number, _Option(waste, candidate, gpu_number))
        return partial.finished()

    def on_fewer_gpus(self, occupancies: Sequence[Occupancy], best: DeviceAssignment) -> DeviceAssignment:
        """Return a cheaper assignment on fewer GPUs while there is one: an empty GPU is worth more than its parts."""
        improved = True
        while improved:
            improved = False
            taken: dict[GpuUuid, int] = {}
            for gpu, candidate in best.places:
                taken[gpu.uuid] = taken.get(gpu.uuid, 0) + candidate.window.placement.size
            for left_out in sorted(taken, key=lambda uuid: taken[uuid])[:_TRIES]:
                others = [
                    occupancy
                    for occupancy in occupancies
                    if occupancy.gpu.uuid in taken and occupancy.gpu.uuid != left_out
                ]
                packed = pack(others, self._wants, self._exclude, most_steps=_STEPS)
                if packed is not None and (found := self.as_packed(others, packed)).key < best.key:
                    best, improved = found, True
                    break
        return best

    def improved(self, occupancies: Sequence[Occupancy], best: DeviceAssignment) -> DeviceAssignment:
        """Return the best of `best` and of what a bounded depth-first search finds."""
        order = self.orders(occupancies)[0]

        def descend(depth: int, partial: _Partial) -> None:
            nonlocal best
            if depth == len(order):
                if (partial.waste, partial.cost) < best.key:
                    best = partial.finished()
                return
            for option in self._options(partial.occupancies, self._wants[order[depth]]):
                waste, cost = partial.waste + option.waste, partial.cost + option.candidate.cost
                if self._effort <= 0 or (waste, cost) >= best.key:
                    return  # the remaining options are no cheaper
                descend(depth + 1, partial.place(order[depth], option))

        descend(0, _Partial(list(occupancies)))
        return best

    def _share(self, want: Want, layout: Layout) -> float:
        profile, _ = self._choice(want, layout)
        return 0.0 if profile is None else profile.memory_slices / layout.memory_slices

    def _choice(self, want: Want, layout: Layout) -> Choice:
        choice = self._choices.get((want, layout))
        if choice is None:
            profile = smallest_profile(want, layout)
            choice = (profile, 0.0 if profile is None else wasted_mib(profile, want, layout))
            self._choices[want, layout] = choice
        return choice

    def _cheapest(self, occupancies: Sequence[Occupancy], want: Want) -> _Option | None:
        best: _Option | None = None
        for number, occupancy in enumerate(occupancies):
            profile, waste = self._choice(want, occupancy.gpu.layout)
            if profile is None:
                continue
            if self._exclude:
                candidate = next(iter(occupancy.candidates(profile, self._cost, self._exclude)), None)
            else:
                candidate = occupancy.best(profile, self._cost)
            if candidate is not None:
                option = _Option(waste, candidate, number)
                if best is None or option.key < best.key:
                    best = option
        return best

    def _options(self, occupancies: Sequence[Occupancy], want: Want) -> list[_Option]:
        """Return the cheapest few slots; of equal GPUs only those of the first."""
        options: list[_Option] = []
        seen: set[tuple[Layout, int, int]] = set()
        for number, occupancy in enumerate(occupancies):
            profile, waste = self._choice(want, occupancy.gpu.layout)
            if profile is None:
                continue
            state = (occupancy.gpu.layout, occupancy.held, occupancy.engines)
            if not occupancy.idle and not self._exclude:
                if state in seen:
                    continue
                seen.add(state)
            self._effort -= 1
            options += [
                _Option(waste, candidate, number)
                for candidate in occupancy.candidates(profile, self._cost, self._exclude)
            ]
        return sorted(options, key=lambda option: option.key)[:_WIDTH]


def _is_idle(occupancy: Occupancy, window: Window) -> bool:
    idle = occupancy.idle_slots.get((window.profile.id, window.placement.start))
    return idle is not None and idle.slot.placement == window.placement

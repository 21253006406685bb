"""Several devices of one request placed together, all or nothing.

First the devices are placed one after the other, in a few orders; that is nearly always as good as can be. When it
finds no way, the exact search of `packing` decides. Then a bounded search looks for something cheaper: the bound limits
optimising, never whether a way is found.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from mig_agent.core.model import Gpu, GpuUuid, Layout, Profile, Slot, Want
from mig_agent.core.planning.occupancy import Candidate, Occupancy
from mig_agent.core.planning.packing import pack
from mig_agent.core.planning.pinning import pin
from mig_agent.core.planning.placement import Window
from mig_agent.core.planning.plan import Policy
from mig_agent.core.planning.profiles import smallest_profile, wasted_mib

_WIDTH = 4
"""So many of the cheapest places are tried for each device when optimising."""

_TRIES = 2
"""So many GPUs are tried to do without, those with least on them first."""
_STEPS = 200
"""Of the search for a way to do without."""

Choice = tuple[Profile | None, float]
"""The profile that serves a want on a layout, and the MiB that it wastes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceAssignment:
    """Where each of several devices goes, in the order of the wants."""

    places: tuple[tuple[Gpu, Candidate], ...]
    waste: float
    cost: float

    @property
    def key(self) -> tuple[float, float]:
        """Lower is better."""
        return (self.waste, self.cost)


@dataclass(frozen=True, slots=True)
class _Option:
    """One place for the next device."""

    waste: float
    candidate: Candidate
    number: int
    """Of the board."""

    @property
    def key(self) -> tuple[float, float, float, int]:
        return (self.waste, self.candidate.cost, self.candidate.age, self.number)


@dataclass(slots=True)
class _Partial:
    """Some of the devices placed; a step of a search."""

    boards: list[Occupancy]
    waste: float = 0.0
    cost: float = 0.0
    places: dict[int, tuple[Gpu, Candidate]] = field(default_factory=dict)

    def place(self, want: int, option: _Option) -> _Partial:
        boards = self.boards.copy()
        board = boards[option.number]
        boards[option.number] = board.place(option.candidate)
        return _Partial(
            boards,
            self.waste + option.waste,
            self.cost + option.candidate.cost,
            {**self.places, want: (board.gpu, option.candidate)},
        )

    def finished(self) -> DeviceAssignment:
        places = tuple(self.places[number] for number in range(len(self.places)))
        return DeviceAssignment(places=places, waste=self.waste, cost=self.cost)


def place_devices(
    gpus: Sequence[Gpu], wants: Sequence[Want], policy: Policy, exclude: frozenset[Slot] = frozenset()
) -> DeviceAssignment | None:
    """A placement of all wants; None when they do not fit together."""
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
    boards: Sequence[Occupancy], wants: Sequence[Want], policy: Policy, exclude: frozenset[Slot]
) -> DeviceAssignment | None:
    if not wants:
        return DeviceAssignment(places=(), waste=0.0, cost=0.0)
    search = _MultiDeviceSearch(wants, policy, exclude)
    best: DeviceAssignment | None = None
    for order in search.orders(boards):
        found = search.one_by_one(boards, order)
        if found is not None and (best is None or found.key < best.key):
            best = found
    if best is None:
        packed = pack(boards, wants, exclude)
        if packed is None:
            return None
        best = search.as_packed(boards, packed)
    best = search.on_fewer_gpus(boards, best)
    return search.improved(boards, best)


class _MultiDeviceSearch:
    """The ways to place the wants of one request."""

    def __init__(self, wants: Sequence[Want], policy: Policy, exclude: frozenset[Slot]) -> None:
        self._wants = wants
        self._cost = policy.creation_cost
        self._exclude = exclude
        self._effort = policy.search_limit
        self._choices: dict[tuple[Want, Layout], Choice] = {}

    def orders(self, boards: Sequence[Occupancy]) -> list[tuple[int, ...]]:
        """Orders worth trying: the largest first, as asked for, the smallest first; each once."""
        layouts = {board.gpu.layout for board in boards}
        shares = [max((self._share(want, layout) for layout in layouts), default=0.0) for want in self._wants]
        numbers = range(len(self._wants))
        largest_first = tuple(sorted(numbers, key=lambda number: -shares[number]))
        smallest_first = tuple(sorted(numbers, key=lambda number: shares[number]))
        return list(dict.fromkeys((largest_first, tuple(numbers), smallest_first)))

    def one_by_one(self, boards: Sequence[Occupancy], order: Sequence[int]) -> DeviceAssignment | None:
        """Each device at its cheapest place beside those before it."""
        partial = _Partial(list(boards))
        for number in order:
            option = self._cheapest(partial.boards, self._wants[number])
            if option is None:
                return None
            partial = partial.place(number, option)
        return partial.finished()

    def as_packed(self, boards: Sequence[Occupancy], packed: Sequence[tuple[int, Window]]) -> DeviceAssignment:
        """The costs and victims of windows that are known to be free and not to overlap."""
        partial = _Partial(list(boards))
        # What can be reused goes first, so that nothing placed before takes it for a victim.
        order = sorted(
            range(len(packed)), key=lambda number: not _is_idle(boards[packed[number][0]], packed[number][1])
        )
        for number in order:
            board_number, window = packed[number]
            board = partial.boards[board_number]
            candidate = board.candidate_at(window, self._cost)
            if candidate is None:
                raise AssertionError(f"no place for {window} that was packed")
            _, waste = self._choice(self._wants[number], board.gpu.layout)
            partial = partial.place(number, _Option(waste, candidate, board_number))
        return partial.finished()

    def on_fewer_gpus(self, boards: Sequence[Occupancy], best: DeviceAssignment) -> DeviceAssignment:
        """The same on one GPU less, as long as that is cheaper: a GPU left empty is worth more than its parts."""
        improved = True
        while improved:
            improved = False
            taken: dict[GpuUuid, int] = {}
            for gpu, candidate in best.places:
                taken[gpu.uuid] = taken.get(gpu.uuid, 0) + candidate.window.placement.size
            for left_out in sorted(taken, key=lambda uuid: taken[uuid])[:_TRIES]:
                others = [board for board in boards if board.gpu.uuid in taken and board.gpu.uuid != left_out]
                packed = pack(others, self._wants, self._exclude, most_steps=_STEPS)
                if packed is not None and (found := self.as_packed(others, packed)).key < best.key:
                    best, improved = found, True
                    break
        return best

    def improved(self, boards: Sequence[Occupancy], best: DeviceAssignment) -> DeviceAssignment:
        """The best of what a bounded depth-first search finds and what is known already."""
        order = self.orders(boards)[0]

        def descend(depth: int, partial: _Partial) -> None:
            nonlocal best
            if depth == len(order):
                if (partial.waste, partial.cost) < best.key:
                    best = partial.finished()
                return
            for option in self._options(partial.boards, self._wants[order[depth]]):
                waste, cost = partial.waste + option.waste, partial.cost + option.candidate.cost
                if self._effort <= 0 or (waste, cost) >= best.key:
                    return  # the options behind are no cheaper
                descend(depth + 1, partial.place(order[depth], option))

        descend(0, _Partial(list(boards)))
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

    def _cheapest(self, boards: Sequence[Occupancy], want: Want) -> _Option | None:
        best: _Option | None = None
        for number, board in enumerate(boards):
            profile, waste = self._choice(want, board.gpu.layout)
            if profile is None:
                continue
            if self._exclude:
                candidate = next(iter(board.candidates(profile, self._cost, self._exclude)), None)
            else:
                candidate = board.best(profile, self._cost)
            if candidate is not None:
                option = _Option(waste, candidate, number)
                if best is None or option.key < best.key:
                    best = option
        return best

    def _options(self, boards: Sequence[Occupancy], want: Want) -> list[_Option]:
        """The cheapest few places; of GPUs that look the same only the first."""
        options: list[_Option] = []
        seen: set[tuple[Layout, int, int]] = set()
        for number, board in enumerate(boards):
            profile, waste = self._choice(want, board.gpu.layout)
            if profile is None:
                continue
            look = (board.gpu.layout, board.held, board.engines)
            if not board.idle and not self._exclude:
                if look in seen:
                    continue
                seen.add(look)
            self._effort -= 1
            options += [
                _Option(waste, candidate, number) for candidate in board.candidates(profile, self._cost, self._exclude)
            ]
        return sorted(options, key=lambda option: option.key)[:_WIDTH]


def _is_idle(board: Occupancy, window: Window) -> bool:
    idle = board.idle_slots.get((window.profile.id, window.placement.start))
    return idle is not None and idle.slot.placement == window.placement

"""Whether several devices fit together at all: an exact search, whatever the mix of GPU models and devices.

For each GPU the sets of windows that can stand side by side are enumerated once and reduced to those that no other set
surpasses; the search then hands every GPU one such set. Wants that every model serves with the same profiles are
interchangeable, so it counts kinds of wants instead of telling them apart. An answer of None means that there is no
way.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from mig_agent.core.board import Board
from mig_agent.core.model import Slot, Want
from mig_agent.core.placement import Window
from mig_agent.core.shelves import Counts, Kinds, Shelf

_ROUNDS = 150
"""Of looking for prices; most searches need a few."""
_TOLERANCE = 1e-7


def pack(
    boards: Sequence[Board],
    wants: Sequence[Want],
    exclude: frozenset[Slot] = frozenset(),
    *,
    most_steps: int | None = None,
) -> tuple[tuple[int, Window], ...] | None:
    """A board (by its place in `boards`) and a free window for each want, none overlapping; None when there is no way.

    Idle instances are no obstacle. Costs are not looked at. With `most_steps`, None also when so many steps of the
    search found nothing: only for those who can do without an answer.
    """
    kinds = Kinds(boards, wants)
    if not all(any(served) for served in kinds.profiles):
        return None
    shelves = _shelves(boards, kinds, exclude)
    chosen = _Search(shelves, kinds, most_steps).run()
    if chosen is None:
        return None
    queues = [list(members) for members in kinds.members]
    placed: dict[int, tuple[int, Window]] = {}
    for number, (shelf, counts) in enumerate(zip(shelves, chosen, strict=True)):
        for kind, window in shelf.windows_for(counts):
            placed[queues[kind].pop()] = (number, window)
    return tuple(placed[number] for number in range(len(wants)))


def _shelves(boards: Sequence[Board], kinds: Kinds, exclude: frozenset[Slot]) -> list[Shelf]:
    """One for each board; boards that look alike share it, unless slots of single GPUs are excluded."""
    made: dict[tuple[object, ...], Shelf] = {}
    shelves = []
    for board in boards:
        look = (board.gpu.uuid if exclude else None, id(board.gpu.layout), board.held, board.engines)
        if look not in made:
            made[look] = Shelf(board, kinds, exclude)
        shelves.append(made[look])
    return shelves


class _Search:
    """Hands out sets shelf by shelf; what failed once with as much left is not tried again."""

    def __init__(self, shelves: Sequence[Shelf], kinds: Kinds, most_steps: int | None) -> None:
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


def _prices(shelves: Sequence[Shelf], kinds: Kinds) -> list[float]:
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


def _weightings(kinds: Kinds) -> list[Sequence[float]]:
    """Ways to weigh kinds: by their share of a GPU, each alone, and the hardest few together."""
    count = len(kinds.profiles)
    alone = [[1.0 if kind == only else 0.0 for kind in range(count)] for only in range(count)]
    hardest = [[1.0 if kind <= last else 0.0 for kind in range(count)] for last in range(count)]
    return [kinds.shares, *alone, *hardest]

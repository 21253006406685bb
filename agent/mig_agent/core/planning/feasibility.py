"""What would fit if leases ended: whether a request can ever be served, and which GPUs to keep for one that waits."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import combinations, islice

from mig_agent.core.model import Gpu, GpuUuid, InstanceState, Layout, Want
from mig_agent.core.planning.occupancy import Occupancy
from mig_agent.core.planning.packing import pack
from mig_agent.core.planning.placement import tables_for
from mig_agent.core.planning.profiles import served_by, share_of_gpus

_TOLERANCE = 1e-9
"""For sums of fractions."""
_MOST_COMBINATIONS = 200
"""So many sets of GPUs of one size are tried; beyond that GPUs are only left out one by one."""
_MOST_SETS = 8
"""So many unlike sets are tried; the same beyond that."""
_STEPS = 200
"""Of the search whether some of the GPUs would do; where that is not clear by then, they would not."""


def empty_occupancy(gpu: Gpu, *, keep_foreign: bool) -> Occupancy:
    """The GPU without its instances; with those that others made, where they are not counted on to go."""
    kept = [each for each in gpu.instances if keep_foreign and each.state is InstanceState.FOREIGN]
    tables = tables_for(gpu.layout)
    held = engines = 0
    for instance in kept:
        held |= instance.slot.placement.mask
        engines += tables.engines_of(instance.slot.profile)
    return Occupancy(gpu, tables, held, engines, ())


def fits_when_empty(gpus: Iterable[Gpu], wants: Sequence[Want], *, keep_foreign: bool = False) -> bool:
    """Whether the wants would fit together on these GPUs with nothing on them."""
    boards = (empty_occupancy(gpu, keep_foreign=keep_foreign) for gpu in gpus)
    if len(wants) == 1:
        return any(_windows(board, wants[0]) for board in boards)
    return pack(list(boards), wants) is not None


def fewest_gpus(
    gpus: Sequence[Gpu], wants: Sequence[Want], rooms: FeasibilityCache | None = None
) -> frozenset[GpuUuid]:
    """The fewest GPUs that could serve the wants once their leases ended, those with least to end first.

    What others made is not counted on to go. Empty when even all GPUs could not serve them. `rooms` are of these wants,
    and remember what was found out an earlier time.
    """
    if len(wants) == 1:
        nearest = _nearest(gpus, wants[0])
        return frozenset() if nearest is None else frozenset({nearest.uuid})
    ordered = sorted(gpus, key=lambda gpu: (gpu.held_mask.bit_count(), gpu.index))
    rooms = FeasibilityCache(wants) if rooms is None else rooms
    if not rooms.suffice(ordered):
        return frozenset()
    unlike: set[tuple[object, ...]] = set()
    least = max(math.ceil(share_of_gpus(gpus, wants) - _TOLERANCE), 1)
    for size in range(least, len(ordered)):
        for chosen in islice(combinations(ordered, size), _MOST_COMBINATIONS):
            if rooms.suffice(chosen, most_steps=_STEPS):
                return _without_needless(chosen, rooms)
            unlike.add(rooms.look_of(chosen))
        if len(unlike) > _MOST_SETS:
            break
    return _without_needless(ordered, rooms)


def _without_needless(gpus: Sequence[Gpu], rooms: FeasibilityCache) -> frozenset[GpuUuid]:
    kept = list(gpus)
    for gpu in reversed(gpus):
        others = [each for each in kept if each is not gpu]
        if rooms.suffice(others, most_steps=_STEPS):
            kept = others
    return frozenset(gpu.uuid for gpu in kept)


class FeasibilityCache:
    """Which sets of emptied GPUs some wants would fit on: of sets that look alike it is found out once."""

    def __init__(self, wants: Sequence[Want]) -> None:
        self.wants = wants
        self._named = frozenset(want.slot.gpu for want in wants if want.slot is not None)
        """The GPUs of slots that the wants name; no other looks like one of these."""
        self._layouts: dict[int, Layout] = {}
        """By identity, which is quicker than by what is in them; kept, so that it stays theirs."""
        self._known: dict[tuple[bool, tuple[object, ...]], bool] = {}
        """By whether it was searched to the end, and the look of the set."""

    def suffice(self, gpus: Sequence[Gpu], *, most_steps: int | None = None) -> bool:
        """Whether the wants fit; what others made is not counted on to go. With `most_steps` as `pack`."""
        key = (most_steps is None, self.look_of(gpus))
        if key not in self._known:
            boards = [empty_occupancy(gpu, keep_foreign=True) for gpu in gpus]
            self._known[key] = pack(boards, self.wants, most_steps=most_steps) is not None
        return self._known[key]

    def look_of(self, gpus: Sequence[Gpu]) -> tuple[object, ...]:
        """What is the same for sets that look alike, emptied."""
        self._layouts.update((id(gpu.layout), gpu.layout) for gpu in gpus)
        boards = [empty_occupancy(gpu, keep_foreign=True) for gpu in gpus]
        return tuple(
            sorted(
                (
                    id(board.gpu.layout),
                    board.held,
                    board.engines,
                    board.gpu.uuid if board.gpu.uuid in self._named else "",
                )
                for board in boards
            )
        )


def _nearest(gpus: Sequence[Gpu], want: Want) -> Gpu | None:
    """The GPU on which least has to end before the want fits; of equals the first."""
    best: tuple[tuple[int, int, int], int] | None = None
    nearest: Gpu | None = None
    for gpu in gpus:
        to_end = _least_to_end(gpu, want)
        if to_end is not None:
            key = (to_end, gpu.index)
            if best is None or key < best:
                best, nearest = key, gpu
    return nearest


def _least_to_end(gpu: Gpu, want: Want) -> tuple[int, int, int] | None:
    """What has to end on one GPU before the want fits; less is nearer, None: what others made is in the way.

    The wait is for the last of the leases to end, so few leases count before few slices. Of as many leases (unless it
    is one) a GPU with a large one among them is better to keep: less of it stands idle meanwhile. `docs/placement.md`
    has what that is worth. Remembered with the frozen GPU.
    """
    profile = served_by(want, gpu)
    if profile is None:
        return None
    key = f"to end {profile.id} {'' if want.slot is None else want.slot.placement}"
    if key not in gpu.scratch:
        held = [each.slot.placement for each in gpu.instances if each.state is not InstanceState.IDLE]
        found: list[tuple[int, int, int]] = []
        for mask in _windows(empty_occupancy(gpu, keep_foreign=True), want):
            sizes = [place.size for place in held if place.mask & mask]
            largest = max(sizes) if len(sizes) > 1 else 0
            found.append((len(sizes), -largest, (mask & gpu.held_mask).bit_count()))
        gpu.scratch[key] = min(found, default=None)
    known = gpu.scratch[key]
    return known if isinstance(known, tuple) else None


def _windows(board: Occupancy, want: Want) -> list[int]:
    """The masks of the windows that would serve the want."""
    profile = served_by(want, board.gpu)
    if profile is None or not board.tables.engines_fit(board.engines + board.tables.engines_of(profile)):
        return []
    windows = (ranked.window for ranked in board.tables.ranked(profile.id, board.held))
    return [each.mask for each in windows if want.slot is None or each.placement == want.slot.placement]

"""Pinning: devices whose slot the request names are placed there before all others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mig_agent.core.model import Slot, Want
from mig_agent.core.planning.occupancy import Candidate, Occupancy
from mig_agent.core.planning.placement import Window


@dataclass(frozen=True, slots=True, kw_only=True)
class Pinned:
    """The occupancies with all named slots placed, and the wants that are left."""

    boards: Sequence[Occupancy]
    places: dict[int, tuple[int, Candidate]]
    """By index of each want that names a slot: the index of its GPU in `boards`, and its placement there."""
    rest: tuple[int, ...]
    """The indices of the other wants."""


def pin(
    boards: Sequence[Occupancy], wants: Sequence[Want], creation_cost: float, exclude: frozenset[Slot] = frozenset()
) -> Pinned | None:
    """Place the wants that name slots; return None if a slot is occupied, excluded or on none of the GPUs."""
    named = [(number, want.slot) for number, want in enumerate(wants) if want.slot is not None]
    if not named:
        return Pinned(boards=boards, places={}, rest=tuple(range(len(wants))))
    after = list(boards)
    numbers = {board.gpu.uuid: number for number, board in enumerate(boards)}
    places: dict[int, tuple[int, Candidate]] = {}
    # Slots of idle instances first, so that no other placement takes such an instance as a victim.
    for want, slot in sorted(named, key=lambda each: not _is_idle(boards, numbers.get(each[1].gpu), each[1])):
        number = numbers.get(slot.gpu)
        window = None if number is None else window_of(after[number], slot)
        if number is None or window is None or Slot(slot.gpu, window.profile, window.placement) in exclude:
            return None
        candidate = after[number].candidate_at(window, creation_cost)
        if candidate is None:
            return None
        places[want] = (number, candidate)
        after[number] = after[number].place(candidate)
    rest = tuple(number for number in range(len(wants)) if number not in places)
    return Pinned(boards=after, places=places, rest=rest)


def window_of(board: Occupancy, slot: Slot) -> Window | None:
    """Return the window of a slot on its GPU; None if the GPU does not offer it."""
    for window in board.tables.windows.get(slot.profile.id, ()):
        if window.profile.name == slot.profile.name and window.placement == slot.placement:
            return window
    return None


def _is_idle(boards: Sequence[Occupancy], number: int | None, slot: Slot) -> bool:
    idle = None if number is None else boards[number].idle_slots.get((slot.profile.id, slot.placement.start))
    return idle is not None and idle.slot.placement == slot.placement

"""What large requests that wait are given, so that small ones do not starve them.

Of those that fit now the larger one goes first. As long as the largest one waits, others leave the GPUs alone that
would be free for it soonest, where they fit elsewhere as well. And the first in the queue that has waited past a limit
keeps the fewest GPUs that can serve it from all behind it, fit or not. `docs/decisions/0010` has what each is worth.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from mig_agent.core.choosing import share_of_gpus
from mig_agent.core.emptied import Rooms, fewest_gpus
from mig_agent.core.finding import NOTHING_RESERVED, usable_gpus
from mig_agent.core.model import Gpu, GpuUuid, NodeView, Request
from mig_agent.core.plan import Plan

LARGE = 0.5
"""The share of a GPU from which a request is worth sparing GPUs for; smaller ones find room soon."""

_MOST_ROOMS = 16
_MOST_KNOWN = 10_000
"""Requests about which something is remembered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """A request in the queue."""

    request: Request
    seq: int
    """Its number of arrival: of equal priority, lower goes first."""
    since: float
    """When it came, in seconds since the epoch."""

    @property
    def order(self) -> tuple[int, int]:
        """Sorts the queue: higher priority first, then first come."""
        return (-self.request.priority, self.seq)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reservation:
    """GPUs that are kept for one waiting request."""

    waiting: Waiting
    gpus: frozenset[GpuUuid]

    def against(self, other: Waiting) -> frozenset[GpuUuid]:
        """The GPUs that are kept from another waiting request: all for those behind, none for those before it."""
        return self.gpus if other.order > self.waiting.order else NOTHING_RESERVED

    def is_touched(self, other: Waiting, plan: Plan) -> bool:
        """Whether the plan of another request puts something on these GPUs."""
        return other.seq != self.waiting.seq and any(device.gpu in self.gpus for device in plan.devices)


class Known:
    """What was found out about requests that wait, kept as long as the GPUs are as they were: it takes long to find."""

    def __init__(self) -> None:
        self._gpus: tuple[Gpu, ...] = ()
        self._fewest: dict[tuple[int, frozenset[GpuUuid]], frozenset[GpuUuid]] = {}
        self._shares: dict[int, float] = {}
        self._rooms: dict[int, Rooms] = {}
        """Of the latest few for whom GPUs were looked for."""

    def fewest(self, view: NodeView, waiting: Waiting, taken: frozenset[GpuUuid]) -> frozenset[GpuUuid]:
        """The fewest GPUs beside those taken that could serve it; empty where there are none."""
        self._look_at(view)
        key = (waiting.seq, taken)
        if key not in self._fewest:
            request = waiting.request
            rooms = self._rooms.setdefault(waiting.seq, Rooms(request.wants))
            if len(self._rooms) > _MOST_ROOMS:
                del self._rooms[next(iter(self._rooms))]
            self._fewest[key] = fewest_gpus(usable_gpus(view, request, taken), request.wants, rooms)
        return self._fewest[key]

    def share(self, view: NodeView, waiting: Waiting) -> float:
        """As the function."""
        self._look_at(view)
        found = self._shares.get(waiting.seq)
        if found is None:
            found = self._shares[waiting.seq] = share(view, waiting.request)
        return found

    def _look_at(self, view: NodeView) -> None:
        # GPUs are frozen: one that has changed is another. Requests come and go also where no GPU changes.
        same = len(view.gpus) == len(self._gpus) and all(map(operator.is_, view.gpus, self._gpus))
        if not same or len(self._shares) > _MOST_KNOWN:
            self._gpus = view.gpus
            self._fewest.clear()
            self._shares.clear()


def in_order(waiting: Iterable[Waiting]) -> tuple[Waiting, ...]:
    """By priority, then first come."""
    return tuple(sorted(waiting, key=lambda each: each.order))


def in_turn(
    view: NodeView, ordered: Sequence[Waiting], kept: Reservation | None, known: Known | None = None
) -> tuple[Waiting, ...]:
    """Which is tried first: by priority, then who has GPUs kept, then the larger one, then first come."""
    first = None if kept is None else kept.waiting.seq
    known = known or Known()

    def turn(each: Waiting) -> tuple[int, bool, float, int]:
        return (-each.request.priority, each.seq != first, -known.share(view, each), each.seq)

    return tuple(sorted(ordered, key=turn)) if len(ordered) > 1 else tuple(ordered)


def reservation(
    view: NodeView, waiting: Iterable[Waiting], now: float, limit_seconds: float, known: Known | None = None
) -> Reservation | None:
    """The GPUs kept for the first in order that has waited past the limit; None when nobody has.

    The GPUs are those that will be free soonest, with least on them that has to end. A request keeps none where all
    that could serve it is cordoned, lost or held by what others made; then the next in order does.
    """
    known = known or Known()
    for each in in_order(waiting):
        if now - each.since >= limit_seconds:
            gpus = known.fewest(view, each, NOTHING_RESERVED)
            if gpus:
                return Reservation(waiting=each, gpus=gpus)
    return None


def sparing(
    view: NodeView, ordered: Sequence[Waiting], kept: Reservation | None, known: Known | None = None
) -> Reservation | None:
    """The GPUs that others leave alone where they can, for the largest that waits and has none kept.

    None where nobody else waits or nobody waits for much.
    """
    known = known or Known()
    taken, first = (NOTHING_RESERVED, None) if kept is None else (kept.gpus, kept.waiting.seq)
    # Of several devices it is not clear which GPUs they will need, and finding out takes long.
    others = [each for each in ordered if each.seq != first and len(each.request.wants) == 1]
    if len(ordered) == 1 or not others:
        return None
    largest = max(others, key=lambda each: known.share(view, each))
    if known.share(view, largest) < LARGE:
        return None
    gpus = known.fewest(view, largest, taken)
    return Reservation(waiting=largest, gpus=gpus) if gpus else None


def share(view: NodeView, request: Request) -> float:
    """How many GPUs a request takes, by slices: 0.25 for a 2g.10gb; what it comes to on the model where it is least."""
    return share_of_gpus(view.gpus, request.wants)

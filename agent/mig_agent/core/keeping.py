"""What large requests that wait are given, so that small ones do not starve them.

Of those that fit now the larger one goes first. As long as the largest one waits, others leave the GPUs alone that
would be free for it soonest, where they fit elsewhere as well. And the first in the queue that has waited past a limit
keeps the fewest GPUs that can serve it from all behind it, fit or not. `docs/decisions/0010` has what each is worth.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from mig_agent.core.choosing import choose
from mig_agent.core.emptied import fewest_gpus
from mig_agent.core.finding import NOTHING_RESERVED, usable_gpus
from mig_agent.core.model import GpuUuid, Layout, NodeView, Request, Want
from mig_agent.core.plan import Plan

LARGE = 0.5
"""The share of a GPU from which a request is worth sparing GPUs for; smaller ones find room soon."""


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


def in_order(waiting: Iterable[Waiting]) -> tuple[Waiting, ...]:
    """By priority, then first come."""
    return tuple(sorted(waiting, key=lambda each: each.order))


def in_turn(view: NodeView, ordered: Sequence[Waiting], kept: Reservation | None) -> tuple[Waiting, ...]:
    """Which is tried first: by priority, then who has GPUs kept, then the larger one, then first come."""
    first = None if kept is None else kept.waiting.seq

    def turn(each: Waiting) -> tuple[int, bool, float, int]:
        return (-each.request.priority, each.seq != first, -share(view, each.request), each.seq)

    return tuple(sorted(ordered, key=turn)) if len(ordered) > 1 else tuple(ordered)


def reservation(view: NodeView, waiting: Iterable[Waiting], now: float, limit_seconds: float) -> Reservation | None:
    """The GPUs kept for the first in order that has waited past the limit; None when nobody has.

    The GPUs are those that will be free soonest, with least on them that has to end. A request keeps none where all
    that could serve it is cordoned, lost or held by what others made; then the next in order does.
    """
    for each in in_order(waiting):
        if now - each.since >= limit_seconds:
            gpus = fewest_gpus(usable_gpus(view, each.request), each.request.wants)
            if gpus:
                return Reservation(waiting=each, gpus=gpus)
    return None


def sparing(view: NodeView, ordered: Sequence[Waiting], kept: Reservation | None) -> Reservation | None:
    """The GPUs that others leave alone where they can, for the largest that waits and has none kept.

    None where nobody else waits or nobody waits for much.
    """
    taken, first = (NOTHING_RESERVED, None) if kept is None else (kept.gpus, kept.waiting.seq)
    # Of several devices it is not clear which GPUs they will need, and finding out takes long.
    others = [each for each in ordered if each.seq != first and len(each.request.wants) == 1]
    if len(ordered) == 1 or not others:
        return None
    largest = max(others, key=lambda each: share(view, each.request))
    if share(view, largest.request) < LARGE:
        return None
    gpus = fewest_gpus(usable_gpus(view, largest.request, taken), largest.request.wants)
    return Reservation(waiting=largest, gpus=gpus) if gpus else None


def share(view: NodeView, request: Request) -> float:
    """How many GPUs a request takes, by slices: 0.25 for a 2g.10gb; what it comes to on the model where it is least."""
    layouts = {id(gpu.layout): gpu.layout for gpu in view.gpus}.values()
    return sum(min((_share(layout, want) for layout in layouts), default=1.0) for want in request.wants)


def _share(layout: Layout, want: Want) -> float:
    profile = choose(want, layout)
    return 1.0 if profile is None else profile.memory_slices / layout.memory_slices

"""Requests that wait: by priority, then first come; a later one may start whenever it fits.

So that a large request is not starved by small ones, the first in the queue that has waited past a limit keeps the
fewest GPUs that can serve it from all behind it. Everything here is a value or a function of `now`: the manager owns
the timer. The queue is not persisted.

How it is meant to be used: every arrival is added; `next_to_start` is asked until it answers None, after each arrival,
whenever something was freed and when a wait passes the limit; then an arrival that is not to wait leaves again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from mig_agent.core.emptied import fewest_gpus
from mig_agent.core.finding import NOTHING_RESERVED, find, usable_gpus
from mig_agent.core.model import GpuUuid, NodeView, Request, RequestId
from mig_agent.core.plan import Plan
from mig_agent.core.policy import Policy


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


class Queue:
    """The waiting requests in order. Has no clock; the moments are handed in."""

    def __init__(self) -> None:
        self._waiting: dict[RequestId, Waiting] = {}
        self._next = 0

    def add(self, request: Request, now: float) -> Waiting:
        """Puts a request in its place. Raises ValueError for an id that waits already."""
        if request.request_id in self._waiting:
            raise ValueError(f"cannot queue request {request.request_id} twice")
        waiting = Waiting(request=request, seq=self._next, since=now)
        self._next += 1
        self._waiting[request.request_id] = waiting
        return waiting

    def remove(self, request_id: RequestId) -> Waiting | None:
        """Takes a request out; None when it does not wait."""
        return self._waiting.pop(request_id, None)

    def get(self, request_id: RequestId) -> Waiting | None:
        """A waiting request."""
        return self._waiting.get(request_id)

    @property
    def waiting(self) -> tuple[Waiting, ...]:
        """All, the next first."""
        return in_order(self._waiting.values())

    def position(self, request_id: RequestId) -> int | None:
        """1 for the first; None when it does not wait."""
        mine = self._waiting.get(request_id)
        if mine is None:
            return None
        return 1 + sum(other.order < mine.order for other in self._waiting.values())

    def __len__(self) -> int:
        return len(self._waiting)


def in_order(waiting: Iterable[Waiting]) -> tuple[Waiting, ...]:
    """By priority, then first come."""
    return tuple(sorted(waiting, key=lambda each: each.order))


def reservation(view: NodeView, waiting: Sequence[Waiting], now: float, limit_seconds: float) -> Reservation | None:
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


def next_to_start(
    view: NodeView,
    waiting: Sequence[Waiting],
    policy: Policy,
    now: float,
    *,
    limit_seconds: float,
    strict_fifo: bool = False,
    only: Waiting | None = None,
) -> tuple[Waiting, Plan] | None:
    """The first request in order that can start now, with its plan; None when none can.

    With `strict_fifo` only the head of the queue may start. With `only` no other request is looked at: a newcomer,
    where those before it are known not to fit.
    """
    found = search(view, waiting, policy, now, limit_seconds=limit_seconds, strict_fifo=strict_fifo, only=only)
    return None if isinstance(found, Waiting) else found


def search(
    view: NodeView,
    waiting: Sequence[Waiting],
    policy: Policy,
    now: float,
    *,
    limit_seconds: float,
    strict_fifo: bool = False,
    only: Waiting | None = None,
    after: Waiting | None = None,
    enough: Callable[[], bool] = lambda: False,
) -> tuple[Waiting, Plan] | Waiting | None:
    """The same in pieces: when `enough` says so it pauses, and answers the last request that it looked at.

    It looks at one at least. `after` is where an earlier piece has paused.
    """
    ordered = in_order(waiting)
    if strict_fifo:
        head = ordered[:1]
        kept = None
    else:
        head = ordered
        kept = reservation(view, ordered, now, limit_seconds)
    if only is not None:
        head = tuple(each for each in head if each.seq == only.seq)
    if after is not None:
        head = tuple(each for each in head if each.order > after.order)
    # Many wait for the same: what did not fit once does not fit for the next one either.
    failed: set[tuple[object, ...]] = set()
    looked_at: Waiting | None = None
    for each in head:
        if looked_at is not None and enough():
            return looked_at
        looked_at = each
        reserved = NOTHING_RESERVED if kept is None else kept.against(each)
        wants = tuple(replace(want, text="") for want in each.request.wants)  # people write the same in many ways
        shape = (wants, each.request.gpus, reserved)
        if shape in failed:
            continue
        found = find(view, each.request, policy, reserved=reserved)
        if found is not None:
            return each, found
        failed.add(shape)
    return None

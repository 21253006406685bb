"""Requests that wait: by priority, then first come; a later one may start whenever it fits.

What keeps a large request from being starved by small ones is in `core.backfill`. Everything here is a value or a
function of `now`: the manager owns the timer. The queue is not persisted.

How it is meant to be used: every arrival is added; `next_to_start` is asked until it answers None, after each arrival,
whenever something was freed and when a wait passes the limit; then an arrival that is not to wait leaves again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from mig_agent.core.backfill import ReservationCache, WaitingRequest, backfill_order, in_order, reservation
from mig_agent.core.model import NodeView, Request, RequestKey
from mig_agent.core.planning.plan import Plan, Policy
from mig_agent.core.planning.search import NOTHING_RESERVED, find

NONE_SEEN: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class PausedSearch:
    """A search that is to go on later."""

    seen: frozenset[int]
    """The numbers of the requests that it has looked at."""


class Queue:
    """The waiting requests in order. Has no clock; the moments are handed in."""

    def __init__(self) -> None:
        self._waiting: dict[RequestKey, WaitingRequest] = {}
        self._next = 0

    def add(self, request: Request, now: float) -> WaitingRequest:
        """Puts a request in its place. Raises ValueError for one that waits already."""
        if request.key in self._waiting:
            raise ValueError(f"cannot queue request {request.request_id} twice")
        waiting = WaitingRequest(request=request, seq=self._next, since=now)
        self._next += 1
        self._waiting[request.key] = waiting
        return waiting

    def remove(self, request: RequestKey) -> WaitingRequest | None:
        """Takes a request out; None when it does not wait."""
        return self._waiting.pop(request, None)

    def get(self, request: RequestKey) -> WaitingRequest | None:
        """A waiting request."""
        return self._waiting.get(request)

    @property
    def waiting(self) -> tuple[WaitingRequest, ...]:
        """All, the next first."""
        return in_order(self._waiting.values())

    def position(self, request: RequestKey) -> int | None:
        """1 for the first; None when it does not wait."""
        mine = self._waiting.get(request)
        if mine is None:
            return None
        return 1 + sum(other.order < mine.order for other in self._waiting.values())

    def __len__(self) -> int:
        return len(self._waiting)


def next_to_start(
    view: NodeView,
    waiting: Sequence[WaitingRequest],
    policy: Policy,
    now: float,
    *,
    limit_seconds: float,
    strict_fifo: bool = False,
    only: WaitingRequest | None = None,
) -> tuple[WaitingRequest, Plan] | None:
    """The first request in turn that can start now, with its plan; None when none can.

    With `strict_fifo` only the head of the queue may start. With `only` no other request is looked at: a newcomer,
    where those before it are known not to fit.
    """
    found = search(view, waiting, policy, now, limit_seconds=limit_seconds, strict_fifo=strict_fifo, only=only)
    return None if isinstance(found, PausedSearch) else found


def search(
    view: NodeView,
    waiting: Sequence[WaitingRequest],
    policy: Policy,
    now: float,
    *,
    limit_seconds: float,
    strict_fifo: bool = False,
    only: WaitingRequest | None = None,
    seen: frozenset[int] = NONE_SEEN,
    enough: Callable[[], bool] = lambda: False,
    known: ReservationCache | None = None,
) -> tuple[WaitingRequest, Plan] | PausedSearch | None:
    """The same in pieces: when `enough` says so it pauses, having looked at one at least.

    `seen` are the numbers of those that earlier pieces have looked at. Who came since is looked at like the others.
    `known` is handed from one piece to the next.
    """
    ordered = in_order(waiting)
    kept = None
    if strict_fifo:
        turns: Sequence[WaitingRequest] = ordered[:1]
    else:
        known = known or ReservationCache()
        kept = reservation(view, ordered, now, limit_seconds, known)
        turns = backfill_order(view, ordered, kept, known)
    # Many wait for the same: what did not fit once does not fit for the next one either.
    failed: set[tuple[object, ...]] = set()
    looked_at = set(seen)
    for each in turns:
        if each.seq in seen or (only is not None and each.seq != only.seq):
            continue
        if len(looked_at) > len(seen) and enough():
            return PausedSearch(frozenset(looked_at))
        looked_at.add(each.seq)
        reserved = NOTHING_RESERVED if kept is None else kept.against(each)
        wants = tuple(replace(want, text="") for want in each.request.wants)  # people write the same in many ways
        shape = (wants, each.request.gpus, reserved)
        if shape in failed:
            continue
        found = find(view, each.request, policy, reserved=reserved)
        if found is None:
            failed.add(shape)
            continue
        return each, found
    return None

"""Waiting requests: by priority, then first come; a later one may start whenever it fits.

`core.backfill` keeps large requests from being starved by small ones. Everything here is a value or a function of
`now`: the manager owns the timer. The queue is not persisted.

Usage: add every arrival; call `search` until it returns None, after each arrival, whenever capacity was freed and
when a wait passes the reservation delay; then remove an arrival that is not to wait.
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
    """A search that was interrupted and is to be resumed."""

    seen: frozenset[int]
    """Arrival numbers of the requests that were already tried."""


class Queue:
    """The waiting requests in order. Has no clock; callers pass the time."""

    def __init__(self) -> None:
        self._waiting: dict[RequestKey, WaitingRequest] = {}
        self._next = 0

    def add(self, request: Request, now: float, former: WaitingRequest | None = None) -> WaitingRequest:
        """Add a request; one that was started in vain keeps its `former` place and time.

        Raises ValueError if it waits already.
        """
        if request.key in self._waiting:
            raise ValueError(f"cannot queue request {request.request_id} twice")
        waiting = former or WaitingRequest(request=request, seq=self._next, since=now)
        self._next += 1  # also for a former one: `version` must change
        self._waiting[request.key] = waiting
        return waiting

    def remove(self, request: RequestKey) -> WaitingRequest | None:
        """Remove a request and return it; None if it does not wait."""
        return self._waiting.pop(request, None)

    def get(self, request: RequestKey) -> WaitingRequest | None:
        """Return a waiting request; None if it does not wait."""
        return self._waiting.get(request)

    @property
    def waiting(self) -> tuple[WaitingRequest, ...]:
        """All waiting requests in queue order."""
        return in_order(self._waiting.values())

    @property
    def oldest_since(self) -> float | None:
        """Time at which the request that waits longest arrived; None if no request waits."""
        return min((each.since for each in self._waiting.values()), default=None)

    def position(self, request: RequestKey) -> int | None:
        """Return the position of a request in the queue, from 1; None if it does not wait."""
        mine = self._waiting.get(request)
        if mine is None:
            return None
        return 1 + sum(other.order < mine.order for other in self._waiting.values())

    @property
    def next_seq(self) -> int:
        """The arrival number that the next request will get."""
        return self._next

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def version(self) -> tuple[int, int]:
        """A value that no other content of this queue had before or will have."""
        return (self._next, len(self._waiting))


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
    """Return the first request in turn that can start now, with its plan, or None; pause once `enough` returns True.

    At least one request is tried before a pause. `seen` are the numbers of those that were tried before the pause;
    requests that came since are tried like the others. Pass the same `known` again when resuming. `strict_fifo`: only
    the head of the queue may start. `only`: no other request is tried, for a new one where those before it are known
    not to fit. `limit_seconds` is the reservation delay.
    """
    ordered = in_order(waiting)
    reserved_for = None
    if strict_fifo:
        order: Sequence[WaitingRequest] = ordered[:1]
    else:
        known = known or ReservationCache()
        reserved_for = reservation(view, ordered, now, limit_seconds, known)
        order = backfill_order(view, ordered, reserved_for, known)
    # Many wait for the same: what did not fit once does not fit for the next one either.
    failed: set[tuple[object, ...]] = set()
    tried = set(seen)
    for each in order:
        if each.seq in seen or (only is not None and each.seq != only.seq):
            continue
        if len(tried) > len(seen) and enough():
            return PausedSearch(frozenset(tried))
        tried.add(each.seq)
        reserved = NOTHING_RESERVED if reserved_for is None else reserved_for.against(each)
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

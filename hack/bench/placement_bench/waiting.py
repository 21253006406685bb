"""Requests that wait until they fit, in the agent's own queue: how long each waits."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from mig_agent.core.backfill import WaitingRequest
from mig_agent.core.load_history import EndedLease, LeaseTimes
from mig_agent.core.model import LeaseId, NodeView, RequestId
from mig_agent.core.planning.plan import DEFAULT_POLICY, Plan
from mig_agent.core.planning.search import find
from mig_agent.core.queue import PausedSearch, Queue, search
from placement_bench.agent import AgentCluster, Handle, request_for
from placement_bench.arrivals import Arrivals


@dataclass(frozen=True, slots=True)
class Discipline:
    """Settings of the queue; limits are in mean service times, which count as seconds here."""

    name: str
    strict_fifo: bool = False
    plain: bool = False
    """First come, and whatever fits: a baseline in place of the agent's queue."""
    limit: float | None = None
    """The reservation delay; None: the agent's default, the running mean of leases."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """The node and its queue at one moment of a replay."""

    now: float
    view: NodeView
    waiting: Sequence[WaitingRequest]
    started: Mapping[LeaseId, tuple[float, int]]
    """Time at which each active lease started, and the number of its request."""
    lease_times: LeaseTimes
    reservation_delay: float


def waits(
    discipline: Discipline,
    arrivals: Arrivals,
    gpus: int,
    watch: Callable[[int, Moment], None] | None = None,
    allowed: Callable[[int], float | None] = lambda _number: None,
) -> list[float]:
    """Return how long each request waits, in order of arrival. All are served in the end.

    `watch` is called after each arrival, with its number. `allowed` returns how far off the deadline of a request's
    lease is; None if it has none.
    """
    cluster = AgentCluster(gpus, DEFAULT_POLICY)
    queue = Queue()
    ending: list[tuple[float, int, Handle]] = []
    found = [0.0] * len(arrivals)
    lease_times = LeaseTimes(1.0)
    active: dict[LeaseId, tuple[float, int]] = {}

    def delay() -> float:
        return lease_times.mean if discipline.limit is None else discipline.limit

    def start_what_fits(now: float) -> None:
        limit = delay()
        while len(queue):
            started = (
                _plain_backfill(cluster.view, queue.waiting)
                if discipline.plain
                else search(
                    cluster.view,
                    queue.waiting,
                    DEFAULT_POLICY,
                    now,
                    limit_seconds=limit,
                    strict_fifo=discipline.strict_fifo,
                )
            )
            if started is None or isinstance(started, PausedSearch):
                return
            waiting, plan = started
            queue.remove(waiting.request.key)
            number = int(waiting.request.request_id)
            found[number] = now - waiting.since
            handle = cluster.carry_out(plan, now)
            active.update((each.lease, (now, number)) for each in handle if each.lease is not None)
            heapq.heappush(ending, (now + arrivals.lasts[number], number, handle))

    def end_until(moment: float) -> None:
        while ending and ending[0][0] <= moment:
            now, number, handle = heapq.heappop(ending)
            cluster.end(handle, now)
            for each in handle:
                active.pop(each.lease or LeaseId(""))
            lease_times.lease_ended(EndedLease(arrivals.lasts[number], allowed(number)))
            start_what_fits(now)

    for number, (now, kind) in enumerate(zip(arrivals.at, arrivals.kind, strict=True)):
        end_until(now)
        queue.add(replace(request_for(kind), request_id=RequestId(str(number))), now)
        start_what_fits(now)
        if watch is not None:
            moment = Moment(
                now=now,
                view=cluster.view,
                waiting=queue.waiting,
                started=active,
                lease_times=lease_times,
                reservation_delay=delay(),
            )
            watch(number, moment)
    end_until(float("inf"))
    return found


def _plain_backfill(view: NodeView, waiting: Sequence[WaitingRequest]) -> tuple[WaitingRequest, Plan] | None:
    failed = set()
    for each in waiting:
        if each.request.wants not in failed:
            found = find(view, each.request, DEFAULT_POLICY)
            if found is not None:
                return each, found
            failed.add(each.request.wants)
    return None

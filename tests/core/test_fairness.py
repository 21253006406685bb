"""Fair share: who used least goes first, and still no request waits for ever."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mig_agent.core.backfill import WaitingRequest, in_order, reservation
from mig_agent.core.fairness import OVERDUE, PastUse, decayed, ranked
from mig_agent.core.model import Holder, NodeView, RequestId, Want
from mig_agent.core.planning.plan import Policy
from support.nodes import A30, H100, Has, Machine, node, nodes, profile, request, wants_for
from support.queueing import next_to_start

DELAY = 100.0
HALF_LIFE = 3600.0
TENANTS = ("vision", "speech", "robots")


def waiting(seq: int, tenant: str, since: float, *wants: Want, priority: int = 0) -> WaitingRequest:
    asked = replace(
        request(*(wants or (profile("1g.10gb"),)), priority=priority),
        request_id=RequestId(str(seq)),
        holder=Holder(tenant=tenant),
    )
    return WaitingRequest(request=asked, seq=seq, since=since)


def test_what_was_used_counts_half_after_a_half_life() -> None:
    past = PastUse()
    past.add("vision", 0.5, 0.0, 60.0, HALF_LIFE)
    at_the_end = past.at(60.0, HALF_LIFE)["vision"]
    assert at_the_end == pytest.approx(30.0, rel=0.01)
    assert past.at(60.0 + HALF_LIFE, HALF_LIFE)["vision"] == pytest.approx(at_the_end / 2)


@given(
    leases=st.lists(st.tuples(st.floats(0, 1e6), st.floats(0, 1e6), st.floats(0, 8)), max_size=8),
    now=st.floats(2e6, 3e6),
)
def test_the_sum_of_past_use_is_that_of_its_leases(leases: list[tuple[float, float, float]], now: float) -> None:
    past = PastUse()
    ends = sorted((start + length, start, gpus) for start, length, gpus in leases)
    for end, start, gpus in ends:
        past.add("vision", gpus, start, end, HALF_LIFE)
    one_by_one = math.fsum(decayed(gpus, start, end, now, HALF_LIFE) for end, start, gpus in ends)
    assert past.at(now, HALF_LIFE).get("vision", 0.0) == pytest.approx(one_by_one, rel=1e-6, abs=1e-9)


def test_within_a_priority_the_tenant_that_used_least_goes_first() -> None:
    requests = [waiting(0, "vision", 0), waiting(1, "speech", 1), waiting(2, "vision", 2, priority=1)]
    order = ranked(requests, {"vision": 50.0}, 10.0, DELAY)
    assert [each.seq for each in order] == [2, 1, 0]
    assert [each.seq for each in ranked(requests, {}, 10.0, DELAY)] == [2, 0, 1]


def test_among_those_that_fit_use_counts_before_size() -> None:
    view = node(Machine(H100))
    requests = [waiting(0, "vision", 0, profile("4g.40gb")), waiting(1, "speech", 1)]
    order = ranked(requests, {"vision": 50.0}, 10.0, DELAY)
    found = next_to_start(view, order, Policy(), 10.0, limit_seconds=DELAY)
    assert found is not None
    assert found[0].seq == 1


USED = st.dictionaries(st.sampled_from(TENANTS), st.floats(0, 1e9), max_size=3)
REQUESTS = st.lists(st.tuples(st.sampled_from(TENANTS), st.integers(0, 2), st.floats(0, 500)), min_size=1, max_size=8)


@given(given_requests=REQUESTS, used=USED, now=st.floats(500, 700))
def test_no_request_is_overtaken_by_one_that_comes_later_than_the_delay(
    given_requests: list[tuple[str, int, float]], used: Mapping[str, float], now: float
) -> None:
    """The bound: whatever tenants used, of two requests with the same priority."""
    arrivals = sorted(given_requests, key=lambda each: each[2])
    requests = [waiting(n, tenant, since, priority=priority) for n, (tenant, priority, since) in enumerate(arrivals)]
    order = ranked(requests, used, now, DELAY)
    place = {each.seq: number for number, each in enumerate(order)}
    for one in requests:
        for later in requests:
            same = one.request.priority == later.request.priority
            # Only one that has waited for the delay is bound to be in front: until then it may be overtaken.
            if same and one.seq < later.seq and now - one.since >= DELAY:
                assert place[one.seq] < place[later.seq]
    assert in_order(order) == order


@given(
    view=nodes((A30, H100), most=3),
    wants=st.lists(wants_for((A30, H100)), min_size=2, max_size=6),
    tenants=st.lists(st.sampled_from(TENANTS), min_size=6, max_size=6),
    used=USED,
    now=st.floats(100, 400),
)
def test_the_reservation_is_the_same_as_first_come_and_is_kept(
    view: NodeView, wants: list[Want], tenants: list[str], used: Mapping[str, float], now: float
) -> None:
    """The starvation bound of the queue does not depend on fair share: neither who gets it, nor which GPUs."""
    requests = [waiting(n, tenants[n], 60.0 * n, want) for n, want in enumerate(wants)]
    order = ranked(requests, used, now, DELAY)
    plain, fair = reservation(view, requests, now, DELAY), reservation(view, order, now, DELAY)
    assert (plain is None) == (fair is None)
    if plain is None or fair is None:
        return
    assert (plain.waiting.seq, plain.gpus) == (fair.waiting.seq, fair.gpus)
    assert fair.waiting.rank == OVERDUE
    found = next_to_start(view, order, Policy(), now, limit_seconds=DELAY)
    if found is not None and found[0].seq != fair.waiting.seq:
        ahead = found[0].order < fair.waiting.order
        assert ahead or not {device.gpu for device in found[1].devices} & fair.gpus


@given(
    stream=st.lists(st.sampled_from(TENANTS[1:]), min_size=40, max_size=40),
    heavy=st.floats(0, 1e9),
)
def test_a_stream_of_tenants_that_used_nothing_never_starves_the_one_that_used_most(
    stream: list[str], heavy: float
) -> None:
    """Each minute a small request of another tenant comes, and leases last a minute."""
    large = waiting(0, "vision", 0.0, profile("7g.80gb"))
    queue, ends, served = [large], [0.0], None
    for minute, tenant in enumerate(stream, 1):
        now = minute * 60.0
        queue.append(waiting(minute, tenant, now))
        ends = [each for each in ends if each + 60.0 > now]
        while served is None:
            busy = [Has("1g.10gb", start, "leased") for start in range(min(len(ends), 7))]
            view = node(Machine(H100, busy))
            order = ranked(queue, {"vision": heavy}, now, DELAY)
            found = next_to_start(view, order, Policy(), now, limit_seconds=DELAY)
            if found is None:
                break
            queue = [each for each in queue if each.seq != found[0].seq]
            if found[0].seq == large.seq:
                served = now
            else:
                ends.append(now)
        if served is not None:
            break
    assert served is not None
    assert served <= DELAY + 60.0 + 60.0  # the delay, the longest lease, and the minute in which it is looked at

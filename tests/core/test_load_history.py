"""What a node has seen of late: lease times, how long leases go on, and which requests come."""

from __future__ import annotations

import math

import pytest

from mig_agent.core.load_history import (
    FEWEST_REQUESTS,
    FIRST_GUESS_SECONDS,
    MOST_LEASE_TIMES,
    MOST_REQUESTS,
    EndedLease,
    LeaseTimes,
    RecentRequests,
    RemainingTimes,
)
from mig_agent.core.model import Request, Want


def test_the_mean_starts_from_a_guess_and_ends_with_the_leases() -> None:
    times = LeaseTimes()
    assert times.mean == FIRST_GUESS_SECONDS
    times.lease_ended(EndedLease(100))
    assert times.mean == pytest.approx((FIRST_GUESS_SECONDS + 100) / 2)
    for seconds in (50, 150) * 400:
        times.lease_ended(EndedLease(seconds))
    assert times.mean == pytest.approx(100, rel=0.01)


def test_it_follows_a_change() -> None:
    times = LeaseTimes(10)
    for _ in range(5000):
        times.lease_ended(EndedLease(10))
    for _ in range(5000):
        times.lease_ended(EndedLease(1000))
    assert times.mean == 1000
    assert times.past.times == (1000,) * MOST_LEASE_TIMES


def test_a_clock_that_was_set_back_counts_for_nothing() -> None:
    times = LeaseTimes(10)
    times.lease_ended(EndedLease(-5))
    assert times.mean == 10
    assert not len(times)


def test_of_leases_with_a_deadline_the_share_that_they_used_is_kept() -> None:
    times = LeaseTimes.of((EndedLease(50.0, 100.0), EndedLease(7.0), EndedLease(30.0, 25.0), EndedLease(5.0, 50.0)))
    assert times.past.shares == (0.1, 0.5, 1.0)
    assert times.past.times == (5.0, 7.0, 30.0, 50.0)


def test_the_rest_of_a_lease_depends_on_its_age() -> None:
    remaining = RemainingTimes((10.0, 20.0, 100.0, 200.0), ())
    assert [remaining.after(0.0, share) for share in (0.1, 0.3, 0.6, 0.9)] == [10, 20, 100, 200]
    assert [remaining.after(50.0, share) for share in (0.25, 0.75)] == [50, 150], "only long ones are so old"


def test_older_than_all_leases_before_is_not_known() -> None:
    remaining = RemainingTimes((10.0, 20.0), (500.0,))
    assert remaining.after(500.0, 0.5) == math.inf


def test_active_leases_count_as_lasting_at_least_as_long_as_they_have() -> None:
    alone = RemainingTimes((10.0, 1000.0), ())
    beside = RemainingTimes((10.0, 1000.0), (500.0,) * 8)
    assert alone.after(0.0, 0.5) == 10.0
    assert beside.after(0.0, 0.5) == 1000.0, "nine of ten leases last longer than 500 s"


def test_a_share_is_never_within_less_time_than_a_smaller_one() -> None:
    remaining = RemainingTimes(tuple(float(each) for each in range(1, 50)), (3.0, 17.0, 17.0, 80.0))
    for age in (0.0, 2.5, 17.0, 48.0):
        rests = [remaining.after(age, share / 100) for share in range(100)]
        assert rests == sorted(rests)
        assert rests[0] > 0


def test_how_often_requests_come() -> None:
    recent, request = RecentRequests(1000.0), Request(wants=(Want(profile="1g.10gb"),))
    for number in range(FEWEST_REQUESTS - 1):
        recent.came(request, 1000.0 + number)
    assert not recent.demand(1100.0).requests, "too few to say"
    recent.came(request, 1100.0)
    assert recent.demand(1100.0).per_second == pytest.approx(FEWEST_REQUESTS / 100)
    for number in range(2 * MOST_REQUESTS):
        recent.came(request, 1100.0 + number)
    assert recent.demand(1100.0 + 2 * MOST_REQUESTS).per_second == pytest.approx(1.0, rel=0.02), "only the last count"

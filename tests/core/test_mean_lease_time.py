"""The limit from the running mean of lease lengths."""

from __future__ import annotations

import pytest

from mig_agent.core.backfill import FIRST_GUESS_SECONDS, MeanLeaseTime


def test_it_starts_from_a_guess_and_ends_with_the_mean() -> None:
    patience = MeanLeaseTime()
    assert patience.limit_seconds == FIRST_GUESS_SECONDS
    patience.lease_ended(100)
    assert patience.limit_seconds == pytest.approx((FIRST_GUESS_SECONDS + 100) / 2)
    for seconds in (50, 150) * 400:
        patience.lease_ended(seconds)
    assert patience.limit_seconds == pytest.approx(100, rel=0.01)


def test_it_follows_a_change() -> None:
    patience = MeanLeaseTime(10)
    for _ in range(5000):
        patience.lease_ended(10)
    for _ in range(5000):
        patience.lease_ended(1000)
    assert patience.limit_seconds > 950


def test_a_clock_that_was_set_back_counts_for_nothing() -> None:
    patience = MeanLeaseTime(10)
    patience.lease_ended(-5)
    assert patience.limit_seconds == 10

"""Pauses before something is tried again."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from mig_agent.core.backoff import Backoff

SECONDS = st.floats(0.001, 3600.0)
FAILURES = st.one_of(st.integers(1, 30), st.integers(1, 10**9))


def test_each_pause_is_twice_the_one_before_up_to_the_longest() -> None:
    backoff = Backoff(2.0, 60.0)
    assert [backoff.pause(failures) for failures in range(1, 8)] == [2, 4, 8, 16, 32, 60, 60]
    assert backoff.pause(3, 0.0) == 4
    assert backoff.pause(3, 0.5) == 6


def test_thirteen_hours_of_refusals_are_no_overflow() -> None:
    """At a minute each these are the 1,025 failures whose power of two no float can hold."""
    for failures in (1024, 1025, 1026, 10**9):
        assert Backoff(2.0, 60.0).pause(failures) == 60


@given(first=SECONDS, longest=SECONDS, failures=FAILURES, chance=st.floats(0, 1))
def test_pauses_grow_to_a_bound_and_differ_by_chance(
    first: float, longest: float, failures: int, chance: float
) -> None:
    backoff = Backoff(first, longest)
    pause = backoff.pause(failures, chance)
    assert min(first, longest) / 2 <= pause <= longest
    assert backoff.pause(failures, 0) <= pause <= backoff.pause(failures, 1)
    assert pause <= backoff.pause(failures + 1, chance)

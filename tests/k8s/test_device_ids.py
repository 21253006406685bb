"""The kubelet's abstract ids."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mig_agent.frontends.kubernetes.resources import device_id, is_agent_id, listed, number_of


@given(total=st.integers(0, 60), numbers=st.sets(st.integers(0, 80), max_size=40))
def test_a_list_has_all_that_is_allocated_and_as_many_as_are_wanted(total: int, numbers: set[int]) -> None:
    allocated = {device_id(each) for each in numbers}
    found = listed(total, allocated)
    assert allocated <= set(found)
    assert len(found) == len(set(found)) == max(total, len(allocated))
    assert all(is_agent_id(each) for each in found)
    free = [number_of(each) for each in found if each not in allocated]
    assert free == [each for each in range(200) if each not in numbers][: len(free)]


@given(total=st.integers(0, 60), numbers=st.sets(st.integers(0, 80), max_size=40), more=st.integers(0, 20))
def test_a_longer_list_only_adds(total: int, numbers: set[int], more: int) -> None:
    allocated = {device_id(each) for each in numbers}
    assert set(listed(total, allocated)) <= set(listed(total + more, allocated))


@pytest.mark.parametrize(
    "other", ["GPU-12", "mig-agent-", "mig-agent-01", "mig-agent-1x", "mig-agent--1", "xmig-agent-1", ""]
)
def test_ids_of_other_plugins_are_recognized(other: str) -> None:
    assert not is_agent_id(other)
    with pytest.raises(ValueError, match="^" + other):
        number_of(other)

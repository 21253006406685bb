"""The length of the list that the kubelet sees: never shorter than what somebody may still believe."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from mig_agent.frontends.kubernetes.device_plugin.device_list import (
    BELIEVED_SECONDS,
    CALM_SECONDS,
    NO_WRITE_SECONDS,
    UNKNOWN_SECONDS,
    DeviceList,
)


def test_a_list_grows_at_once() -> None:
    advertisement = DeviceList()
    assert advertisement.plan(3, 0.0) == 3
    advertisement.showed(3, 0.5)
    assert advertisement.plan(7, 1.0) == 7


def test_a_list_shrinks_two_seconds_after_the_node_stopped_showing_more() -> None:
    advertisement = DeviceList()
    advertisement.showed(7, 0.0)
    advertisement.plan(7, 0.0)
    assert advertisement.plan(4, 1.0) == 7
    assert advertisement.due() is None, "it changes when the node object does"
    advertisement.kubelet_wrote(1.0)
    advertisement.showed(4, 1.1)
    assert advertisement.plan(4, 1.1) == 7
    due = advertisement.due()
    assert due == 1.1 + BELIEVED_SECONDS
    assert advertisement.plan(4, due) == 4


def test_kubelet_that_writes_its_number_back_restarts_the_wait() -> None:
    advertisement = DeviceList()
    advertisement.showed(7, 0.0)
    advertisement.plan(7, 0.0)
    advertisement.showed(4, 1.0)
    advertisement.showed(7, 2.5)
    advertisement.kubelet_wrote(2.5)
    assert advertisement.plan(4, 3.1) == 7
    advertisement.showed(4, 3.2)  # patched again
    assert advertisement.plan(4, 3.2 + BELIEVED_SECONDS - 0.01) == 7
    assert advertisement.plan(4, 3.2 + BELIEVED_SECONDS) == 4


def test_a_list_does_not_shrink_while_the_kubelet_may_be_writing_it_to_the_node() -> None:
    """Found by a churn: it had counted the list, the list shrank, and then it showed the longer one."""
    advertisement = DeviceList()
    advertisement.showed(7, 0.0)
    advertisement.plan(7, 0.0)
    advertisement.kubelet_wrote(1.0)
    advertisement.showed(4, 6.0)
    assert advertisement.plan(4, 6.0) == 7
    assert advertisement.plan(4, 6.0 + BELIEVED_SECONDS) == 7, "its next write may be under way"
    advertisement.kubelet_wrote(11.0)
    advertisement.showed(7, 11.0)
    advertisement.showed(4, 11.1)
    assert advertisement.plan(4, 11.1) == 7
    assert advertisement.plan(4, 11.1 + BELIEVED_SECONDS) == 4
    assert 11.1 + BELIEVED_SECONDS < 11.0 + CALM_SECONDS


def test_wait_for_a_silent_kubelet_is_bounded() -> None:
    advertisement = DeviceList()
    advertisement.showed(7, 0.0)
    advertisement.plan(7, 0.0)
    advertisement.showed(4, 1.0)
    advertisement.plan(4, 1.0 + BELIEVED_SECONDS)
    due = advertisement.due()
    assert due == 1.0 + BELIEVED_SECONDS + NO_WRITE_SECONDS
    assert advertisement.plan(4, due - 0.1) == 7
    assert advertisement.plan(4, due) == 4


def test_list_shrinks_later_if_the_node_status_is_unknown() -> None:
    advertisement = DeviceList()
    advertisement.plan(7, 0.0)
    assert advertisement.plan(4, 1.0) == 7
    assert advertisement.plan(2, 5.0) == 7
    assert advertisement.due() == 1.0 + UNKNOWN_SECONDS
    assert advertisement.plan(2, 1.0 + UNKNOWN_SECONDS) == 2
    assert advertisement.plan(1, 20.0) == 2, "a new shrink waits for itself"


def test_list_that_grows_again_cancels_its_shrinking() -> None:
    advertisement = DeviceList()
    advertisement.plan(7, 0.0)
    advertisement.plan(4, 1.0)
    advertisement.plan(7, 10.0)
    assert advertisement.plan(4, 1.0 + UNKNOWN_SECONDS) == 7


def test_list_stays_for_a_while_if_the_node_status_is_unknown() -> None:
    advertisement = DeviceList()
    advertisement.showed(7, 0.0)
    advertisement.plan(7, 0.0)
    advertisement.showed(None, 1.0)
    assert advertisement.plan(2, 1.0 + UNKNOWN_SECONDS - 0.1) == 7


def test_while_the_api_server_is_away_the_list_stays_as_long_as_the_node_showed() -> None:
    """Pods are bound on what the node showed last, as soon as the API server is back and before anybody corrects it."""
    advertisement = DeviceList()
    advertisement.showed(7, 0.0)
    advertisement.plan(7, 0.0)
    advertisement.showed(None, 1.0, in_touch=False)
    assert advertisement.plan(2, 1.0) == 7
    advertisement.showed(None, 500.0, in_touch=False)
    assert advertisement.plan(2, 500.0) == 7
    advertisement.showed(7, 501.0)
    assert advertisement.plan(2, 501.0) == 7
    advertisement.showed(2, 502.0)
    advertisement.kubelet_wrote(502.0)
    assert advertisement.plan(2, 502.0 + BELIEVED_SECONDS - 0.1) == 7
    assert advertisement.plan(2, 502.0 + BELIEVED_SECONDS) == 2


def test_wait_is_bounded_if_the_api_server_accepts_no_writes() -> None:
    advertisement = DeviceList()
    advertisement.showed(7, 0.0)
    advertisement.plan(7, 0.0)
    advertisement.showed(None, 1.0, in_touch=False)
    advertisement.plan(2, 1.0)
    advertisement.showed(None, 100.0)
    assert advertisement.plan(2, 100.0) == 7
    assert advertisement.plan(2, 100.0 + UNKNOWN_SECONDS) == 2


def test_starting_agent_lists_what_the_node_still_shows() -> None:
    advertisement = DeviceList()
    advertisement.showed(7, 0.0)
    assert advertisement.plan(3, 0.0) == 7


def test_due_times_are_in_the_future() -> None:
    """Else the numbers would be worked out again and again in between."""
    advertisement = DeviceList()
    advertisement.showed(7, 0.0)
    advertisement.plan(7, 0.0)
    advertisement.showed(None, 0.5)
    advertisement.plan(4, 1.0)
    now = 1.0
    for _ in range(5):
        due = advertisement.due()
        if due is None:
            break
        assert due > now
        now = due
        advertisement.plan(4, now)
    assert advertisement.due() is None
    assert advertisement.length == 4


def test_restart_of_the_kubelet_resets_the_list() -> None:
    advertisement = DeviceList()
    advertisement.plan(7, 0.0)
    advertisement.withdrawn()
    assert advertisement.plan(2, 1.0) == 2


@dataclass(frozen=True)
class Step:
    seconds: float
    target: int | None = None
    shown: int | None = None
    unknown: bool = False
    written: bool = False


STEPS = st.lists(
    st.one_of(
        st.builds(Step, st.floats(0.0, 3.0), target=st.integers(0, 9)),
        st.builds(Step, st.floats(0.0, 3.0), shown=st.integers(0, 9)),
        st.builds(Step, st.floats(0.0, 3.0), unknown=st.just(True)),
        st.builds(Step, st.floats(0.0, 3.0), written=st.just(True)),
        st.builds(Step, st.floats(0.0, 30.0)),
    ),
    max_size=30,
)


@given(STEPS)
def test_list_always_covers_the_target_and_recent_node_status(steps: list[Step]) -> None:
    advertisement = DeviceList()
    now, target, shown, history = 0.0, 0, None, list[tuple[float, int]]()
    for step in steps:
        now += step.seconds
        if shown is not None:
            history.append((now, shown))  # it was shown until now
        if step.target is not None:
            target = step.target
        if step.written:
            advertisement.kubelet_wrote(now)
        if step.shown is not None or step.unknown:
            shown = step.shown
            advertisement.showed(shown, now)
        length = advertisement.plan(target, now)
        assert length >= target
        assert length >= max((count for at, count in history if at + BELIEVED_SECONDS > now), default=0)
        assert length >= (shown or 0)
        assert advertisement.length == length


@given(STEPS)
def test_list_shrinks_to_its_target_when_nothing_changes(steps: list[Step]) -> None:
    advertisement = DeviceList()
    now, target = 0.0, 0
    for step in steps:
        now += step.seconds
        target = target if step.target is None else step.target
        if step.written:
            advertisement.kubelet_wrote(now)
        if step.shown is not None or step.unknown:
            advertisement.showed(step.shown, now)
        advertisement.plan(target, now)
    if advertisement.shown is not None:
        advertisement.showed(target, now)
    advertisement.plan(target, now)
    for _ in range(20):
        due = advertisement.due()
        if due is None:
            break
        now = max(now, due)
        advertisement.plan(target, now)
    assert advertisement.length == target
    assert advertisement.due() is None

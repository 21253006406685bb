"""What is read from the objects of Kubernetes, how a watch moves on, and which Events are sent: the pure parts."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mig_agent.adapters.kubeapi.events import (
    BURST,
    MOST_MESSAGE_BYTES,
    MOST_REMEMBERED,
    REFILL_SECONDS,
    REMEMBERED_SECONDS,
    EventContent,
    EventCorrelator,
    EventSubject,
    new_event,
    truncated,
)
from mig_agent.adapters.kubeapi.informer import (
    FIRST_PAUSE_SECONDS,
    LONGEST_PAUSE_SECONDS,
    NodeWatchState,
    PodsWatchState,
    lines,
    pause_seconds,
)
from mig_agent.adapters.kubeapi.objects import KubeApiError, NodeCondition, daemon_set_facts, node_facts, pod_facts
from mig_agent.adapters.kubeapi.patches import owned_patch, pointer

POD = EventSubject(kind="Pod", namespace="team-a", name="train", uid="u-2")
NODE = EventSubject(kind="Node", name="n1", uid="u-1")


def test_a_pod_is_read_with_what_decides_about_its_lease() -> None:
    owner = {"kind": "DaemonSet", "name": "mig-agent", "controller": True}
    pod = pod_facts(
        {
            "metadata": {
                "namespace": "team-a",
                "name": "train",
                "uid": "u-2",
                "deletionTimestamp": "2026-11-21T17:00:00Z",
                "ownerReferences": [{"kind": "Thing", "name": "x"}, owner],
            },
            "spec": {"nodeName": "n1", "priority": 1000},
            "status": {"phase": "Succeeded"},
        }
    )
    assert (pod.priority, pod.deleting, pod.finished, pod.node, pod.daemon_set) == (1000, True, True, "n1", "mig-agent")


def test_a_pod_that_says_little_of_itself_is_read_all_the_same() -> None:
    pod = pod_facts({"metadata": {"namespace": "a", "name": "b", "uid": "c", "ownerReferences": None}, "spec": None})
    assert (pod.priority, pod.deleting, pod.finished, pod.daemon_set) == (0, False, False, "")


def test_what_a_pod_asks_for_is_read() -> None:
    containers = [{"resources": {"requests": {"a.b/c": "1", "cpu": "2"}}}]
    facts = pod_facts({"metadata": {"namespace": "a", "name": "b", "uid": "c"}, "spec": {"containers": containers}})
    assert facts.resources == {"a.b/c": 1}


def test_a_node_is_read() -> None:
    facts = node_facts(
        {
            "metadata": {"name": "n1", "uid": "u", "labels": {"a": "b"}, "annotations": None, "resourceVersion": "9"},
            "status": {
                "capacity": {"nvidia.com/mig-1g.10gb": "7"},
                "conditions": [{"type": "Ready", "status": "True", "reason": "KubeletReady", "message": "fine"}],
            },
        }
    )
    assert facts.capacity == {"nvidia.com/mig-1g.10gb": "7"}
    assert facts.allocatable == {}
    assert facts.conditions["Ready"] == NodeCondition(
        type="Ready", status="True", reason="KubeletReady", message="fine"
    )
    assert facts.resource_version == "9"


@pytest.mark.parametrize("deleting", [True, False])
def test_a_daemon_set_on_its_way_out_is_told_from_one_that_stays(*, deleting: bool) -> None:
    stamp = {"deletionTimestamp": "2026-11-21T17:00:00Z"} if deleting else {}
    assert daemon_set_facts({"metadata": {"uid": "u", **stamp}}).deleting is deleting


@pytest.mark.parametrize(
    ("status", "retryable"),
    [(0, True), (429, True), (500, True), (503, True), (403, False), (404, False), (409, False)],
)
def test_what_may_succeed_soon(status: int, *, retryable: bool) -> None:
    assert KubeApiError("cannot", status).retryable is retryable


def test_names_are_one_step_of_a_pointer() -> None:
    assert pointer("nvidia.com/mig-1g.10gb") == "nvidia.com~1mig-1g.10gb"
    assert pointer("a~1/b") == "a~01~1b"


def test_resources_of_no_plugin_and_whose_they_are_are_one_write() -> None:
    patch = owned_patch({"b": 2, "a": None}, {"mig-agent.io/node-resources": "b"})
    numbers = {"a": None, "b": "2"}
    metadata = {"annotations": {"mig-agent.io/node-resources": "b"}}
    assert patch == {"metadata": metadata, "status": {"capacity": numbers, "allocatable": numbers}}
    assert owned_patch({}, {"x": None}) == {"metadata": {"annotations": {"x": None}}}
    assert "metadata" not in owned_patch({"a": 1}, {})


# Watching


def change(kind: str, version: str) -> dict[str, object]:
    return {"type": kind, "object": {"metadata": {"name": "n1", "uid": "u", "resourceVersion": version}}}


def test_a_position_moves_with_changes_and_bookmarks() -> None:
    position = NodeWatchState("n1")
    listed = position.relist({"metadata": {"resourceVersion": "5"}, "items": []})
    assert listed is None
    assert position.resource_version == "5"
    facts = position.apply(change("MODIFIED", "6"))
    assert facts is not None
    assert facts.resource_version == "6"
    assert position.apply(change("BOOKMARK", "8")) is None
    assert position.apply(change("DELETED", "9")) is None
    assert position.resource_version == "9"


def test_an_error_within_a_watch_has_the_node_listed_again() -> None:
    position = NodeWatchState("n1")
    position.relist({"metadata": {"resourceVersion": "5"}, "items": []})
    with pytest.raises(KubeApiError, match="too old") as caught:
        position.apply({"type": "ERROR", "object": {"code": 410, "message": "too old"}})
    assert caught.value.status == 410
    assert position.resource_version == ""


def pod_change(kind: str, name: str, uid: str, version: str) -> dict[str, object]:
    meta = {"namespace": "a", "name": name, "uid": uid, "resourceVersion": version}
    return {"type": kind, "object": {"metadata": meta, "spec": {"nodeName": "n1"}}}


def test_of_pods_the_whole_picture_is_told_whenever_one_changes() -> None:
    position = PodsWatchState("n1")
    first = position.relist(
        {"metadata": {"resourceVersion": "5"}, "items": [pod_change("", "x", "u-1", "4")["object"]]}
    )
    assert first is not None
    assert first[("a", "x")].uid == "u-1"
    second = position.apply(pod_change("ADDED", "y", "u-2", "6"))
    third = position.apply(pod_change("DELETED", "x", "u-1", "7"))
    assert position.apply({"type": "BOOKMARK", "object": {"metadata": {"resourceVersion": "8"}}}) is None
    assert [sorted(name for _, name in each or ()) for each in (first, second, third)] == [["x"], ["x", "y"], ["y"]]
    assert position.resource_version == "8"
    again = position.relist({"metadata": {"resourceVersion": "9"}, "items": None})
    assert again == {}, "that no pod is there is said, too"


@given(
    text=st.lists(st.binary(min_size=1).filter(lambda each: b"\n" not in each and bool(each.strip()))), data=st.data()
)
def test_lines_are_whole_wherever_the_pieces_end(text: list[bytes], data: st.DataObject) -> None:
    whole = b"".join(each + b"\n" for each in text)

    def pieces() -> Iterator[bytes]:
        rest = whole
        while rest:
            size = data.draw(st.integers(1, len(rest)))
            yield rest[:size]
            rest = rest[size:]

    assert list(lines(pieces())) == text


@given(failures=st.integers(1, 10_000), chance=st.floats(0, 1))
def test_pauses_grow_to_a_bound_and_differ_between_nodes(failures: int, chance: float) -> None:
    pause = pause_seconds(failures, chance)
    assert FIRST_PAUSE_SECONDS / 2 <= pause <= LONGEST_PAUSE_SECONDS
    assert pause_seconds(failures, 0) <= pause <= pause_seconds(failures + 1, chance)


# Events


def event_of(words: str = "words", about: EventSubject = POD) -> EventContent:
    return EventContent(about=about, reason="Waits", words=words, warning=True)


def test_each_object_has_a_burst_of_events_and_then_a_trickle() -> None:
    correlator = EventCorrelator()
    assert [correlator.allow(POD, 100.0) for _ in range(BURST + 2)] == [True] * BURST + [False] * 2
    assert correlator.allow(NODE, 100.0), "another object has a burst of its own"
    assert correlator.dropped == 2
    assert correlator.allow(POD, 100.0 + REFILL_SECONDS)
    assert not correlator.allow(POD, 100.0 + REFILL_SECONDS)


def test_a_clock_that_is_set_back_gives_no_events() -> None:
    correlator = EventCorrelator()
    for _ in range(BURST):
        correlator.allow(POD, 1e9)
    assert not correlator.allow(POD, 0.0)
    assert not correlator.allow(POD, 1.0)


def test_what_was_told_is_known_until_the_server_forgets_it() -> None:
    correlator = EventCorrelator()
    assert correlator.find(event_of(), 0.0) is None
    correlator.remember(event_of(), "train.1", 0.0)
    found = correlator.find(event_of(), 10.0)
    assert found is not None
    assert found.name == "train.1"
    assert correlator.find(event_of("others"), 10.0) is None
    assert correlator.find(event_of(), REMEMBERED_SECONDS) is None


def test_the_book_stays_small() -> None:
    correlator = EventCorrelator()
    pods = [
        EventSubject(kind="Pod", namespace="a", name=f"p{number}", uid=str(number))
        for number in range(MOST_REMEMBERED + 50)
    ]
    for about in pods:
        assert correlator.allow(about, 0.0)
        correlator.remember(event_of(about=about), "name", 0.0)
    assert correlator.find(event_of(about=pods[-1]), 0.0) is not None
    assert correlator.find(event_of(about=pods[0]), 0.0) is None
    assert len(correlator._sent) == len(correlator._buckets) == MOST_REMEMBERED


def test_an_event_of_a_node_lives_in_the_default_namespace_and_names_no_other() -> None:
    event = new_event(event_of(about=NODE), "n1.1", "n1", 1_800_000_000.0)
    assert event["metadata"]["namespace"] == "default"
    assert "namespace" not in event["involvedObject"]
    assert event["firstTimestamp"] == event["lastTimestamp"] == "2027-01-15T08:00:00Z"
    assert event["source"] == {"component": "mig-agent", "host": "n1"}


@given(words=st.text(max_size=3000))
def test_a_message_is_no_longer_than_the_server_takes(words: str) -> None:
    short = truncated(words)
    assert len(short.encode()) <= MOST_MESSAGE_BYTES
    assert short == words or words.startswith(short.removesuffix("…"))

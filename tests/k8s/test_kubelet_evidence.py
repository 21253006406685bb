"""Evidence that a pod has ended: the kubelet's silence, and its ignorance after a start, prove nothing."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mig_agent.adapters.kubeapi import PodFacts
from mig_agent.adapters.kubelet import Identity, ListedContainer, ListedPod
from mig_agent.core.owner import KubeletDevice, Pod
from mig_agent.frontends.kubernetes.pods.kubelet_evidence import (
    Listing,
    PodLiveness,
    Seen,
    liveness_from_api,
    liveness_from_kubelet,
)

FIRST, SECOND = Identity(1, 10, 100), Identity(1, 10, 200)
POD = Pod(namespace="team-a", name="train-0", uid="uid-1")


def device(number: int) -> KubeletDevice:
    return KubeletDevice(resource="nvidia.com/mig-1g.10gb", id=f"mig-agent-{number}")


def listing(*pods: tuple[str, list[int]], kubelet: Identity | None = FIRST) -> Listing:
    return Listing.of(
        kubelet,
        [
            ListedPod(
                namespace="team-a",
                name=name,
                containers=(ListedContainer(name="main", devices=tuple(map(device, numbers))),),
            )
            for name, numbers in pods
        ],
    )


def after(*listings: Listing, pod: Pod = POD, numbers: tuple[int, ...] = (0,)) -> Seen:
    seen = Seen()
    for each in listings:
        seen.note(each, [(pod, tuple(map(device, numbers)))])
    return seen


THERE, ABSENT = listing(("train-0", [0])), listing(("other", [5]))


def fate(now: Listing, seen: Seen, *numbers: int) -> PodLiveness:
    return liveness_from_kubelet(POD, tuple(map(device, numbers or (0,))), now, seen)


def test_a_listed_pod_lives() -> None:
    assert fate(THERE, Seen()) is PodLiveness.LIVES
    assert fate(THERE, after(THERE)) is PodLiveness.LIVES


def test_pod_that_is_no_longer_listed_is_gone() -> None:
    assert fate(ABSENT, after(THERE)) is PodLiveness.GONE
    assert fate(listing(), after(THERE)) is PodLiveness.GONE


def test_a_kubelet_that_has_just_started_proves_nothing() -> None:
    """The kubelet answers before it has heard of its pods again, and their containers run on meanwhile."""
    empty = listing(kubelet=SECOND)
    assert fate(empty, after(THERE)) is PodLiveness.UNSURE
    assert fate(empty, after(THERE, empty)) is PodLiveness.UNSURE
    again = listing(("train-0", [0]), kubelet=SECOND)
    assert fate(empty, after(THERE, empty, again)) is PodLiveness.GONE


def test_list_of_an_unknown_kubelet_proves_nothing() -> None:
    assert fate(listing(kubelet=None), after(THERE)) is PodLiveness.UNSURE
    assert fate(listing(kubelet=None), after(listing(("train-0", [0]), kubelet=None))) is PodLiveness.UNSURE


def test_a_pod_that_this_agent_never_saw_is_not_gone_by_the_list_alone() -> None:
    """The pod ended while the agent was down, or the kubelet does not know it yet."""
    assert fate(ABSENT, Seen()) is PodLiveness.UNSURE
    assert fate(ABSENT, after(ABSENT)) is PodLiveness.UNSURE


def test_a_pod_of_the_same_name_with_other_devices_is_another_pod() -> None:
    anew = listing(("train-0", [3]))
    assert fate(anew, after(THERE)) is PodLiveness.GONE
    assert fate(anew, Seen()) is PodLiveness.UNSURE, "it may be the same, whose init container alone had the device"


def test_a_device_that_another_pod_has_is_gone_whatever_was_seen() -> None:
    assert fate(listing(("other", [0])), Seen()) is PodLiveness.GONE


@pytest.mark.parametrize("names", [("train-0", "other"), ("other", "train-0")])
def test_a_device_that_the_kubelet_gave_to_two_pods_ends_neither(names: tuple[str, str]) -> None:
    assert fate(listing(*((name, [0]) for name in names)), Seen()) is PodLiveness.LIVES


def test_a_pod_with_one_of_its_devices_still_listed_lives() -> None:
    assert fate(THERE, after(listing(("train-0", [0, 1])), numbers=(0, 1)), 0, 1) is PodLiveness.LIVES


def test_a_pod_whose_devices_are_never_listed_is_gone_with_its_name() -> None:
    named = listing(("train-0", []))
    assert fate(named, after(named)) is PodLiveness.UNSURE
    assert fate(ABSENT, after(named)) is PodLiveness.GONE


def facts(**changes: object) -> PodFacts:
    fields: dict[str, object] = {"uid": "uid-1", "phase": "Running", "node": "n1"} | changes
    return PodFacts(namespace="team-a", name="train-0", **fields)  # type: ignore[arg-type] # fields of mixed types


@pytest.mark.parametrize(
    ("found", "is_listed", "expected"),
    [
        (None, False, PodLiveness.GONE),
        (None, True, PodLiveness.LIVES),
        (facts(), False, PodLiveness.LIVES),
        (facts(deleting=True), False, PodLiveness.LIVES),
        (facts(phase="Succeeded"), True, PodLiveness.GONE),
        (facts(phase="Failed"), False, PodLiveness.GONE),
        (facts(uid="uid-2"), True, PodLiveness.GONE),
        (facts(uid="mirror", static_uid="uid-1"), False, PodLiveness.LIVES),
        (facts(node="n2"), False, PodLiveness.GONE),
    ],
)
def test_liveness_by_the_api_server(found: PodFacts | None, is_listed: bool, expected: PodLiveness) -> None:
    assert liveness_from_api(POD, found, is_listed=is_listed, node="n1") is expected


@given(
    st.lists(
        st.tuples(st.sampled_from([FIRST, SECOND]), st.booleans(), st.booleans()),
        max_size=12,
    )
)
def test_only_a_run_of_the_kubelet_that_has_shown_the_pod_can_prove_its_end(
    answers: list[tuple[Identity, bool, bool]],
) -> None:
    seen, shown_by = Seen(), set[Identity]()
    before: Identity | None = None
    for kubelet, there, named in answers:
        if kubelet != before:
            shown_by.clear()
        before = kubelet
        now = listing(*([("train-0", [0])] if there else [("train-0", [])] if named else []), kubelet=kubelet)
        found = fate(now, seen)
        if there:
            assert found is PodLiveness.LIVES
            shown_by.add(kubelet)
        elif found is PodLiveness.GONE:
            assert kubelet in shown_by
        if named and not there:
            shown_by.add(kubelet)
        seen.note(now, [(POD, (device(0),))])

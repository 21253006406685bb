"""The owners of the numbers in the node's status, and how these are corrected: all cases of the pure part."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mig_agent.adapters.kubeapi import NodeFacts
from mig_agent.frontends.kubernetes.node_resources.ownership import (
    OURS,
    Correction,
    OwnershipConflict,
    correction,
    others,
    owned,
)

A, B, C = "nvidia.com/mig-1g.10gb", "nvidia.com/mig-2g.20gb", "mig-agent.io/memory-10g"


def node(numbers: Mapping[str, str], ours: str | None = None) -> NodeFacts:
    annotations = {} if ours is None else {OURS: ours}
    return NodeFacts(name="n1", uid="u", annotations=annotations, capacity=dict(numbers), allocatable=dict(numbers))


def after(facts: NodeFacts, change: Correction) -> NodeFacts:
    """The node when the API server has merged the change."""

    def merged(before: Mapping[str, str], patch: Mapping[str, object]) -> dict[str, str]:
        left = {name: text for name, text in before.items() if name not in patch}
        return left | {name: str(value) for name, value in patch.items() if value is not None}

    return replace(
        facts,
        capacity=merged(facts.capacity, change.counts),
        allocatable=merged(facts.allocatable, change.counts),
        annotations=merged(facts.annotations, change.annotations),
    )


def test_new_numbers_are_written_with_the_annotation() -> None:
    change = correction({A: 7, B: 0}, node({"cpu": "2"}), ())
    assert change == Correction(counts={A: 7, B: 0}, annotations={OURS: f"{A},{B}"})


def test_correct_numbers_are_not_written_again() -> None:
    facts = node({A: "7", "cpu": "2"}, A)
    assert not correction({A: 7}, facts, ())
    for overwritten in (replace(facts, allocatable={A: "6"}), replace(facts, capacity={A: "6"})):
        assert correction({A: 7}, overwritten, ()) == Correction(counts={A: 7})


def test_unwanted_numbers_are_removed() -> None:
    assert correction({A: 7}, node({A: "7", B: "3"}, f"{A},{B}"), ()) == Correction(
        counts={B: None}, annotations={OURS: A}
    )
    gone = correction({}, node({A: "7", C: "5"}, A), ())
    assert gone == Correction(counts={A: None}, annotations={OURS: None})
    assert correction({}, node({}, A), ()) == Correction(annotations={OURS: None})


def test_wrong_numbers_are_corrected_before_removals() -> None:
    facts = node({A: "5", B: "3"}, f"{A},{B}")
    assert correction({A: 7, C: 1}, facts, ()) == Correction(
        counts={A: 7, C: 1}, annotations={OURS: ",".join(sorted([A, B, C]))}
    )
    right = after(facts, correction({A: 7, C: 1}, facts, ()))
    last = correction({A: 7, C: 1}, right, ())
    assert last == Correction(counts={B: None}, annotations={OURS: ",".join(sorted([A, C]))})
    assert last.removes
    assert not correction({A: 7, C: 1}, right, (), removing=False), "as long as that is refused"


def test_resource_taken_over_by_another_is_left_alone() -> None:
    assert correction({A: 7}, node({A: "3"}, A), {A}) == Correction(annotations={OURS: None})
    assert not correction({A: 7}, node({A: "3"}), {A})


@pytest.mark.parametrize(
    ("shown", "ours", "registered", "written", "expected"),
    [
        ({}, None, {}, (), None),
        ({A: "0"}, None, {}, (), None),
        ({A: "7"}, A, {}, (), None),
        ({A: "7"}, None, {}, (A,), None),
        ({A: "7"}, None, {}, (), OwnershipConflict.SHOWN),
        ({A: "many"}, None, {}, (), OwnershipConflict.SHOWN),
        ({A: "7"}, A, {A: frozenset({"GPU-1"})}, (A,), OwnershipConflict.PLUGIN),
        ({A: "7"}, A, {A: frozenset({"mig-agent-1", "GPU-1"})}, (), OwnershipConflict.PLUGIN),
        ({}, None, {A: frozenset({"mig-agent-1"})}, (), OwnershipConflict.ENDED),
        ({A: "0"}, None, {A: frozenset()}, (), OwnershipConflict.ENDED),
        ({A: "0"}, None, {B: frozenset({"GPU-1"})}, (), None),
    ],
)
def test_resource_is_never_served_in_two_ways(
    shown: dict[str, str],
    ours: str | None,
    registered: dict[str, frozenset[str]],
    written: tuple[str, ...],
    expected: OwnershipConflict | None,
) -> None:
    assert others([A], node(shown, ours), registered, written).get(A) is expected


def test_names_come_from_the_annotation() -> None:
    assert owned(node({}, f"{A},{B},")) == {A, B}
    assert owned(node({})) == frozenset()


NAMES = st.sampled_from([A, B, C])
NUMBERS = st.dictionaries(NAMES, st.integers(0, 9).map(str))


@given(
    wanted=st.dictionaries(NAMES, st.integers(0, 9)),
    shown=NUMBERS,
    ours=st.none() | st.sets(NAMES).map(lambda names: ",".join(sorted(names))),
    plugins=st.sets(NAMES),
)
def test_two_writes_suffice_and_change_no_other_resource(
    wanted: dict[str, int], shown: dict[str, str], ours: str | None, plugins: set[str]
) -> None:
    before = node({**shown, "cpu": "2"}, ours)
    registered = {name: frozenset({"GPU-1"}) for name in plugins}
    not_ours = others({*wanted, *owned(before)}, before, registered)
    change = correction(wanted, before, not_ours)
    assert not change.counts.keys() & plugins
    assert change.counts.keys() <= wanted.keys() | owned(before)
    between = after(before, change)
    second = correction(wanted, between, others({*wanted, *owned(between)}, between, registered))
    assert second.removes or not second.counts
    now = after(between, second)
    assert not correction(wanted, now, others({*wanted, *owned(now)}, now, registered))
    for name in wanted.keys() - not_ours.keys():
        assert now.capacity[name] == now.allocatable[name] == str(wanted[name])
    assert owned(now) == wanted.keys() - not_ours.keys()
    assert now.capacity["cpu"] == "2"
    cleared = after(now, correction({}, now, others(owned(now), now, registered)))
    assert not owned(cleared)
    assert {name: text for name, text in cleared.capacity.items() if name not in owned(now)} == {
        name: text for name, text in now.capacity.items() if name not in owned(now)
    }

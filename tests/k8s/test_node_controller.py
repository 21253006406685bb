"""The state of GPUs that a node shows: the condition, the feature labels, and that what others wrote stays."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mig_agent.adapters.kubeapi import NodeCondition, NodeFacts
from mig_agent.core.events import Event, EventKind
from mig_agent.core.model import GpuState, NodeView
from mig_agent.core.owner import Pod, PodOwner
from mig_agent.core.pod_resources import in_kubernetes
from mig_agent.frontends.kubernetes.node.conditions import CONDITION, CORDONED, LOST, NONE, condition_of
from mig_agent.frontends.kubernetes.node.controller import Shown, nothing, shown
from mig_agent.frontends.kubernetes.node.events import Notice, notice
from mig_agent.frontends.kubernetes.node.feature_labels import (
    NODE_FEATURE_DISCOVERY,
    OURS,
    TIMESTAMP,
    Changes,
    changes,
    feature_labels,
)
from mig_agent.frontends.kubernetes.resources import Naming
from support.nodes import A100_40, H100, Has, Machine, node, nodes, whole

FACTS = NodeFacts(name="n1", uid="u")


def resource_of(profile: str) -> str:
    return f"nvidia.com/mig-{in_kubernetes(profile)}"


def labels_of(view: NodeView, driver: str = "550.54.15") -> Mapping[str, str]:
    return feature_labels(view, driver, resource_of)


def after(facts: NodeFacts, made: Changes) -> NodeFacts:
    """The node after the API server took the changes."""
    return replace(
        facts, labels=merged(facts.labels, made.labels), annotations=merged(facts.annotations, made.annotations)
    )


def merged(before: Mapping[str, str], patch: Mapping[str, str | None]) -> dict[str, str]:
    return {name: value for name, value in {**before, **patch}.items() if value is not None}


# The condition


def test_no_problem_is_shown_as_false() -> None:
    found = condition_of(node(Machine(H100)))
    assert found is not None
    assert (found.type, found.status, found.reason) == (CONDITION, "False", NONE)


def test_a_cordoned_gpu_is_named_with_its_reason() -> None:
    found = condition_of(node(Machine(H100), Machine(H100, state=GpuState.CORDONED, reason="cordoned by root: fan")))
    assert found is not None
    assert (found.status, found.reason) == ("True", CORDONED)
    assert found.message == "GPU 1 (GPU-00000001): cordoned by root: fan"


def test_lost_gpu_outranks_a_cordoned_one() -> None:
    found = condition_of(node(Machine(H100, state=GpuState.CORDONED), Machine(H100, state=GpuState.LOST)))
    assert found is not None
    assert found.reason == LOST
    assert "GPU 0" in found.message
    assert "GPU 1" in found.message


def test_a_message_stays_short_however_long_the_reasons_are() -> None:
    lost = Machine(H100, state=GpuState.LOST, reason="x" * 100_000)
    found = condition_of(node(*[lost] * 16))
    assert found is not None
    assert len(found.message) <= 2000


def test_a_node_without_mig_shows_nothing() -> None:
    view = node(whole(capable=False))
    assert condition_of(view) is None
    assert labels_of(view) == {}
    assert condition_of(node()) is None


# Feature labels


def test_labels_are_those_of_feature_discovery_for_the_mixed_strategy() -> None:
    labels = labels_of(node(Machine(H100), Machine(H100, (Has("7g.80gb", 0, "leased", "alice"),))))
    assert labels["nvidia.com/mig.capable"] == "true"
    assert labels["nvidia.com/mig.strategy"] == "mixed"
    assert labels["nvidia.com/gpu.product"] == "NVIDIA-H100-80GB-HBM3"
    assert labels["nvidia.com/gpu.count"] == "2"
    assert labels["nvidia.com/gpu.replicas"] == "0"
    assert labels["nvidia.com/cuda.driver-version.full"] == "550.54.15"
    assert labels["nvidia.com/cuda.driver.rev"] == "15"
    profile = {name.partition("mig-1g.10gb.")[2]: value for name, value in labels.items() if "mig-1g.10gb." in name}
    assert {name: value for name, value in profile.items() if not name.startswith("me.")} == {
        "count": "14",
        "replicas": "1",
        "sharing-strategy": "none",
        "product": "NVIDIA-H100-80GB-HBM3-MIG-1g.10gb",
        "memory": "9984",
        "multiprocessors": "16",
        "slices.gi": "1",
        "slices.ci": "1",
        "engines.copy": "1",
        "engines.decoder": "1",
        "engines.encoder": "0",
        "engines.jpeg": "1",
        "engines.ofa": "0",
    }
    assert labels["nvidia.com/mig-1g.10gb.me.product"] == "NVIDIA-H100-80GB-HBM3-MIG-1g.10gb.me"
    assert labels["nvidia.com/mig-1g.10gb.me.count"] == "2"


def test_labels_cover_both_models() -> None:
    labels = labels_of(node(Machine(A100_40), Machine(H100)))
    assert labels["nvidia.com/mig-1g.5gb.count"] == "7"
    assert labels["nvidia.com/mig-1g.10gb.count"] == "11", "seven on the H100, four on the A100"
    assert labels["nvidia.com/mig-1g.5gb.product"] == "NVIDIA-A100-SXM4-40GB-MIG-1g.5gb"
    assert (labels["nvidia.com/gpu.product"], labels["nvidia.com/gpu.count"]) == ("NVIDIA-A100-SXM4-40GB", "1")


def test_gpus_that_cannot_do_mig_or_do_not_now_are_told_apart() -> None:
    labels = labels_of(node(whole(capable=False), Machine(H100)))
    assert (labels["nvidia.com/gpu.product"], labels["nvidia.com/gpu.replicas"]) == ("NVIDIA-H100-80GB-HBM3", "0")
    labels = labels_of(node(whole()))
    assert (labels["nvidia.com/gpu.product"], labels["nvidia.com/gpu.replicas"]) == ("NVIDIA-A10", "1")
    assert not any("mig-" in name for name in labels)


def test_labels_do_not_change_with_what_is_leased() -> None:
    empty = labels_of(node(Machine(H100)))
    for has in (Has("1g.10gb", 3, "leased", "a"), Has("3g.40gb", 4), Has("7g.80gb", 0, "foreign")):
        assert labels_of(node(Machine(H100, (has,)))) == empty


@given(view=nodes())
def test_all_labels_are_valid_in_kubernetes(view: NodeView) -> None:
    for name, value in labels_of(view).items():
        prefix, _, rest = name.partition("/")
        assert re.fullmatch(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?", prefix)
        assert re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?", rest)
        assert re.fullmatch(r"([A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?)?", value)


@pytest.mark.parametrize("version", ["", "unknown", "550"])
def test_unusual_driver_version_is_accepted(version: str) -> None:
    labels = labels_of(node(Machine(H100)), version)
    assert ("nvidia.com/cuda.driver.major" in labels) is (version == "550")


# What is written


def test_labels_are_written_once_and_remembered_as_ours() -> None:
    first = changes({"a/x": "1", "a/y": "2"}, FACTS)
    assert first.labels == {"a/x": "1", "a/y": "2"}
    assert first.annotations == {OURS: "a/x,a/y"}
    assert not changes({"a/x": "1", "a/y": "2"}, after(FACTS, first))


def test_label_of_another_writer_is_never_changed() -> None:
    facts = replace(FACTS, labels={"a/x": "theirs"})
    made = changes({"a/x": "1", "a/y": "2"}, facts)
    assert made.labels == {"a/y": "2"}
    later = after(facts, made)
    assert not changes({"a/x": "1", "a/y": "2"}, later)
    assert after(later, changes({}, later)) == facts


def test_agent_removes_its_labels_when_feature_discovery_runs() -> None:
    ours = after(FACTS, changes({"a/x": "1", "a/y": "2"}, FACTS))
    theirs = replace(
        ours,
        labels={**ours.labels, TIMESTAMP: "1"},
        annotations={**ours.annotations, NODE_FEATURE_DISCOVERY: f"a/x,{TIMESTAMP}"},
    )
    made = changes({"a/x": "1", "a/y": "2"}, theirs)
    assert made.labels == {"a/y": None}
    assert made.annotations == {OURS: None}
    gone = after(theirs, made)
    assert gone.labels == {"a/x": "1", TIMESTAMP: "1"}
    assert not changes({"a/x": "1"}, gone)


def test_labels_of_a_removed_profile_are_removed() -> None:
    before = after(FACTS, changes({"a/x": "1", "a/y": "2"}, FACTS))
    made = changes({"a/y": "3"}, before)
    assert made.labels == {"a/y": "3", "a/x": None}
    assert made.annotations == {OURS: "a/y"}


names = st.sampled_from(["a/u", "a/v", "a/w", TIMESTAMP])
some = st.dictionaries(names, st.sampled_from(["1", "2"]))


@given(theirs=some, wishes=st.lists(some, min_size=1, max_size=4))
def test_uninstall_always_restores_the_node(theirs: Mapping[str, str], wishes: list[Mapping[str, str]]) -> None:
    before = replace(FACTS, labels=theirs)
    facts = before
    for wish in wishes:
        wanted = {name: value for name, value in wish.items() if name != TIMESTAMP}
        facts = after(facts, changes(wanted, facts))
        assert not changes(wanted, facts), "the second time nothing is left to write"
        for name, value in theirs.items():
            assert facts.labels[name] == value
    assert after(facts, changes({}, facts)) == before


# All together


def show(
    view: NodeView, facts: NodeFacts, *, label: str = "", features: bool = True, paused: bool = False
) -> Shown | None:
    return shown(view, facts, label=label, features=features, paused=paused, driver_version="550.1", naming=Naming())


def test_without_the_nodes_label_everything_shown_is_removed() -> None:
    first = show(node(Machine(H100)), FACTS)
    assert first is not None
    assert first.condition is not None
    there = after(replace(FACTS, conditions={CONDITION: first.condition}), first.changes)
    assert CONDITION in there.conditions
    assert OURS in there.annotations
    off = show(node(Machine(H100)), there, label="mig")
    assert off == nothing(there)
    assert off is not None
    assert off.condition is None
    assert after(there, off.changes).labels == {}


def test_an_agent_that_started_paused_leaves_the_node_as_it_is() -> None:
    assert show(node(), FACTS, paused=True) is None
    assert show(node(Machine(H100)), FACTS, paused=True) is not None


def test_feature_labels_can_be_switched_off_alone() -> None:
    found = show(node(Machine(H100)), FACTS, features=False)
    assert found is not None
    assert not found.changes
    assert isinstance(found.condition, NodeCondition)


# Events


@pytest.mark.parametrize("kind", EventKind)
def test_only_what_an_administrator_should_see_becomes_an_event(kind: EventKind) -> None:
    found = notice(Event(kind=kind, at=0.0, revision=1, message="GPU 2 was cordoned by root"))
    concerns = kind.value.startswith(("gpu-", "ledger-", "certificate")) or kind.value in {
        "agent-paused",
        "agent-resumed",
        "driver-unavailable",
    }
    if kind is EventKind.GPU_MODE_REQUESTED:
        concerns = False
    assert (found is not None) is concerns
    if found is not None:
        assert re.fullmatch(r"[A-Z][A-Za-z]+", found.reason)
        assert found.words == "GPU 2 was cordoned by root"


def test_pod_gets_an_event_when_its_lease_is_released_by_force() -> None:
    pod = Pod(namespace="team-a", name="train", uid="u-1")
    words = "lease 7f of pod team-a/train ended: released by root by force, while its pod is on this node"
    ended = Event(
        kind=EventKind.LEASE_ENDED,
        at=0.0,
        revision=1,
        message=words,
        data={"reason": "forced", **PodOwner(pod=pod).event_data()},
    )
    assert notice(ended) == Notice(reason="LeaseReleased", words=words, warning=True, about=pod)


@pytest.mark.parametrize(
    ("kind", "reason", "told"),
    [
        (EventKind.LEASE_DEGRADED, "gpu-lost", True),
        (EventKind.LEASE_DEGRADED, "instance-lost", True),
        (EventKind.LEASE_ENDED, "gpu-lost", True),
        (EventKind.LEASE_ENDED, "gpu-reset", True),
        (EventKind.LEASE_ENDED, "pod-ended", False),
        (EventKind.LEASE_ENDED, "reboot", False),
    ],
)
def test_pod_gets_an_event_when_it_loses_a_device(kind: EventKind, reason: str, told: bool) -> None:
    pod = Pod(namespace="team-a", name="train", uid="u-1")
    found = notice(
        Event(
            kind=kind,
            at=0.0,
            revision=1,
            message="it is lost",
            data={"reason": reason, **PodOwner(pod=pod).event_data()},
        )
    )
    expected = Notice(reason="DeviceLost", words="it is lost", warning=True, about=pod)
    assert found == (expected if told else None)
    nobody = notice(Event(kind=kind, at=0.0, revision=1, message="it is lost", data={"reason": reason}))
    assert nobody is None, "a lease that is no pod's"

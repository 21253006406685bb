"""The labels of a node that pause its agent."""

from __future__ import annotations

import pytest

from mig_agent.adapters.kubeapi import NodeFacts
from mig_agent.frontends.kubernetes.node.pause_labels import NOT_READ_YET, carries, pauses

DEPLOY = "nvidia.com/gpu.deploy"


def facts(**labels: str) -> NodeFacts:
    return NodeFacts(name="n1", uid="u", labels=labels)


@pytest.mark.parametrize(
    ("labels", "label", "carried"),
    [
        ({}, "", True),
        ({"mig": "x"}, "", True),
        ({"mig": "true"}, "mig=true", True),
        ({"mig": "false"}, "mig=true", False),
        ({}, "mig=true", False),
        ({"mig": ""}, "mig", True),
        ({"mig": "anything"}, "mig", True),
        ({}, "mig", False),
        ({"mig": ""}, "mig=", True),
        ({"mig": "x"}, "mig=", False),
        ({}, "mig=", False),
        ({"a.io/mig": "a"}, "a.io/mig=a", True),
    ],
)
def test_a_label_is_carried_with_its_value_or_with_any(labels: dict[str, str], label: str, *, carried: bool) -> None:
    assert carries(labels, label) is carried


def test_unread_node_is_not_served_if_a_label_is_configured() -> None:
    assert pauses(None, "mig=true") == (NOT_READ_YET,)
    assert pauses(None, "") == ()


def test_without_the_label_the_reason_names_it() -> None:
    assert pauses(facts(mig="true"), "mig=true") == ()
    assert pauses(facts(), "mig=true") == ("the missing label mig=true of node n1",)


@pytest.mark.parametrize("value", ["paused-for-driver-upgrade", "paused-for-mig-change", "paused-for-vgpu-change"])
def test_a_pause_of_the_gpu_operator_is_one_reason_however_many_components_it_stops(value: str) -> None:
    labels = {f"{DEPLOY}.device-plugin": value, f"{DEPLOY}.dcgm": value, f"{DEPLOY}.mig-manager": "false"}
    (reason,) = pauses(NodeFacts(name="n1", uid="u", labels=labels), "")
    assert value in reason


def test_two_pauses_and_a_missing_label_are_three_reasons() -> None:
    labels = {f"{DEPLOY}.dcgm": "paused-for-driver-upgrade", f"{DEPLOY}.client": "paused-for-mig-change"}
    assert len(pauses(NodeFacts(name="n1", uid="u", labels=labels), "mig")) == 3


@pytest.mark.parametrize(
    "labels",
    [
        {f"{DEPLOY}.device-plugin": "true", f"{DEPLOY}.mig-manager": "false", f"{DEPLOY}.driver": "pre-installed"},
        {"example.com/gpu.deploy.device-plugin": "paused-for-driver-upgrade"},
        {"nvidia.com/gpu-driver-upgrade-state": "upgrade-done"},
    ],
)
def test_label_values_that_are_no_pause(labels: dict[str, str]) -> None:
    assert pauses(NodeFacts(name="n1", uid="u", labels=labels), "") == ()

"""Pods that are asked, and what is said of those that are not."""

from __future__ import annotations

from typing import Any

import pytest

from mig_agent.kubectl.agent_pods import AgentPod, agent_pods

Json = dict[str, Any]


def pod(name: str, state: Json | None = None, *, node: str = "n1", made: int = 1, **status: object) -> Json:
    states = [] if state is None else [{"name": "agent", "state": state}]
    return {
        "metadata": {"name": name, "creationTimestamp": f"2026-01-01T00:00:0{made}Z"},
        "spec": {"nodeName": node},
        "status": {"phase": "Running", "containerStatuses": states, **status},
    }


def test_one_that_runs_can_be_asked() -> None:
    assert agent_pods([pod("a", {"running": {}})]) == (AgentPod(node="n1", name="a"),)


@pytest.mark.parametrize(
    ("found", "trouble"),
    [
        (
            pod("a", {"waiting": {"reason": "ImagePullBackOff", "message": "no such image"}}, phase="Pending"),
            "its agent's pod is Pending (ImagePullBackOff: no such image)",
        ),
        (
            pod("a", {"waiting": {"reason": "ContainerCreating", "message": "x"}}, phase="Pending"),
            "its agent's pod is Pending (ContainerCreating)",
        ),
        (pod("a", {"terminated": {"reason": "Error"}}), "its agent's pod is Running (Error)"),
        (
            pod("a", phase="Pending", conditions=[{"status": "False", "message": "0/1 nodes are available"}]),
            "its agent's pod is Pending (0/1 nodes are available)",
        ),
        (pod("a", phase=""), "its agent's pod is Unknown"),
    ],
    ids=["waits", "is made", "crashed", "is not bound", "nothing is known"],
)
def test_why_one_cannot_be_asked(found: Json, trouble: str) -> None:
    assert agent_pods([found])[0].trouble == trouble


def test_of_two_on_a_node_the_one_that_can_be_asked() -> None:
    ends, new = pod("old", {"running": {}}, made=1), pod("new", {"running": {}}, made=2)
    ends["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:05Z"
    assert [each.name for each in agent_pods([ends, new])] == ["new"]
    created = pod("new", {"waiting": {"reason": "ContainerCreating"}}, made=2, phase="Pending")
    old = pod("old", {"running": {}}, made=1)
    assert [each.name for each in agent_pods([created, old])] == ["old"]
    assert [each.name for each in agent_pods([old, created])] == ["old"]


def test_one_that_is_not_bound_belongs_to_the_node_that_its_daemonset_names() -> None:
    found = pod("a", node="", phase="Pending")
    fields = [{"key": "metadata.name", "operator": "In", "values": ["n7"]}]
    required = {"nodeSelectorTerms": [{"matchFields": fields}]}
    found["spec"] = {"affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": required}}}
    assert agent_pods([found])[0].node == "n7"

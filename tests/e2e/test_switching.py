"""The agent is told to leave the node's GPUs alone for a while: pods that run go on, new ones wait."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from support.cluster import installed
from support.cluster.layout import NODE
from support.cluster.pods import PROFILE, condition, is_bound, is_running, is_unschedulable
from support.cluster.space import Space

SLICE = f"{PROFILE}1g.10gb"
ONE = {SLICE: 1}
OPERATORS = "nvidia.com/gpu.deploy.device-plugin"

Switch = Callable[[Space], None]


def label_off(space: Space) -> None:
    installed.label(space.cluster, "false")


def label_on(space: Space) -> None:
    installed.label(space.cluster)


def pause(space: Space) -> None:
    assert space.agent.pause("new cables").paused


def resume(space: Space) -> None:
    assert not space.agent.resume().paused


def operator(space: Space, value: str | None) -> None:
    space.cluster.api.merge(f"/api/v1/nodes/{NODE}", {"metadata": {"labels": {OPERATORS: value}}})


def operator_pauses(space: Space) -> None:
    operator(space, "paused-for-driver-upgrade")


def operator_resumes(space: Space) -> None:
    operator(space, "true")


@pytest.fixture
def space(space: Space) -> Iterator[Space]:
    """The next test finds a node that no operator knows."""
    yield space
    operator(space, None)


def come_and_find_nothing(space: Space, name: str) -> None:
    """Returns when the pod waits for a node. A scheduler that does not know the node's new numbers yet may bind it."""
    for _ in range(5):
        space.pod(name, ONE)
        pods = space.until(lambda pods: is_unschedulable(pods[name]) or is_bound(pods[name]), "a new pod is looked at")
        if is_unschedulable(pods[name]):
            return
        space.delete(name)
    raise AssertionError(space.explain(f"{name} is bound again and again"))


@pytest.mark.parametrize(
    ("off", "on"),
    [(label_off, label_on), (pause, resume), (operator_pauses, operator_resumes)],
    ids=["label", "pause", "operator"],
)
def test_off_and_on_under_running_pods(space: Space, off: Switch, on: Switch) -> None:
    space.running("a", ONE)
    lease = space.lease("a")
    space.running("ends", ONE)
    off(space)
    try:
        space.until(lambda _: space.status().paused, "the agent has let go")
        # Those that run, and nothing more.
        space.until(lambda _: space.allocatable(SLICE) <= 2, "the node shows no more than what runs")
        come_and_find_nothing(space, "new")
        space.delete("ends")
        space.until(lambda _: set(space.leases()) == {"a"}, "the end of a pod is noticed all the same")
        assert is_running(space.pods()["a"])
    finally:
        on(space)
    space.until_running("new")
    assert space.lease("a").id == lease.id
    assert is_running(space.pods()["a"])


def test_a_cordoned_gpu_is_a_condition_of_the_node(space: Space) -> None:
    gpu = space.status().gpus[0]
    space.agent.cordon(gpu.index, "smells of smoke")
    try:
        space.until(
            lambda _: "smells of smoke" in condition(space.node(), "MigGpuProblem").get("message", ""),
            "the node shows it",
        )
        assert condition(space.node(), "MigGpuProblem").get("status") == "True"
        space.until_allocatable(f"{PROFILE}7g.80gb", 0)
    finally:
        space.agent.uncordon(gpu.index)
    space.until(lambda _: condition(space.node(), "MigGpuProblem").get("status") == "False", "it is taken back")
    space.until_allocatable(f"{PROFILE}7g.80gb", 1)

"""Values of the chart that take something back: what was written on the node before does not stay."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.cluster import installed
from support.cluster.layout import NODE
from support.cluster.pods import PROFILE, is_running
from support.cluster.space import Space

SLICE = f"{PROFILE}1g.10gb"
FEATURE = "nvidia.com/mig.capable"
MINE = "nvidia.com/mine"
ANNOTATION = "mig-agent.io/feature-labels"


@pytest.fixture
def afterwards(space: Space) -> Iterator[Space]:
    """The next test finds the agent as it was."""
    yield space
    label(space, MINE, None)
    installed.install_again(space.cluster)
    installed.until_agent_ready(space.cluster)
    space.until_allocatable(SLICE, 7)


def label(space: Space, name: str, value: str | None) -> None:
    space.cluster.api.merge(f"/api/v1/nodes/{NODE}", {"metadata": {"labels": {name: value}}})


def features(space: Space) -> set[str]:
    """Labels that tell of GPUs, whoever wrote them; those that the GPU operator is told by are another thing."""
    names = space.node()["metadata"]["labels"]
    return {name for name in names if name.startswith("nvidia.com/") and not name.startswith("nvidia.com/gpu.deploy.")}


def test_feature_labels_that_are_switched_off_go(afterwards: Space) -> None:
    space = afterwards
    space.until(lambda _: FEATURE in features(space), "the node is labelled")
    label(space, MINE, "x")
    installed.install_again(space.cluster, featureLabels="off")
    space.until(lambda _: features(space) == {MINE}, "its labels are gone, and nobody else's")
    space.until(lambda _: ANNOTATION not in space.node()["metadata"]["annotations"], "and what it noted of them")


def test_a_node_that_another_label_leaves_out_is_left_clean(afterwards: Space) -> None:
    space = afterwards
    (device,) = space.running("a", {SLICE: 1})
    space.running("b", {SLICE: 1})
    space.delete("b")
    space.until(lambda _: FEATURE in features(space), "the node is labelled")
    installed.install_again(space.cluster, nodeLabel="pool=mig")
    space.until(lambda _: not installed.agent_pod(space.cluster), "its agent is gone")
    space.until(lambda _: not features(space), "its labels are gone")
    kinds = {condition["type"] for condition in space.node()["status"]["conditions"]}
    assert "MigGpuProblem" not in kinds
    space.until_allocatable(SLICE, 0)
    assert is_running(space.pods()["a"])
    installed.install_again(space.cluster)
    installed.until_agent_ready(space.cluster)
    assert space.lease("a").devices[0].uuid == device.uuid
    assert len(space.instances()) == 1, "what nobody had was destroyed"

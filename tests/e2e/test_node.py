"""The agent on its node object: the switch by label, the GPU operator's pause, condition, Events, feature labels."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from support.cluster import installed
from support.cluster.api import Json
from support.cluster.layout import NODE
from support.cluster.pods import PROFILE, condition
from support.cluster.space import Space

SMALL = f"{PROFILE}1g.10gb"
ONE = {SMALL: 1}
CONDITION = "MigGpuProblem"
ANNOTATION = "mig-agent.io/feature-labels"
FEATURE = "nvidia.com/mig-1g.10gb.product"
OPERATOR = ("nvidia.com/gpu.deploy.device-plugin", "nvidia.com/gpu.deploy.dcgm-exporter")
TIMESTAMP = "nvidia.com/gfd.timestamp"


@pytest.fixture
def space(space: Space) -> Iterator[Space]:
    """Whatever a test does to the node's labels is undone."""
    try:
        yield space
    finally:
        put(space, **{installed.LABEL: "true", TIMESTAMP: None}, **dict.fromkeys(OPERATOR))
        space.until(lambda _: not space.status().paused, "it serves again", may_fail=True)


def put(space: Space, **labels: str | None) -> None:
    """On the node; None takes one away."""
    space.cluster.api.merge(f"/api/v1/nodes/{NODE}", {"metadata": {"labels": labels}})


def labels_of(space: Space) -> dict[str, str]:
    return dict(space.node()["metadata"]["labels"])


def annotations_of(space: Space) -> dict[str, str]:
    return dict(space.node()["metadata"].get("annotations", {}))


def shown(space: Space) -> Json:
    return condition(space.node(), CONDITION)


def told(space: Space, reason: str, words: str) -> bool:
    """Whether an event of the node says this."""
    found = space.cluster.api.items("/api/v1/namespaces/default/events", fieldSelector=f"involvedObject.name={NODE}")
    return any(each["reason"] == reason and words in each["message"] for each in found)


def test_without_its_label_nothing_of_the_agent_is_on_the_node_but_what_pods_hold(space: Space) -> None:
    (device,) = space.running("kept", ONE)
    space.running("short", ONE)
    space.delete("short")
    space.until(lambda _: shown(space) and FEATURE in labels_of(space), "the node shows its GPUs")
    put(space, **{installed.LABEL: "false"})
    space.until(lambda _: not shown(space) and FEATURE not in labels_of(space), "nothing of it is on the node")
    assert ANNOTATION not in annotations_of(space)
    space.until_allocatable(SMALL, 1)
    assert any(installed.LABEL in reason for reason in space.status().paused)
    assert space.instances() == ["1g.10gb"], "whoever gets the GPUs next finds no idle instance"
    assert space.lease("kept").devices == (device,)
    put(space, **{installed.LABEL: "true"})
    space.until(lambda _: shown(space) and FEATURE in labels_of(space), "the node shows its GPUs again")


def test_the_gpu_operators_pause_holds_until_its_last_component_goes_on(space: Space) -> None:
    put(space, **dict.fromkeys(OPERATOR, "paused-for-driver-upgrade"))
    space.until(lambda _: space.status().paused, "the agent has let go")
    (reason,) = space.status().paused
    assert "paused-for-driver-upgrade" in reason
    space.until(lambda _: told(space, "MigAgentPaused", reason), "an event of the node says so")
    put(space, **{OPERATOR[0]: "true"})
    # What the agent does about a label that came before this one has been done when it has done this.
    put(space, **{TIMESTAMP: "1795283000"})
    space.until(lambda _: FEATURE not in labels_of(space), "the agent has seen the labels")
    assert space.status().paused == (reason,)
    put(space, **dict.fromkeys(OPERATOR, "true"))
    space.until(lambda _: not space.status().paused, "it goes on")
    space.until(lambda _: told(space, "MigAgentResumed", reason), "an event of the node says so")


def test_administrators_see_cordons_in_the_nodes_events(space: Space) -> None:
    try:
        space.agent.cordon(0, "the fan is loud")
        space.until(lambda _: told(space, "GpuCordoned", "the fan is loud"), "an event says why")
    finally:
        space.agent.uncordon(0)
    space.until(lambda _: told(space, "GpuUncordoned", "GPU 0"), "and that it is over")


def test_labels_are_those_of_gpu_feature_discovery(space: Space) -> None:
    space.until(lambda _: FEATURE in labels_of(space), "the node is labelled")
    found = labels_of(space)
    assert found["nvidia.com/mig.strategy"] == "mixed"
    assert found["nvidia.com/gpu.product"] == "NVIDIA-H100-80GB-HBM3"
    assert found["nvidia.com/gpu.count"] == "1", "of this model"
    assert found[FEATURE] == "NVIDIA-H100-80GB-HBM3-MIG-1g.10gb"
    assert found["nvidia.com/mig-1g.10gb.count"] == "7"
    assert found["nvidia.com/mig-1g.6gb.count"] == "4"
    ours = set(annotations_of(space)[ANNOTATION].split(","))
    assert ours == {name for name in found if name.startswith("nvidia.com/")}


def test_where_gpu_feature_discovery_comes_the_agents_labels_go(space: Space) -> None:
    space.until(lambda _: FEATURE in labels_of(space), "the node is labelled")
    put(space, **{TIMESTAMP: "1795283000"})
    space.until(lambda _: FEATURE not in labels_of(space), "they are gone")
    assert [name for name in labels_of(space) if name.startswith("nvidia.com/")] == [TIMESTAMP]
    assert ANNOTATION not in annotations_of(space)
    put(space, **{TIMESTAMP: None})
    space.until(lambda _: FEATURE in labels_of(space), "they are back")


def test_an_api_server_that_hangs_holds_up_nobody_on_the_node(space: Space) -> None:
    """It is stopped in the middle of whatever it does, and takes connections but answers none."""
    space.running("kept", ONE)
    space.until(lambda _: shown(space).get("status") == "False", "the node says that all is well")
    node = space.cluster.node
    node.kill("kube-apiserver", signal.SIGSTOP)
    try:
        with space.agent.lease(mig_profile="2g.20gb", name="somebody on the node") as lease:
            assert lease.devices[0].profile == "2g.20gb"
            assert len(space.agent.status().leases) == 2
        space.agent.cordon(0, "while nobody looked")
    finally:
        node.kill("kube-apiserver", signal.SIGCONT)
    try:
        space.until(lambda _: "while nobody looked" in shown(space).get("message", ""), "the node shows it then")
        space.until(lambda _: told(space, "GpuCordoned", "while nobody looked"), "and so does an event")
    finally:
        space.agent.uncordon(0)
    space.until(lambda _: shown(space).get("status") == "False", "it is over")
    assert space.lease("kept").devices

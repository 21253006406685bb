"""Another device plugin on the node serves a name that is the agent's, too: the agent gives way, in words."""

from __future__ import annotations

from support.cluster import installed
from support.cluster.layout import NODE
from support.cluster.otherplugin import GIVEN, another_plugin
from support.cluster.pods import MEMORY, PROFILE
from support.cluster.space import Space

SLICE = f"{PROFILE}1g.10gb"
AMOUNT = f"{MEMORY}10g"
"""Seven on the H100 and two on the A30."""
OTHERS = ("GPU-a", "GPU-b", "GPU-c")
SECONDS = 180.0
"""The agent looks every half minute whether the other is still there."""


def refusals(space: Space) -> list[str]:
    """What events of the node say."""
    found = space.cluster.api.items("/api/v1/namespaces/default/events", fieldSelector=f"involvedObject.name={NODE}")
    return [each["message"] for each in found if each["reason"] == "ResourceRefused"]


def theirs(space: Space, name: str) -> None:
    """A pod that the other plugin serves."""
    space.pod(name, {SLICE: 1})
    space.until_running(name)
    seen = space.environment(name)
    assert seen[GIVEN] in OTHERS
    assert "CUDA_VISIBLE_DEVICES" not in seen


def ours(space: Space, name: str, resource: str) -> None:
    """A pod that the agent serves."""
    (device,) = space.running(name, {resource: 1})
    assert space.visible(name) == [device.uuid]


def test_one_that_comes_after_the_agent_has_the_name_until_it_goes(space: Space) -> None:
    space.until_allocatable(SLICE, 7)
    with another_plugin(space.cluster.node, SLICE, OTHERS):
        space.until(lambda _: refusals(space), "the node's events tell of it")
        (words,) = refusals(space)
        assert words.startswith(f"cannot serve {SLICE}: another device plugin on this node offers 3 of it")
        space.until_allocatable(SLICE, len(OTHERS))
        theirs(space, "theirs")
        ours(space, "ours", AMOUNT)
        assert set(space.leases()) == {"ours"}
    space.until(lambda _: space.allocatable(SLICE) == 7, "the agent serves it again", seconds=SECONDS)
    assert space.allocatable(AMOUNT) == 9, "nothing is kept for what the other has given"
    ours(space, "back", SLICE)
    space.cluster.api.delete(f"{space.path}/pods/theirs")
    space.until(lambda pods: "theirs" not in pods, "it is gone")


def test_one_that_is_there_before_the_agent_keeps_the_name(space: Space) -> None:
    installed.label_away(space.cluster)
    with another_plugin(space.cluster.node, SLICE, OTHERS):
        installed.label_back(space.cluster)
        space.until_allocatable(AMOUNT, 9)
        space.until_allocatable(SLICE, len(OTHERS))
        theirs(space, "theirs")
        ours(space, "ours", AMOUNT)
        installed.replace_agent(space.cluster)
        space.until_allocatable(AMOUNT, 9)
        assert space.allocatable(SLICE) == len(OTHERS), "whatever becomes of the agent"
        space.cluster.api.delete(f"{space.path}/pods/theirs")
        space.until(lambda pods: "theirs" not in pods, "it is gone")
    space.until(lambda _: space.allocatable(SLICE) == 6, "the agent serves it, but what it gave", seconds=SECONDS)
    ours(space, "late", SLICE)

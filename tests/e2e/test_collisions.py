"""Pods that are bound to the same slices, before the scheduler can know better: none fails, the later one waits."""

from __future__ import annotations

import signal
from collections.abc import Mapping

import pytest

from support.cluster.api import Json
from support.cluster.pods import MEMORY, PROFILE, container, is_bound, is_running, is_unschedulable, pod
from support.cluster.space import Space

_TRIES = 20


def collide(space: Space, first: Json, second: Json) -> tuple[str, str]:
    """Both are bound to the node, which has room for one: the names of the one that runs, and of the other.

    The scheduler finds both in its queue when it wakes up, and binds them one right after the other.
    """
    names = {first["metadata"]["name"], second["metadata"]["name"]}
    scheduler = "kube-scheduler"
    asked = {
        name for each in (first, second) for one in each["spec"]["containers"] for name in one["resources"]["limits"]
    }
    for _ in range(_TRIES):
        space.until(lambda _: all(map(space.allocatable, asked)), "the node has room for either")
        space.cluster.node.kill(scheduler, signal.SIGSTOP)
        try:
            space.create(first)
            space.create(second)
        finally:
            space.cluster.node.kill(scheduler, signal.SIGCONT)
        pods = space.until(
            lambda pods: (
                any(map(is_running, pods.values()))
                and all(is_bound(each) or is_unschedulable(each) for each in pods.values())
            ),
            "one runs and the other is where it is",
        )
        (running,) = [name for name, each in pods.items() if is_running(each)]
        if all(map(is_bound, pods.values())):
            return running, (names - {running}).pop()
        for name in names:
            space.delete(name)
    pytest.fail(f"the scheduler never bound both in {_TRIES} tries")


def is_told(space: Space, name: str, *, by: str) -> bool:
    """Whether the pod's events say in the agent's words why it waits, and who holds what it waits for."""
    return any("cannot" in each and "mig-" in each and f"pod {space.name}/{by}" in each for each in space.events(name))


@pytest.mark.parametrize(
    "other",
    [
        [{f"{PROFILE}1g.10gb": 1}],
        [{f"{MEMORY}80g": 1}],
        [{f"{PROFILE}1g.10gb": 1}, {f"{PROFILE}2g.20gb": 1}],
    ],
    ids=["one slice", "by memory", "two containers"],
)
def test_the_later_of_two_waits_and_starts(space: Space, other: list[Mapping[str, int]]) -> None:
    whole = pod("whole", [container(limits={f"{PROFILE}7g.80gb": 1})])
    parts = pod("parts", [container(f"c{number}", limits) for number, limits in enumerate(other)])
    running, waiting = collide(space, whole, parts)
    assert set(space.leases()) == {running}
    space.delete(running)
    space.until_running(waiting)
    assert set(space.leases()) == {waiting}


def test_why_it_waits_stands_in_its_events(space: Space) -> None:
    whole = pod("whole", [container(limits={f"{PROFILE}7g.80gb": 1})])
    part = pod("part", [container(limits={f"{PROFILE}1g.10gb": 1})])
    running, waiting = collide(space, whole, part)
    space.until(lambda _: is_told(space, waiting, by=running), "its events say why it waits, and for whom")
    space.delete(running)
    space.until_running(waiting)


def test_a_pod_that_is_deleted_while_it_waits_leaves_nothing(space: Space) -> None:
    whole = pod("whole", [container(limits={f"{PROFILE}7g.80gb": 1})])
    part = pod("part", [container(limits={f"{PROFILE}1g.10gb": 1})])
    running, waiting = collide(space, whole, part)
    space.delete(waiting)
    space.until(lambda _: not space.status().queue, "its request leaves the queue")
    assert set(space.leases()) == {running}

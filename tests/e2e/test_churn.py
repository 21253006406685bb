"""Deployments of unlike profiles come, grow, shrink and lose pods for a while: nothing is lost, nobody stays behind."""

from __future__ import annotations

import os
import random
import time

import pytest

from support.cluster import installed
from support.cluster.pods import MEMORY, PROFILE, deployment, is_running
from support.cluster.space import Space

SECONDS = float(os.environ.get("CHURN_SECONDS", "90"))
_PAUSE_SECONDS = 0.4
KINDS = {
    "one": {f"{PROFILE}1g.10gb": 1},
    "two": {f"{PROFILE}2g.20gb": 1},
    "three": {f"{PROFILE}3g.40gb": 1},
    "whole": {f"{PROFILE}7g.80gb": 1},
    "memory": {f"{MEMORY}10g": 1},
    "pair": {f"{PROFILE}1g.6gb": 1, f"{PROFILE}1g.10gb": 1},
}
FULL = {
    f"{PROFILE}1g.10gb": 7,
    f"{PROFILE}2g.20gb": 3,
    f"{PROFILE}3g.40gb": 2,
    f"{PROFILE}7g.80gb": 1,
    f"{PROFILE}1g.6gb": 4,
    f"{MEMORY}10g": 9,
}
"""What the node shows of these while nobody has anything."""
LAST = {"one": 2, "two": 1, "three": 0, "whole": 0, "memory": 2, "pair": 1}
"""Replicas that fit together, at the end."""


def scale(space: Space, name: str, replicas: int) -> None:
    path = f"/apis/apps/v1/namespaces/{space.name}/deployments/{name}"
    space.cluster.api.merge(path, {"spec": {"replicas": replicas}})


def shown(space: Space) -> dict[str, int]:
    """How many of each resource the node has, as the scheduler sees it."""
    return {resource: space.allocatable(resource) for resource in FULL}


def check(space: Space) -> None:
    """At every moment: no pod has failed, and no device belongs to two."""
    space.until(lambda _: True, "no pod fails")
    uuids = [device.uuid for lease in space.leases().values() for device in lease.devices]
    assert len(set(uuids)) == len(uuids), space.explain("a device belongs to two")


@pytest.mark.timeout(SECONDS + 300)
def test_churn(space: Space) -> None:
    space.until(lambda _: shown(space) == FULL, "the node has all that its GPUs can be cut into")
    chance = random.Random(7)  # noqa: S311 -- the same churn every time
    for name, limits in KINDS.items():
        space.cluster.api.create(
            f"/apis/apps/v1/namespaces/{space.name}/deployments", deployment(name, chance.randint(0, 2), limits)
        )
    began, upgraded = time.monotonic(), False
    while time.monotonic() < began + SECONDS:
        if time.monotonic() > began + SECONDS / 2 and not upgraded:
            # As an upgrade does it: even then nobody is bound to what the agent cannot give.
            installed.replace_agent(space.cluster)
            upgraded = True
        pods = sorted(space.pods())
        if pods and chance.random() < 0.5:
            space.cluster.api.delete(f"{space.path}/pods/{chance.choice(pods)}")
        else:
            scale(space, chance.choice(list(KINDS)), chance.choice((0, 0, 1, 1, 2, 3)))
        check(space)
        time.sleep(_PAUSE_SECONDS)  # the pace of the churn
    for name, replicas in LAST.items():
        scale(space, name, replicas)
    space.until(
        lambda pods: len(pods) == sum(LAST.values()) and all(map(is_running, pods.values())), "all that fits runs"
    )
    check(space)
    space.until(lambda _: len(space.leases()) == sum(LAST.values()), "no pod of before has a lease")
    space.until(lambda _: not space.status().queue, "nobody waits")
    for name in KINDS:
        scale(space, name, 0)
    space.until(lambda pods: not pods and not space.leases(), "all are gone, and their leases too")
    space.until(lambda _: shown(space) == FULL, "no slice is lost")

"""What is published: at once, again when something changed, and nothing where the API server drops counters."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path

import pytest

from mig_agent.adapters.kubeapi import PodFacts, PodName
from mig_agent.core.dra.names import DRIVER
from mig_agent.engine.tasks import Tasks
from mig_agent.frontends.kubernetes.dra import publisher as publisher_module
from mig_agent.frontends.kubernetes.dra.publisher import Publisher
from support.claims import NODE, ClaimsApi, pods_using
from support.engine import Node, engine

Pods = Mapping[PodName, PodFacts]


class Follower:
    """The pods of the node, as a watch tells them."""

    def __init__(self) -> None:
        self.tell: Callable[[Pods], None] = lambda _pods: None

    def follow(self, on_change: Callable[[Pods], None]) -> Follower:
        self.tell = on_change
        on_change({})
        return self

    def close(self) -> None:
        """Nothing is told afterwards."""
        self.tell = lambda _pods: None


@contextlib.asynccontextmanager
async def publishing(
    folder: Path, api: ClaimsApi, gpus: str = "a100-40gb:1,h100-80gb:1"
) -> AsyncIterator[tuple[Node, Follower, Publisher]]:
    async with engine(folder, gpus) as node:
        tasks, follower = Tasks(), Follower()
        publisher = Publisher(node.manager, api, NODE, follower.follow, tasks)  # type: ignore[arg-type]  # a stand-in
        publisher.start()
        try:
            yield node, follower, publisher
        finally:
            publisher.stop()
            await tasks.end(1.0)


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publisher_module, "SETTLE_SECONDS", 0.0)


def problems(node: Node) -> str:
    return " ".join(node.manager.snapshot.problems)


async def test_every_slot_is_published_and_leases_outside_dra_change_counters_in_place(tmp_path: Path) -> None:
    api = ClaimsApi()
    async with publishing(tmp_path, api) as (node, _, _):
        await node.until(lambda: len(api.stored) == 2)
        assert api.scheduler().allocate(lambda device: device.profile == "7g.80gb") is not None
        api.writes.clear()
        granted = await node.acquire("7g.80gb")
        await node.until(lambda: api.scheduler().allocate(lambda device: device.profile == "7g.80gb") is None)
        assert {each["spec"]["pool"]["generation"] for each in api.stored.values()} == {1}
        assert api.writes[0].endswith("counters-0000-1")
        await node.release(granted)
        await node.until(lambda: api.scheduler().allocate(lambda device: device.profile == "7g.80gb") is not None)


async def test_nothing_is_published_where_counters_are_dropped(tmp_path: Path) -> None:
    api = ClaimsApi(drops_counters=True)
    async with publishing(tmp_path, api) as (node, _, _):
        await node.until(lambda: "DRAPartitionableDevices" in problems(node))
        assert not api.stored
        assert problems(node).count("cannot publish") == 1


async def test_an_api_server_that_does_not_answer_is_tried_again(tmp_path: Path) -> None:
    api = ClaimsApi(silent=True)
    async with publishing(tmp_path, api) as (node, _, _):
        await node.until(lambda: "cannot reach" in problems(node))
        api.silent = False
        await node.until(lambda: len(api.stored) == 2 and not problems(node))


async def test_the_slot_of_a_bound_pods_claim_keeps_its_counters(tmp_path: Path) -> None:
    """It is known from the pod before the claim is prepared: nothing else lowers what its device takes."""
    api = ClaimsApi()
    async with publishing(tmp_path, api) as (node, follower, _):
        await node.until(lambda: len(api.stored) == 2)
        device = api.scheduler().allocate(lambda device: device.profile == "7g.40gb")
        assert device is not None
        api.allocated("train", device.name)
        follower.tell(pods_using(train="train"))
        await node.acquire("7g.40gb")  # the agent's own queue does not know it
        await node.acquire("7g.80gb")
        await node.until(lambda: api.scheduler().allocate(lambda device: device.profile == "1g.10gb") is None)
        assert api.scheduler().lowest == 0


async def test_slices_that_were_deleted_or_that_nobody_can_read_are_mended(tmp_path: Path) -> None:
    api = ClaimsApi()
    api.stored["odd"] = {"metadata": {"name": "odd"}, "spec": {"driver": DRIVER}}
    async with publishing(tmp_path, api) as (node, _, publisher):
        await node.until(lambda: len(api.stored) == 2 and "odd" not in api.stored)
        api.stored.clear()  # as a kubelet does when it starts
        publisher.refresh()
        await node.until(lambda: len(api.stored) == 2)

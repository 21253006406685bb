"""The numbers in the node's status, with the real manager: they follow leases, pods, other writers and the kubelet."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from mig_agent.adapters.kubeapi import InformerSubscription, KubeApiError, NodeFacts
from mig_agent.adapters.kubelet import KubeletPaths
from mig_agent.core.model import Holder
from mig_agent.core.owner import KubeletDevice, Pod
from mig_agent.engine import tasks
from mig_agent.frontends.kubernetes.node_resources import controller
from mig_agent.frontends.kubernetes.node_resources.controller import NodeStatus, NodeStatusSettings
from mig_agent.frontends.kubernetes.node_resources.metrics import NodeStatusMetrics
from mig_agent.frontends.kubernetes.node_resources.ownership import OURS
from support.engine import ADMIN, Node, engine
from support.owners import bound

ONE, TWO, SEVEN, MEMORY = (
    "nvidia.com/mig-1g.5gb",
    "nvidia.com/mig-2g.10gb",
    "nvidia.com/mig-7g.40gb",
    "mig-agent.io/memory-5g",
)
OVERFLOWING = 1100
"""Failures in a row whose power of two no float can hold."""
POSSIBLE = "mig_agent_kubelet_devices_possible"


@dataclass
class Server:
    """A node object as an API server has it."""

    facts: NodeFacts = field(default_factory=lambda: NodeFacts(name="n1", uid="u"))
    down: bool = False
    keeps: frozenset[str] = frozenset()
    """What it does not let anybody take away."""
    patches: int = 0
    refused: int = 0
    told: list[str] = field(default_factory=list)
    watches: list[InformerSubscription] = field(default_factory=list)

    async def node(self) -> NodeFacts:
        return self.facts

    def follow_node(
        self, on_change: Callable[[NodeFacts], None], on_lost: Callable[[str], None]
    ) -> InformerSubscription:
        following = InformerSubscription(on_change, on_lost, self.watches.remove)
        self.watches.append(following)
        asyncio.get_running_loop().call_soon(lambda: following.change(self.facts))
        return following

    async def patch_owned(self, counts: Mapping[str, int | None], annotations: Mapping[str, str | None]) -> None:
        await asyncio.sleep(0)
        if self.down:
            self.refused += 1
            raise KubeApiError("cannot change it: nobody answers")
        if any(counts.get(name, 0) is None for name in self.keeps):
            raise KubeApiError("cannot change it: an agent changes only the resources that it serves", 422)
        self.patches += 1
        self.write(counts, annotations)

    async def tell(self, about: Pod | None, reason: str, words: str, *, warning: bool) -> None:
        assert about is None
        assert warning
        self.told.append(f"{reason}: {words}")

    def write(self, counts: Mapping[str, int | None], annotations: Mapping[str, str | None] | None = None) -> None:
        """Whoever does."""
        numbers = {name: text for name, text in self.facts.allocatable.items() if name not in counts}
        numbers |= {name: str(count) for name, count in counts.items() if count is not None}
        notes = {**self.facts.annotations, **(annotations or {})}
        kept = {name: text for name, text in notes.items() if text is not None}
        self.show(replace(self.facts, capacity=numbers, allocatable=numbers, annotations=kept))

    def show(self, facts: NodeFacts) -> None:
        self.facts = facts
        for watch in tuple(self.watches):
            watch.change(facts)

    def number(self, name: str) -> str | None:
        shown = self.facts.allocatable.get(name)
        assert shown == self.facts.capacity.get(name)
        return shown


@dataclass
class World:
    node: Node
    server: Server
    status: NodeStatus
    paths: KubeletPaths
    asked: dict[Pod, Mapping[str, int]]

    async def shows(self, **numbers: str | None) -> None:
        names = {"one": ONE, "two": TWO, "seven": SEVEN, "memory": MEMORY}
        await self.node.until(lambda: all(self.server.number(names[key]) == number for key, number in numbers.items()))

    def register(self, **devices: list[str]) -> None:
        """Set what the kubelet has in its checkpoint of device plugins."""
        self.paths.plugins.mkdir(parents=True, exist_ok=True)
        names = {"one": ONE, "two": TWO}
        content = {"Data": {"RegisteredDevices": {names[key]: ids for key, ids in devices.items()}}}
        new = self.paths.plugins / "new"
        new.write_text(json.dumps(content))
        new.rename(self.paths.checkpoint)
        self.status.refresh()


@asynccontextmanager
async def world(
    folder: Path, server: Server | None = None, *, shows: bool = True, label: str = ""
) -> AsyncIterator[World]:
    paths = KubeletPaths(folder / "kubelet")
    asked: dict[Pod, Mapping[str, int]] = {}
    async with engine(folder, "a100-40gb:1") as node:
        there = server or Server()
        settings = NodeStatusSettings(node="n1", shows=shows, label=label)
        status = NodeStatus(node.manager, there, paths, asked.get, settings)
        status.start()
        try:
            yield World(node, there, status, paths, asked)
        finally:
            await status.close()


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the waits that take seconds elsewhere."""
    for name, value in {"PAUSE_SECONDS": (0.001, 0.01), "RETRY_SECONDS": (0.01, 0.01), "POLL_SECONDS": 0.05}.items():
        monkeypatch.setattr(controller, name, value)


async def test_numbers_follow_leases(tmp_path: Path) -> None:
    async with world(tmp_path) as at:
        await at.shows(one="7", two="3", seven="1", memory="7")
        lease = await at.node.acquire("1g.5gb")
        await at.shows(one="6", two="3", seven="0", memory="6")
        await at.node.release(lease)
        await at.shows(one="7", two="3", seven="1")
        assert set(at.server.facts.annotations[OURS].split(",")) == set(at.server.facts.allocatable)


async def test_a_pods_lease_counts_for_what_the_pod_asks_for(tmp_path: Path) -> None:
    """A scheduler takes off what the pod asks for; what it has left is what can be made."""
    async with world(tmp_path) as at:
        pod = Pod(namespace="a", name="x", uid="u-1")
        granted = await at.node.acquire("1g.5gb", holder=Holder(), pod=pod)
        await at.shows(one="7", memory="7", seven="0")  # nobody knows yet, so it counts for both
        at.asked[pod] = {ONE: 1}
        at.status.refresh()
        await at.shows(one="7", memory="6", seven="0")
        await at.node.manager.bind(granted.lease.id, bound(pod))
        await at.shows(one="7", memory="6", seven="0")
        at.asked[pod] = {}
        at.status.refresh()
        await at.shows(one="6", memory="6")
        await at.node.manager.owner_ended(granted.lease.id, "its pod has ended")
        await at.shows(one="7", memory="7", seven="1")


async def test_a_pod_that_a_plugin_has_served_counts_as_before(tmp_path: Path) -> None:
    async with world(tmp_path) as at:
        device = KubeletDevice(resource=ONE, id="mig-agent-0")
        await at.node.acquire("1g.5gb", holder=Holder(), pod=Pod(namespace="a", name="x"), kubelet_devices=(device,))
        await at.shows(one="7", memory="6", seven="0")


async def test_metrics_have_the_names_that_those_of_a_device_plugin_have(tmp_path: Path) -> None:
    async with world(tmp_path) as at:
        registry = CollectorRegistry()
        registry.register(NodeStatusMetrics(at.status))

        def says(**expected: int) -> bool:
            found = {
                each: registry.get_sample_value(f"mig_agent_kubelet_devices_{each}", {"resource": ONE})
                for each in expected
            }
            return found == expected

        await at.node.until(lambda: says(possible=7, allocated=0, promised=0))
        pod = Pod(namespace="a", name="x", uid="u-1")
        at.asked[pod] = {ONE: 1}
        granted = await at.node.acquire("1g.5gb", holder=Holder(), pod=pod)
        await at.node.acquire("2g.10gb")
        await at.node.until(lambda: says(possible=5, allocated=0, promised=1))
        await at.node.manager.bind(granted.lease.id, bound(pod))
        await at.node.until(lambda: says(possible=5, allocated=1, promised=0))
        served = KubeletDevice(resource=ONE, id="mig-agent-0")
        await at.node.acquire("1g.5gb", holder=Holder(), pod=Pod(namespace="a", name="y"), kubelet_devices=(served,))
        await at.node.until(lambda: says(possible=5, allocated=2, promised=0))
        at.register(one=["GPU-1"])
        await at.node.until(lambda: registry.get_sample_value(POSSIBLE, {"resource": ONE}) is None)
        assert registry.get_sample_value(POSSIBLE, {"resource": TWO}) is not None


async def test_overwritten_numbers_are_written_again(tmp_path: Path) -> None:
    async with world(tmp_path) as at:
        await at.shows(one="7")
        for number in (0, 3, 9):
            at.server.write({ONE: number})
            await at.shows(one="7")
        at.server.write({ONE: None}, {OURS: None})
        await at.shows(one="7")
        await at.node.until(lambda: ONE in at.server.facts.annotations.get(OURS, ""))
        assert not at.server.told


async def test_refused_write_is_tried_again(tmp_path: Path) -> None:
    server = Server(down=True)
    async with world(tmp_path, server) as at:
        await at.node.acquire("1g.5gb")
        server.down = False
        await at.shows(one="6")


async def test_controller_survives_half_a_day_of_refusals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(controller, "RETRY_SECONDS", (0.0, 0.0))
    monkeypatch.setattr(tasks, "AGAIN_SECONDS", 1e9)  # a loop that has to begin anew has failed
    async with world(tmp_path, Server(down=True)) as at:
        await at.node.until(lambda: at.server.refused > OVERFLOWING)
        at.server.down = False
        await at.shows(one="7")


async def test_resource_of_a_device_plugin_is_reported_and_not_written(tmp_path: Path) -> None:
    async with world(tmp_path) as at:
        await at.shows(one="7", two="3")
        at.register(one=["MIG-1", "MIG-2"])
        at.server.write({ONE: 2})
        await at.node.until(lambda: at.server.told)
        (told,) = at.server.told
        assert told.startswith(f"ResourceRefused: cannot show {ONE} on node n1: a device plugin serves that there; ")
        await at.node.acquire("2g.10gb")
        await at.shows(one="2", two="2")
        assert ONE not in at.server.facts.annotations[OURS].split(",")
        await at.status.close()
        await at.status.clear()
        assert at.server.facts.allocatable == {ONE: "2"}


async def test_resource_of_an_ended_plugin_is_written_once_the_kubelet_forgets_it(tmp_path: Path) -> None:
    there = NodeFacts(name="n1", uid="u", allocatable={ONE: "0"}, capacity={ONE: "0"})
    async with world(tmp_path, Server(there)) as at:
        at.register(one=[], two=["mig-agent-0"])
        await at.shows(memory="7")
        at.register()
        await at.shows(one="7", two="3")
        assert not at.server.told, "it is over soon, and nobody has to do anything"


async def test_numbers_of_another_writer_are_not_changed(tmp_path: Path) -> None:
    there = NodeFacts(name="n1", uid="u", allocatable={ONE: "5"}, capacity={ONE: "5"})
    async with world(tmp_path, Server(there)) as at:
        await at.shows(two="3")
        assert at.server.number(ONE) == "5"
        assert "somebody else shows that there" in at.server.told[0]


async def test_numbers_are_zero_while_paused(tmp_path: Path) -> None:
    async with world(tmp_path) as at:
        pod = Pod(namespace="a", name="x", uid="u-1")
        at.asked[pod] = {ONE: 1}
        await at.node.acquire("1g.5gb", holder=Holder(), pod=pod)
        await at.shows(one="7", two="3")
        await at.node.manager.pause("a new driver", ADMIN)
        await at.shows(one="1", two="0", memory="0")
        await at.node.manager.resume("a new driver", ADMIN)
        await at.shows(one="7", two="3")


async def test_without_its_label_the_node_shows_nothing(tmp_path: Path) -> None:
    async with world(tmp_path, label="mig=true") as at:
        at.server.show(replace(at.server.facts, labels={"mig": "true"}))
        await at.shows(one="7")
        at.server.show(replace(at.server.facts, labels={"mig": "false"}))
        await at.shows(one=None, two=None, memory=None)
        await at.node.until(lambda: OURS not in at.server.facts.annotations)


async def test_with_another_setting_shown_numbers_are_removed(tmp_path: Path) -> None:
    numbers = {ONE: "7", TWO: "3", "cpu": "2"}
    there = NodeFacts(name="n1", uid="u", annotations={OURS: ONE}, allocatable=numbers, capacity=numbers)
    async with world(tmp_path, Server(there), shows=False) as at:
        await at.shows(one=None, two="3")
        await at.node.until(lambda: OURS not in at.server.facts.annotations)
        patches = at.server.patches
        await at.node.release(await at.node.acquire("1g.5gb"))
        at.server.write({TWO: 1})
        await asyncio.sleep(0.2)
        assert at.server.patches == patches


async def test_refused_removal_delays_no_other_write(tmp_path: Path) -> None:
    old = "nvidia.com/old-1g.5gb"
    there = NodeFacts(name="n1", uid="u", annotations={OURS: old}, allocatable={old: "7"}, capacity={old: "7"})
    async with world(tmp_path, Server(there, keeps=frozenset({old}))) as at:
        await at.shows(one="7")
        for _ in range(3):
            lease = await at.node.acquire("1g.5gb")
            await at.shows(one="6")
            await at.node.release(lease)
            await at.shows(one="7")
        at.server.keeps = frozenset()
        await at.node.until(lambda: at.server.number(old) is None)


async def test_uninstall_clears_the_node_and_a_restart_does_not(tmp_path: Path) -> None:
    async with world(tmp_path) as at:
        await at.shows(one="7")
        at.server.write({"cpu": 2})
        await at.status.close()
        assert at.server.number(ONE) == "7"
        await at.status.clear()
        assert at.server.facts.allocatable == {"cpu": "2"}
        assert OURS not in at.server.facts.annotations

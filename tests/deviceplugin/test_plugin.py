"""The plugin's numbers: what the kubelet is shown, and what is written to the node."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from mig_agent.adapters.cdi import CDI_KIND, CdiFolder
from mig_agent.adapters.kubeapi import NodeFacts
from mig_agent.adapters.kubelet import KubeletPaths
from mig_agent.core.model import KubeletDevice
from mig_agent.engine.callers import Caller
from mig_agent.frontends.deviceplugin.metrics import PluginMetrics
from mig_agent.frontends.deviceplugin.plugin import Plugin, PluginSettings, Served
from mig_agent.frontends.deviceplugin.registering import Offer, Registering
from mig_agent.frontends.deviceplugin.service import ResourceService
from support.engine import Node, engine
from support.plugged import LARGE, MIDDLE, SMALL, Words, devices

ADMIN = Caller(name="root", uid=0, admin=True)


@dataclass
class Running:
    node: Node
    plugin: Plugin
    words: Words

    def served(self, resource: str) -> Served:
        return self.plugin.served[resource]

    async def settled(self) -> None:
        """Returns when all numbers are worked out."""
        await self.node.quiet()
        self.plugin.refresh()
        await asyncio.sleep(0)
        await asyncio.sleep(0)

    async def numbers(self, *resources: str) -> list[int]:
        """How many there are or can be of each."""
        await self.settled()
        return [self.served(each).target for each in resources]

    def listed(self, resource: str) -> int:
        return len(self.served(resource).service.ids)


@contextlib.asynccontextmanager
async def running(gpus: str = "h100-80gb:1") -> AsyncIterator[Running]:
    """Nothing is at the kubelet's sockets: what it would ask is asked by the test."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        async with engine(folder, gpus) as node:
            words = Words()
            plugin = Plugin(
                manager=node.manager,
                paths=KubeletPaths(folder / "kubelet"),
                cdi=CdiFolder(folder / "cdi", CDI_KIND, node.host, simulated=True),
                api=words,
                settings=PluginSettings(node="node-1"),
            )
            await plugin.start()
            try:
                yield Running(node, plugin, words)
            finally:
                await plugin.close()


def shows(**counts: int) -> NodeFacts:
    return NodeFacts(
        name="node-1",
        uid="uid",
        kubelet_version="v1.36.2",
        allocatable={
            f"nvidia.com/mig-{name.replace('_', '.').removeprefix('p')}": str(n) for name, n in counts.items()
        },
    )


async def test_an_empty_gpu_could_be_cut_in_any_way() -> None:
    async with running() as at:
        assert await at.numbers(SMALL, MIDDLE, LARGE) == [7, 2, 1]
        assert [at.listed(each) for each in (SMALL, MIDDLE, LARGE)] == [7, 2, 1]


async def test_from_the_moment_of_allocation_room_is_kept() -> None:
    """Nothing is made before the container starts, and other resources must not count on it."""
    async with running() as at:
        await at.plugin.allocate([devices(0, resource=MIDDLE)])
        assert at.served(SMALL).target == 4, "at once"
        assert await at.numbers(MIDDLE, SMALL, LARGE) == [2, 4, 0]


async def test_what_runs_is_counted_once_while_it_is_made_and_after() -> None:
    async with running() as at:
        seen: set[int] = set()
        at.node.manager.on_view.append(lambda: seen.add(at.served(SMALL).target))
        for number in range(7):
            await at.plugin.allocate([devices(number)])
            granted = await at.node.acquire("1g.10gb", kubelet_devices=devices(number))
            assert granted.lease.kubelet_devices == devices(number)
            at.plugin.book.on_way.clear()
            assert await at.numbers(SMALL) == [7]
        assert await at.numbers(MIDDLE, LARGE) == [0, 0]
        assert at.listed(SMALL) == 7


async def test_paused_and_cordoned_there_is_nothing_more() -> None:
    async with running() as at:
        await at.plugin.allocate([devices(3)])
        await at.node.manager.cordon("0", True, "broken", ADMIN)
        assert await at.numbers(SMALL, LARGE) == [1, 0]
        await at.node.manager.cordon("0", False, "", ADMIN)
        assert await at.numbers(SMALL) == [7]
        await at.node.manager.pause("driver upgrade", ADMIN)
        assert await at.numbers(SMALL, LARGE) == [1, 0]


async def test_the_list_does_not_get_shorter_than_what_the_node_shows() -> None:
    async with running() as at:
        at.plugin.node_showed(shows(p1g_10gb=7, p7g_80gb=1))
        await at.settled()
        await at.plugin.allocate([devices(0, resource=LARGE)])
        await at.settled()
        assert (at.served(SMALL).target, at.listed(SMALL)) == (0, 7)
        at.plugin.node_showed(shows(p1g_10gb=0, p7g_80gb=1))
        await at.node.until(lambda: at.listed(SMALL) == 0)


async def test_only_what_the_kubelet_listens_to_is_written_to_the_node() -> None:
    async with running() as at:
        at.plugin.node_showed(shows(p1g_10gb=3))
        await at.settled()
        assert at.words.patched == []
        at.served(SMALL).service.streams = 1
        await at.settled()
        await at.node.until(lambda: at.words.patched)
        assert at.words.patched[0] == {SMALL: 7}
        at.served(SMALL).service.streams = 0


async def test_before_it_stops_it_offers_nothing_and_waits_until_nobody_believes_in_more() -> None:
    async with running() as at:
        at.plugin.node_showed(shows(p1g_10gb=7))
        at.served(SMALL).service.streams = 1
        await at.plugin.allocate([devices(5)])
        draining = asyncio.create_task(at.plugin.drain())
        await at.node.until(lambda: {SMALL: 0} in at.words.patched)
        assert not draining.done()
        assert at.listed(SMALL) == 7
        at.plugin.node_showed(shows(p1g_10gb=0))
        await draining
        assert devices(5)[0].id in at.served(SMALL).service.ids
        at.served(SMALL).service.streams = 0


async def test_what_there_is_no_more_stays_known_to_the_kubelet() -> None:
    async with running() as at:
        await at.plugin.allocate([devices(0, resource=LARGE)])
        await at.plugin.drain()
        small = at.served(SMALL).service
        assert len(small.known) == 7, "as many as the node could ever give"
        assert len(at.served(LARGE).service.known) == 1


async def test_without_an_api_server_stopping_takes_no_time() -> None:
    async with running() as at:
        at.plugin.node_unknown("cannot reach it")
        await asyncio.wait_for(at.plugin.drain(), 5.0)


async def test_metrics_tell_of_each_resource() -> None:
    async with running() as at:
        await at.plugin.allocate([devices(0, resource=MIDDLE)])
        await at.settled()
        registry = CollectorRegistry()
        registry.register(PluginMetrics(at.plugin))
        of = {"resource": MIDDLE}
        assert registry.get_sample_value("mig_agent_kubelet_devices", of) == 2
        assert registry.get_sample_value("mig_agent_kubelet_devices_allocated", of) == 1
        assert registry.get_sample_value("mig_agent_kubelet_connected", of) == 0
        assert registry.get_sample_value("mig_agent_pods_waiting") == 0


class Others:
    def __init__(self) -> None:
        self.devices: tuple[KubeletDevice, ...] = ()

    async def allocatable(self) -> tuple[KubeletDevice, ...]:
        return self.devices


@pytest.fixture
async def at() -> AsyncIterator[Running]:
    async with running() as found:
        yield found


async def test_a_resource_of_another_plugin_is_left_to_it(at: Running) -> None:
    with tempfile.TemporaryDirectory() as name:
        paths = KubeletPaths(Path(name))
        others, told, lost = Others(), list[str](), list[ResourceService]()
        registering = Registering(paths=paths, kubelet=others, on_lost=lost.append, on_taken=told.append)
        service = at.served(SMALL).service
        registering.add(service)
        offer: Offer = registering.offers[SMALL]
        await registering.look()
        sockets: list[object] = [offer.socket]
        assert sockets == [None], "there is no kubelet, and nothing happens"
        paths.plugins.mkdir()
        paths.registration.touch()  # a kubelet that does not answer
        await registering.look()
        assert offer.failures == 1
        assert "cannot register nvidia.com/mig-1g.10gb" in offer.words
        assert offer.socket is not None
        assert offer.socket.is_there
        offer.again = 0.0
        others.devices = (KubeletDevice(resource=SMALL, id="GPU-1"), KubeletDevice(resource=LARGE, id="mig-agent-0"))
        await registering.look()
        taken = [offer.taken]
        (words,) = told
        assert words.startswith("cannot serve nvidia.com/mig-1g.10gb: another device plugin on this node offers 1")
        offer.again = 0.0
        await registering.look()
        assert len(told) == 1, "once"
        others.devices = ()
        offer.again = 0.0
        await registering.look()
        taken.append(offer.taken)
        assert taken == [True, False]
        assert offer.failures == 2, "it is tried again"
        await registering.close(0.0)

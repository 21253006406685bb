"""The plugin's numbers: what the kubelet is shown, and what is written to the node."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from mig_agent.adapters.cdi import CDI_KIND, CdiFolder
from mig_agent.adapters.kubeapi import NodeFacts
from mig_agent.adapters.kubelet import KubeletPaths
from mig_agent.core.model import Holder, Lease
from mig_agent.core.owner import KubeletDevice, Pod
from mig_agent.engine.callers import Caller
from mig_agent.frontends.kubernetes.device_plugin.allocations import Acquisition
from mig_agent.frontends.kubernetes.device_plugin.metrics import PluginMetrics
from mig_agent.frontends.kubernetes.device_plugin.plugin import Plugin, PluginSettings, Served
from mig_agent.frontends.kubernetes.device_plugin.registration import Offer, Registration
from mig_agent.frontends.kubernetes.device_plugin.service import ResourceService
from support.engine import CREATE, Node, engine
from support.owners import bound, devices_of, pod_of
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
        """Return how many there are or can be of each."""
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


def shows(heartbeat: str = "", **counts: int) -> NodeFacts:
    return NodeFacts(
        name="node-1",
        uid="uid",
        heartbeat=heartbeat,
        allocatable={
            f"nvidia.com/mig-{name.replace('_', '.').removeprefix('p')}": str(n) for name, n in counts.items()
        },
    )


async def test_an_empty_gpu_could_be_cut_in_any_way() -> None:
    async with running() as at:
        assert await at.numbers(SMALL, MIDDLE, LARGE) == [7, 2, 1]
        assert [at.listed(each) for each in (SMALL, MIDDLE, LARGE)] == [7, 2, 1]


async def test_capacity_is_reserved_from_the_moment_of_allocation() -> None:
    """Nothing is made before the container starts, and other resources must not count on it."""
    async with running() as at:
        await at.plugin.allocate([devices(0, resource=MIDDLE)])
        assert at.served(SMALL).target == 4, "at once"
        assert await at.numbers(MIDDLE, SMALL, LARGE) == [2, 4, 0]


async def test_device_is_counted_once_while_created_and_after() -> None:
    async with running() as at:
        seen: set[int] = set()
        at.node.manager.on_view.append(lambda: seen.add(at.served(SMALL).target))
        for number in range(7):
            await at.plugin.allocate([devices(number)])
            granted = await at.node.acquire("1g.10gb", kubelet_devices=devices(number))
            assert devices_of(granted.lease) == devices(number)
            at.plugin.table.pending.clear()
            assert await at.numbers(SMALL) == [7]
        assert await at.numbers(MIDDLE, LARGE) == [0, 0]
        assert at.listed(SMALL) == 7


MEMORY = "mig-agent.io/memory-10g"


async def promised(at: Running, *wants: str, name: str = "train", **fields: Any) -> Lease:
    """A lease taken for a pod that has not come."""
    pod = Pod(namespace="team-a", name=name, uid=f"uid-{name}")
    return (await at.node.acquire(*wants, holder=Holder(), pod=pod, **fields)).lease


async def test_reservation_is_counted_under_the_resource_that_the_pod_requests() -> None:
    async with running() as at:
        at.plugin.asked = lambda _: {MEMORY: 1}
        assert await at.numbers(MEMORY, SMALL, MIDDLE) == [7, 7, 2]
        lease = await promised(at, "1g.10gb")
        assert await at.numbers(MEMORY, SMALL, MIDDLE) == [7, 6, 1]
        assert (at.served(MEMORY).reserved, at.served(SMALL).reserved) == (1, 0)
        assert at.listed(MEMORY) == 7
        at.plugin.asked = lambda _: None  # the API server has not said yet
        assert await at.numbers(MEMORY, SMALL, MIDDLE) == [7, 7, 1]
        at.plugin.asked = lambda _: {}
        assert await at.numbers(MEMORY, SMALL, MIDDLE) == [6, 6, 1]
        await at.node.manager.owner_ended(lease.id, "it never came")
        assert await at.numbers(MEMORY, SMALL, MIDDLE) == [7, 7, 2]


async def test_reservation_is_counted_once_while_it_is_bound() -> None:
    """The instance is counted from its creation until the pod has it: the numbers stay what they were."""
    async with running() as at:
        at.plugin.asked = lambda _: {SMALL: 1}
        seen: set[tuple[int, int]] = set()
        at.node.manager.on_view.append(lambda: seen.add((at.served(SMALL).target, at.served(LARGE).target)))
        lease = await promised(at, "1g.10gb")
        await at.settled()
        assert at.served(SMALL).reserved == 1
        two = at.served("nvidia.com/mig-2g.20gb")
        assert two.target == 3
        await at.plugin.allocate([devices(0)])
        assert (at.served(SMALL).target, at.served(SMALL).reserved) == (7, 0), "the id on its way takes it"
        assert two.target == 3, "and no room is kept for it beside that"
        pod = pod_of(lease)
        assert pod is not None
        await at.node.manager.bind(lease.id, bound(pod, devices(0)))
        at.plugin.table.pending.clear()
        assert await at.numbers(SMALL, LARGE) == [7, 0]
        assert two.target == 3
        assert {small for small, _ in seen} == {7}


async def test_numbers_do_not_dip_while_a_device_is_created_for_a_pod() -> None:
    async with running() as at:
        at.plugin.asked = lambda _: None
        at.node.simulator.hang(CREATE)
        asked = at.node.start(promised(at, "7g.80gb"))
        await at.node.stuck()
        at.plugin.refresh()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert at.served(LARGE).target == 1
        at.node.simulator.clear()
        await asked
        assert await at.numbers(LARGE, SMALL) == [1, 0]


async def test_pod_without_a_reservation_does_not_block_the_one_with_it() -> None:
    """The cluster's scheduler bound it on the number that was meant for the other; one more is offered then."""
    async with running() as at:
        at.plugin.asked = lambda _: {LARGE: 1}
        await promised(at, "7g.80gb")
        await at.plugin.allocate([devices(0, resource=LARGE)])
        assert at.served(LARGE).target == 1
        (device,) = devices(0, resource=LARGE)
        at.plugin.table.acquisitions[device] = Acquisition(
            owner=bound(Pod(namespace="team-a", name="other"), (device,)),
            request=at.node.request("7g.80gb"),
            since=0.0,
            task=asyncio.get_running_loop().create_future(),  # type: ignore[arg-type]  # nothing waits for it
        )
        assert await at.numbers(LARGE) == [2]
        assert at.listed(LARGE) == 2


async def test_reserved_devices_stay_listed_while_draining() -> None:
    async with running() as at:
        at.plugin.asked = lambda _: {SMALL: 1}
        await promised(at, "1g.10gb")
        await at.settled()
        at.plugin.node_changed(shows(p1g_10gb=7))
        draining = at.node.start(at.plugin.drain())
        await asyncio.sleep(0)
        at.plugin.node_changed(shows(p1g_10gb=0))
        await draining
        assert at.served(SMALL).target == 0
        assert at.listed(SMALL) >= 1


async def test_no_more_devices_while_paused_or_cordoned() -> None:
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
        at.plugin.node_changed(shows(p1g_10gb=7, p7g_80gb=1))
        await at.settled()
        await at.plugin.allocate([devices(0, resource=LARGE)])
        await at.settled()
        assert (at.served(SMALL).target, at.listed(SMALL)) == (0, 7)
        at.plugin.node_changed(shows(p1g_10gb=0, p7g_80gb=1, heartbeat="later"))
        await at.node.until(lambda: at.listed(SMALL) == 0)


async def test_only_resources_that_the_kubelet_watches_are_written_to_the_node() -> None:
    async with running() as at:
        at.plugin.node_changed(shows(p1g_10gb=3))
        await at.settled()
        assert at.words.patched == []
        at.served(SMALL).service.streams = 1
        await at.settled()
        await at.node.until(lambda: at.words.patched)
        assert at.words.patched[0] == {SMALL: 7}
        at.served(SMALL).service.streams = 0


async def test_stop_withdraws_all_devices_and_waits_for_the_node_status() -> None:
    async with running() as at:
        at.plugin.node_changed(shows(p1g_10gb=7))
        at.served(SMALL).service.streams = 1
        await at.plugin.allocate([devices(5)])
        draining = asyncio.create_task(at.plugin.drain())
        await at.node.until(lambda: {SMALL: 0} in at.words.patched)
        assert not draining.done()
        assert at.listed(SMALL) == 7
        at.plugin.node_changed(shows(p1g_10gb=0))
        await draining
        assert devices(5)[0].id in at.served(SMALL).service.ids
        at.served(SMALL).service.streams = 0


async def test_withdrawn_devices_stay_known_to_the_kubelet() -> None:
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


async def test_a_device_that_is_lost_stays_taken_and_its_file_goes() -> None:
    """A kubelet that has just started asks nobody before it starts a container, which must not get what is lost."""
    async with running("h100-80gb:2") as at:
        both = devices(0, 1, resource=LARGE)
        pod = Pod(namespace="team-a", name="train", uid="u")
        lease = (await at.node.acquire("7g.80gb", "7g.80gb", kubelet_devices=both, holder=Holder(), pod=pod)).lease
        injector = at.plugin._injector
        assert injector is not None
        await injector.inject(both, dict.fromkeys(both, lease))
        files = injector._folder.names
        await at.settled()
        assert len(files()) == 2
        at.node.simulator.lose_gpu(0)
        await at.node.look()
        await at.settled()
        await at.node.until(lambda: len(files()) == 1)
        assert await at.numbers(LARGE) == [2], "the kubelet has given both away"
        at.node.simulator.lose_gpu(1)
        await at.node.look()
        await at.settled()
        await at.node.until(lambda: not files())
        assert await at.numbers(LARGE) == [0]


async def test_metrics_cover_each_resource() -> None:
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


async def test_resource_of_another_plugin_is_not_served(at: Running) -> None:
    with tempfile.TemporaryDirectory() as name:
        paths = KubeletPaths(Path(name))
        others, told, lost = Others(), list[str](), list[ResourceService]()
        registering = Registration(paths=paths, kubelet=others, on_lost=lost.append, on_taken=told.append)
        service = at.served(SMALL).service
        registering.add(service)
        offer: Offer = registering.offers[SMALL]
        await registering.check()
        sockets: list[object] = [offer.socket]
        assert sockets == [None], "there is no kubelet, and nothing happens"
        paths.plugins.mkdir()
        paths.registration.touch()  # a kubelet that does not answer
        await registering.check()
        assert offer.failures == 1
        assert "cannot register nvidia.com/mig-1g.10gb" in offer.message
        assert offer.socket is not None
        assert offer.socket.is_there
        offer.retry_at = 0.0
        others.devices = (KubeletDevice(resource=SMALL, id="GPU-1"), KubeletDevice(resource=LARGE, id="mig-agent-0"))
        await registering.check()
        taken = [offer.taken]
        (words,) = told
        assert words.startswith("cannot serve nvidia.com/mig-1g.10gb: another device plugin on this node offers 1")
        offer.retry_at = 0.0
        await registering.check()
        assert len(told) == 1, "once"
        others.devices = ()
        offer.retry_at = 0.0
        await registering.check()
        taken.append(offer.taken)
        assert taken == [True, False]
        assert offer.failures == 2, "it is tried again"
        await registering.close(0.0)

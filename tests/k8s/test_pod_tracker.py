"""Following pods, with the real manager: what the API server shows, answers or leaves open, and what comes of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from mig_agent.adapters.kubeapi import InformerSubscription, KubeApiError, PodFacts, PodName
from mig_agent.core.events import EventKind
from mig_agent.core.model import Holder, Lease, LeaseId
from mig_agent.core.owner import KubeletDevice, Owner, Pod
from mig_agent.frontends.kubernetes.pods import tracker
from mig_agent.frontends.kubernetes.pods.tracker import MOST_QUERIES, PodTracker
from mig_agent.simulator import STATE_FILE
from support.clock import VirtualClock
from support.engine import ADMIN, Node, engine

NODE = "n1"
RESOURCE = "nvidia.com/mig-1g.5gb"
ARRIVAL = 600.0


@dataclass
class Server:
    """Pods as an API server has them; a watch shows them when it is told to."""

    pods: dict[PodName, PodFacts] = field(default_factory=dict)
    down: bool = False
    asked: list[PodName] = field(default_factory=list)
    watches: list[InformerSubscription] = field(default_factory=list)
    closed: int = 0
    before_answer: Callable[[], None] = lambda: None

    async def pod(self, namespace: str, name: str) -> PodFacts | None:
        self.asked.append((namespace, name))
        self.before_answer()
        await asyncio.sleep(0)
        if self.down:
            raise KubeApiError("cannot read it: nobody answers")
        return self.pods.get((namespace, name))

    def follow_pods(
        self, on_change: Callable[[Mapping[PodName, PodFacts]], None], on_lost: Callable[[str], None]
    ) -> InformerSubscription:
        def left(following: InformerSubscription) -> None:
            self.closed += 1
            self.watches.remove(following)

        following = InformerSubscription(on_change, on_lost, left)
        self.watches.append(following)
        return following

    def put(self, name: str, **fields: Any) -> Pod:
        """A pod of the namespace `a`; bound to nothing unless said."""
        pod = Pod(namespace="a", name=name, uid=fields.pop("uid", f"u-{name}"))
        facts = {"phase": "Pending", "node": "", "resources": {RESOURCE: 1}, **fields}
        self.pods[pod.namespace, pod.name] = PodFacts(namespace="a", name=name, uid=pod.uid, **facts)
        return pod

    def bind(self, name: str, node: str = NODE) -> None:
        self.pods["a", name] = replace(self.pods["a", name], node=node)

    def show(self) -> None:
        """Show the pods that are bound to the node to whoever watches."""
        for watch in self.watches:
            watch.change({name: facts for name, facts in self.pods.items() if facts.node == NODE})

    def refuse(self) -> None:
        for watch in self.watches:
            watch.lost("cannot watch: pods is forbidden")


@dataclass
class World:
    """A node with leases for pods."""

    node: Node
    server: Server
    follower: PodTracker

    async def promise(self, pod: Pod, *, ttl: float | None = None) -> Lease:
        """A lease that a scheduler took for a pod."""
        granted = await self.node.acquire("1g.5gb", holder=Holder(tenant="a"), pod=pod, ttl_seconds=ttl)
        return granted.lease

    def lease(self, lease: Lease) -> Lease:
        return self.node.leases[lease.id]

    async def arrived(self, lease: Lease) -> None:
        await self.node.until(lambda: self.lease(lease).owner.is_bound)

    async def ended(self, lease: Lease) -> str:
        """Return why the lease ended."""
        await self.node.until(lambda: lease.id not in self.node.leases)
        return next(each.message for each in self.node.told(EventKind.LEASE_ENDED) if each.lease == lease.id)

    async def watched(self) -> None:
        await self.node.until(lambda: self.server.watches)

    async def asked_of(self, name: str, times: int = 1) -> None:
        await self.node.until(lambda: self.server.asked.count(("a", name)) >= times)


@asynccontextmanager
async def world(
    folder: Path,
    server: Server | None = None,
    *,
    alone: bool = False,
    clock: Callable[[], float] | None = None,
) -> AsyncIterator[World]:
    gpus = "" if (folder / STATE_FILE).exists() else "a100-40gb:1"
    async with engine(folder, gpus, follows_pods=True) as node:
        there = server or Server()
        following = PodTracker(
            node.manager,
            there,
            node=NODE,
            arrival_seconds=ARRIVAL,
            alone=alone,
            now=clock or node.clock.now,
        )
        following.start()
        try:
            yield World(node, there, following)
        finally:
            await following.close()


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the waits that take seconds elsewhere."""
    for name, value in {
        "SETTLE_SECONDS": 0.001,
        "REST_SECONDS": 0.01,
        "QUERY_AGAIN_SECONDS": (0.01, 0.05),
        "RETRY_SECONDS": (0.01, 0.05),
    }.items():
        monkeypatch.setattr(tracker, name, value)


async def test_a_pod_that_is_bound_here_has_its_lease_and_ends_it(tmp_path: Path) -> None:
    async with world(tmp_path) as at:
        pod = at.server.put("x")
        lease = await at.promise(pod, ttl=60)
        await at.watched()
        at.server.show()
        at.server.bind("x")
        at.server.show()
        await at.arrived(lease)
        assert at.lease(lease).expires_at is None
        at.server.put("x", node=NODE, phase="Succeeded")
        at.server.show()
        assert "its pod has ended" in await at.ended(lease)


async def test_pod_that_ended_unobserved_is_queried_first(tmp_path: Path) -> None:
    async with world(tmp_path) as at:
        pod = at.server.put("x", node=NODE)
        lease = await at.promise(pod, ttl=60)
        await at.watched()
        at.server.show()
        await at.arrived(lease)
        at.server.asked.clear()
        hidden = at.server.pods.pop(("a", "x"))
        at.server.show()
        at.server.pods["a", "x"] = hidden
        await at.asked_of("x", 2)
        assert lease.id in at.node.leases, "the watch was behind: the pod is there"
        del at.server.pods["a", "x"]
        assert "its pod is gone" in await at.ended(lease)


async def test_silent_api_server_ends_no_lease(tmp_path: Path) -> None:
    async with world(tmp_path) as at:
        pod = at.server.put("x", node=NODE)
        lease, kept = await at.promise(pod), await at.promise(at.server.put("y"))
        await at.watched()
        at.server.show()
        await at.arrived(lease)
        at.server.down = True
        at.server.pods.clear()
        at.server.refuse()
        at.server.show()
        await at.asked_of("x", 3)
        at.node.clock.advance(10 * ARRIVAL)
        await at.asked_of("y", 3)
        assert set(at.node.leases) == {lease.id, kept.id}
        at.server.down = False
        await at.ended(lease)
        await at.ended(kept)


async def test_without_the_right_to_watch_pods_are_asked_for(tmp_path: Path) -> None:
    async with world(tmp_path) as at:
        lease = await at.promise(at.server.put("x"), ttl=60)
        await at.watched()
        at.server.refuse()
        await at.asked_of("x")
        at.server.bind("x")
        await at.arrived(lease)
        at.server.put("x", node=NODE, phase="Failed")
        assert "its pod has ended" in await at.ended(lease)


@pytest.mark.parametrize(
    ("fields", "words"),
    [({"node": "n2"}, "its pod is on node n2"), ({"phase": "Failed"}, "has ended"), ({"uid": "u-9"}, "is gone")],
)
async def test_lease_without_deadline_ends_if_its_pod_is_never_bound(
    tmp_path: Path, fields: dict[str, str], words: str
) -> None:
    async with world(tmp_path) as at:
        lease = await at.promise(at.server.put("x"))
        await at.watched()
        at.server.show()
        await at.asked_of("x")
        assert at.lease(lease).owner.is_reserved
        at.server.put("x", **fields)
        assert words in await at.ended(lease)


async def test_unbound_lease_is_kept_for_the_configured_time(tmp_path: Path) -> None:
    async with world(tmp_path) as at:
        lease = await at.promise(at.server.put("x"))
        await at.watched()
        at.server.show()
        at.node.clock.advance(ARRIVAL - 1)
        await at.asked_of("x", 3)
        assert at.lease(lease).owner.is_reserved
        at.node.clock.advance(1)
        assert "has not come in 10m" in await at.ended(lease)


async def test_renewal_restarts_the_wait_for_the_pod(tmp_path: Path) -> None:
    """Its scheduler, which had no answer to its binding, binds it a moment later."""
    async with world(tmp_path) as at:
        lease = await at.promise(at.server.put("x"))
        token = at.node.manager._context.tokens.token(lease.id)
        await at.watched()
        at.server.show()
        at.node.clock.advance(ARRIVAL - 1)
        await at.node.manager.renew(lease.id, token, None, ADMIN)
        at.node.clock.advance(ARRIVAL - 1)
        await at.asked_of("x", len(at.server.asked) + 3)
        assert at.lease(lease).owner.is_reserved
        at.node.clock.advance(1)
        assert "has not come in 10m" in await at.ended(lease)


async def test_lease_being_renewed_is_not_overdue(tmp_path: Path) -> None:
    async with world(tmp_path) as at:
        lease = await at.promise(at.server.put("x"))
        token = at.node.manager._context.tokens.token(lease.id)
        await at.watched()
        at.server.show()
        confirming: list[asyncio.Task[Lease]] = []

        def answered() -> None:
            """The API server says that the pod is unbound, while the ledger is at it."""
            if not confirming:
                at.node.clock.advance(ARRIVAL)
                confirming.append(at.node.start(at.node.manager.renew(lease.id, token, None, ADMIN)))

        at.server.before_answer = answered
        await at.node.until(lambda: confirming)
        await confirming[0]
        await at.asked_of("x", len(at.server.asked) + 3)
        assert at.lease(lease).owner.is_reserved


async def test_restarted_agent_restarts_the_wait_for_the_pod(tmp_path: Path) -> None:
    server = Server()
    async with world(tmp_path, server) as at:
        lease = await at.promise(server.put("x"))
    clock = VirtualClock()
    clock.advance(2 * ARRIVAL)
    async with world(tmp_path, server, clock=clock.now) as at:
        await at.watched()
        server.show()
        await at.asked_of("x", len(server.asked) + 3)
        assert at.lease(lease).owner.is_reserved
        clock.advance(ARRIVAL)
        await at.ended(lease)


async def test_deadline_ends_unbound_lease_without_the_api_server(tmp_path: Path) -> None:
    async with world(tmp_path) as at:
        lease = await at.promise(at.server.put("x"), ttl=60)
        await at.watched()
        at.server.show()
        at.node.clock.advance(61)
        assert "time is over" in await at.ended(lease)


async def test_requests_of_pods_are_known_before_they_are_bound(tmp_path: Path) -> None:
    async with world(tmp_path) as at:
        told: list[int] = []
        at.follower.on_change.append(lambda: told.append(1))
        pod = at.server.put("x", resources={RESOURCE: 2})
        assert at.follower.asked(pod) is None
        await at.promise(pod, ttl=60)
        await at.node.until(lambda: at.follower.asked(pod) == {RESOURCE: 2})
        assert told
        assert at.follower.asked(replace(pod, uid="u-9")) is None, "that is another pod"
        asked = len(at.server.asked)
        await at.watched()
        at.server.show()
        at.server.bind("x")
        at.server.show()
        await at.node.until(lambda: all(each.owner.is_bound for each in at.node.leases.values()))
        assert len(at.server.asked) == asked, "who shows in the watch, and is known, is not asked for"


async def test_queries_for_many_leases_are_spread_over_scans(tmp_path: Path) -> None:
    async with world(tmp_path) as at:
        pods = [at.server.put(f"x{number}") for number in range(7)]
        for pod in pods:
            await at.promise(pod)
        assert len(pods) > MOST_QUERIES
        await at.watched()
        at.server.show()
        for pod in pods:
            await at.asked_of(pod.name, 2)


async def test_no_watch_without_leases_of_pods(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracker, "LINGER_SECONDS", 0.05)
    async with world(tmp_path) as at:
        await at.node.acquire("1g.5gb")
        lease = await at.promise(at.server.put("x"))
        await at.watched()
        assert len(at.server.watches) == 1
        await at.node.manager.owner_ended(lease.id, "it is over")
        await at.node.until(lambda: not at.server.watches)
        await at.promise(at.server.put("y"))
        await at.watched()


@pytest.mark.parametrize("alone", [True, False])
async def test_leases_with_kubelet_devices_are_left_to_the_device_plugin(tmp_path: Path, *, alone: bool) -> None:
    async with world(tmp_path, alone=alone) as at:
        pod = at.server.put("x", node=NODE, phase="Failed")
        device = KubeletDevice(resource=RESOURCE, id="mig-agent-0")
        served = await at.node.acquire("1g.5gb", holder=Holder(), pod=pod, kubelet_devices=(device,))
        other = await at.promise(at.server.put("y", node=NODE))
        await at.watched()
        at.server.show()
        await at.arrived(other)
        if alone:
            assert "its pod has ended" in await at.ended(served.lease)
        else:
            assert served.lease.id in at.node.leases


async def test_change_is_repeated_until_the_ledger_accepts_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mig_agent.core.errors import Reason, refuse  # noqa: PLC0415 -- of this test alone

    async with world(tmp_path) as at:
        record = at.node.manager.bind
        refused: list[LeaseId] = []

        async def once_not(lease: LeaseId, owner: Owner) -> Lease:
            if len(refused) < 2:
                refused.append(lease)
                raise refuse(Reason.LEDGER_FAILED, "cannot give it: the disk is full")
            return await record(lease, owner)

        monkeypatch.setattr(at.node.manager, "bind", once_not)
        lease = await at.promise(at.server.put("x", node=NODE), ttl=60)
        await at.watched()
        at.server.show()
        await at.arrived(lease)
        assert refused == [lease.id, lease.id]


async def test_restarted_agent_continues_from_the_ledger(tmp_path: Path) -> None:
    server = Server()
    async with world(tmp_path, server) as at:
        there, gone = server.put("there", node=NODE), server.put("gone", node=NODE)
        leases = [await at.promise(there), await at.promise(gone)]
        await at.watched()
        server.show()
        for lease in leases:
            await at.arrived(lease)
    assert not server.watches
    del server.pods["a", "gone"]
    async with world(tmp_path, server) as at:
        await at.watched()
        server.show()
        assert "its pod is gone" in await at.ended(leases[1])
        assert at.lease(leases[0]).owner.is_bound

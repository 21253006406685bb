"""Random histories of pods for which leases are taken, and of others: nobody gets what was taken for another pod."""

from __future__ import annotations

import asyncio
import itertools
import os
import tempfile
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from mig_agent.core.errors import RefusedError
from mig_agent.core.model import Holder, InstanceState, Lease, LeaseId
from mig_agent.core.owner import KubeletDevice, Pod
from mig_agent.engine.callers import Caller
from mig_agent.engine.results import Granted
from mig_agent.frontends.kubernetes.reservations import (
    count_reserved,
    leases_for,
    match_slots,
    reserved_slots,
    slots_of,
)
from support.clock import VirtualClock
from support.engine import PATIENCE_SECONDS, killed
from support.owners import bound, devices_of, pod_of
from support.plugged import Plugged, Words, plugged

EXAMPLES = int(os.environ.get("HISTORIES", "15"))
"""More of them by hand: HISTORIES=500."""
SCHEDULER = Caller(name="volcano", scheduler=True)
ONE, TWO, MEMORY = "nvidia.com/mig-1g.10gb", "nvidia.com/mig-2g.20gb", "mig-agent.io/memory-10g"
ASKS = ((ONE,), (TWO,), (MEMORY,), (ONE, MEMORY), (TWO, ONE), (ONE, ONE))
TAKES = (("1g.10gb",), ("2g.20gb",), ("3g.40gb",), ("1g.10gb", "1g.10gb"), ("2g.20gb", "1g.10gb"))
FITTING = {ONE: "1g.10gb", TWO: "2g.20gb", MEMORY: "2g.20gb"}
TTL_SECONDS = 60.0
AT_ONCE_SECONDS = 0.05
"""For a container that may have to wait for its place."""

NUMBER = st.integers(0, 100)
STEPS = {
    "pod": 2,
    "take": 3,
    "take_what_fits": 4,
    "namesake": 1,
    "bind": 4,
    "start": 4,
    "start_all": 1,
    "arrive": 2,
    "release": 1,
    "renew": 1,
    "pass_time": 1,
    "lapse_at_start": 1,
    "end": 1,
    "kill": 1,
}
"""With how often each comes."""
STEP = st.tuples(st.sampled_from([name for name, weight in STEPS.items() for _ in range(weight)]), NUMBER, NUMBER)


@dataclass
class Each:
    """A pod of the history."""

    pod: Pod
    asks: tuple[str, ...]
    devices: tuple[KubeletDevice, ...] = ()
    """As the kubelet gave them; none before it is bound."""
    runs: bool = False


@dataclass
class History:
    """The model: what the test itself knows must be so."""

    at: Plugged
    pods: dict[str, Each] = field(default_factory=dict)
    taken: dict[LeaseId, Granted] = field(default_factory=dict)
    numbers: itertools.count[int] = field(default_factory=lambda: itertools.count(1))

    async def step(self, name: str, number: int, other: int) -> bool:
        """Return whether the agent is to be killed after the step."""
        if name == "kill":
            return True
        action: Callable[[int, int], Coroutine[Any, Any, None]] = getattr(self, name)
        await action(number, other)
        await self.quiet()
        self.check()
        return False

    # What a scheduler does

    async def pod(self, number: int, _other: int) -> None:
        if len(self.pods) < 5:
            name = f"pod-{next(self.numbers)}"
            uid = f"uid-{name}"
            self.pods[name] = Each(Pod(namespace="team-a", name=name, uid=uid), ASKS[number % len(ASKS)])

    async def take(self, number: int, other: int) -> None:
        each = self.one(number)
        if each is not None:
            await self.take_for(each, TAKES[other % len(TAKES)], other)

    async def take_what_fits(self, number: int, other: int) -> None:
        each = self.one(number)
        if each is not None:
            await self.take_for(each, tuple(FITTING[resource] for resource in each.asks[: 1 + other % 2]), other)

    async def take_for(self, each: Each, wants: tuple[str, ...], other: int) -> None:
        holder = Holder(tenant="namespace team-a")
        ttl = None if other % 4 == 0 else TTL_SECONDS
        request = self.at.node.request(*wants, holder=holder, pod=each.pod, ttl_seconds=ttl)
        try:
            granted = await self.at.node.manager.acquire(request, SCHEDULER)
        except RefusedError:
            return
        self.at.node.manager.delivered(granted.lease.id)
        self.taken[granted.lease.id] = granted

    async def namesake(self, number: int, _other: int) -> None:
        """Something is taken for a pod of the same name, which is yet to come or long gone."""
        each = self.one(number)
        if each is not None:
            other = Each(Pod(namespace="team-a", name=each.pod.name, uid="another"), each.asks)
            request = self.at.node.request("1g.10gb", holder=Holder(), pod=other.pod, ttl_seconds=TTL_SECONDS)
            try:
                granted = await self.at.node.manager.acquire(request, SCHEDULER)
            except RefusedError:
                return
            self.at.node.manager.delivered(granted.lease.id)

    async def release(self, number: int, _other: int) -> None:
        lease = self.lease(number)
        if lease is not None and (granted := self.taken.get(lease.id)) is not None:
            try:
                await self.at.node.manager.release(lease.id, granted.token, SCHEDULER)
            except RefusedError:
                assert lease.owner.is_bound, "what is promised is its scheduler's"
            else:
                assert lease.owner.is_reserved, "what is a pod's ends with it"

    async def renew(self, number: int, other: int) -> None:
        lease = self.lease(number)
        if lease is not None and (granted := self.taken.get(lease.id)) is not None and lease.owner.is_reserved:
            ttl = None if other % 3 == 0 else TTL_SECONDS
            await self.at.node.manager.renew(lease.id, granted.token, ttl, SCHEDULER)

    # What the kubelet and the API server do

    async def bind(self, number: int, other: int) -> None:
        each = self.one(number)
        if each is None or each.devices:
            return
        taken = {device for one in self.pods.values() for device in one.devices}
        devices = []
        for resource in each.asks:
            free = (KubeletDevice(resource=resource, id=f"mig-agent-{index}") for index in itertools.count(other % 7))
            devices.append(next(device for device in free if device not in taken and device not in devices))
        each.devices = tuple(devices)
        uid = each.pod.uid if other % 5 else ""
        await self.at.admit(each.pod.name, *devices, uid=uid or f"uid-{each.pod.name}")
        if not uid:  # the kubelet's checkpoint cannot be read
            self.at.words.recorded = tuple(one for one in self.at.words.recorded if not set(one.devices) & set(devices))

    async def arrive(self, number: int, _other: int) -> None:
        lease = self.lease(number)
        if lease is None:
            return
        each = self.pods.get(pod_of(lease).name)
        if each is not None and each.devices and each.pod == pod_of(lease):
            await self.at.node.manager.bind(lease.id, bound(each.pod))

    async def start(self, number: int, _other: int) -> None:
        each = self.one(number)
        if each is not None and each.devices:
            await self.begin(each)

    async def start_all(self, _number: int, _other: int) -> None:
        await asyncio.gather(*(self.begin(each) for each in tuple(self.pods.values()) if each.devices))

    async def lapse_at_start(self, number: int, other: int) -> None:
        """Deadlines come while containers start."""
        each = self.one(number)
        if each is None or not each.devices:
            return
        starting = asyncio.get_running_loop().create_task(self.begin(each, expects=False))
        for _ in range(other % 20):
            await asyncio.sleep(0)
        self.at.node.clock.advance(TTL_SECONDS + 1)
        await starting

    async def begin(self, each: Each, *, expects: bool = True) -> None:
        """All of its containers; by resource, as the kubelet does."""
        due = self.due(each) if expects and not each.runs else {}
        by_resource: dict[str, list[KubeletDevice]] = {device.resource: [] for device in each.devices}
        for device in each.devices:
            by_resource[device.resource].append(device)
        try:
            for devices in by_resource.values():
                await self.at.start(*devices, seconds=AT_ONCE_SECONDS)
        except RefusedError:
            assert not each.runs, "what runs is never refused its own"
            return
        each.runs = True
        for lease in due:
            assert set(devices_of(self.at.node.leases[lease])) <= set(each.devices), "it got what was taken for it"
            assert devices_of(self.at.node.leases[lease])

    def due(self, each: Each) -> dict[LeaseId, Lease]:
        """Return the leases that were reserved for the pod and fit its devices."""
        view = self.at.node.manager.snapshot.view
        standing = {one for lease in view.leases.values() for one in devices_of(lease)}
        missing = [one for one in each.devices if one not in standing]
        leases = [lease for lease in leases_for(view, each.pod) if pod_of(lease) == each.pod]
        layouts = {uuid: gpu.layout for uuid, gpu in view.by_uuid.items()}
        wants = [self.at.starting._resources[one.resource].want for one in missing]
        fits = match_slots([slots_of(lease, view) for lease in leases], wants, layouts)
        return {lease.id: lease for lease, fit in zip(leases, fits, strict=True) if fit}

    async def end(self, number: int, _other: int) -> None:
        each = self.one(number)
        if each is None:
            return
        del self.pods[each.pod.name]
        if each.devices:
            self.at.words.drop(each.pod.name)
            self.at.words.recorded = tuple(
                one for one in self.at.words.recorded if not set(one.devices) & set(each.devices)
            )
        for lease in self.at.node.leases.values():  # as who follows the pods does
            if pod_of(lease) == each.pod and not devices_of(lease):
                await self.at.node.manager.owner_ended(lease.id, "its pod has ended")
        await self.at.following.poll()
        # What was being made for it may be leased all the same, and is seen to be nobody's then.
        await self.quiet()
        await self.at.following.poll()
        await self.at.following.poll()

    async def pass_time(self, number: int, _other: int) -> None:
        self.at.node.clock.advance(float(number))

    async def at_rest(self) -> None:
        """Everybody goes; what nobody confirmed has lapsed."""
        for _ in tuple(self.pods):
            await self.end(0, 0)
        self.at.node.clock.advance(TTL_SECONDS + 1)
        await self.quiet()
        assert all(lease.owner.is_reserved and lease.expires_at is None for lease in self.at.node.leases.values())
        assert not self.at.table.acquisitions

    # What must be so

    async def quiet(self) -> None:
        """Returns when nothing is under way but what waits in the queue."""
        manager = self.at.node.manager
        context = manager._context
        while True:
            queued = {f"acquire-{each.request_id}" for each in manager.snapshot.queue}
            running = [task for task in context.tasks._running if task.get_name() not in queued]
            if not running:
                break
            await asyncio.wait(running, timeout=PATIENCE_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        await context.journal.commit(())

    def one(self, number: int) -> Each | None:
        return list(self.pods.values())[number % len(self.pods)] if self.pods else None

    def lease(self, number: int) -> Lease | None:
        leases = list(self.at.node.leases.values())
        return leases[number % len(leases)] if leases else None

    def check(self) -> None:
        view = self.at.node.manager.snapshot.view
        leases = list(view.leases.values())
        given = Counter(generation for lease in leases for generation in lease.instances)
        assert all(count == 1 for count in given.values()), "no instance is given twice"
        assert set(given) == {each.generation for each in self.at.node.instances(InstanceState.LEASED)}
        devices = Counter(device for lease in leases for device in devices_of(lease))
        assert all(count == 1 for count in devices.values()), "one instance for each of the kubelet's devices"
        for lease in leases:
            if devices_of(lease):
                each = self.pods[pod_of(lease).name]
                # What the kubelet asked for has no UID where its checkpoint could not be read.
                assert pod_of(lease) == (each.pod if pod_of(lease).uid else replace(each.pod, uid=""))
                assert pod_of(lease).uid or lease.id not in self.taken
                assert set(devices_of(lease)) <= set(each.devices)
                assert lease.expires_at is None
            if lease.expires_at is not None:
                assert lease.expires_at > self.at.node.clock.now(), "deadlines are kept"
        for each in self.pods.values():
            assert not each.runs or set(each.devices) <= set(devices), "what runs keeps its devices"
        self.check_counts(leases)

    def check_counts(self, leases: list[Lease]) -> None:
        view = self.at.node.manager.snapshot.view
        wants = {name: resource.want for name, resource in self.at.starting._resources.items()}
        asks = {each.pod: Counter(each.asks) for each in self.pods.values()}
        counts = count_reserved(reserved_slots(view), view, wants, lambda pod: asks.get(pod, Counter()))
        open_ = [lease for lease in leases if not devices_of(lease)]
        assert sum(counts.values()) <= sum(len(lease.instances) for lease in open_)
        has = Counter(device.resource for lease in leases for device in devices_of(lease))
        everything = sum(asks.values(), Counter[str]())
        assert not Counter(counts) + has - everything, "no pod is counted with more than it asks for"


async def _live(folder: Path, steps: list[tuple[str, int, int]]) -> None:
    words, left = Words(), iter(steps)
    history: History | None = None
    gpus, over = "h100-80gb:1", False
    clock = VirtualClock()
    while not over:
        async with plugged(folder, gpus, words=words, follows_pods=True, clock=clock) as at:
            gpus = ""
            history = History(at) if history is None else history
            history.at = at
            if history.pods:
                await at.following.poll()
                history.check()
            for step in left:
                if await history.step(*step):
                    await killed(at.node)
                    break
            else:
                over = True
                await history.at_rest()


@settings(max_examples=EXAMPLES, deadline=None)
@given(steps=st.lists(STEP, min_size=20, max_size=40))
def test_reservations_are_bound_only_to_their_own_pods(steps: list[tuple[str, int, int]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(_live(Path(folder), steps))

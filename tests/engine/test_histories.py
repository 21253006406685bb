"""Long random histories through the real manager, adapter and pynvml over simulated GPUs of every model.

A history is a list of steps drawn by hypothesis: requests, releases, workloads, other people's instances, failures of
the driver, restarts, kills and reboots. After each step the invariants are checked against the simulator's own state
and tables, and at the end, when everything has come to rest, the ledger against the hardware.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mig_agent.adapters.ledger.store import LEDGER_FILE, Ledger
from mig_agent.core.errors import RefusedError
from mig_agent.core.events import Event, EventKind
from mig_agent.core.model import Instance, InstanceState, Request
from mig_agent.engine.results import Granted
from mig_agent.simulator import MODELS, Code, SimulatorError
from mig_agent.simulator.models import GpuModel, GpuProfile
from support.engine import ADMIN, ANYBODY, CREATE, CREATE_COMPUTE, DESTROY, DESTROY_COMPUTE, Node, killed, start
from support.figures import Figure

WITH_MIG = [key for key, model in MODELS.items() if model.can_mig]
MIXED = ["a100-40gb,h100-80gb", "a30,h200-141gb:2", "rtx-pro-6000,a100-80gb", "h100-80gb:3"]
EXAMPLES = int(os.environ.get("HISTORIES", "6"))
"""For each model; more of them by hand: HISTORIES=500."""
STEPS = 30
STEPS_DONE = "steps of random histories in one process"

CALLS = [
    CREATE,
    CREATE_COMPUTE,
    DESTROY,
    DESTROY_COMPUTE,
    "nvmlDeviceGetComputeRunningProcesses_v3",
    "nvmlDeviceGetGpuInstanceById",
    "nvmlGpuInstanceGetInfo",
    "nvmlDeviceGetGpuInstances",
    "nvmlDeviceGetMigDeviceHandleByIndex",
    "nvmlDeviceGetHandleByUUID",
    "nvmlDeviceGetMigMode",
    "nvmlGpuInstanceGetComputeInstances",
]
CODES = [Code.INSUFFICIENT_RESOURCES, Code.IN_USE, Code.UNKNOWN, Code.NOT_FOUND, Code.INVALID_ARGUMENT, Code.TIMEOUT]

NUMBER = st.integers(0, 1000)
STEP = st.one_of(
    *(st.tuples(st.just("acquire"), NUMBER, st.integers(1, 3)) for _ in range(3)),
    *(st.tuples(st.just("acquire_at_once"), NUMBER, st.integers(2, 5)) for _ in range(2)),
    st.tuples(st.just("release"), NUMBER, st.just(0)),
    st.tuples(st.just("release"), NUMBER, st.just(0)),
    st.tuples(st.just("occupy"), NUMBER, st.just(0)),
    st.tuples(st.just("hold"), NUMBER, st.just(0)),
    st.tuples(st.just("vacate"), NUMBER, st.just(0)),
    st.tuples(st.just("create_foreign"), NUMBER, st.integers(0, 1)),
    st.tuples(st.just("destroy_foreign"), NUMBER, st.just(0)),
    st.tuples(st.just("fail"), NUMBER, NUMBER),
    st.tuples(st.just("pass_time"), st.integers(0, 100), st.just(0)),
    st.tuples(st.just("reclaim"), st.just(0), st.just(0)),
    st.tuples(st.just("restart"), st.just(0), st.just(0)),
    st.tuples(st.just("kill"), NUMBER, st.integers(0, 30)),
    st.tuples(st.just("go_away"), NUMBER, st.integers(0, 30)),
    st.tuples(st.just("pause"), NUMBER, st.integers(0, 30)),
    st.tuples(st.just("reboot"), st.just(0), st.just(0)),
)


@dataclass
class History:
    """One history: the engine, and what the test itself knows must be so."""

    folder: Path
    node: Node
    leases: dict[str, Granted] = field(default_factory=dict)
    requests: dict[str, Request] = field(default_factory=dict)
    pids: list[int] = field(default_factory=list)
    foreign: list[str] = field(default_factory=list)
    cut_short: bool = False
    """Whether a request ended in the middle in this step."""
    counted_beside: frozenset[EventKind] = frozenset()
    """Events of this step whose instances a plan may have counted, though they are not there at its end."""
    told: list[Event] = field(default_factory=list)
    """Since the last step began."""

    @property
    def model(self) -> list[GpuModel]:
        return [MODELS[gpu["model"]] for gpu in self.node.simulator.machine()["gpus"]]

    # Steps

    async def step(self, name: str, number: int, other: int) -> None:
        self.told.clear()
        # What had to wait while the agent was paused is planned anew, for what it finds then.
        self.cut_short = name in {"kill", "go_away", "pause"}
        self.counted_beside = frozenset({EventKind.INSTANCE_DESTROYED}) if name == "acquire_at_once" else frozenset()
        before, foreign = self.node.simulator.machine(), frozenset(self.foreign)
        action: Callable[[int, int], Coroutine[Any, Any, None]] = getattr(self, name)
        await action(number, other)
        await self.node.at_rest()
        if name != "reboot":
            # What is foreign only now may have the number of one of ours that went in this step.
            foreign &= set(self.foreign)
            self.check_nothing_in_use_was_destroyed(before, foreign, may_lose=name == "destroy_foreign")
        self.check_destroyed(reclaimed=name == "reclaim")
        self.check_view()

    async def acquire(self, number: int, devices: int) -> None:
        request = self.request(number, devices)
        try:
            granted = await self.node.manager.acquire(request, ANYBODY)
        except RefusedError:
            return
        self.granted(request, granted)

    async def acquire_at_once(self, number: int, count: int) -> None:
        await asyncio.gather(*(self.acquire(number + each, 1) for each in range(count)))

    async def release(self, number: int, _other: int) -> None:
        if self.leases:
            lease = sorted(self.leases)[number % len(self.leases)]
            await self.node.release(self.leases.pop(lease))

    async def occupy(self, number: int, _other: int) -> None:
        self.use(number, self.node.simulator.occupy)

    async def hold(self, number: int, _other: int) -> None:
        self.use(number, self.node.simulator.hold)

    async def vacate(self, number: int, _other: int) -> None:
        if self.pids:
            try:
                self.node.simulator.vacate(self.pids.pop(number % len(self.pids)))
            except SimulatorError:
                return  # its instance went with a reboot

    async def create_foreign(self, number: int, with_compute: int) -> None:
        gpu = number % len(self.model)
        profiles = self.model[gpu].profiles
        profile = profiles[number % len(profiles)]
        try:
            made, _ = self.node.simulator.create_foreign(gpu, profile.name, with_compute=bool(with_compute))
        except SimulatorError:
            return  # there is no room
        self.foreign.append(f"{gpu}/{made}")

    async def destroy_foreign(self, number: int, _other: int) -> None:
        """Somebody destroys an instance: a foreign one, or ours behind our back."""
        there = [
            f"{index}/{instance['id']}"
            for index, gpu in enumerate(self.node.simulator.machine()["gpus"])
            for instance in gpu["instances"]
        ]
        if not there:
            return
        where = there[number % len(there)]
        try:
            self.node.simulator.destroy_foreign(where)
        except SimulatorError:
            return  # somebody is on it
        if where in self.foreign:
            self.foreign.remove(where)
        for lease, granted in tuple(self.leases.items()):
            if any(f"{each.gpu_index}/{each.gpu_instance_id}" == where for each in granted.devices):
                del self.leases[lease]
        self.node.simulator.clear()  # a look that fails would notice later
        await self.node.look()

    async def fail(self, number: int, other: int) -> None:
        self.node.simulator.fail(CALLS[number % len(CALLS)], CODES[other % len(CODES)], nth=1 + number % 3)

    async def pass_time(self, seconds: int, _other: int) -> None:
        self.node.clock.advance(seconds)
        await self.node.at_rest()
        await self.node.look()

    async def reclaim(self, _number: int, _other: int) -> None:
        await self.node.manager.reclaim((), ADMIN)

    async def restart(self, _number: int, _other: int) -> None:
        await self.node.manager.close()
        await self.begin_again()

    async def kill(self, number: int, after: int) -> None:
        """The agent is killed at some point of a request, and the client asks the next agent again."""
        request = self.request(number, 1 + number % 2)
        task = self.node.start(self.node.manager.acquire(request, ANYBODY))
        for _ in range(after):
            await asyncio.sleep(0 if after % 2 else 0.0005)
        await killed(self.node)
        task.cancel()
        (answer,) = await asyncio.gather(task, return_exceptions=True)
        await self.begin_again()
        if isinstance(answer, Granted):
            self.granted(request, answer)
        unanswered = set(self.node.leases) - set(self.leases)
        assert len(unanswered) <= 1
        try:
            again = await self.node.manager.acquire(request, ANYBODY)
        except RefusedError:
            assert not unanswered
            assert not isinstance(answer, Granted)
            return
        assert unanswered <= {again.lease.id}
        if isinstance(answer, Granted):
            assert (again.lease, again.token, again.devices) == (answer.lease, answer.token, answer.devices)
        self.granted(request, again)

    async def go_away(self, number: int, after: int) -> None:
        """A client is gone in the middle of its request; its lease, if it came to that, ends by itself."""
        request = self.request(number, 1)
        task = self.node.start(self.node.manager.acquire(request, ANYBODY))
        for _ in range(after):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        await self.node.at_rest()
        self.node.clock.advance(61)
        await self.node.at_rest()

    async def pause(self, number: int, after: int) -> None:
        """The agent is paused in the middle of a request; meanwhile others come to the hardware; then it goes on."""
        self.node.simulator.clear()  # a driver that does not answer would keep it paused
        request = self.request(number, 1)
        task = self.node.start(self.node.manager.acquire(request, ANYBODY))
        for _ in range(after):
            await asyncio.sleep(0 if after % 2 else 0.0005)
        assert (await self.node.manager.pause("", ADMIN, lasting=True)).driver_released
        await (self.create_foreign, self.destroy_foreign, self.occupy, self.release)[number % 4](number // 4, 0)
        assert not (await self.node.manager.resume("", ADMIN, lasting=True)).paused
        (answer,) = await asyncio.gather(task, return_exceptions=True)
        if isinstance(answer, Granted) and answer.lease.id in self.node.leases:
            self.granted(request, answer)
        else:
            assert isinstance(answer, Granted | RefusedError)

    async def reboot(self, _number: int, _other: int) -> None:
        self.node.simulator.clear()
        self.node.simulator.reboot(keep_mig_mode=True)
        self.leases.clear()
        self.foreign.clear()
        self.pids.clear()
        await self.node.look()
        assert not self.node.leases
        assert not self.node.instances()

    # Parts of steps

    async def begin_again(self) -> None:
        self.node.simulator.clear()  # an agent that cannot read its GPUs does not start
        self.node = await start(self.folder, clock=self.node.clock)
        self.node.manager.observers.append(self.told.append)
        for lease, granted in self.leases.items():
            again = await self.node.manager.acquire(self.requests[lease], ANYBODY)
            assert (again.lease, again.token, again.devices) == (granted.lease, granted.token, granted.devices)

    def request(self, number: int, devices: int) -> Request:
        wants = []
        for device in range(devices):
            model = self.model[(number + device) % len(self.model)]
            profile = model.profiles[(number // 7 + device) % len(model.profiles)]
            wants.append(profile.name if number % 2 else f"{profile.memory_mib - number % 5}Mi")
        return self.node.request(*wants)

    def use(self, number: int, how: Callable[[str], int]) -> None:
        """A process comes to an instance: a leased one, or one that somebody did not leave in time."""
        there = [
            f"{index}/{instance['id']}"
            for index, gpu in enumerate(self.node.simulator.machine()["gpus"])
            for instance in gpu["instances"]
            if instance["compute"]
        ]
        if there:
            self.pids.append(how(there[number % len(there)]))

    def granted(self, request: Request, granted: Granted) -> None:
        self.node.manager.delivered(granted.lease.id)
        self.leases[granted.lease.id] = granted
        self.requests[granted.lease.id] = request
        machine = self.node.simulator.machine()
        for want, device in zip(request.wants, granted.devices, strict=True):
            gpu = machine["gpus"][device.gpu_index]
            row = self.smallest(self.model[device.gpu_index], want.memory_bytes, want.profile)
            assert device.profile == row.name
            (there,) = (each for each in gpu["instances"] if each["id"] == device.gpu_instance_id)
            assert (there["profile"], [each["id"] for each in there["compute"]]) == (
                row.id,
                [device.compute_instance_id],
            )

    @staticmethod
    def smallest(model: GpuModel, memory_bytes: int | None, name: str | None) -> GpuProfile:
        """By the simulator's own tables."""
        if name is not None:
            return next(each for each in model.profiles if each.name == name)
        enough = [each for each in model.profiles if each.is_plain and each.memory_mib << 20 >= (memory_bytes or 0)]
        return min(enough, key=lambda each: (each.memory_mib, each.slices, each.windows[0].size))

    # Invariants

    def check_nothing_in_use_was_destroyed(self, before: Any, foreign: frozenset[str], *, may_lose: bool) -> None:
        after = self.node.simulator.machine()
        leased = {
            (device.gpu_index, device.gpu_instance_id) for granted in self.leases.values() for device in granted.devices
        }
        for index, (old, new) in enumerate(zip(before["gpus"], after["gpus"], strict=True)):
            serials = {each["serial"] for each in new["instances"]}
            for instance in old["instances"]:
                occupied = any(compute["processes"] for compute in instance["compute"])
                mine = f"{index}/{instance['id']}" in foreign
                still = instance["serial"] in serials
                assert still or not occupied
                assert still or may_lose or not mine
            there = {each["id"] for each in new["instances"]}
            assert {gi for gpu, gi in leased if gpu == index} <= there

    def check_destroyed(self, *, reclaimed: bool) -> None:
        """What was destroyed had to go: its slices (or, for attribute profiles, its engines) were needed."""
        wanted = [event for event in self.told if event.kind is EventKind.INSTANCE_CREATED]
        # Where one device of a request fails, or all is cut short here, the others leave no trace of what they needed.
        cut_short = self.cut_short or any(event.kind is EventKind.STEP_FAILED for event in self.told)
        for event in self.told:
            if event.kind is not EventKind.INSTANCE_DESTROYED:
                continue
            assert event.data["reason"] in {"needed", "half-made"} or (
                reclaimed and event.data["reason"] == "reclaimed"
            )
            if event.data["reason"] == "needed" and wanted and not cut_short:
                overlaps = any(each.gpu == event.gpu and _slices(each) & _slices(event) for each in wanted)
                assert overlaps or self.engines_were_short(event)

    def engines_were_short(self, gone: Event) -> bool:
        """Whether what stands now, or was to stand, leaves no engines for what was destroyed.

        A plan that was made while others were being carried out counted what those were about to destroy, too.
        """
        index = gone.gpu_index or 0
        model = self.model[index]
        by_name = {each.name: each for each in model.profiles}
        rows = [model.by_id[each["profile"]] for each in self.node.simulator.machine()["gpus"][index]["instances"]]
        rows += [
            by_name[str(each.data["profile"])]
            for each in self.told
            if each is gone or (each.gpu == gone.gpu and each.kind in self.counted_beside)
        ]
        taken = [sum(counts) for counts in zip(*(row.engines for row in rows), strict=True)]
        return any(count > total for count, total in zip(taken, model.engine_totals, strict=True))

    def check_view(self) -> None:
        view = self.node.manager.snapshot.view
        for gpu in view.gpus:
            taken = 0
            for instance in gpu.instances:
                assert not taken & instance.slot.placement.mask
                taken |= instance.slot.placement.mask
                assert (instance.state is InstanceState.LEASED) is (instance.lease is not None)
        held = [generation for lease in view.leases.values() for generation in lease.instances]
        assert len(held) == len(set(held))
        assert set(view.leases) == set(self.leases)
        for lease in view.leases.values():
            for generation in lease.instances:
                assert view.instances[generation].lease == lease.id

    async def come_to_rest(self) -> None:
        """Everybody goes home; what is blocked comes back; ledger and hardware are the same."""
        self.node.simulator.clear()
        while self.pids:
            await self.vacate(0, 0)
        for _ in range(3):
            self.node.clock.advance(120)
            await self.node.at_rest()
            await self.node.look()
        view = self.node.manager.snapshot.view
        allowed = {InstanceState.IDLE, InstanceState.LEASED, InstanceState.FOREIGN}
        assert {each.state for each in view.instances.values()} <= allowed
        for gpu, real in zip(view.gpus, self.node.simulator.machine()["gpus"], strict=True):
            assert sorted(map(_known, gpu.instances)) == sorted(
                (each["id"], each["profile"], each["start"], tuple(compute["id"] for compute in each["compute"]))
                for each in real["instances"]
            )
            foreign = {each.gpu_instance_id for each in gpu.instances if each.state is InstanceState.FOREIGN}
            assert foreign == {int(where.split("/")[1]) for where in self.foreign if where.startswith(f"{gpu.index}/")}
        await self.node.manager.close()
        ledger = Ledger.open(self.folder / LEDGER_FILE)
        ours = [each for each in view.instances.values() if each.state is not InstanceState.FOREIGN]
        assert sorted(map(_recorded, ledger.contents.instances)) == sorted(map(_recorded, ours))
        standing = {each.lease.id: each.lease for each in ledger.contents.leases if each.ended_at is None}
        assert standing == dict(view.leases)
        ledger.close()


def _slices(event: Event) -> int:
    return ((1 << int(event.data["size"])) - 1) << int(event.data["start"])


def _known(instance: Instance) -> tuple[int | None, int, int, tuple[int, ...]]:
    compute = () if instance.compute_instance_id is None else (instance.compute_instance_id,)
    return (instance.gpu_instance_id, instance.slot.profile.id, instance.slot.placement.start, compute)


def _recorded(instance: Instance) -> tuple[object, ...]:
    return (
        instance.generation,
        instance.slot.gpu,
        instance.slot.profile.id,
        instance.slot.placement,
        instance.gpu_instance_id,
        instance.compute_instance_id,
        instance.uuid,
        instance.state.value,
        instance.lease or "",
    )


async def live(gpus: str, steps: list[tuple[str, int, int]]) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        history = History(folder, await start(folder, gpus))
        history.node.manager.observers.append(history.told.append)
        for step in steps:
            await history.step(*step)
        await history.come_to_rest()


@pytest.mark.parametrize("model", WITH_MIG)
@settings(max_examples=EXAMPLES)
@given(steps=st.lists(STEP, min_size=STEPS, max_size=STEPS))
def test_every_model(model: str, steps: list[tuple[str, int, int]], figure: Figure) -> None:
    asyncio.run(live(model, steps))
    figure(STEPS_DONE, len(steps))


@pytest.mark.parametrize("gpus", MIXED)
@settings(max_examples=EXAMPLES)
@given(steps=st.lists(STEP, min_size=STEPS, max_size=STEPS))
def test_several_gpus(gpus: str, steps: list[tuple[str, int, int]], figure: Figure) -> None:
    asyncio.run(live(gpus, steps))
    figure(STEPS_DONE, len(steps))

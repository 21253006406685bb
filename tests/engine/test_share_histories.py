"""Random histories of shares, MIG instances and whole GPUs through the real manager over simulated GPUs.

What enforces a share is a file, which outlives an engine that is killed (`support.shares.FileEnforcer`). After each
step: the limits that are set up on a GPU fit in its memory, and none is both whole and shared. At rest, what is set up
is what is leased.
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

from mig_agent.core.errors import DriverErrorKind, RefusedError
from mig_agent.core.model import InstanceState, Request, Want
from mig_agent.engine.results import Granted
from mig_agent.simulator.models import MODELS
from support.engine import ADMIN, ANYBODY, Node, killed, start
from support.figures import Figure
from support.shares import OVERHEAD_MIB, FileEnforcer

MACHINES = ["l40s:2", "a100-40gb+nomig:1,h100-80gb:1"]
EXAMPLES = int(os.environ.get("HISTORIES", "6"))
"""For each machine; more of them by hand: HISTORIES=500."""
STEPS = 30
KEPT_MIB = 1024
"""What the driver reserves and what stays free, of each GPU."""
NUMBER = st.integers(0, 1000)
OTHER = st.integers(0, 30)
STEP = st.one_of(
    *(st.tuples(st.just("acquire"), NUMBER, OTHER) for _ in range(4)),
    st.tuples(st.just("acquire_at_once"), NUMBER, st.integers(2, 5)),
    *(st.tuples(st.just("release"), NUMBER, OTHER) for _ in range(2)),
    *(
        st.tuples(st.just(each), NUMBER, OTHER)
        for each in ("occupy", "vacate", "fail", "lose", "pass_time", "restart", "kill", "go_away", "pause", "reboot")
    ),
)


@dataclass
class History:
    """One history: the engine, and what the test itself knows must be so."""

    folder: Path
    node: Node
    enforcer: FileEnforcer
    leases: dict[str, Granted] = field(default_factory=dict)
    requests: dict[str, Request] = field(default_factory=dict)
    pids: list[int] = field(default_factory=list)

    async def step(self, name: str, number: int, other: int) -> None:
        action: Callable[[int, int], Coroutine[Any, Any, None]] = getattr(self, name)
        await action(number, other)
        await self.node.at_rest()
        self.check()

    async def acquire(self, number: int, _other: int) -> None:
        request = self.request(number)
        try:
            self.granted(request, await self.node.manager.acquire(request, ANYBODY))
        except RefusedError:
            return

    async def acquire_at_once(self, number: int, count: int) -> None:
        await asyncio.gather(*(self.acquire(number + 3 * each, 0) for each in range(count)))

    async def release(self, number: int, _other: int) -> None:
        if self.leases:
            await self.node.release(self.leases.pop(sorted(self.leases)[number % len(self.leases)]))

    async def occupy(self, number: int, _other: int) -> None:
        gpus = self.node.simulator.machine()["gpus"]
        without = [index for index, gpu in enumerate(gpus) if not gpu["mig_current"]]
        self.pids.append(self.node.simulator.occupy(str(without[number % len(without)]), used_mib=number * 10))

    async def vacate(self, number: int, _other: int) -> None:
        if self.pids:
            self.node.simulator.vacate(self.pids.pop(number % len(self.pids)))

    async def fail(self, number: int, other: int) -> None:
        what, kinds = ("begin", "end", "check")[number % 3], (DriverErrorKind.UNKNOWN, DriverErrorKind.TIMEOUT)
        self.enforcer.fail(what, kinds[other % 2], left_behind=what == "begin" and other % 3 == 0)

    async def lose(self, number: int, _other: int) -> None:
        """A daemon is killed: its lease ends, and only its own."""
        held = {each.devices[0].generation: lease for lease, each in self.leases.items() if each.devices[0].enforced_by}
        if held:
            generation = sorted(held)[number % len(held)]
            self.enforcer.fails["check"].clear()
            self.enforcer.lose(generation)
            del self.leases[held[generation]]
            await self.node.look()

    async def pass_time(self, number: int, _other: int) -> None:
        self.node.clock.advance(number)
        await self.node.at_rest()
        await self.node.look()

    async def restart(self, _number: int, _other: int) -> None:
        await self.node.manager.close()
        await self.begin_again()

    async def kill(self, number: int, after: int) -> None:
        """The agent is killed at some point of a request or of a share's end."""
        request = self.request(number)
        if number % 3 == 0:
            await self.release(number, 0)
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
        try:
            again = await self.node.manager.acquire(request, ANYBODY)
        except RefusedError:
            assert not unanswered
            assert not isinstance(answer, Granted)
            return
        assert unanswered <= {again.lease.id}
        self.granted(request, again)

    async def go_away(self, number: int, after: int) -> None:
        """A client is gone in the middle of its request; its lease, if it came to that, ends by itself."""
        task = self.node.start(self.node.manager.acquire(self.request(number), ANYBODY))
        for _ in range(after):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        await self.node.at_rest()
        self.node.clock.advance(61)
        await self.node.at_rest()

    async def pause(self, number: int, _other: int) -> None:
        """The agent is paused, and leases end meanwhile."""
        assert (await self.node.manager.pause("", ADMIN, lasting=True)).driver_released
        await self.release(number, 0)
        assert not (await self.node.manager.resume("", ADMIN, lasting=True)).paused

    async def reboot(self, _number: int, _other: int) -> None:
        self.node.simulator.reboot(keep_mig_mode=True)
        self.leases.clear()
        self.pids.clear()
        self.enforcer.reboot()
        await self.node.look()
        assert not self.node.leases

    async def begin_again(self) -> None:
        self.enforcer.fails["check"].clear()
        self.node = await start(self.folder, clock=self.node.clock, enforcers=lambda _driver, _host: (self.enforcer,))
        for lease, granted in self.leases.items():
            again = await self.node.manager.acquire(self.requests[lease], ANYBODY)
            assert (again.lease, again.token, again.devices) == (granted.lease, granted.token, granted.devices)
            assert again.environment == granted.environment

    def request(self, number: int) -> Request:
        wants = (
            Want(memory_bytes=(1 + number % 40) << 30, text="memory"),
            Want(fraction=(1 + number % 7) / 8, text="a fraction"),
            Want(memory_bytes=(1 + number % 5) << 30, text="memory"),
            Want(whole_gpu=True, text="a whole GPU"),
        )
        return self.node.request(wants[number % len(wants)])

    def granted(self, request: Request, granted: Granted) -> None:
        self.node.manager.delivered(granted.lease.id)
        self.leases[granted.lease.id] = granted
        self.requests[granted.lease.id] = request

    def check(self) -> None:
        view = self.node.manager.snapshot.view
        assert set(view.leases) == set(self.leases)
        for gpu, there in zip(view.gpus, self.node.simulator.machine()["gpus"], strict=True):
            limits = self.enforcer.limits(gpu.uuid)
            usable = MODELS[there["model"]].memory_mib - KEPT_MIB
            assert sum(limits.values()) + OVERHEAD_MIB * len(limits) <= usable
            whole = any(each.kind.takes_whole_gpu and each.lease for each in gpu.instances)
            assert not (whole and limits), "whole and shared at once"
            leased = {each.generation for each in gpu.instances if each.kind.shares_memory and each.lease}
            assert leased <= limits.keys()

    async def come_to_rest(self) -> None:
        """What is set up is what is leased, and then everybody goes home."""
        for failures in self.enforcer.fails.values():
            failures.clear()
        while self.pids:
            await self.vacate(0, 0)
        for _ in range(3):
            self.node.clock.advance(120)
            await self.node.at_rest()
            await self.node.look()
        await self.node.at_rest()
        self.check()
        shares = {each.generation for each in self.node.instances() if each.kind.shares_memory}
        assert shares == self.enforcer.limits_by_share().keys()
        assert all(each.state is InstanceState.LEASED for each in self.node.instances() if each.kind.shares_memory)
        while self.leases:
            await self.release(0, 0)
        await self.node.at_rest()
        assert not self.enforcer.limits_by_share()
        await self.node.manager.close()


@pytest.mark.parametrize("there", MACHINES)
def test_histories(there: str, figure: Figure) -> None:
    @settings(max_examples=EXAMPLES)
    @given(steps=st.lists(STEP, min_size=STEPS, max_size=STEPS))
    def run(steps: list[tuple[str, int, int]]) -> None:
        asyncio.run(_live(there, steps))
        figure("steps of random histories in one process", len(steps))

    run()


async def _live(there: str, steps: list[tuple[str, int, int]]) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        enforcer = FileEnforcer(folder / "shares")
        node = await start(folder, there, enforcers=lambda _driver, _host: (enforcer,))
        history = History(folder, node, enforcer)
        for name_, number, other in steps:
            await history.step(name_, number, other)
        await history.come_to_rest()

"""Two methods to choose among many nodes: to ask all of them each time, or to keep their plans by watching them."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Sequence
from typing import Protocol

from mig_agent.client import AsyncClient, AsyncLease, ClientError, Plan, Refused
from mig_agent.client.request_args import RequestArgs

MEMORY = ("5G", "10G", "20G", "40G")
"""What pods request, each as often."""


class Chooser(Protocol):
    """A scheduler's method."""

    async def place(self, memory: str) -> AsyncLease:
        """Acquire on the best of all nodes."""


def asking(memory: str, revision: int | None = None) -> RequestArgs:
    """Return a request for a lease that ends by itself, as a scheduler's does."""
    return RequestArgs(gpu_memory=memory, ttl=60.0, if_revision=revision)


class Everywhere:
    """Asks every node for every pod, all at once."""

    def __init__(self, agents: Sequence[AsyncClient]) -> None:
        self._agents = agents

    async def place(self, memory: str) -> AsyncLease:
        """Plan on each node, and acquire on the best."""
        while True:
            outcomes = await asyncio.gather(*(agent.plan(gpu_memory=memory) for agent in self._agents))
            plans = {number: each for number, each in enumerate(outcomes) if isinstance(each, Plan)}
            best = min(plans, key=lambda number: plans[number].score)
            with contextlib.suppress(Refused):  # overtaken by another pod
                return await self._agents[best].acquire(**asking(memory, plans[best].revision))


class Watching:
    """Keeps for each node how it would serve each kind of request; asks again only after an event there."""

    def __init__(self, agents: Sequence[AsyncClient]) -> None:
        self._agents = agents
        self._known: dict[str, dict[int, tuple[float, int]]] = {memory: {} for memory in MEMORY}
        """For each kind, the score and the revision by node."""
        self._changed = [asyncio.Event() for _ in agents]
        self._tasks: list[asyncio.Task[None]] = []
        self._complete = asyncio.Event()
        self.delays: list[float] = []
        """Seconds from the emission of each event to its receipt here."""

    async def start(self, *, planning: bool = True) -> None:
        """Wait until all nodes are watched and, with `planning`, their plans are known."""
        for number in range(len(self._agents)):
            self._tasks.append(asyncio.create_task(self._follow(number)))
            if planning:
                self._changed[number].set()
                self._tasks.append(asyncio.create_task(self._keep(number)))
        if planning:
            await self._complete.wait()

    async def close(self) -> None:
        """Stop watching."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def forget(self) -> None:
        """Clear the delays."""
        self.delays.clear()

    async def place(self, memory: str) -> AsyncLease:
        """Acquire, mostly without asking anything before."""
        while True:
            known = self._known[memory]
            if not known:
                await asyncio.sleep(0.001)
                continue
            best = min(known, key=known.__getitem__)
            revision = known[best][1]
            # Whatever the result, what is known of that node is outdated.
            for each in self._known.values():
                each.pop(best, None)
            try:
                return await self._agents[best].acquire(**asking(memory, revision))
            except Refused:
                self._changed[best].set()

    async def _follow(self, number: int) -> None:
        async for event in self._agents[number].watch():
            self.delays.append(time.time() - event.at)
            self._changed[number].set()

    async def _keep(self, number: int) -> None:
        while True:
            await self._changed[number].wait()
            self._changed[number].clear()
            with contextlib.suppress(ClientError):
                outcomes = await self._agents[number].plan_each([asking(memory) for memory in MEMORY])
                for memory, outcome in zip(MEMORY, outcomes, strict=True):
                    if isinstance(outcome, Plan):
                        self._known[memory][number] = outcome.score, outcome.revision
                    else:
                        self._known[memory].pop(number, None)
            if all(len(known) == len(self._agents) for known in self._known.values()):
                self._complete.set()


class Pods:
    """Pods that arrive as fast as they are placed; the oldest ends when there are many."""

    def __init__(self, chooser: Chooser, most: int, seed: int = 1) -> None:
        self._chooser = chooser
        self._most = most
        self._chance = random.Random(seed)  # noqa: S311 -- the same pods every time
        self._leases: list[AsyncLease] = []
        self.took: list[float] = []
        """Seconds of each decision."""

    async def place(self, count: int, at_once: int) -> float:
        """Make this many decisions; return the seconds of all together."""
        todo = iter(range(count))

        async def work() -> None:
            for _ in todo:
                began = time.perf_counter()
                self._leases.append(await self._chooser.place(self._chance.choice(MEMORY)))
                self.took.append(time.perf_counter() - began)
                if len(self._leases) > self._most:
                    await self._leases.pop(0).release()

        began = time.perf_counter()
        await asyncio.gather(*(work() for _ in range(at_once)))
        return time.perf_counter() - began

    async def end(self) -> None:
        """End all pods."""
        for first in range(0, len(self._leases), 100):
            await asyncio.gather(*(lease.release() for lease in self._leases[first : first + 100]))
        self._leases.clear()

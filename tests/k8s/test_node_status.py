"""Writes to the node object: a fall at once, a rise when the kubelet has taken it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field

from mig_agent.adapters.kubelet import KubeletError
from mig_agent.core.owner import KubeletDevice
from mig_agent.frontends.kubernetes.device_plugin.node_status import Mismatch, NodeStatusPatcher
from support.plugged import MIDDLE, SMALL, Words, devices


@dataclass
class Kubelet:
    """Tells how many healthy devices of each resource it has taken by now."""

    has: dict[str, int] = field(default_factory=dict)
    silent: bool = False

    async def allocatable(self) -> tuple[KubeletDevice, ...]:
        if self.silent:
            raise KubeletError("cannot tell")
        return tuple(device for name, count in self.has.items() for device in devices(*range(count), resource=name))


@dataclass
class SlowKubelet(Kubelet):
    """Answers with what it had when it was asked, when it is let."""

    asked: asyncio.Event = field(default_factory=asyncio.Event)
    answer: asyncio.Event = field(default_factory=asyncio.Event)

    async def allocatable(self) -> tuple[KubeletDevice, ...]:
        known = await super().allocatable()
        self.asked.set()
        await self.answer.wait()
        return known


@dataclass
class Node:
    """The node object, and what it should show."""

    shown: dict[str, int]
    right: dict[str, int]

    def wrong(self) -> Mapping[str, Mismatch]:
        return {
            name: Mismatch(shown=self.shown[name], right=right, capacity=7)
            for name, right in self.right.items()
            if right != self.shown[name]
        }


@contextlib.asynccontextmanager
async def running(node: Node, kubelet: Kubelet) -> AsyncIterator[tuple[NodeStatusPatcher, Words]]:
    words = Words()
    numbers = NodeStatusPatcher(api=words, kubelet=kubelet, wrong=node.wrong, changed=lambda: None)
    task = asyncio.create_task(numbers.run())
    try:
        yield numbers, words
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110 -- what it waits for happens in the code under test
            await asyncio.sleep(0.01)


async def test_increase_waits_for_the_kubelet_and_decrease_does_not() -> None:
    node = Node(shown={SMALL: 2, MIDDLE: 3}, right={SMALL: 4, MIDDLE: 1})
    kubelet = Kubelet({SMALL: 3, MIDDLE: 3})
    async with running(node, kubelet) as (numbers, words):
        numbers.compare_soon()
        await until(lambda: words.patched)
        assert words.patched == [{MIDDLE: 1}]
        node.shown[MIDDLE] = 1
        numbers.compare_soon()
        await asyncio.sleep(0.3)  # in which nothing must come
        assert words.patched == [{MIDDLE: 1}]
        kubelet.has[SMALL] = 4  # nobody tells that it has: it is looked at again
        await until(lambda: len(words.patched) > 1)
        assert words.patched[1] == {SMALL: 4}


async def test_silent_kubelet_is_waited_for_briefly() -> None:
    node = Node(shown={SMALL: 2}, right={SMALL: 4})
    async with running(node, Kubelet(silent=True)) as (numbers, words):
        numbers.compare_soon()
        await until(lambda: words.patched)
        assert words.patched == [{SMALL: 4}]


async def test_further_increase_waits_its_own_time() -> None:
    node = Node(shown={SMALL: 2}, right={SMALL: 4})
    kubelet = SlowKubelet({SMALL: 4})
    async with running(node, kubelet) as (numbers, words):
        numbers.compare_soon()
        await kubelet.asked.wait()
        node.right[SMALL] = 7
        numbers.compare_soon()
        kubelet.answer.set()
        await asyncio.sleep(0.2)  # in which nothing must come
        assert not words.patched
        kubelet.has[SMALL] = 7
        await until(lambda: words.patched)
        assert words.patched == [{SMALL: 7}]

"""A scrape runs on a thread of its own, and may be held up there anywhere: the planner depends on none of it."""

from __future__ import annotations

import asyncio
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

from prometheus_client import generate_latest

import mig_agent
from mig_agent.frontends.metrics import Metrics
from support.engine import Node, engine

_OURS = str(Path(mig_agent.__file__).parent)
_PATIENCE_SECONDS = 30.0


class _Scrape:
    """One scrape on its own thread, which stops before the n-th line of the agent's code that it comes to."""

    def __init__(self, metrics: Metrics, stop_at: int) -> None:
        self._metrics = metrics
        self._left = stop_at
        self._go_on = threading.Event()
        self._here = threading.Event()
        self.where = ""
        """The line before which it stopped; empty when it came to its end."""
        self._thread = threading.Thread(target=self._run, daemon=True)

    async def begin(self) -> None:
        """Returns when it has stopped at its line, or has come to its end."""
        self._thread.start()
        assert await asyncio.to_thread(self._here.wait, _PATIENCE_SECONDS)

    async def end(self) -> None:
        """Lets it go on, to its end."""
        self._go_on.set()
        await asyncio.to_thread(self._thread.join, _PATIENCE_SECONDS)
        assert not self._thread.is_alive()

    def _run(self) -> None:
        sys.settrace(self._traced)
        try:
            generate_latest(self._metrics.registry)
        finally:
            sys.settrace(None)
            self._here.set()

    def _traced(self, frame: FrameType, event: str, _argument: Any) -> Any:
        if not frame.f_code.co_filename.startswith(_OURS):
            return None
        if event == "line":
            self._left -= 1
            if not self._left:
                self.where = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
                self._here.set()
                self._go_on.wait(_PATIENCE_SECONDS)
        return self._traced


async def _leased_beside(node: Node, scrape: _Scrape) -> list[str]:
    """The devices of two leases that stand at once, the first of which was granted while the scrape was held up."""
    await scrape.begin()
    alice = await node.acquire("4G", name="alice")
    await scrape.end()
    bob = await node.acquire("4G", name="bob")
    await node.release(alice)
    await node.release(bob)
    return [each.devices[0].uuid for each in (alice, bob)]


async def test_no_instance_is_leased_twice_wherever_a_scrape_is_held_up(tmp_path: Path) -> None:
    metrics = Metrics()
    async with engine(tmp_path, "a100-40gb:1") as node:
        metrics.watch(lambda: node.manager.published)
        await _leased_beside(node, _Scrape(metrics, 0))  # both instances are there, idle, from now on
        twice, stop_at = [], 0
        while True:
            stop_at += 1
            scrape = _Scrape(metrics, stop_at)
            one, other = await _leased_beside(node, scrape)
            if one == other:
                twice.append(scrape.where)
            if not scrape.where:
                break
        assert stop_at > 1, "it was held up nowhere"
        assert not twice, "one instance was leased twice, with the scrape held up there"

"""Other settings for an engine that runs."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from mig_agent.core.errors import Reason, RefusedError
from mig_agent.core.events import EventKind
from support.engine import engine


async def test_the_queue_is_scanned_under_the_new_policy(tmp_path: Path) -> None:
    """With `strict_fifo` off a request that fits starts, though it was held back behind a large one."""
    async with engine(tmp_path, "a100-40gb", strict_fifo=True) as node:
        await node.acquire("4g.20gb")
        large = asyncio.create_task(node.acquire("7g.40gb", wait_seconds=1000.0))
        await node.until(lambda: node.manager.published.queue_length == 1)
        small = asyncio.create_task(node.acquire("1g.5gb", wait_seconds=1000.0))
        await node.until(lambda: node.manager.published.queue_length == 2)
        node.manager.reconfigure(replace(node.manager.settings, strict_fifo=False))
        await asyncio.wait_for(small, 30)
        assert not node.manager.snapshot.strict_fifo
        large.cancel()


async def test_a_shorter_queue_keeps_who_waits_and_refuses_others(tmp_path: Path) -> None:
    async with engine(tmp_path, "a100-40gb") as node:
        lease = await node.acquire("7g.40gb")
        waiting = asyncio.create_task(node.acquire("7g.40gb", wait_seconds=1000.0))
        await node.until(lambda: node.manager.published.queue_length == 1)
        node.manager.reconfigure(replace(node.manager.settings, max_waiting=1))
        with pytest.raises(RefusedError) as caught:
            await node.acquire("7g.40gb", wait_seconds=1000.0)
        assert caught.value.refusal.reason is Reason.QUEUE_FULL
        await node.release(lease)
        await asyncio.wait_for(waiting, 30)


async def test_idle_instances_are_destroyed_by_the_new_limit(tmp_path: Path) -> None:
    async with engine(tmp_path, "a100-40gb") as node:
        await node.release(await node.acquire("7g.40gb"))
        node.clock.advance(100)
        await node.quiet()
        assert not node.told(EventKind.INSTANCE_DESTROYED)
        node.manager.reconfigure(replace(node.manager.settings, idle_limit_seconds=50.0))
        await node.until(lambda: node.told(EventKind.INSTANCE_DESTROYED))


async def test_what_the_engine_is_made_with_cannot_change(tmp_path: Path) -> None:
    async with engine(tmp_path, "a100-40gb") as node:
        with pytest.raises(ValueError, match="cannot change node"):
            node.manager.reconfigure(replace(node.manager.settings, node="other"))

"""Fair share on a running engine: who used least lately is served first, also after a kill; the delay bounds it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from mig_agent.engine.results import Granted
from support.engine import ANYBODY, Node, engine, killed, start

DAY = 86400.0
FAIR: dict[str, Any] = {"fair_share_half_life_seconds": 7 * DAY, "reservation_after_seconds": 600.0}


async def waits(node: Node, tenant: str, **fields: Any) -> asyncio.Task[Granted]:
    before = len(node.manager.snapshot.queue)
    task = node.start(node.acquire("7g.40gb", tenant=tenant, name=tenant, **{"wait_seconds": 1e6, **fields}))
    await node.until(lambda: len(node.manager.snapshot.queue) > before)
    return task


def queue(node: Node) -> list[str]:
    return [each.who.tenant for each in node.manager.snapshot.queue]


async def use(node: Node, tenant: str, seconds: float) -> None:
    lease = await node.acquire("7g.40gb", tenant=tenant, name=tenant)
    node.clock.advance(seconds)
    await node.release(lease)


@pytest.mark.parametrize("kill", [False, True], ids=["at once", "after a kill"])
async def test_the_tenant_that_used_least_goes_first(tmp_path: Path, *, kill: bool) -> None:
    node = await start(tmp_path, "a100-40gb", **FAIR)
    await use(node, "vision", DAY)
    await use(node, "speech", DAY / 4)
    held = await node.acquire("7g.40gb", tenant="robots")
    clock = node.clock
    if kill:
        await killed(node)
        node = await start(tmp_path, clock=clock, **FAIR)
    one, two = await waits(node, "vision"), await waits(node, "speech")
    assert queue(node) == ["speech", "vision"]
    assert [each.place.position for each in node.manager.snapshot.queue] == [1, 2]
    used = node.manager._parts.fair_share.used()
    assert used["vision"] > 3 * used["speech"] > 0
    await node.manager.release(held.lease.id, held.token, ANYBODY)
    served = await two
    assert not one.done()
    await node.release(served)
    await one
    await node.manager.close()


async def test_what_waited_for_the_delay_is_not_overtaken(tmp_path: Path) -> None:
    async with engine(tmp_path, "a100-40gb", **FAIR) as node:
        await use(node, "vision", DAY)
        held = await node.acquire("7g.40gb", tenant="robots")
        heavy = await waits(node, "vision")
        node.clock.advance(601)
        light = await waits(node, "speech")
        assert queue(node) == ["vision", "speech"]
        urgent = await waits(node, "speech", priority=1)
        assert queue(node) == ["speech", "vision", "speech"]
        await node.release(held)
        await node.release(await urgent)
        await node.release(await heavy)
        await light


async def test_without_it_the_queue_is_first_come(tmp_path: Path) -> None:
    async with engine(tmp_path, "a100-40gb") as node:
        await use(node, "vision", DAY)
        await node.acquire("7g.40gb", tenant="robots")
        for tenant in ("vision", "speech"):
            await waits(node, tenant)
        assert queue(node) == ["vision", "speech"]
        assert node.manager._parts.fair_share.used() == {}

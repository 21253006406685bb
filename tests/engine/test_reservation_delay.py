"""How long a request waits before GPUs are kept for it: by how long leases last, also after a restart."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from mig_agent.core.backfill import LONGEST_DELAY_SECONDS, SHORTEST_DELAY_SECONDS
from mig_agent.core.errors import RefusedError
from support.engine import Node, engine, killed, start


async def leases_of(node: Node, seconds: float, count: int) -> None:
    """So many leases, one after the other, each of so many seconds."""
    for _ in range(count):
        granted = await node.acquire("1g.5gb")
        node.clock.advance(seconds)
        await node.release(granted)


def limit_of(node: Node) -> float:
    return node.manager.snapshot.reservation_after_seconds


async def gets_one(node: Node) -> bool:
    """Whether somebody who does not wait gets a small instance; it is given back."""
    try:
        await node.release(await node.acquire("1g.5gb"))
    except RefusedError:
        return False
    return True


async def test_gpus_are_reserved_after_the_mean_lease_time(tmp_path: Path) -> None:
    async with engine(tmp_path, "a100-40gb") as node:
        assert limit_of(node) == 300, "while nothing is known"
        await leases_of(node, 50.0, 20)
        limit = limit_of(node)
        assert limit == pytest.approx((300 + 20 * 50) / 21)
        await node.acquire("3g.20gb")
        large = node.start(node.acquire("7g.40gb", wait_seconds=6000.0))
        await node.until(lambda: node.manager.snapshot.queue)
        node.clock.advance(limit / 2)
        assert await gets_one(node), "it has not waited long"
        node.clock.advance(limit / 2)
        assert not await gets_one(node), "the GPU is kept for who waits"
        large.cancel()
        await asyncio.wait([large])


@pytest.mark.parametrize("crash", [False, True], ids=["stopped", "killed"])
async def test_the_mean_survives_a_restart(tmp_path: Path, crash: bool) -> None:
    node = await start(tmp_path, "a100-40gb")
    await leases_of(node, 900.0, 10)
    before, clock = limit_of(node), node.clock
    assert before > 500
    await node.quiet()
    await (killed(node) if crash else node.manager.close())
    async with engine(tmp_path, clock=clock) as again:
        assert limit_of(again) == pytest.approx(before)


async def test_a_limit_that_is_set_wins(tmp_path: Path) -> None:
    async with engine(tmp_path, "a100-40gb", reservation_after_seconds=77.0) as node:
        await leases_of(node, 900.0, 5)
        assert limit_of(node) == 77


async def test_the_limit_stays_within_bounds(tmp_path: Path) -> None:
    async with engine(tmp_path, "a100-40gb") as node:
        await leases_of(node, 0.0, 60)
        assert limit_of(node) == SHORTEST_DELAY_SECONDS
        await leases_of(node, 30 * 24 * 3600.0, 20)
        assert limit_of(node) == LONGEST_DELAY_SECONDS


async def test_however_a_lease_ends_it_counts(tmp_path: Path) -> None:
    async with engine(tmp_path, "a100-40gb") as node:
        await node.acquire("1g.5gb", ttl_seconds=1000.0)
        node.clock.advance(1000)
        await node.until(lambda: not node.leases)
        assert limit_of(node) == pytest.approx((300 + 1000) / 2)

"""What a waiting request's client, a status and a dry run say of its start and of what blocks it."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from mig_agent.core.forecast import FEWEST_LEASE_TIMES, Basis
from mig_agent.core.limits import NO_LIMITS, Limit, LimitValue, UsageLimits
from mig_agent.core.model import Holder, Request
from mig_agent.engine.callers import Caller
from mig_agent.engine.results import QueueEntry, QueuePlace
from support.engine import ADMIN, ANYBODY, Node, engine, killed, start

LASTS = 100.0


async def leases_before(node: Node, count: int = FEWEST_LEASE_TIMES, lasts: float = LASTS) -> None:
    """So many leases, one after the other, each of so many seconds."""
    for _ in range(count):
        granted = await node.acquire("7g.40gb")
        node.clock.advance(lasts)
        await node.release(granted)


async def waits(node: Node, *, name: str = "bob", places: list[QueuePlace] | None = None) -> asyncio.Task[object]:
    before = len(node.manager.snapshot.queue)
    request = node.request("7g.40gb", wait_seconds=6000.0, name=name)
    task: asyncio.Task[object] = node.start(
        node.manager.acquire(request, ANYBODY, None if places is None else places.append)
    )
    await node.until(lambda: len(node.manager.snapshot.queue) > before)
    return task


async def queue_of(node: Node) -> tuple[QueueEntry, ...]:
    await node.manager.refresh_estimates()
    return node.manager.snapshot.queue


async def end(*tasks: asyncio.Task[object]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)


async def test_the_client_and_the_status_say_when_it_starts_and_what_blocks_it(tmp_path: Path) -> None:
    async with engine(tmp_path, "a100-40gb") as node:
        await leases_before(node)
        held = await node.acquire("7g.40gb", name="alice", ttl_seconds=500.0)
        node.clock.advance(40)
        places: list[QueuePlace] = []
        task = await waits(node, places=places)
        assert places[0].position == 1, "at once, while nothing is computed"
        node.clock.advance(1)
        await node.until(lambda: places[-1].estimate)
        estimate = places[-1].estimate
        assert estimate is not None
        assert estimate.basis is Basis.LEASES
        assert estimate.leases == FEWEST_LEASE_TIMES
        assert estimate.median == pytest.approx(node.clock.now() + 59)
        for blockers in (places[0].blockers, places[-1].blockers):
            (blocker,) = blockers
            assert (blocker.holder, blocker.lease) == ("alice", held.lease.id)
            assert blocker.expires_at == held.lease.expires_at
        (entry,) = await queue_of(node)
        assert (entry.place.estimate, entry.place.blockers) == (estimate, places[-1].blockers)
        await end(task)


async def test_a_new_estimate_is_reported_when_it_has_changed(tmp_path: Path) -> None:
    async with engine(tmp_path, "a100-40gb") as node:
        await leases_before(node)
        held = await node.acquire("7g.40gb")
        places: list[QueuePlace] = []
        task = await waits(node, places=places)
        node.clock.advance(1)
        await node.until(lambda: places[-1].estimate)
        reported = len(places)
        await node.manager.renew(held.lease.id, held.token, 20.0, ANYBODY)
        node.clock.advance(11)
        await node.until(lambda: len(places) > reported)
        estimate = places[-1].estimate
        assert estimate is not None
        assert estimate.latest == pytest.approx(node.clock.now() + 9)
        await end(task)


async def test_an_estimate_that_did_not_come_true_is_withdrawn(tmp_path: Path) -> None:
    """All leases before lasted a second. One that goes on is expected to end at its deadline, not within a second."""
    async with engine(tmp_path, "a100-40gb") as node:
        await leases_before(node, lasts=1.0)
        held = await node.acquire("7g.40gb", ttl_seconds=12.0)
        places: list[QueuePlace] = []
        task = await waits(node, places=places)
        (entry,) = await queue_of(node)
        assert entry.place.estimate is not None
        assert entry.place.estimate.latest == pytest.approx(node.clock.now() + 1.0)
        node.clock.advance(1)
        await node.until(lambda: places[-1].estimate)
        node.clock.advance(2)
        assert node.manager.snapshot.queue[0].place.estimate is None, "not said again while nothing better is known"
        await node.until(lambda: places[-1].estimate and places[-1].estimate.latest == held.lease.expires_at)
        (entry,) = await queue_of(node)
        assert entry.place.estimate is not None
        assert entry.place.estimate.latest == held.lease.expires_at
        await end(task)


async def test_a_renewed_deadline_is_not_told_as_it_was(tmp_path: Path) -> None:
    async with engine(tmp_path, "a100-40gb") as node:
        held = await node.acquire("7g.40gb", ttl_seconds=3.0)
        places: list[QueuePlace] = []
        task = await waits(node, places=places)
        node.clock.advance(1)
        await node.until(lambda: places[-1].estimate)
        renewed = await node.manager.renew(held.lease.id, held.token, 12.0, ANYBODY)
        node.clock.advance(3.5)
        await node.until(lambda: places[-1].estimate and places[-1].estimate.latest == renewed.expires_at)
        await end(task)


async def test_few_leases_and_no_deadline_say_nothing(tmp_path: Path) -> None:
    async with engine(tmp_path, "a100-40gb") as node:
        await node.acquire("7g.40gb")
        task = await waits(node)
        (entry,) = await queue_of(node)
        assert entry.place.estimate is None
        assert entry.place.blockers
        await end(task)


async def test_deadlines_alone_are_an_upper_bound(tmp_path: Path) -> None:
    async with engine(tmp_path, "a100-40gb") as node:
        held = await node.acquire("7g.40gb", ttl_seconds=77.0)
        task = await waits(node)
        (entry,) = await queue_of(node)
        assert entry.place.estimate is not None
        assert entry.place.estimate.basis is Basis.DEADLINES
        assert (entry.place.estimate.median, entry.place.estimate.latest) == (None, held.lease.expires_at)
        await end(task)


async def test_a_dry_run_is_estimated_behind_the_queue(tmp_path: Path) -> None:
    async with engine(tmp_path, "a100-40gb") as node:
        await leases_before(node)
        await node.acquire("7g.40gb")
        task = await waits(node)
        estimate = await node.manager.estimate(node.request("7g.40gb"), ANYBODY)
        assert estimate is not None
        assert estimate.median == pytest.approx(node.clock.now() + 2 * LASTS)
        (entry,) = await queue_of(node)
        assert entry.place.estimate is not None
        assert entry.place.estimate.median == pytest.approx(node.clock.now() + LASTS)
        await end(task)


async def test_nothing_is_said_while_the_agent_is_paused(tmp_path: Path) -> None:
    async with engine(tmp_path, "a100-40gb") as node:
        await leases_before(node)
        await node.acquire("7g.40gb")
        task = await waits(node)
        assert (await queue_of(node))[0].place.estimate is not None
        await node.manager.pause("a new driver", ADMIN)
        (entry,) = await queue_of(node)
        assert (entry.place.estimate, entry.place.blockers) == (None, ())
        assert await node.manager.estimate(node.request("7g.40gb"), ANYBODY) is None
        await end(task)


async def test_lease_times_are_known_after_a_restart(tmp_path: Path) -> None:
    node = await start(tmp_path, "a100-40gb")
    await leases_before(node)
    await node.acquire("7g.40gb")
    clock = node.clock
    await node.quiet()
    await killed(node)
    async with engine(tmp_path, clock=clock) as again:
        task = await waits(again)
        (entry,) = await queue_of(again)
        assert entry.place.estimate is not None
        assert entry.place.estimate.leases == FEWEST_LEASE_TIMES
        await end(task)


async def test_gpus_that_are_kept_for_another_block_it(tmp_path: Path) -> None:
    async with engine(tmp_path, "a100-40gb", reservation_after_seconds=10.0) as node:
        await node.acquire("3g.20gb")
        large = await waits(node)
        node.clock.advance(20)
        request = node.request("1g.5gb", wait_seconds=600.0, name="carol")
        small: asyncio.Task[object] = node.start(node.manager.acquire(request, ANYBODY))
        await node.until(lambda: len(node.manager.snapshot.queue) == 2)
        _, entry = await queue_of(node)
        assert [(each.what, each.state) for each in entry.place.blockers] == [("the GPU", "reserved")]
        await end(small, large)


# ---------------------------------------------------------------- limits and fair share


def one_lease_each() -> UsageLimits:
    value = LimitValue(value=1, text="1", setting="roles.user.leases")
    return UsageLimits(roles={"user": {Limit.LEASES: value}})


def of_user(node: Node, name: str, *, wait: bool = False) -> tuple[Request, Caller]:
    caller = Caller(name=name, uid=1000 + len(name))
    holder = Holder(name=name, tenant=name, uid=caller.uid)
    return node.request("7g.40gb", holder=holder, wait_seconds=6000.0 if wait else None), caller


async def user_waits(node: Node, name: str, places: list[QueuePlace] | None = None) -> asyncio.Task[object]:
    before = len(node.manager.snapshot.queue)
    request, caller = of_user(node, name, wait=True)
    task: asyncio.Task[object] = node.start(
        node.manager.acquire(request, caller, None if places is None else places.append)
    )
    await node.until(lambda: len(node.manager.snapshot.queue) > before)
    return task


async def test_what_waits_for_its_own_limit_gets_the_limit_and_no_estimate(tmp_path: Path) -> None:
    async with engine(tmp_path, "a100-40gb", limits=one_lease_each()) as node:
        await leases_before(node)
        held = await node.manager.acquire(*of_user(node, "alice"))
        node.manager.delivered(held.lease.id)
        places: list[QueuePlace] = []
        alice, bob = await user_waits(node, "alice", places), await user_waits(node, "bob")
        mine, other = await queue_of(node)
        assert (mine.place.estimate, mine.place.blockers) == (None, ())
        assert places[0].limit == mine.place.limit
        assert "alice holds 1 of at most 1 lease" in mine.place.limit
        assert other.place.estimate is not None
        assert other.place.estimate.median == pytest.approx(node.clock.now() + LASTS), "alice is passed over"
        assert not other.place.limit
        assert other.place.blockers
        node.manager.reconfigure(replace(node.manager.settings, limits=NO_LIMITS))
        node.clock.advance(30)
        await node.until(lambda: places[-1].estimate)
        assert not places[-1].limit
        assert places[-1].blockers
        await end(alice, bob)


async def test_what_will_wait_for_its_own_limit_gets_no_estimate(tmp_path: Path) -> None:
    """Of two requests of one user, who may have one lease, the second starts when the first one's lease ends."""
    async with engine(tmp_path, "a100-40gb", limits=one_lease_each()) as node:
        await leases_before(node)
        await node.acquire("7g.40gb")
        tasks = [await user_waits(node, each) for each in ("bob", "bob", "carol")]
        first, second, third = await queue_of(node)
        assert first.place.estimate is not None
        assert second.place.estimate is None
        assert not second.place.limit, "now it is not the limit that blocks it"
        assert second.place.blockers
        assert third.place.estimate is not None
        assert third.place.estimate.median == pytest.approx(node.clock.now() + 2 * LASTS)
        assert await node.manager.estimate(*of_user(node, "bob")) is None
        dry = await node.manager.estimate(*of_user(node, "dave"))
        assert dry is not None
        assert dry.median == pytest.approx(node.clock.now() + 3 * LASTS)
        await end(*tasks)


async def test_estimates_follow_the_order_of_fair_share(tmp_path: Path) -> None:
    fair: dict[str, float] = {"fair_share_half_life_seconds": 1e6, "reservation_after_seconds": 5000.0}
    async with engine(tmp_path, "a100-40gb", **fair) as node:
        await leases_before(node)  # of the tenant of all tests, which has used most
        used, _ = node.request("7g.40gb").holder, await node.acquire("7g.40gb")
        tasks = [await waits(node), await user_waits(node, "bob")]
        first, second = await queue_of(node)
        assert (first.who.tenant, second.who.tenant) == ("bob", used.tenant)
        medians = [each.place.estimate and each.place.estimate.median for each in (first, second)]
        assert medians == [pytest.approx(node.clock.now() + LASTS), pytest.approx(node.clock.now() + 2 * LASTS)]
        dry = await node.manager.estimate(*of_user(node, "carol"))
        assert dry is not None
        assert dry.median == pytest.approx(node.clock.now() + 2 * LASTS), "after bob, who came first, before the others"
        await end(*tasks)

"""Requests that wait: their order, their patience, and what they keep from others."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from pathlib import Path

import pytest

from mig_agent.core import backfill
from mig_agent.core.errors import Reason, Refusal, RefusedError
from mig_agent.core.events import EventKind
from mig_agent.core.model import Gpu, GpuUuid, InstanceState, Want
from mig_agent.core.planning.feasibility import FeasibilityCache, fewest_gpus
from mig_agent.core.planning.plan import Plan
from mig_agent.engine import queueing
from mig_agent.engine.results import Granted, QueuePlace
from support.engine import ANYBODY, CREATE, Node, engine


async def waits(node: Node, *wants: str, **fields: object) -> asyncio.Task[Granted]:
    """A request that is in the queue when this returns."""
    before = len(node.manager.snapshot.queue)
    task = node.start(node.acquire(*wants, **{"wait_seconds": 600.0, **fields}))
    await node.until(lambda: len(node.manager.snapshot.queue) > before or task.done())
    return task


async def test_a_request_waits_and_is_served_when_something_is_released(tmp_path: Path) -> None:
    async with engine(tmp_path, "a100-40gb") as node:
        first = await node.acquire("7g.40gb")
        task = await waits(node, "7g.40gb")
        queue = node.manager.snapshot.queue
        assert [(each.place.position, each.who.name, each.wants[0].text) for each in queue] == [(1, "alice", "7g.40gb")]
        await node.release(first)
        granted = await task
        assert granted.devices[0].reused
        assert node.manager.snapshot.queue == ()
        assert EventKind.REQUEST_QUEUED in node.kinds()


async def test_the_rest_of_a_larger_instance_serves_the_next_in_the_queue(tmp_path: Path) -> None:
    """The first destroys it for a small one of its own; the others need not wait for anything else."""
    async with engine(tmp_path, "a100-40gb") as node:
        big = await node.acquire("7g.40gb")
        tasks = [await waits(node, "1g.5gb") for _ in range(3)]
        await node.release(big)
        granted = await asyncio.wait_for(asyncio.gather(*tasks), 30.0)
        assert len({each.devices[0].uuid for each in granted}) == 3


async def test_a_wait_that_times_out_is_refused_with_its_reason(tmp_path: Path) -> None:
    async with engine(tmp_path, "a100-40gb") as node:
        await node.acquire("7g.40gb", name="bob")
        task = await waits(node, "1g.5gb", wait_seconds=60.0)
        node.clock.advance(59)
        await asyncio.sleep(0)
        assert not task.done()
        node.clock.advance(1)
        with pytest.raises(RefusedError) as refused:
            await task
        refusal = refused.value.refusal
        assert refusal.reason is Reason.WAITED_TOO_LONG
        assert refusal.message.startswith("cannot place 1g.5gb on GPU 0 within 1m: slices ")
        assert "bob" in refusal.message + str(refusal.blockers)
        assert EventKind.REQUEST_DEQUEUED in node.kinds()


async def test_a_request_may_wait_without_a_limit(tmp_path: Path) -> None:
    async with engine(tmp_path, "a100-40gb") as node:
        first = await node.acquire("7g.40gb")
        task = await waits(node, "1g.5gb", wait_seconds=math.inf)
        node.clock.advance(30 * 24 * 3600)
        assert not task.done()
        await node.release(first)
        await task


async def test_what_can_never_be_served_does_not_wait(tmp_path: Path) -> None:
    async with engine(tmp_path, "a100-40gb") as node:
        for asked, reason in (("48G", Reason.TOO_LARGE), ("9g.99gb", Reason.UNKNOWN_PROFILE)):
            with pytest.raises(RefusedError) as refused:
                await node.acquire(asked, wait_seconds=600.0)
            assert refused.value.refusal.reason is reason


async def test_nor_does_it_behind_others_or_on_a_full_node(tmp_path: Path) -> None:
    async with engine(tmp_path, "a100-40gb:2") as node:
        full = [await node.acquire("7g.40gb") for _ in range(2)]
        first = await waits(node, "7g.40gb")
        told = len(node.told(EventKind.REQUEST_QUEUED))
        never: tuple[tuple[tuple[str, ...], tuple[str, ...], Reason], ...] = (
            (("48G",), (), Reason.TOO_LARGE),
            (("9g.99gb",), (), Reason.UNKNOWN_PROFILE),
            (("7g.40gb",) * 3, (), Reason.TOO_MANY_DEVICES),
            (("1g.5gb",) * 15, (), Reason.TOO_MANY_DEVICES),
            (("1g.5gb", "7g.40gb"), ("0",), Reason.TOO_MANY_DEVICES),
            (("1g.5gb",), ("7",), Reason.UNKNOWN_GPU),
        )
        for wants, gpus, reason in never:
            with pytest.raises(RefusedError) as refused:
                await node.acquire(*wants, wait_seconds=600.0, gpus=gpus)
            assert refused.value.refusal.reason is reason
            assert not refused.value.refusal.retryable
        assert len(node.manager.snapshot.queue) == 1
        assert len(node.told(EventKind.REQUEST_QUEUED)) == told
        await node.release(full[0])
        await first


async def test_a_client_that_goes_away_leaves_the_queue(tmp_path: Path) -> None:
    async with engine(tmp_path, "a100-40gb") as node:
        first = await node.acquire("7g.40gb")
        gone = await waits(node, "7g.40gb")
        stays = await waits(node, "3g.20gb")
        gone.cancel()
        await node.until(lambda: len(node.manager.snapshot.queue) == 1)
        await node.release(first)
        assert (await stays).devices[0].profile == "3g.20gb"
        assert len(node.leases) == 1


async def test_higher_priority_goes_first(tmp_path: Path) -> None:
    async with engine(tmp_path, "a100-40gb") as node:
        first = await node.acquire("7g.40gb")
        low = await waits(node, "7g.40gb", name="low")
        high = await waits(node, "7g.40gb", name="high", priority=5)
        assert [each.who.name for each in node.manager.snapshot.queue] == ["high", "low"]
        await node.release(first)
        served = await high
        assert not low.done()
        await node.release(served)
        await low


async def test_a_small_request_passes_a_large_one_that_waits(tmp_path: Path) -> None:
    async with engine(tmp_path, "a100-40gb") as node:
        await node.acquire("3g.20gb")
        large = await waits(node, "7g.40gb")
        fits = {each.profile: each.count for each in node.manager.snapshot.available}
        assert (fits["1g.5gb"], fits["7g.40gb"]) == (4, 0), "a small one may pass the large one that waits"
        assert (await node.acquire("1g.5gb")).devices[0].profile == "1g.5gb"
        assert not large.done()


async def test_with_strict_fifo_no_request_passes_another(tmp_path: Path) -> None:
    async with engine(tmp_path, "a100-40gb", strict_fifo=True) as node:
        first = await node.acquire("3g.20gb")
        large = await waits(node, "7g.40gb")
        with pytest.raises(RefusedError) as refused:
            await node.acquire("1g.5gb")
        assert refused.value.refusal.reason is Reason.NO_CAPACITY
        assert refused.value.refusal.message.endswith(": 1 request came first")
        assert not any(each.count for each in node.manager.snapshot.available), "as the refusal says"
        await node.release(first)
        await large


async def test_a_gpu_is_reserved_for_the_oldest_after_the_delay(tmp_path: Path) -> None:
    async with engine(tmp_path, "a100-40gb", reservation_after_seconds=100.0) as node:
        first = await node.acquire("3g.20gb")
        large = await waits(node, "7g.40gb", wait_seconds=6000.0)
        node.clock.advance(101)
        with pytest.raises(RefusedError):
            await node.acquire("1g.5gb")
        behind = await waits(node, "1g.5gb")
        assert not behind.done()
        await node.release(first)
        served = await large
        assert not behind.done()
        await node.release(served)
        assert (await behind).devices[0].profile == "1g.5gb"


async def test_the_position_in_the_queue_is_reported(tmp_path: Path) -> None:
    async with engine(tmp_path, "a100-40gb") as node:
        first = await node.acquire("7g.40gb")
        ahead = await waits(node, "7g.40gb")
        places: list[QueuePlace] = []
        request = node.request("7g.40gb", wait_seconds=600.0)
        task = node.start(node.manager.acquire(request, ANYBODY, places.append))
        await node.until(lambda: places)
        assert [each.position for each in places] == [2]
        ahead.cancel()
        await node.until(lambda: len(node.manager.snapshot.queue) == 1)
        node.clock.advance(1)
        await node.until(lambda: len(places) > 1)
        assert [each.position for each in places] == [2, 1]
        await node.release(first)
        await task


async def test_the_queue_has_a_limit(tmp_path: Path) -> None:
    async with engine(tmp_path, "a100-40gb", max_waiting=2) as node:
        await node.acquire("7g.40gb")
        tasks = [await waits(node, "7g.40gb") for _ in range(2)]
        with pytest.raises(RefusedError) as refused:
            await node.acquire("7g.40gb", wait_seconds=600.0)
        assert refused.value.refusal.reason is Reason.QUEUE_FULL
        for task in tasks:
            task.cancel()


async def test_a_retry_of_a_waiting_request_waits_in_the_same_place(tmp_path: Path) -> None:
    async with engine(tmp_path, "a100-40gb") as node:
        first = await node.acquire("7g.40gb")
        request = node.request("7g.40gb", wait_seconds=600.0)
        one = node.start(node.manager.acquire(request, ANYBODY))
        await node.until(lambda: node.manager.snapshot.queue)
        places: list[QueuePlace] = []
        two = node.start(node.manager.acquire(request, ANYBODY, places.append))
        await node.until(lambda: places)
        assert len(node.manager.snapshot.queue) == 1
        one.cancel()
        await node.release(first)
        assert (await two).lease.request_id == request.request_id


async def test_waiting_requests_start_when_a_gpu_is_uncordoned(tmp_path: Path) -> None:
    async with engine(tmp_path, "a100-40gb") as node:
        await node.manager.cordon("0", True, "", ANYBODY)
        task = await waits(node, "7g.40gb")
        assert not task.done()
        await node.manager.cordon("0", False, "", ANYBODY)
        await task


async def test_two_requests_never_get_one_instance(tmp_path: Path) -> None:
    async with engine(tmp_path, "a100-40gb") as node:
        first = await node.acquire("7g.40gb")
        await node.release(first)
        tasks = [node.start(node.acquire("7g.40gb", wait_seconds=600.0)) for _ in range(5)]
        for _ in range(5):
            done, _pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            assert len(node.instances(InstanceState.LEASED)) == 1
            for task in done:
                tasks.remove(task)
                await node.release(await task)
        assert node.creations() == 1


async def test_a_client_that_disconnects_does_not_delay_the_requests_behind_it(tmp_path: Path) -> None:
    async with engine(tmp_path, "a100-40gb") as node:
        first = await node.acquire("7g.40gb")
        one = await waits(node, "3g.20gb", name="one", priority=1)
        two = await waits(node, "7g.40gb", name="two")
        node.simulator.hang(CREATE)
        await node.release(first)
        await node.until(lambda: node.instances(InstanceState.CREATING))
        one.cancel()
        await asyncio.wait([one])
        node.simulator.clear()
        assert (await two).devices[0].profile == "7g.40gb"
        assert len(node.instances()) == 1


MANY = 200
"""More turns of the event loop than it takes to look at each who waits a few times over."""


async def crowded(node: Node) -> Granted:
    """Many wait, each for something else, and the last one fits as soon as this lease has ended."""
    held = [await node.acquire("1g.5gb") for _ in range(7)]
    await node.manager.cordon("1", True, "", ANYBODY)
    for number in range(1, 8):
        await waits(node, "7g.40gb", *["1g.5gb"] * number)
    await waits(node, "1g.5gb")
    return held[0]


def last_waits(node: Node) -> bool:
    return any(len(each.wants) == 1 and each.who.name == "alice" for each in node.manager.snapshot.queue)


@pytest.fixture
def one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each piece of a look through the queue is one request."""
    monkeypatch.setattr(queueing, "_PIECE_SECONDS", 0.0)


@pytest.mark.usefixtures("one_by_one")
async def test_a_scan_reaches_the_end_of_the_queue_however_much_is_released(tmp_path: Path) -> None:
    """What is released sends the look back to the beginning, to those whom it may serve, but not for ever."""
    async with engine(tmp_path, "a100-40gb:2") as node:
        await node.release(await crowded(node))
        for _ in range(MANY):
            node.manager._context.state.capacity_freed.emit()  # something that serves nobody here
            await asyncio.sleep(0)
        assert not last_waits(node)


@pytest.mark.usefixtures("one_by_one")
@pytest.mark.parametrize("patience", [None, 600.0], ids=["who do not wait", "who wait and leave again"])
async def test_a_scan_reaches_the_end_of_the_queue_however_many_arrive(tmp_path: Path, patience: float | None) -> None:
    async with engine(tmp_path, "a100-40gb:2") as node:
        await node.release(await crowded(node))
        newcomers: list[asyncio.Task[Granted]] = []
        for _ in range(MANY):
            request = node.request("2g.10gb", name="bob", wait_seconds=patience)
            newcomers.append(node.start(node.manager.acquire(request, ANYBODY)))
            if len(newcomers) > 3:
                newcomers[-3].cancel()
            await asyncio.sleep(0)
        assert not last_waits(node)
        for each in newcomers:
            each.cancel()
        await asyncio.gather(*newcomers, return_exceptions=True)


@pytest.mark.usefixtures("one_by_one")
async def test_capacity_freed_during_a_scan_causes_another_scan(tmp_path: Path) -> None:
    """Also when the look went on to its end, and those before have been passed by."""
    async with engine(tmp_path, "a100-40gb:2") as node:
        await node.release(await crowded(node))
        await node.until(lambda: not last_waits(node))
        task = await waits(node, "1g.5gb", priority=5)
        for _ in range(queueing._MOST_RESTARTS + 3):
            node.manager._context.state.capacity_freed.emit()
            await asyncio.sleep(0)
        await node.manager.cordon("1", False, "", ANYBODY)
        assert (await task).devices


async def test_reservations_are_computed_once_per_scan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """That takes longest of all, so not for each piece of a look through a long queue."""
    monkeypatch.setattr(queueing, "_PIECE_SECONDS", 0.0)
    worked_out: list[int] = []

    def counted(
        gpus: Sequence[Gpu], wants: Sequence[Want], rooms: FeasibilityCache | None = None
    ) -> frozenset[GpuUuid]:
        worked_out.append(len(wants))
        return fewest_gpus(gpus, wants, rooms)

    monkeypatch.setattr(backfill, "fewest_gpus", counted)
    async with engine(tmp_path, "a100-40gb:2", reservation_after_seconds=60.0) as node:
        await crowded(node)
        node.clock.advance(61)
        worked_out.clear()
        node.manager._context.state.capacity_freed.emit()
        await node.until(lambda: not node.manager._parts.queue._scan_is_scheduled)
        assert sorted(worked_out) == list(range(1, 9))  # GPUs are found for the last alone


async def test_a_grant_that_fails_keeps_its_place_and_its_time(tmp_path: Path) -> None:
    """An idle instance turns out to be in use when it is to be destroyed; no request behind goes ahead for that."""
    async with engine(tmp_path, "a100-40gb") as node:
        held = await node.acquire("1g.5gb")
        first = await waits(node, "7g.40gb", name="first", wait_seconds=100.0)
        node.clock.advance(30)
        second = await waits(node, "7g.40gb", name="second")
        since = node.manager.snapshot.queue[0].since
        node.simulator.occupy(node.where(held))
        await node.release(held)
        await node.until(lambda: len(node.told(EventKind.REQUEST_QUEUED)) == 3)
        queue = node.manager.snapshot.queue
        assert [(each.who.name, each.since) for each in queue] == [("first", since), ("second", since + 30)]
        node.clock.advance(71)
        with pytest.raises(RefusedError) as caught:
            await first
        assert caught.value.refusal.reason is Reason.WAITED_TOO_LONG, "the time before counts"
        assert not second.done()
        second.cancel()


async def test_a_dry_run_keeps_off_what_is_reserved_for_others(tmp_path: Path) -> None:
    async with engine(tmp_path, "a100-40gb") as node:
        await node.acquire("3g.20gb")
        waiting = await waits(node, "7g.40gb", name="first")
        (fits,) = node.manager.plan([node.request("1g.5gb")])
        assert isinstance(fits, Plan)
        node.clock.advance(node.manager.snapshot.reservation_after_seconds + 1)
        (refusal,) = node.manager.plan([node.request("1g.5gb")])
        assert isinstance(refusal, Refusal)
        with pytest.raises(RefusedError) as caught:
            await node.acquire("1g.5gb")
        assert refusal.message == caught.value.refusal.message
        (ahead,) = node.manager.plan([node.request("1g.5gb", priority=5)])
        assert isinstance(ahead, Plan), "what goes before it is not kept off"
        waiting.cancel()


async def test_a_dry_run_says_with_strict_fifo_that_others_came_first(tmp_path: Path) -> None:
    async with engine(tmp_path, "a100-40gb", strict_fifo=True) as node:
        await node.acquire("3g.20gb")
        waiting = await waits(node, "7g.40gb")
        (refusal,) = node.manager.plan([node.request("1g.5gb")])
        assert isinstance(refusal, Refusal)
        with pytest.raises(RefusedError) as caught:
            await node.acquire("1g.5gb")
        assert refusal.message == caught.value.refusal.message
        waiting.cancel()

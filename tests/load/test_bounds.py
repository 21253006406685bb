"""Work that many ask for at once is done once, in turns, or not at all when nobody waits for it any more."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from pathlib import Path

import pytest

from mig_agent.core.errors import Reason, RefusedError
from mig_agent.core.model import GpuUuid
from mig_agent.core.observation import InstanceUsage
from mig_agent.engine import acquire
from mig_agent.engine.tasks import Fairness
from mig_agent.frontends.grpc.call_limits import CallLimit
from mig_agent.pb.migagent.v1 import partition_manager_pb2 as pb
from support.engine import ANYBODY, CREATE, engine
from support.service import TIMEOUT, service

MANY = 200


async def test_turns_are_taken_one_after_the_other_and_leave_room_in_between() -> None:
    turns = Fairness()
    told: list[str] = []

    async def long(number: int) -> None:
        await turns.yield_turn()
        told.append(str(number))

    async def short() -> None:
        while len(told) < MANY:
            told.append("short")
            await asyncio.sleep(0)

    await asyncio.gather(*(long(number) for number in range(5)), short())
    assert [each for each in told if each != "short"] == [str(number) for number in range(5)]
    places = [told.index(str(number)) for number in range(5)]
    assert all("short" in told[one:other] for one, other in itertools.pairwise(places))


async def test_who_leaves_while_it_waits_for_its_turn_is_never_queued(tmp_path: Path) -> None:
    async with engine(tmp_path, "a100-40gb") as node:
        taken = await node.acquire("7g.40gb")
        calls = [
            node.start(node.manager.acquire(node.request("1g.5gb", "2g.10gb", wait_seconds=1e6), ANYBODY))
            for _ in range(30)
        ]
        for each in calls:
            await asyncio.sleep(0)
            each.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        await node.until(lambda: not node.manager._parts.acquirer._jobs)
        assert not node.manager.snapshot.queue
        await node.release(taken)
        await node.quiet()
        assert not node.leases


async def test_requests_that_are_being_served_have_a_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also while the driver hangs, and when those who asked have gone away."""
    monkeypatch.setattr(acquire, "MOST_SERVED", 3)
    async with engine(tmp_path, "a100-40gb", max_waiting=2) as node:
        fault = node.simulator.hang(CREATE)
        calls = [node.start(node.manager.acquire(node.request("1g.5gb"), ANYBODY)) for _ in range(5)]
        await node.stuck()
        calls[0].cancel()
        await asyncio.wait([calls[0]])
        with pytest.raises(RefusedError) as refused:
            await node.manager.acquire(node.request("1g.5gb"), ANYBODY)
        assert refused.value.refusal.reason is Reason.QUEUE_FULL
        assert "5 requests are being served or wait, which is the limit" in refused.value.refusal.message
        node.simulator.clear(fault)
        await asyncio.gather(*calls, return_exceptions=True)
        await node.until(lambda: not node.manager._parts.acquirer._jobs)
        assert (await node.acquire("1g.5gb")).devices


async def test_many_who_ask_for_the_usage_at_once_share_one_reading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with service(tmp_path, "a100-40gb") as served:
        await served.acquire(profile="1g.5gb")
        driver = served.node.driver
        read = driver.usage
        readings = []

        def counted(gpu: GpuUuid, gpu_instance_id: int | None, *, tenure: str) -> InstanceUsage:
            readings.append(gpu)
            return read(gpu, gpu_instance_id, tenure=tenure)

        monkeypatch.setattr(driver, "usage", counted)
        answers = await asyncio.gather(
            *(served.users.Usage(pb.UsageRequest(), timeout=TIMEOUT) for _ in range(MANY)),
        )
        assert all(len(each.instances) == 1 for each in answers)
        assert 0 < len(readings) < MANY // 2


async def test_many_who_ask_what_happened_at_once_are_all_answered(tmp_path: Path) -> None:
    async with service(tmp_path, "a100-40gb") as served:
        await served.acquire(profile="1g.5gb")
        await served.node.quiet()
        answers = await asyncio.gather(
            *(served.users.Events(pb.EventsRequest(), timeout=TIMEOUT) for _ in range(MANY)),
        )
        assert all(each.events for each in answers)


def test_a_call_limit_refuses_when_it_is_reached_and_admits_again() -> None:
    limit = CallLimit(2, "examples")
    with contextlib.ExitStack() as stack:
        for _ in range(2):
            stack.enter_context(limit.slot())
        with pytest.raises(RefusedError) as refused, limit.slot():
            raise AssertionError("the limit was reached")
        assert refused.value.refusal.reason is Reason.QUEUE_FULL
        assert "2 examples are open" in refused.value.refusal.message
    with limit.slot():
        assert limit.remaining(None) == 1
    assert limit.remaining(None) == 2

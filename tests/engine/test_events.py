"""What is told of what happens: at once, on resuming, and from the ledger."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from mig_agent.core.errors import Reason, RefusedError
from mig_agent.core.events import Event, EventKind
from mig_agent.engine.event_bus import MOST_UNREAD, RING
from support.engine import engine


async def take(events: AsyncIterator[Event], count: int) -> list[EventKind]:
    found = []
    async for event in events:
        found.append(event.kind)
        if len(found) == count:
            break
    return found


async def test_a_subscriber_gets_events(tmp_path: Path) -> None:
    async with engine(tmp_path, "a100-40gb") as node:
        events = node.manager.subscribe(None)
        task = node.start(take(events, 4))
        granted = await node.acquire("4G")
        await node.release(granted)
        await node.acquire("4G")
        assert await task == [
            EventKind.INSTANCE_CREATED,
            EventKind.LEASE_GRANTED,
            EventKind.LEASE_ENDED,
            EventKind.INSTANCE_REUSED,
        ]


async def test_a_subscriber_resumes_after_its_revision(tmp_path: Path) -> None:
    async with engine(tmp_path, "a100-40gb") as node:
        first = await node.acquire("4G")
        revision = node.manager.snapshot.view.revision
        await node.release(first)
        await node.acquire("4G")
        events = node.manager.subscribe(revision)
        assert await take(events, 3) == [
            EventKind.LEASE_ENDED,
            EventKind.INSTANCE_REUSED,
            EventKind.LEASE_GRANTED,
        ]


async def test_revisions_rise(tmp_path: Path) -> None:
    async with engine(tmp_path, "a100-40gb:2") as node:
        granted = [await node.acquire("1g.5gb") for _ in range(4)]
        await asyncio.gather(*(node.release(each) for each in granted))
        await asyncio.gather(*(node.acquire("1g.5gb") for _ in range(6)))
        revisions = [event.revision for event in node.happened]
        assert revisions == sorted(revisions)
        assert revisions[-1] == node.manager.snapshot.view.revision


@pytest.mark.parametrize("which", ["too old", "to come"])
async def test_a_revision_that_cannot_be_resumed_is_refused(tmp_path: Path, which: str) -> None:
    async with engine(tmp_path, "a100-40gb") as node:
        revision = 0 if which == "too old" else node.manager.snapshot.view.revision + 5
        with pytest.raises(RefusedError) as refused:
            node.manager.subscribe(revision)
        assert refused.value.refusal.reason is Reason.REVISION_CHANGED
        assert refused.value.refusal.revision == node.manager.snapshot.view.revision
        assert refused.value.refusal.changed == ("unknown",)


async def test_a_slow_subscriber_is_refused(tmp_path: Path) -> None:
    async with engine(tmp_path, "a100-40gb") as node:
        events = node.manager.subscribe(None)
        hub = node.manager._context.events
        example = Event(kind=EventKind.LEASE_RENEWED, at=0.0, revision=10**6, message="example")
        for _ in range(MOST_UNREAD + 1):
            hub.emit(example)
        with pytest.raises(RefusedError) as refused:
            await anext(events)
        assert refused.value.refusal.reason is Reason.QUEUE_FULL
        for _ in range(RING + 1):
            hub.emit(example)
        assert len(hub._ring) == RING
        assert not hub._subscriptions


async def test_a_subscriber_that_resumes_far_back_is_not_too_slow_at_once(tmp_path: Path) -> None:
    async with engine(tmp_path, "a100-40gb") as node:
        revision = node.manager.snapshot.view.revision
        await node.acquire("4G")
        hub = node.manager._context.events
        example = Event(kind=EventKind.LEASE_RENEWED, at=0.0, revision=10**6, message="example")
        for _ in range(2 * MOST_UNREAD):
            hub.emit(example)
        events = node.manager.subscribe(revision)
        for _ in range(MOST_UNREAD):
            hub.emit(example)
        assert len(await take(events, 3 * MOST_UNREAD)) == 3 * MOST_UNREAD
        for _ in range(4 * MOST_UNREAD):
            hub.emit(example)
        assert events.overrun
        events.close()


@pytest.mark.parametrize("read", [False, True], ids=["never read", "read"])
async def test_a_closed_subscription_is_removed(tmp_path: Path, read: bool) -> None:
    async with engine(tmp_path, "a100-40gb") as node:
        events = node.manager.subscribe(None)
        await node.acquire("4G")
        if read:
            assert (await anext(events)).kind is EventKind.INSTANCE_CREATED
        events.close()
        events.close()
        assert not node.manager._context.events._subscriptions
        await node.acquire("4G")
        with pytest.raises(StopAsyncIteration):
            await anext(events)


async def test_a_failing_observer_does_not_stop_the_others(tmp_path: Path) -> None:
    async with engine(tmp_path, "a100-40gb") as node:

        def fails(_event: Event) -> None:
            raise ValueError("no")

        node.manager.observers.insert(0, fails)
        await node.acquire("4G")
        assert EventKind.LEASE_GRANTED in node.kinds()


async def test_events_are_in_the_ledger(tmp_path: Path) -> None:
    async with engine(tmp_path, "a100-40gb,h100-80gb") as node:
        await node.acquire("1g.5gb", name="bob")
        node.clock.advance(100)
        middle = node.clock.now()
        await node.acquire("3g.40gb", name="eve")
        everything = await node.manager.history.events(0.0, None, 1000)
        assert [event.kind for event in everything] == [
            EventKind.AGENT_STARTED,
            EventKind.INSTANCE_CREATED,
            EventKind.LEASE_GRANTED,
            EventKind.INSTANCE_CREATED,
            EventKind.LEASE_GRANTED,
        ]
        assert everything[1:] == tuple(node.happened)
        assert [event.holder for event in await node.manager.history.events(middle, None, 1000)][-1] == "eve"
        assert len(await node.manager.history.events(0.0, "1", 1000)) == 2
        assert len(await node.manager.history.events(0.0, node.gpu(1).uuid, 1000)) == 2
        assert [event.kind for event in await node.manager.history.events(0.0, None, 2)] == [
            EventKind.INSTANCE_CREATED,
            EventKind.LEASE_GRANTED,
        ]
    async with engine(tmp_path) as after:
        kinds = [event.kind for event in await after.manager.history.events(0.0, None, 1000)]
        assert kinds[-2:] == [EventKind.AGENT_STOPPING, EventKind.AGENT_STARTED]


async def test_subscriptions_end_with_the_agent(tmp_path: Path) -> None:
    async with engine(tmp_path, "a100-40gb") as node:
        events = node.manager.subscribe(None)
        heard: list[EventKind] = []

        async def listen() -> None:
            async for event in events:
                heard.append(event.kind)  # noqa: PERF401 -- each is wanted as it comes

        task = node.start(listen())
        await asyncio.sleep(0)
        await node.manager.close()
        await task
        assert heard == [EventKind.AGENT_STOPPING]


async def test_an_ended_lease_is_found_by_its_name_the_latest_first(tmp_path: Path) -> None:
    async with engine(tmp_path, "a100-40gb") as node:
        history = node.manager.history
        leases = []
        for holder in ("alice (train)", "bob (train)", "carol", "x% (_)"):
            granted = await node.acquire("4G", name=holder)
            leases.append(granted.lease.id)
            await node.release(granted)
        for name, which in (
            ("train", 1),
            ("alice", 0),
            ("alice (train)", 0),
            ("bob", 1),
            ("carol", 2),
            (leases[0], 0),
            (leases[0][:9], 0),
            ("_", 3),
        ):
            assert await history.lease_called(name) == leases[which], name
        for name in ("%", "ali", "rain", ")", "train)", "b (train)"):
            with pytest.raises(RefusedError) as refused:
                await history.lease_called(name)
            assert refused.value.refusal.reason is Reason.UNKNOWN_LEASE, name
        active = await node.acquire("4G", name="carol")
        assert await history.lease_called("carol") == active.lease.id

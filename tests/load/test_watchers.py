"""Readers of Watch that are slow, that stop reading, or that are gone: what is kept for them is bounded."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterable, Mapping
from pathlib import Path
from typing import Any, cast

import grpc
import pytest

from mig_agent.core.events import Event, EventKind
from mig_agent.engine.event_bus import MOST_SUBSCRIBERS, MOST_UNREAD
from mig_agent.pb.migagent.v1 import partition_manager_pb2 as pb
from support.engine import Node
from support.service import TIMEOUT, Service, detail_of, service

LONG = "something long happened; " * 40
"""So that the buffers on the way to a reader that does not read are soon full."""


class GoneConnection:
    """The server's end of a call whose client has vanished: the first write finds it out, or never ends."""

    def __init__(self, *, hangs: bool) -> None:
        self._hangs = hangs

    def auth_context(self) -> Mapping[str, Iterable[bytes]]:
        return {}

    def peer(self) -> str:
        return "unix:"

    async def write(self, _message: object) -> None:
        if self._hangs:
            await asyncio.get_running_loop().create_future()
        raise asyncio.CancelledError


def happen(node: Node, times: int = 1) -> None:
    """Events without anything behind them."""
    hub = node.manager._context.events
    for _ in range(times):
        hub.emit(Event(kind=EventKind.LEASE_RENEWED, at=0.0, revision=10**6, message=LONG))


async def fall_behind(node: Node) -> None:
    """Until nobody is subscribed any more, event by event, so that whoever reads can keep up."""
    hub = node.manager._context.events

    async def go_on() -> None:
        while hub._subscriptions:
            happen(node, MOST_UNREAD // 8)
            await asyncio.sleep(0)

    await asyncio.wait_for(go_on(), TIMEOUT)


@pytest.mark.parametrize("hangs", [False, True], ids=["at once", "while it is written to"])
async def test_a_watcher_that_vanishes_before_its_first_read_leaves_nothing(tmp_path: Path, hangs: bool) -> None:
    async with service(tmp_path, "a100-40gb") as served:
        hub = served.node.manager._context.events
        for _ in range(2 * MOST_SUBSCRIBERS):
            gone = cast("Any", GoneConnection(hangs=hangs))
            call = asyncio.create_task(served.servicers[0].watch(pb.WatchRequest(), gone))
            await asyncio.sleep(0)
            call.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await call
            assert not hub._subscriptions


async def test_a_reader_that_does_not_read_is_dropped_and_told_so_when_it_does(tmp_path: Path) -> None:
    async with service(tmp_path, "a100-40gb") as served:
        messages = aiter(served.users.Watch(pb.WatchRequest(), timeout=TIMEOUT))
        await anext(messages)
        await fall_behind(served.node)
        assert await still_serves(served)
        seen: list[pb.WatchResponse] = []
        with pytest.raises(grpc.RpcError) as dropped:
            await read_all(messages, seen)
        assert seen
        assert dropped.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        detail = detail_of(dropped.value)
        assert detail.reason == "queue-full"
        assert f"cannot go on telling what happens: the reader is {MOST_UNREAD} events behind" in detail.message
        assert "watch again" in detail.hint


async def test_a_reader_that_reads_is_not_disturbed_by_one_that_does_not(tmp_path: Path) -> None:
    async with service(tmp_path, "a100-40gb") as served:
        hub = served.node.manager._context.events
        stuck = served.users.Watch(pb.WatchRequest(), timeout=TIMEOUT)
        await anext(aiter(stuck))
        good = aiter(served.users.Watch(pb.WatchRequest(), timeout=TIMEOUT))
        await anext(good)
        sent = 0
        while len(hub._subscriptions) == 2:
            for _ in range(64):
                happen(served.node)
                sent += 1
            for _ in range(64):
                await anext(good)
        assert len(hub._subscriptions) == 1
        happen(served.node)
        assert (await anext(good)).event.message == LONG
        assert sent > MOST_UNREAD
        stuck.cancel()


async def test_too_many_watchers_are_refused_in_words(tmp_path: Path) -> None:
    async with service(tmp_path, "a100-40gb") as served:
        calls = [served.users.Watch(pb.WatchRequest(), timeout=TIMEOUT) for _ in range(MOST_SUBSCRIBERS)]
        await asyncio.gather(*(anext(aiter(each)) for each in calls))
        with pytest.raises(grpc.RpcError) as refused:
            await anext(aiter(served.users.Watch(pb.WatchRequest(), timeout=TIMEOUT)))
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert f"{MOST_SUBSCRIBERS} read already" in detail_of(refused.value).message
        assert await still_serves(served)
        calls[0].cancel()
        hub = served.node.manager._context.events
        await served.node.until(lambda: len(hub._subscriptions) < MOST_SUBSCRIBERS)
        await anext(aiter(served.users.Watch(pb.WatchRequest(), timeout=TIMEOUT)))


async def read_all(messages: AsyncIterator[pb.WatchResponse], into: list[pb.WatchResponse]) -> None:
    async for each in messages:
        into.append(each)  # noqa: PERF401 -- those before the error count


async def still_serves(served: Service) -> bool:
    """Whether somebody else gets a lease and gives it back, and sees the status."""
    granted = await served.acquire(memory="4G")
    await served.users.Release(pb.ReleaseRequest(lease=granted.lease.id, token=granted.token), timeout=TIMEOUT)
    status = await served.users.Status(pb.StatusRequest(), timeout=TIMEOUT)
    return not status.leases

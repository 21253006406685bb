"""On each stream one write is in progress at a time, and none is cut off, whatever meets it and however slow it is."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import grpc
import pytest

from mig_agent.core.events import Event, EventKind
from mig_agent.frontends.grpc.handlers import method_handlers
from mig_agent.pb.migagent.v1 import partition_manager_pb2 as pb
from support.acquire import RECEIVED
from support.service import Service, ask, service


class SlowReader:
    """The server's end of a call whose client reads nothing until `reads` is set; counts what gRPC would not stand."""

    def __init__(self, *said: pb.AcquireRequest) -> None:
        self._said = list(said)
        self._over = asyncio.Event()
        self.reads = asyncio.Event()
        self.writing = False
        self.wrote: list[Any] = []
        self.status: grpc.StatusCode | None = None
        self.wrong: list[str] = []

    def auth_context(self) -> Mapping[str, Iterable[bytes]]:
        return {}

    def peer(self) -> str:
        return "unix:"

    async def read(self) -> object:
        if self._said:
            return self._said.pop(0)
        await self._over.wait()
        return grpc.aio.EOF

    async def write(self, message: object) -> None:
        if self.writing:
            self.wrong.append("a write while another is in progress")
        self.writing = True
        try:
            await self.reads.wait()
        except asyncio.CancelledError:
            self.wrong.append("a write that was cut off")
            raise
        self.writing = False
        self.wrote.append(message)

    async def abort(self, code: grpc.StatusCode, _words: str, **_metadata: object) -> None:
        if self.writing:
            self.wrong.append("a status while a write is in progress")
        self.status = code
        self._over.set()
        raise grpc.aio.AbortError

    def hang_up(self) -> None:
        self._over.set()


def call_of(served: Service, method: str, first: object, context: SlowReader) -> asyncio.Task[object]:
    handler: Any = method_handlers(served.servicers[0], 100)[method]
    served_by = handler.stream_stream or handler.unary_stream
    return asyncio.create_task(served_by(first, context))


async def is_stuck(context: SlowReader, served: Service) -> None:
    await served.node.until(lambda: context.writing)


async def the_status(task: asyncio.Task[object], context: SlowReader) -> grpc.StatusCode | None:
    context.reads.set()
    with pytest.raises(grpc.aio.AbortError):
        await asyncio.wait_for(task, 30)
    assert not context.wrong
    return context.status


async def out_of_patience(served: Service) -> None:
    served.node.clock.advance(11)


async def closed(served: Service) -> None:
    for each in served.servicers:
        each.stop()
    await served.node.manager.close()


@pytest.mark.parametrize(
    ("method", "message"), [("Acquire", pb.AcquireRequest), ("Hold", pb.HoldRequest)], ids=["Acquire", "Hold"]
)
@pytest.mark.parametrize(
    ("end", "code"),
    [(out_of_patience, grpc.StatusCode.DEADLINE_EXCEEDED), (closed, grpc.StatusCode.UNAVAILABLE)],
    ids=["waited too long", "the agent stops"],
)
async def test_refusal_waits_for_the_write_of_a_position(
    tmp_path: Path, method: str, message: Callable[..., Any], end: Callable[[Service], Any], code: grpc.StatusCode
) -> None:
    async with service(tmp_path, "a100-40gb") as served:
        await served.acquire(profile="7g.40gb")
        first = message(request=ask(memory="4G", wait_seconds=10))
        context = SlowReader(*([first] if method == "Acquire" else []))
        task = call_of(served, method, first, context)
        await is_stuck(context, served)
        await end(served)
        for _ in range(20):
            await asyncio.sleep(0)
        assert not task.done()
        assert context.status is None
        assert await the_status(task, context) is code
        assert [each.WhichOneof("update") for each in context.wrote] == ["queued"]


async def test_grant_waits_for_the_write_of_a_position(tmp_path: Path) -> None:
    async with service(tmp_path, "a100-40gb") as served:
        held = await served.acquire(profile="7g.40gb")
        context = SlowReader(pb.AcquireRequest(request=ask(memory="4G", wait_seconds=10)))
        task = call_of(served, "Acquire", None, context)
        await is_stuck(context, served)
        await served.users.Release(pb.ReleaseRequest(lease=held.lease.id, token=held.token))
        await served.node.until(lambda: served.node.leases and held.lease.id not in served.node.leases)
        assert not context.wrote
        context.reads.set()
        await served.node.until(lambda: len(context.wrote) == 2)
        assert [each.WhichOneof("update") for each in context.wrote] == ["queued", "granted"]
        context.hang_up()
        await asyncio.wait_for(task, 30)
        assert not context.wrong


async def test_overrun_watch_ends_after_the_write_in_progress(tmp_path: Path) -> None:
    async with service(tmp_path, "a100-40gb") as served:
        events = served.node.manager._context.events
        context = SlowReader()
        task = call_of(served, "Watch", pb.WatchRequest(), context)
        await is_stuck(context, served)
        while events._subscriptions:
            events.emit(Event(kind=EventKind.LEASE_RENEWED, at=0.0, revision=10**6, message="something"))
        await asyncio.sleep(0)
        assert not task.done()
        assert await the_status(task, context) is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert len(context.wrote) == 1


async def test_stopped_watch_ends_after_the_write_in_progress(tmp_path: Path) -> None:
    async with service(tmp_path, "a100-40gb") as served:
        context = SlowReader()
        task = call_of(served, "Watch", pb.WatchRequest(), context)
        await is_stuck(context, served)
        await served.acquire(memory="4G")
        for each in served.servicers:
            each.stop()
        await asyncio.sleep(0)
        assert not task.done()
        assert await the_status(task, context) is grpc.StatusCode.UNAVAILABLE
        assert len(context.wrote) == 1
        assert not served.servicers[0]._on_stop


async def test_stopped_hold_ends_after_the_write_in_progress_and_keeps_its_lease(
    tmp_path: Path,
) -> None:
    async with service(tmp_path, "a100-40gb") as served:
        context = SlowReader()
        task = call_of(served, "Hold", pb.HoldRequest(request=ask(memory="4G")), context)
        await is_stuck(context, served)
        for each in served.servicers:
            each.stop()
        assert not task.done()
        assert await the_status(task, context) is grpc.StatusCode.UNAVAILABLE
        assert [each.WhichOneof("update") for each in context.wrote] == ["granted"]
        assert len(served.node.leases) == 1
        assert not served.servicers[0]._held


async def test_client_that_never_reads_leaks_nothing(tmp_path: Path) -> None:
    async with service(tmp_path, "a100-40gb") as served:
        context = SlowReader(pb.AcquireRequest(request=ask(memory="4G")), RECEIVED)
        task = call_of(served, "Acquire", None, context)
        # `received` was said before anything was granted.
        with pytest.raises(grpc.aio.AbortError):
            await asyncio.wait_for(task, 30)
        assert context.status is grpc.StatusCode.INVALID_ARGUMENT
        assert not context.wrong

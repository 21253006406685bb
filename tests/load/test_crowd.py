"""A thousand clients at once on a real agent: bounded queues, words beyond each bound, and flat memory."""

from __future__ import annotations

import asyncio
import re
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import psutil
import pytest

from mig_agent.adapters.transport.connection_limits import allow_open_files
from mig_agent.engine.event_bus import MOST_SUBSCRIBERS
from mig_agent.pb.migagent.v1 import partition_manager_pb2 as pb
from mig_agent.pb.migagent.v1.partition_manager_pb2_grpc import PartitionManagerStub
from support.acquire import asking, granted_on
from support.agent import Agent, eventually, short_folder
from support.figures import Figure
from support.service import TIMEOUT, ask, detail_of

if TYPE_CHECKING:  # it is in the stubs alone
    from mig_agent.pb.migagent.v1.partition_manager_pb2_grpc import PartitionManagerAsyncStub

_PING = re.compile(r"ping[ _]timeout|keepalive[ _](?:watchdog )?timeout", re.IGNORECASE)
"""What gRPC says when it gives a connection up because no answer to a ping came."""
CLIENTS = 1000
ROUNDS = 3
PATIENT = 10 * TIMEOUT
"""Seconds for a call that a thousand others are made beside."""
BURST = 10_000
BURST_CONNECTIONS = 20
MIB = 1 << 20
ROOM_TO_GROW_MIB = 25
"""Between rounds that do the same, far less than what a thousand clients take."""


@pytest.fixture
def folder() -> Iterator[Path]:
    with short_folder() as path:
        yield path


@asynccontextmanager
async def clients(agent: Agent, number: int) -> AsyncIterator[list[PartitionManagerAsyncStub]]:
    """So many, each with a connection of its own."""
    allow_open_files()  # in this process: a shell allows few
    options = (
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.min_reconnect_backoff_ms", 60_000),
        ("grpc.http2.ping_timeout_ms", int(PATIENT * 1000)),  # a busy machine is no broken connection
    )
    channels = [grpc.aio.insecure_channel(agent.address, options=options) for _ in range(number)]
    try:
        stubs: list[Any] = [PartitionManagerStub(channel) for channel in channels]
        yield stubs
    finally:
        for channel in channels:
            await channel.close()


async def status(stub: PartitionManagerAsyncStub) -> pb.StatusResponse:
    return await stub.Status(pb.StatusRequest(), timeout=TIMEOUT)


async def until_nobody_waits(stub: PartitionManagerAsyncStub) -> None:
    async def nobody() -> None:
        while (await status(stub)).queue:  # noqa: ASYNC110 -- another process tells it
            await asyncio.sleep(0.05)

    await asyncio.wait_for(nobody(), PATIENT)


def memory_mib(agent: Agent) -> float:
    assert agent.process is not None
    return psutil.Process(agent.process.pid).memory_info().rss / MIB


async def test_a_thousand_clients_wait_and_one_more_is_refused(folder: Path, figure: Figure) -> None:
    with Agent(folder, "a30", flags=["--max-waiting", str(CLIENTS)]) as agent:
        async with clients(agent, 2) as (holder, visitor):
            granted = await granted_on(holder, ask(profile="4g.24gb"), TIMEOUT)
            memory = []
            for number in range(ROUNDS):
                await a_round(agent, visitor, number)
                memory.append(memory_mib(agent))
            last = await status(visitor)
            assert [each.id for each in last.leases] == [granted.lease.id]
            await holder.Release(pb.ReleaseRequest(lease=granted.lease.id, token=granted.token), timeout=TIMEOUT)
        assert memory[-1] < memory[0] + ROOM_TO_GROW_MIB, memory
        assert memory[-1] < memory[-2] + ROOM_TO_GROW_MIB, memory
        figure("clients that waited at once, over all rounds", CLIENTS * ROUNDS)


async def a_round(agent: Agent, visitor: PartitionManagerAsyncStub, number: int) -> None:
    """All come, all wait, somebody looks, one too many is refused, and all go: half of them simply vanish."""
    async with clients(agent, CLIENTS) as crowd:
        waiting = [
            each.Acquire(
                asking(
                    ask(
                        pb.Want(memory=f"{20_000 + place % 100}M"),
                        wait_seconds=float("inf"),
                        request_id=f"{number}/{place}",
                    )
                ),
                timeout=PATIENT,
            )
            for place, each in enumerate(crowd)
        ]
        first = await asyncio.gather(*(anext(aiter(each)) for each in waiting))
        assert all(each.WhichOneof("update") == "queued" for each in first)
        seen = await status(visitor)
        assert len(seen.queue) == CLIENTS
        with pytest.raises(grpc.RpcError) as refused:
            await anext(aiter(visitor.Acquire(asking(ask(memory="20G", wait_seconds=60.0)))))
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert f"{CLIENTS} requests wait already, which is the limit" in detail_of(refused.value).message
        for each in waiting[::2]:
            each.cancel()
    await until_nobody_waits(visitor)


async def test_a_thousand_clients_that_all_want_something_at_once_are_all_answered(
    folder: Path, figure: Figure
) -> None:
    """Most of them are refused: there are 14 devices. Nothing is given twice, nothing stays."""
    with Agent(folder, "h100-80gb:2") as agent:
        async with clients(agent, CLIENTS) as crowd:
            answers = await asyncio.gather(*(take_and_give_back(each) for each in crowd))
            served, refused = answers.count("served"), answers.count("no-capacity")
            assert served + refused == CLIENTS, sorted(set(answers))
            assert served
            left = await status(crowd[0])
            assert not left.leases
            assert {pb.InstanceState.Name(each.state) for gpu in left.gpus for each in gpu.instances} == {
                "INSTANCE_STATE_IDLE"
            }
        figure("clients at once that asked and were answered", CLIENTS)


async def take_and_give_back(stub: PartitionManagerAsyncStub) -> str:
    try:
        granted = await granted_on(stub, ask(profile="1g.10gb"), PATIENT)
    except grpc.RpcError as error:
        return detail_of(error).reason
    await status(stub)
    await stub.Release(pb.ReleaseRequest(lease=granted.lease.id, token=granted.token), timeout=PATIENT)
    return "served"


async def test_calls_beyond_the_limit_are_refused_in_words_and_others_still_served(folder: Path) -> None:
    with Agent(folder, "a30", flags=["--max-calls", "3"]) as agent:
        async with clients(agent, 1) as (stub,):
            streams = [stub.Watch(pb.WatchRequest(), timeout=PATIENT) for _ in range(3)]
            await asyncio.gather(*(anext(aiter(each)) for each in streams))
            with pytest.raises(grpc.RpcError) as refused:
                await anext(aiter(stub.Watch(pb.WatchRequest(), timeout=TIMEOUT)))
            assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            detail = detail_of(refused.value)
            assert (detail.reason, detail.retryable) == ("queue-full", True)
            assert "cannot take one more call: 3 requests and watches are open" in detail.message
            assert "max_calls" in detail.hint
            # What ends by itself has room of its own, and so have the administrators.
            assert (await status(stub)).gpus
            agent.migctl("--address", f"unix://{agent.folder}/admin.sock", "reclaim")
            streams[0].cancel()

            def room_again() -> bool:
                return agent.migctl("request", "--gpu-memory", "4G", code=None).returncode == 0

            await asyncio.to_thread(eventually, room_again, "a place is free again")
        assert not agent.log().count("Traceback")


async def test_a_message_that_is_too_long_is_refused_and_the_agent_goes_on(folder: Path) -> None:
    with Agent(folder, "a30") as agent:
        async with clients(agent, 1) as (stub,):
            huge = ask(memory="4G", request_id="x" * (2 << 20))
            with pytest.raises(grpc.RpcError) as refused:
                await anext(aiter(stub.Acquire(asking(huge), timeout=TIMEOUT)))
            assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert "larger than max" in str(refused.value.details())
            assert (await status(stub)).gpus


async def test_watchers_that_vanish_at_any_moment_leave_their_places(folder: Path) -> None:
    """More of them than there are places, gone before, while and after the agent notices that they are there."""
    with Agent(folder, "a30") as agent:
        for moment in range(4):
            async with clients(agent, MOST_SUBSCRIBERS // 2) as crowd:
                calls = [each.Watch(pb.WatchRequest(), timeout=PATIENT) for each in crowd]
                for each in calls[: len(calls) * moment // 3]:
                    await anext(aiter(each))
                for each in calls[::2]:
                    each.cancel()
        async with clients(agent, 1) as (stub,):
            calls = []
            # All places are there again, as soon as the agent has noticed.
            while len(calls) < MOST_SUBSCRIBERS:
                call = stub.Watch(pb.WatchRequest(), timeout=PATIENT)
                try:
                    await anext(aiter(call))
                except grpc.RpcError:
                    await asyncio.sleep(0.05)
                else:
                    calls.append(call)


def test_readers_that_are_stopped_do_not_hold_up_the_agent(folder: Path) -> None:
    """Programs that watch and are then stopped (SIGSTOP): others are served, and the agent ends in time."""
    with Agent(folder, "a30") as agent:
        watching = [agent.begin("events", "--follow", "-o", "json") for _ in range(3)]
        for each in watching:
            assert each.stdout is not None
        try:
            lease = agent.ask("request", "--gpu-memory", "4G")["lease"]
            first = watching[0].stdout
            assert first is not None
            assert first.readline()
            for each in watching:
                psutil.Process(each.pid).suspend()
            for _ in range(4):
                agent.migctl("release", lease)
                lease = agent.ask("request", "--gpu-memory", "4G")["lease"]
            assert agent.ask("status")["leases"]
            assert agent.stop() == 0
        finally:
            for each in watching:
                each.kill()
                each.communicate()


@pytest.mark.parametrize("max_calls", [50, 2000])
async def test_a_burst_is_refused_in_words_and_each_release_gets_through(
    folder: Path, figure: Figure, max_calls: int
) -> None:
    """Ten thousand calls at once, Releases among them."""
    with Agent(folder, "h100-80gb:8", flags=["--max-calls", str(max_calls)]) as agent:
        async with clients(agent, BURST_CONNECTIONS) as crowd:
            leases = [await take(each) for each in crowd for _ in range(2)]

            async def acquire(number: int) -> str:
                stub = crowd[number % BURST_CONNECTIONS]
                request = ask(profile="7g.80gb", request_id=str(number), wait_seconds=(number % 3) * 0.5)
                call = stub.Acquire(asking(request), timeout=PATIENT)
                try:
                    async for _ in call:
                        pass
                except grpc.aio.AioRpcError as error:
                    return outcome(error)
                return "OK"

            async def release(number: int, granted: pb.Granted) -> str:
                """As mig_agent.client does: once more where the connection was lost; the same lease, so no harm."""
                stub = crowd[number % BURST_CONNECTIONS]
                request = pb.ReleaseRequest(lease=granted.lease.id, token=granted.token)
                for left in (1, 0):
                    try:
                        await stub.Release(request, timeout=PATIENT)
                    except grpc.aio.AioRpcError as error:
                        if not left or outcome(error) != LOST:
                            return outcome(error)
                    else:
                        break
                return "OK"

            burst = [acquire(number) for number in range(BURST // 2)]
            releases = [release(number, granted) for number, granted in enumerate(leases)]
            rest = [acquire(number) for number in range(BURST // 2, BURST)]
            began = time.monotonic()
            answers = await asyncio.gather(*burst, *releases, *rest)
            seconds = time.monotonic() - began
        released = answers[len(burst) : len(burst) + len(releases)]
        assert set(released) == {"OK"}, Counter(released)
        # Those past their deadline waited as long as they had said.
        usual = {"OK", "RESOURCE_EXHAUSTED in words", "DEADLINE_EXCEEDED in words"}
        # Only where the machine was too busy for a minute to answer a ping; else no connection may be lost.
        starved = {LATE, LOST} if seconds > PING_SECONDS else set()
        assert set(answers) <= usual | {UNHEARD} | starved, Counter(answers)
        figure("calls of bursts for which grpc.aio made up INTERNAL", answers.count(UNHEARD))
        figure("calls of bursts that were refused in words", len(answers) - answers.count("OK"))
        assert not agent.log().count("Traceback")


async def test_a_thousand_calls_wait_on_one_connection_and_a_release_gets_through(folder: Path) -> None:
    with Agent(folder, "a30") as agent:
        async with clients(agent, 1) as (stub,):
            granted = await take(stub, "4g.24gb")
            waiting = [
                stub.Acquire(
                    asking(ask(memory="20G", wait_seconds=1e6, request_id=str(each))),
                    timeout=PATIENT,
                )
                for each in range(CLIENTS)
            ]
            first = await asyncio.gather(*(anext(aiter(each)) for each in waiting))
            assert {each.WhichOneof("update") for each in first} == {"queued"}
            assert len((await status(stub)).queue) == CLIENTS
            request = pb.ReleaseRequest(lease=granted.lease.id, token=granted.token)
            await stub.Release(request, timeout=PATIENT)
            assert len((await status(stub)).queue) == CLIENTS - 1  # the first of them has it


UNHEARD = "a refusal that grpc.aio hid"
"""Where a stream ends before its client writes, grpc.aio makes up a status (docs/api.md, grpc/grpc issue 36066)."""


LATE = "refused, as its request came a minute after its stream"
"""Where the machine is so busy that this process takes a minute to write what it began."""


LOST = "the connection was lost, as one side did not answer a ping in time"
"""The agent promises this to a client that does not answer (docs/security.md); here both share a busy machine."""
PING_SECONDS = 60.0
"""The least time for which either side waits for the answer to a ping."""


def outcome(error: grpc.aio.AioRpcError) -> str:
    made_up = error.code() is grpc.StatusCode.INTERNAL and error.details() == "Internal error from Core"
    if made_up and "SendMessageOperation" in (error.debug_error_string() or ""):
        return UNHEARD
    if error.code() is grpc.StatusCode.INVALID_ARGUMENT and "a request: none came in " in (error.details() or ""):
        return LATE
    if error.code() is grpc.StatusCode.UNAVAILABLE and _PING.search(error.details() or ""):
        return LOST
    words = (error.details() or "").startswith("cannot ")
    return f"{error.code().name} {'in words' if words else error.details()}"


async def take(stub: PartitionManagerAsyncStub, profile: str = "1g.10gb") -> pb.Granted:
    return await granted_on(stub, ask(profile=profile), PATIENT)

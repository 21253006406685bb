"""The calls that are measured, made directly on the wire so that no client library is measured with them."""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, cast

import grpc
from echo import METHOD

from mig_agent.pb.migagent.v1 import partition_manager_pb2 as pb
from mig_agent.pb.migagent.v1 import partition_manager_pb2_grpc as pb_grpc

if TYPE_CHECKING:
    from mig_agent.pb.migagent.v1.partition_manager_pb2_grpc import PartitionManagerAsyncStub as AsyncStub

_RECEIVED = pb.AcquireRequest(received=pb.Received())

Pair = Callable[[], Awaitable[None]]
"""Makes two calls, one after the other."""


def stub_on(channel: grpc.aio.Channel) -> AsyncStub:
    """Return an asynchronous stub; the generated class is the same for both kinds, only the type stubs differ."""
    return cast("AsyncStub", pb_grpc.PartitionManagerStub(channel))


async def acquire(stub: AsyncStub, memory_mib: int, gpus: tuple[str, ...] = (), *, request_id: str = "") -> pb.Granted:
    """Acquire one instance with this much memory and confirm it. Raises grpc.RpcError."""
    name = request_id or uuid.uuid4().hex
    request = pb.Request(wants=[pb.Want(memory_bytes=memory_mib << 20)], request_id=name, gpus=gpus)
    granted = None
    call = stub.Acquire()
    await call.write(pb.AcquireRequest(request=request))
    async for answer in call:
        if answer.HasField("granted"):
            granted = answer.granted
            with contextlib.suppress(asyncio.InvalidStateError):  # it has ended: its status tells why
                await call.write(_RECEIVED)
    if granted is None:
        message = "cannot measure: Acquire ended without an answer"
        raise RuntimeError(message)
    return granted


def is_broken(error: grpc.aio.AioRpcError) -> bool:
    """Return True if a stream ended while it was written to: grpc.aio then replaces the pending status by this one."""
    return error.code() is grpc.StatusCode.INTERNAL and error.details() == "Internal error from Core"


async def release(stub: AsyncStub, granted: pb.Granted) -> None:
    """End the lease."""
    await stub.Release(pb.ReleaseRequest(lease=granted.lease.id, token=granted.token))


def lease_pair(channel: grpc.aio.Channel, memory_mib: int = 4000) -> Pair:
    """Return Acquire and Release as a pair."""
    stub = stub_on(channel)

    async def pair() -> None:
        await release(stub, await acquire(stub, memory_mib))

    return pair


def unconfirmed_lease_pair(channel: grpc.aio.Channel, memory_mib: int = 4000) -> Pair:
    """Return Acquire and Release as a pair, for an agent that awaits no confirmation."""
    stub = stub_on(channel)

    async def pair() -> None:
        request = pb.Request(wants=[pb.Want(memory_bytes=memory_mib << 20)], request_id=uuid.uuid4().hex)
        call = stub.Acquire()
        await call.write(pb.AcquireRequest(request=request))
        (granted,) = [answer.granted async for answer in call if answer.HasField("granted")]
        await release(stub, granted)

    return pair


def echo_pair(channel: grpc.aio.Channel) -> Pair:
    """Return two echoes of the size of such a request as a pair."""
    call: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(METHOD)
    payload = b"x" * 64

    async def pair() -> None:
        await call(payload)
        await call(payload)

    return pair


async def latencies(pair: Pair, times: int) -> list[float]:
    """Return the seconds of each pair."""
    found = []
    for _ in range(times):
        began = time.perf_counter()
        await pair()
        found.append(time.perf_counter() - began)
    return found


async def throughput(pair: Pair, clients: int, times_each: int) -> float:
    """Return pairs per second, with this many clients at once."""

    async def client() -> None:
        for _ in range(times_each):
            await pair()

    began = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(clients)))
    return clients * times_each / (time.perf_counter() - began)

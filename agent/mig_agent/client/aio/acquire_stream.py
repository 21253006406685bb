"""An Acquire stream on an event loop: from the request to the confirmation that the lease was received."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

import grpc

from mig_agent.client.acquire_stream import GIVE_UP_SECONDS, RECEIVED, AcquireCall
from mig_agent.client.aio.connection import AsyncConnection
from mig_agent.client.aio.hold_stream import first_grant
from mig_agent.client.error_mapping import Dropped
from mig_agent.client.errors import ClientError
from mig_agent.client.hold_stream import OnQueued
from mig_agent.client.types import Grant
from mig_agent.pb.migagent.v1 import partition_manager_pb2 as pb

if TYPE_CHECKING:
    from mig_agent.client.request_args import RequestArgs
    from mig_agent.pb.migagent.v1.partition_manager_pb2_grpc import PartitionManagerAsyncStub

    Stream = grpc.aio.StreamStreamCall[pb.AcquireRequest, pb.AcquireResponse]


class AsyncAcquiring:
    """Takes one lease and confirms it, as `mig_agent.client.acquire_stream.Acquiring`; for one event loop."""

    def __init__(self, connection: AsyncConnection, args: RequestArgs, background: set[asyncio.Task[None]]) -> None:
        """Keep tasks that outlive a cancelled caller in `background`. Raises UsageError for invalid arguments."""
        self._connection = connection
        self._acquire = AcquireCall(args)
        self._background = background
        self._stream: Stream | None = None

    async def take(self, on_queued: OnQueued | None, *, confirm: bool) -> Grant:
        """Return the lease, confirmed or to be confirmed later. Raises Refused, NoAgent."""

        async def attempt(stub: PartitionManagerAsyncStub) -> Grant:
            grant = await self._open(stub, on_queued)
            if confirm:
                await self._finish(grant)
            return grant

        return await self._connection.call_safely_repeated(attempt)

    async def confirm(self) -> None:
        """Tell the agent that the lease was received. Raises Refused if it has ended meanwhile, NoAgent."""

        async def attempt(stub: PartitionManagerAsyncStub) -> None:
            if self._stream is None:
                await self._open(stub, None)
            await self._finish(None)

        await self._connection.call_safely_repeated(attempt)

    def close(self) -> None:
        """Leave the lease as it is: an unconfirmed one ends by itself."""
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.cancel()

    async def _open(self, stub: PartitionManagerAsyncStub, on_queued: OnQueued | None) -> Grant:
        stream = self._stream = stub.Acquire(timeout=self._acquire.timeout)
        try:
            await self._send(stream, self._acquire.message)
        except BaseException:
            stream.cancel()
            raise
        return await first_grant(stream, on_queued)

    async def _finish(self, grant: Grant | None) -> None:
        stream, self._stream = self._stream, None
        if stream is None:
            return
        try:
            await self._send(stream, RECEIVED)
            async for _ in stream:
                pass
        except BaseException as error:
            stream.cancel()
            # The agent may count the lease as confirmed, though no caller has it.
            if grant is not None and self._acquire.is_own and isinstance(error, asyncio.CancelledError):
                task = asyncio.get_running_loop().create_task(self._give_up(grant), name=f"give up {grant.id}")
                self._background.add(task)
                task.add_done_callback(self._background.discard)
            raise

    async def _send(self, stream: Stream, message: pb.AcquireRequest) -> None:
        """Send a message. Raises NoAgent, which is repeated, if the stream broke and gRPC does not report how."""
        try:
            await stream.write(message)
        except asyncio.InvalidStateError:
            return  # the call has ended: its status says why
        except grpc.aio.AioRpcError as error:
            # grpc.aio reports this for a stream that ends during a write, instead of the status that is about to
            # arrive.
            if error.code() is grpc.StatusCode.INTERNAL:
                raise Dropped(f"cannot go on with the agent at {self._connection.address}: the stream broke") from error
            raise

    async def _give_up(self, grant: Grant) -> None:
        release = pb.ReleaseRequest(lease=grant.id, token=grant.token)
        with contextlib.suppress(ClientError):
            await self._connection.call(lambda stub: stub.Release(release, timeout=GIVE_UP_SECONDS))

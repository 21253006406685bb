"""An Acquire stream on an event loop: from the request to the confirmation that the lease has arrived."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

import grpc

from mig_agent.client.acquire_stream import GIVE_UP_SECONDS, RECEIVED, Wanted
from mig_agent.client.aio.connection import AsyncConnection
from mig_agent.client.aio.hold_stream import first_grant
from mig_agent.client.error_mapping import Dropped
from mig_agent.client.errors import ClientError
from mig_agent.client.hold_stream import OnQueued
from mig_agent.client.types import Grant
from mig_agent.pb.migagent.v1 import partition_manager_pb2 as pb

if TYPE_CHECKING:
    from mig_agent.client.request_args import Asking
    from mig_agent.pb.migagent.v1.partition_manager_pb2_grpc import PartitionManagerAsyncStub

    Stream = grpc.aio.StreamStreamCall[pb.AcquireRequest, pb.AcquireResponse]


class AsyncAcquiring:
    """As `mig_agent.client.acquire_stream.Acquiring`, on one event loop."""

    def __init__(self, connection: AsyncConnection, asking: Asking, background: set[asyncio.Task[None]]) -> None:
        """`background` keeps the tasks that go on after a caller was cancelled. Raises UsageError."""
        self._connection = connection
        self._wanted = Wanted(asking)
        self._background = background
        self._stream: Stream | None = None

    async def take(self, on_queued: OnQueued | None, *, confirm: bool) -> Grant:
        """As `Acquiring.take`."""

        async def attempt(stub: PartitionManagerAsyncStub) -> Grant:
            grant = await self._open(stub, on_queued)
            if confirm:
                await self._finish(grant)
            return grant

        return await self._connection.call_safely_repeated(attempt)

    async def confirm(self) -> None:
        """As `Acquiring.confirm`."""

        async def attempt(stub: PartitionManagerAsyncStub) -> None:
            if self._stream is None:
                await self._open(stub, None)
            await self._finish(None)

        await self._connection.call_safely_repeated(attempt)

    def close(self) -> None:
        """As `Acquiring.close`."""
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.cancel()

    async def _open(self, stub: PartitionManagerAsyncStub, on_queued: OnQueued | None) -> Grant:
        stream = self._stream = stub.Acquire(timeout=self._wanted.timeout)
        try:
            await self._say(stream, self._wanted.message)
        except BaseException:
            stream.cancel()
            raise
        return await first_grant(stream, on_queued)

    async def _finish(self, grant: Grant | None) -> None:
        stream, self._stream = self._stream, None
        if stream is None:
            return
        try:
            await self._say(stream, RECEIVED)
            async for _ in stream:
                pass
        except BaseException as error:
            stream.cancel()
            # The agent may take the lease for confirmed, and nobody would have it.
            if grant is not None and self._wanted.is_own and isinstance(error, asyncio.CancelledError):
                task = asyncio.get_running_loop().create_task(self._give_up(grant), name=f"give up {grant.id}")
                self._background.add(task)
                task.add_done_callback(self._background.discard)
            raise

    async def _say(self, stream: Stream, message: pb.AcquireRequest) -> None:
        """Send a message. Raises NoAgent, to be asked again, where the stream has broken and gRPC does not say how."""
        try:
            await stream.write(message)
        except asyncio.InvalidStateError:
            return  # the call has ended: its status tells why
        except grpc.aio.AioRpcError as error:
            # Made up by grpc.aio for a stream that ends while it is written to, in place of the status on its way.
            if error.code() is grpc.StatusCode.INTERNAL:
                raise Dropped(f"cannot go on with the agent at {self._connection.address}: the stream broke") from error
            raise

    async def _give_up(self, grant: Grant) -> None:
        release = pb.ReleaseRequest(lease=grant.id, token=grant.token)
        with contextlib.suppress(ClientError):
            await self._connection.call(lambda stub: stub.Release(release, timeout=GIVE_UP_SECONDS))

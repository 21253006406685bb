"""A Hold stream that a task keeps open, and reopens when the agent restarts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Protocol

import grpc

from mig_agent.client.aio.connection import AsyncConnection
from mig_agent.client.connection import is_interruption
from mig_agent.client.errors import ClientError
from mig_agent.client.hold_stream import (
    ATTACH_AGAIN_SECONDS,
    Held,
    OnQueued,
    grant_in,
    no_lease_error,
    stream_ended_error,
)
from mig_agent.client.types import Grant
from mig_agent.pb.migagent.v1 import partition_manager_pb2 as pb


class AsyncGrantStream(Protocol):
    """Responses of Acquire or Hold, with a way to end the call."""

    def __aiter__(self) -> AsyncIterator[pb.AcquireResponse | pb.HoldResponse]:
        """Yield responses; a second reader continues where the first one stopped."""
        ...

    def cancel(self) -> bool:
        """End the call."""
        ...


class AsyncHolding(Held):
    """A lease that lasts until this object is closed or this process ends."""

    def __init__(
        self, connection: AsyncConnection, request: pb.Request, *, on_lost: Callable[[ClientError], None] | None
    ) -> None:
        super().__init__(request, on_lost)
        self._connection = connection
        self._stream: AsyncGrantStream | None = None
        self._closing = False
        self._task: asyncio.Task[None] | None = None

    async def open(self, on_queued: OnQueued | None) -> Grant:
        """Take the lease and keep the stream open. Raises Refused, NoAgent."""
        grant = await self._connection.call_safely_repeated(lambda _stub: self._attach(on_queued))
        self._task = asyncio.create_task(self._keep(), name=f"mig-agent-hold-{grant.id}")
        return grant

    def stop_attaching(self) -> None:
        """Do not reopen the stream when it ends."""
        self._closing = True

    async def close(self) -> None:
        """End the stream, and with it the lease. Returns when the task has ended."""
        self.stop_attaching()
        if self._stream is not None:
            self._stream.cancel()
        if self._task is not None and self._task is not asyncio.current_task():
            self._task.cancel()
            await asyncio.wait([self._task])

    async def _attach(self, on_queued: OnQueued | None) -> Grant:
        stream: AsyncGrantStream = self._connection.stub.Hold(pb.HoldRequest(request=self._request))
        self._stream = stream
        return await first_grant(stream, on_queued)

    async def _keep(self) -> None:
        """Wait for the stream's end, and reopen it while the agent may come back; the task's function."""
        error = await self._end_of_stream()
        while not self._closing and is_interruption(error):
            try:
                await self._connection.call_safely_repeated(
                    lambda _stub: self._attach(None), patience=ATTACH_AGAIN_SECONDS
                )
                error = await self._end_of_stream()
            except ClientError as failed:
                error = failed
                break
        if not self._closing:
            self._lose(error)

    async def _end_of_stream(self) -> ClientError:
        if self._stream is None:
            return no_lease_error()
        try:
            async for _ in self._stream:
                pass
        except (grpc.RpcError, asyncio.CancelledError) as error:
            return await self._connection.failure(error)
        return stream_ended_error(self._connection.address)


async def first_grant(stream: AsyncGrantStream, on_queued: OnQueued | None) -> Grant:
    """Report queue positions until the lease is granted. Raises grpc.RpcError, and NoAgent if no lease comes.

    Any other exception, such as CancelledError, cancels the call, which leaves the queue.
    """
    try:
        async for response in stream:
            grant = grant_in(response, on_queued)
            if grant is not None:
                return grant
    except BaseException:
        stream.cancel()
        raise
    raise no_lease_error()

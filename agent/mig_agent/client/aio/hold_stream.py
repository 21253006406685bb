"""A Hold stream that is kept open by a task, and attached to again when the agent restarts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Protocol

import grpc

from mig_agent.client.aio.connection import AsyncConnection
from mig_agent.client.connection import is_interruption
from mig_agent.client.errors import ClientError
from mig_agent.client.hold_stream import ATTACH_AGAIN_SECONDS, Held, OnQueued, ended_by, told, without_lease
from mig_agent.client.types import Grant
from mig_agent.pb.migagent.v1 import partition_manager_pb2 as pb


class AsyncGrantStream(Protocol):
    """What Acquire and Hold answer: their messages, and a way to end it."""

    def __aiter__(self) -> AsyncIterator[pb.AcquireResponse | pb.HoldResponse]:
        """Reads; once more, it goes on where the last reader stopped."""
        ...

    def cancel(self) -> bool:
        """Ends it."""
        ...


class AsyncHolding(Held):
    """A lease that lives as long as this object is not closed and this process lives."""

    def __init__(
        self, connection: AsyncConnection, request: pb.Request, *, on_lost: Callable[[ClientError], None] | None
    ) -> None:
        super().__init__(request, on_lost)
        self._connection = connection
        self._stream: AsyncGrantStream | None = None
        self._closing = False
        self._task: asyncio.Task[None] | None = None

    async def open(self, on_queued: OnQueued | None) -> Grant:
        """Takes the lease and keeps the stream open. Raises Refused, NoAgent."""
        grant = await self._connection.call_safely_repeated(lambda _stub: self._attach(on_queued))
        self._task = asyncio.create_task(self._keep(), name=f"mig-agent-hold-{grant.id}")
        return grant

    def stop_attaching(self) -> None:
        """From now on the end of the stream is wanted."""
        self._closing = True

    async def close(self) -> None:
        """Ends the stream, and with it the lease. Returns when the task has ended."""
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
        """The task: waits for the stream's end, and attaches again while the agent may be back."""
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
            return without_lease()
        try:
            async for _ in self._stream:
                pass
        except (grpc.RpcError, asyncio.CancelledError) as error:
            return await self._connection.failure(error)
        return ended_by(self._connection.address)


async def first_grant(stream: AsyncGrantStream, on_queued: OnQueued | None) -> Grant:
    """Reads places in the queue until the lease is granted. Raises what grpc raises, and NoAgent without an answer.

    The call is cancelled when anything else is raised, such as CancelledError: that leaves the queue.
    """
    try:
        async for response in stream:
            grant = told(response, on_queued)
            if grant is not None:
                return grant
    except BaseException:
        stream.cancel()
        raise
    raise without_lease()

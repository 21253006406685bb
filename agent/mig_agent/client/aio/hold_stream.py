"""A Hold stream that a task keeps open, and reopens when the agent is back, however long it was away."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING, Protocol

import grpc

from mig_agent.client.absence import OnAway
from mig_agent.client.aio.connection import AsyncConnection
from mig_agent.client.errors import ClientError
from mig_agent.client.hold_stream import (
    PAUSE_SECONDS,
    Held,
    OnQueued,
    grant_in,
    no_lease_error,
    stream_ended_error,
)
from mig_agent.client.types import Grant, QueuePosition
from mig_agent.pb.migagent.v1 import partition_manager_pb2 as pb

if TYPE_CHECKING:
    from mig_agent.client.api_methods import Call


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
        self,
        connection: AsyncConnection,
        request: pb.Request,
        *,
        on_lost: Callable[[ClientError], None] | None = None,
        on_away: OnAway | None = None,
    ) -> None:
        super().__init__(request, on_lost, on_away)
        self._connection = connection
        self._stream: AsyncGrantStream | None = None
        self._closing = False
        self._task: asyncio.Task[None] | None = None

    async def open(self, on_queued: OnQueued | None) -> Grant:
        """Take the lease and keep the stream open. Raises Refused, NoAgent."""

        def report(position: QueuePosition) -> None:
            self._absence.over()
            if on_queued is not None:
                on_queued(position)

        grant = await self._connection.call_safely_repeated(
            lambda _stub: self._attach(report), until=self._wait.moment, on_failure=self._absence.failed
        )
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

    def release_later(self, call: Call[None]) -> asyncio.Task[None]:
        """Release the lease by `call` when the agent is back; return the task, which ends with its event loop.

        Until then it would stay for as long as this process lives.
        """
        connection = self._connection.another()

        async def release() -> None:
            try:
                with contextlib.suppress(ClientError):  # a refusal: it has ended
                    await connection.call_safely_repeated(call.on, until=math.inf)
            finally:
                await connection.close()

        return asyncio.create_task(release(), name=f"mig-agent-release-{self._lease}")

    async def _attach(self, on_queued: OnQueued | None) -> Grant:
        stream: AsyncGrantStream = self._connection.stub.Hold(self._to_send())
        self._stream = stream
        grant = await first_grant(stream, on_queued)
        try:
            self._granted(grant)
        except ClientError:
            stream.cancel()
            raise
        return grant

    async def _keep(self) -> None:
        """Wait for the stream's end, and reopen it, however long the agent is away; the task's function."""
        error = await self._end_of_stream()
        while not self._closing and self._is_passing(error):
            self._absence.failed(error)
            try:
                await self._connection.call_safely_repeated(
                    lambda _stub: self._attach(None), until=math.inf, on_failure=self._absence.failed
                )
                error = await self._end_of_stream()
            except ClientError as failed:
                error = failed
                if self._is_passing(error):
                    await asyncio.sleep(PAUSE_SECONDS)
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

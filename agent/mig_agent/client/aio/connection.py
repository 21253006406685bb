"""One connection to the agent on an event loop; failed calls become errors with messages."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

import grpc

from mig_agent.client.addresses import Address
from mig_agent.client.api_methods import Answer
from mig_agent.client.channels import Tls, open_async_channel
from mig_agent.client.connection import MOST_FORMER, BaseConnection, OnFailure, is_interruption
from mig_agent.client.error_mapping import Dropped, failure_of
from mig_agent.client.errors import ClientError
from mig_agent.core.errors import UsageError
from mig_agent.pb.migagent.v1.partition_manager_pb2_grpc import PartitionManagerStub

if TYPE_CHECKING:  # it exists in the stubs alone
    from mig_agent.pb.migagent.v1.partition_manager_pb2_grpc import PartitionManagerAsyncStub


class AsyncConnection(BaseConnection):
    """A channel that opens on first use, on the event loop running then."""

    def __init__(self, address: Address, tls: Tls | None, *, patience: float) -> None:
        super().__init__(address, tls, patience=patience)
        self._channel: grpc.aio.Channel | None = None
        self._former: list[grpc.aio.Channel] = []
        self._closing: set[asyncio.Task[None]] = set()
        self._stub: PartitionManagerAsyncStub | None = None

    @property
    def stub(self) -> PartitionManagerAsyncStub:
        """The service's methods, on a channel with the present certificate files.

        Raises UsageError if TLS is missing or its files cannot be read.
        """
        new = self.are_files_new()
        if self._stub is not None:
            if new:
                self._renew()
            return self._stub
        self._channel = open_async_channel(self.address, self._tls)
        self._stub = _stub_of(self._channel)
        return self._stub

    def _renew(self) -> None:
        try:
            channel = open_async_channel(self.address, self._tls)
        except UsageError:
            return  # files in the middle of a replacement: they will have changed again at the next call
        if self._channel is not None:
            self._former.append(self._channel)
        self._channel, self._stub = channel, _stub_of(channel)
        while len(self._former) > MOST_FORMER:
            task = asyncio.get_running_loop().create_task(self._former.pop(0).close(), name="a former channel")
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

    def another(self) -> AsyncConnection:
        """Return a connection to the same agent that is closed apart from this one."""
        another = AsyncConnection(self.address, self._tls, patience=self._patience)
        another._answered = self._answered
        return another

    async def close(self) -> None:
        """Close the channel; calls in flight fail. Later calls open a new one."""
        former, self._former = self._former, []
        channel, self._channel, self._stub = self._channel, None, None
        for each in (*former, channel):
            if each is not None:
                await each.close()

    async def call(self, work: Callable[[PartitionManagerAsyncStub], Awaitable[Answer]]) -> Answer:
        """Return the answer of `work`, which calls one method. Raises Refused, NoAgent or another ClientError."""
        stub = self.stub
        try:
            answer = await work(stub)
        except (grpc.RpcError, asyncio.CancelledError) as error:
            raise await self.failure(error) from error
        self._answered = True
        return answer

    async def failure(self, error: grpc.RpcError | asyncio.CancelledError) -> ClientError:
        """Return the error that a failed call means. Raises CancelledError if the caller's own task was cancelled."""
        if isinstance(error, asyncio.CancelledError):
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise error
            return Dropped(f"cannot go on with the agent at {self.address}: the connection was closed")
        # In a thread: it may probe the socket to find out why it does not answer.
        return self.record_failure(await asyncio.to_thread(failure_of, error, self.address))

    async def call_safely_repeated(
        self,
        work: Callable[[PartitionManagerAsyncStub], Awaitable[Answer]],
        *,
        until: float | None = None,
        on_failure: OnFailure | None = None,
    ) -> Answer:
        """Call `work`, which must be safe to repeat, and repeat it while the connection breaks.

        Repeats for the connection's patience with growing pauses, and on until the moment `until` of `time.monotonic`,
        or the task is cancelled. `on_failure` is called before each further try, with why the last one failed.
        """
        try:
            return await self.call(work)
        except ClientError as error:
            if not self.is_worth_repeating(error):
                raise
        pauses = self.pauses(until)
        while True:
            try:
                return await self.call(work)
            except ClientError as error:
                pause = next(pauses, None) if is_interruption(error) else None
                if pause is None:
                    raise
                if on_failure is not None:
                    on_failure(error)
            await asyncio.sleep(pause)


def _stub_of(channel: grpc.aio.Channel) -> PartitionManagerAsyncStub:
    stub: Any = PartitionManagerStub(channel)  # the same class; only its type has two names
    typed: PartitionManagerAsyncStub = stub
    return typed

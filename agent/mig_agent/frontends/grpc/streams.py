"""The messages on one request's stream while it is served: its position in the queue, and the client's confirmation.

Only one write may be in progress on a stream, and a task that writes must not be cancelled: the operation of gRPC's
core would go on, and the next one on the same stream would fail, even the status that ends it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import grpc

from mig_agent.core.errors import MigAgentError, UsageError
from mig_agent.engine.results import QueuePlace
from mig_agent.frontends.grpc import encode
from mig_agent.frontends.grpc.handlers import Context, next_message
from mig_agent.pb.migagent.v1 import partition_manager_pb2 as pb

_METHOD = "Acquire"


class QueueReports:
    """Sends a waiting request's place in the queue to its client. Not thread-safe; use from the event loop."""

    def __init__(self, context: Context, wrap: Callable[[pb.Queued], pb.AcquireResponse | pb.HoldResponse]) -> None:
        """Write each place in the queue to `context`, as the response message that `wrap` makes of it."""
        self._context = context
        self._wrap = wrap
        self._latest: QueuePlace | None = None
        self._writing: asyncio.Task[None] | None = None

    def report(self, place: QueuePlace) -> None:
        """Send a new place in the queue; skip earlier ones that are not written yet."""
        self._latest = place
        if self._writing is None or self._writing.done():
            self._writing = asyncio.get_running_loop().create_task(self._write())

    async def finish(self) -> None:
        """Wait until no report is being written, which takes as long as the client does not read.

        Await this after the last report and before anything else is written, even the status.
        """
        if self._writing is not None:
            await asyncio.shield(self._writing)

    async def _write(self) -> None:
        written: QueuePlace | None = None
        try:
            while self._latest is not None and written is not self._latest:
                written = self._latest
                await self._context.write(self._wrap(encode.queued(written)))
        except (grpc.aio.BaseError, asyncio.CancelledError):
            return  # the client has disconnected, which ends the call


def request_in(message: pb.AcquireRequest | None) -> pb.Request:
    """Return the request that opens an Acquire stream. Raises UsageError if the first message is anything else."""
    if message is None:
        raise UsageError("cannot serve a stream without a request", "send `request` as its first message")
    if message.HasField("received"):
        raise UsageError(
            "cannot confirm a lease that this stream has not brought",
            "send `request` first, and `received` once you have read `granted`",
        )
    request: pb.Request = message.request
    return request


class Confirmation:
    """Waits for the second message of an Acquire stream: the client's confirmation that it received the lease.

    Not thread-safe; use from the event loop.
    """

    def __init__(self, context: Context) -> None:
        """Start to read from `context`. Nothing else may read from it afterwards."""
        loop = asyncio.get_running_loop()
        self._outcome: asyncio.Future[bool | MigAgentError] = loop.create_future()
        # Not cancelled when the call ends: the read in progress ends with the call.
        self._listening = loop.create_task(self._listen(context))

    @contextmanager
    def not_yet(self) -> Iterator[None]:
        """Cancel the block and raise UsageError if the client sends a message; it may end its half of the stream.

        The block must not write to the stream, since it may be cancelled.
        """
        task = asyncio.current_task()
        inside = True

        def said(_outcome: object) -> None:
            if inside and task is not None and self._too_early() is not None:
                task.cancel()

        self._outcome.add_done_callback(said)
        try:
            yield
        except asyncio.CancelledError:
            mistake = self._too_early()
            if task is None or mistake is None:
                raise
            task.uncancel()
            raise mistake from None
        finally:
            inside = False
            self._outcome.remove_done_callback(said)
        mistake = self._too_early()
        if mistake is not None:
            raise mistake

    def fail(self, error: MigAgentError) -> None:
        """Make `outcome` raise this error: the lease has ended, or the agent stops."""
        if not self._outcome.done():
            self._outcome.set_result(error)

    async def outcome(self) -> bool:
        """Wait for the client: True if it has confirmed the lease, False if it has ended its half of the stream.

        Raises the error that `fail` was given, and UsageError for any other message of the client.
        """
        outcome = await self._outcome
        if isinstance(outcome, MigAgentError):
            raise outcome
        return outcome

    def _too_early(self) -> MigAgentError | None:
        outcome = self._outcome.result() if self._outcome.done() else False
        if outcome is True:
            return UsageError(
                "cannot take the word for it that the lease was received: it was not granted yet",
                "send `received` once you have read `granted`",
            )
        return outcome or None

    async def _listen(self, context: Context) -> None:
        said: bool | MigAgentError
        try:
            said = _said(await next_message(context, _METHOD))
        except MigAgentError as error:
            said = error
        except (grpc.aio.BaseError, asyncio.CancelledError):
            said = False  # the call has ended
        if not self._outcome.done():
            self._outcome.set_result(said)


def _said(message: pb.AcquireRequest | None) -> bool:
    """Return True for `received`, False for the end of the client's half. Raises UsageError for any other message."""
    if message is None:
        return False
    if message.HasField("received"):
        return True
    if message.HasField("request"):
        raise UsageError("cannot serve a second request on one stream", "call Acquire once more")
    raise UsageError(
        "cannot read the second message of an Acquire stream: it says nothing that is known here",
        "send `received` once you have read `granted`",
    )

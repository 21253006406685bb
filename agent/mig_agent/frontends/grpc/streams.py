"""What goes over the stream of one request while it is served: its place in the queue, and what its client says.

On the agent's side one write at a time is in progress on a stream, and a task that writes is never cancelled: the
operation of gRPC's core would go on, and the next one on the same stream would fail, the status that ends it included.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import grpc

from mig_agent.core.errors import MigAgentError, UsageError
from mig_agent.frontends.grpc.handlers import Context, next_message
from mig_agent.pb.migagent.v1 import partition_manager_pb2 as pb

_METHOD = "Acquire"


class QueueReports:
    """Writes a request's place in the queue, the latest only, while the request waits. Belongs to the event loop."""

    def __init__(self, context: Context, wrap: Callable[[pb.Queued], pb.AcquireResponse | pb.HoldResponse]) -> None:
        """Write to `context`, in messages that `wrap` makes."""
        self._context = context
        self._wrap = wrap
        self._latest = 0
        self._writing: asyncio.Task[None] | None = None

    def report(self, position: int) -> None:
        """Tell the client a new place; one that is not written yet is left out."""
        self._latest = position
        if self._writing is None or self._writing.done():
            self._writing = asyncio.get_running_loop().create_task(self._write())

    async def finish(self) -> None:
        """Wait until no report is being written, however long the client does not read.

        To be awaited after the last report and before anything else is written, the status included.
        """
        if self._writing is not None:
            await asyncio.shield(self._writing)

    async def _write(self) -> None:
        written = 0
        try:
            while written != self._latest:
                written = self._latest
                await self._context.write(self._wrap(pb.Queued(position=written)))
        except (grpc.aio.BaseError, asyncio.CancelledError):
            return  # the client has gone away, which ends the call


def request_in(message: pb.AcquireRequest | None) -> pb.Request:
    """Return the request that opens an Acquire stream. Raises UsageError where the first message is anything else."""
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
    """What the client of one Acquire stream says after its request: that it has the lease, or nothing more.

    Belongs to the event loop.
    """

    def __init__(self, context: Context) -> None:
        """Listen from now on. Nothing else may read from `context` any more."""
        loop = asyncio.get_running_loop()
        self._outcome: asyncio.Future[bool | MigAgentError] = loop.create_future()
        # Not cancelled when the call ends: the read that is under way comes to its end with the call.
        self._listening = loop.create_task(self._listen(context))

    @contextmanager
    def not_yet(self) -> Iterator[None]:
        """Raise UsageError from the block as soon as the client says anything more; it may end its half of the stream.

        Nothing may be written inside the block: it is cancelled where the client says something.
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
        """End the wait for the client with an error: the lease has ended, or the agent stops."""
        if not self._outcome.done():
            self._outcome.set_result(error)

    async def outcome(self) -> bool:
        """Wait for the client: True where it has the lease, False where it has ended its half of the stream.

        Raises what `fail` was given, UsageError for anything else that the client says.
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
            said = False  # the call has come to its end
        if not self._outcome.done():
            self._outcome.set_result(said)


def _said(message: pb.AcquireRequest | None) -> bool:
    """Read a client's second message: whether it is `received`. Raises UsageError for anything but that or the end."""
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

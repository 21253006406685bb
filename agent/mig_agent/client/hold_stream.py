"""A Hold stream that a thread keeps open, and reopens when the agent restarts."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Protocol, TypeAlias

import grpc

from mig_agent.client import decode
from mig_agent.client.addresses import Address
from mig_agent.client.connection import Connection, is_interruption
from mig_agent.client.error_mapping import Dropped, failure_of
from mig_agent.client.errors import ClientError
from mig_agent.client.types import Grant, QueuePosition
from mig_agent.pb.migagent.v1 import partition_manager_pb2 as pb

ATTACH_AGAIN_SECONDS = 75.0
"""Time limit for reopening the stream: the agent keeps a held lease for 60 seconds after its restart."""
OnQueued: TypeAlias = Callable[[QueuePosition], None]


class GrantStream(Protocol):
    """Responses of Acquire or Hold, with a way to end the call."""

    def __iter__(self) -> Iterator[pb.AcquireResponse | pb.HoldResponse]:
        """Yield responses."""
        ...

    def cancel(self) -> bool:
        """End the call."""
        ...


class Held:
    """State of a held lease that the synchronous and the asynchronous stream share."""

    def __init__(self, request: pb.Request, on_lost: Callable[[ClientError], None] | None) -> None:
        self._request = request
        self._on_lost = on_lost
        self.lost: ClientError | None = None
        """The error that ended the lease, unless it was closed here."""

    def _lose(self, error: ClientError) -> None:
        self.lost = error
        if self._on_lost is not None:
            self._on_lost(error)


class Holding(Held):
    """A lease that lasts until this object is closed or this process ends."""

    def __init__(
        self, connection: Connection, request: pb.Request, *, on_lost: Callable[[ClientError], None] | None
    ) -> None:
        super().__init__(request, on_lost)
        self._connection = connection
        self._stream: GrantStream | None = None
        self._closing = threading.Event()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def open(self, on_queued: OnQueued | None) -> Grant:
        """Take the lease and keep the stream open. Raises Refused, NoAgent."""
        grant = self._connection.call_safely_repeated(lambda _stub: self._attach(on_queued))
        self._thread = threading.Thread(target=self._keep, name=f"mig-agent-hold-{grant.id}", daemon=True)
        self._thread.start()
        return grant

    def stop_attaching(self) -> None:
        """Do not reopen the stream when it ends."""
        self._closing.set()

    def close(self) -> None:
        """End the stream, and with it the lease. Returns when the thread has ended."""
        self.stop_attaching()
        with self._lock:
            if self._stream is not None:
                self._stream.cancel()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout=5)

    def _attach(self, on_queued: OnQueued | None) -> Grant:
        stream: GrantStream = self._connection.stub.Hold(pb.HoldRequest(request=self._request))
        with self._lock:
            self._stream = stream
            if self._closing.is_set():
                stream.cancel()
        return first_grant(stream, on_queued)

    def _keep(self) -> None:
        """Wait for the stream's end, and reopen it while the agent may come back; the thread's function."""
        error = self._end_of_stream()
        while not self._closing.is_set() and is_interruption(error):
            try:
                self._connection.call_safely_repeated(
                    lambda _stub: self._attach(None), patience=ATTACH_AGAIN_SECONDS, unwanted=self._closing
                )
                error = self._end_of_stream()
            except ClientError as failed:
                error = failed
                break
        if not self._closing.is_set():
            self._lose(error)

    def _end_of_stream(self) -> ClientError:
        stream = self._stream
        if stream is None:
            return Dropped("cannot hold a lease without a stream")
        try:
            for _ in stream:
                pass
        except grpc.RpcError as error:
            return failure_of(error, self._connection.address)
        return stream_ended_error(self._connection.address)


def first_grant(stream: GrantStream, on_queued: OnQueued | None) -> Grant:
    """Report queue positions until the lease is granted. Raises grpc.RpcError, and NoAgent if no lease comes.

    Any other exception, such as KeyboardInterrupt, cancels the call, which leaves the queue.
    """
    try:
        for response in stream:
            grant = grant_in(response, on_queued)
            if grant is not None:
                return grant
    except BaseException:
        stream.cancel()
        raise
    raise no_lease_error()


def grant_in(response: pb.AcquireResponse | pb.HoldResponse, on_queued: OnQueued | None) -> Grant | None:
    """Return the lease if the response has it; pass a queue position to `on_queued`."""
    if response.HasField("granted"):
        return decode.grant(response.granted)
    if response.HasField("queued") and on_queued is not None:
        on_queued(decode.queue_position(response.queued))
    return None


def no_lease_error() -> Dropped:
    """Return the error for a stream that ended without a lease."""
    return Dropped("cannot take what the agent answered: its stream ended with no lease")


def stream_ended_error(address: Address) -> Dropped:
    """Return the error for a held lease whose stream ended without an error."""
    return Dropped(f"cannot hold the lease: the agent at {address} ended the stream")

"""A Hold stream that is kept open in a thread of its own, and attached to again when the agent restarts."""

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
from mig_agent.client.types import Grant
from mig_agent.pb.migagent.v1 import partition_manager_pb2 as pb

ATTACH_AGAIN_SECONDS = 75.0
"""How long to try to attach again: the agent keeps a held lease for 60 seconds after it is back."""
OnQueued: TypeAlias = Callable[[int], None]


class GrantStream(Protocol):
    """What Acquire and Hold answer: their messages, and a way to end it."""

    def __iter__(self) -> Iterator[pb.AcquireResponse | pb.HoldResponse]:
        """Reads."""
        ...

    def cancel(self) -> bool:
        """Ends it."""
        ...


class Held:
    """What a held lease is, however its stream is read."""

    def __init__(self, request: pb.Request, on_lost: Callable[[ClientError], None] | None) -> None:
        self._request = request
        self._on_lost = on_lost
        self.lost: ClientError | None = None
        """Why the lease ended without being closed here."""

    def _lose(self, error: ClientError) -> None:
        self.lost = error
        if self._on_lost is not None:
            self._on_lost(error)


class Holding(Held):
    """A lease that lives as long as this object is not closed and this process lives."""

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
        """Takes the lease and keeps the stream open. Raises Refused, NoAgent."""
        grant = self._connection.call_safely_repeated(lambda _stub: self._attach(on_queued))
        self._thread = threading.Thread(target=self._keep, name=f"mig-agent-hold-{grant.id}", daemon=True)
        self._thread.start()
        return grant

    def stop_attaching(self) -> None:
        """From now on the end of the stream is wanted."""
        self._closing.set()

    def close(self) -> None:
        """Ends the stream, and with it the lease. Returns when the thread has ended."""
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
        """The thread: waits for the stream's end, and attaches again while the agent may be back."""
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
        return ended_by(self._connection.address)


def first_grant(stream: GrantStream, on_queued: OnQueued | None) -> Grant:
    """Reads places in the queue until the lease is granted. Raises what grpc raises, and NoAgent without an answer.

    The call is cancelled when anything else is raised, such as KeyboardInterrupt: that leaves the queue.
    """
    try:
        for response in stream:
            grant = told(response, on_queued)
            if grant is not None:
                return grant
    except BaseException:
        stream.cancel()
        raise
    raise without_lease()


def told(response: pb.AcquireResponse | pb.HoldResponse, on_queued: OnQueued | None) -> Grant | None:
    """The lease, when this message brings it; a place in the queue is told to `on_queued`."""
    if response.HasField("granted"):
        return decode.grant(response.granted)
    if response.HasField("queued") and on_queued is not None:
        on_queued(response.queued.position)
    return None


def without_lease() -> Dropped:
    """A stream that ended too early."""
    return Dropped("cannot take what the agent answered: its stream ended with no lease")


def ended_by(address: Address) -> Dropped:
    """A held lease whose stream ended with no error."""
    return Dropped(f"cannot hold the lease: the agent at {address} ended the stream")

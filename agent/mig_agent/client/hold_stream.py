"""A Hold stream that a thread keeps open, and reopens when the agent is back, however long it was away."""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Protocol, TypeAlias

import grpc

from mig_agent.client import decode
from mig_agent.client.absence import Absence, OnAway, WaitLimit
from mig_agent.client.addresses import Address
from mig_agent.client.connection import Connection, is_interruption
from mig_agent.client.error_mapping import Dropped, failure_of
from mig_agent.client.errors import ClientError, Refused
from mig_agent.client.types import Grant, QueuePosition
from mig_agent.core.errors import Reason
from mig_agent.pb.migagent.v1 import partition_manager_pb2 as pb

if TYPE_CHECKING:
    from mig_agent.client.api_methods import Call

_ABOUT_THE_LEASE = frozenset({Reason.LEASE_ENDED, Reason.REQUEST_ID_REUSED, Reason.NOT_PERMITTED})
_PASSING = frozenset({Reason.QUEUE_FULL, Reason.LEDGER_FAILED, Reason.SHUTTING_DOWN, Reason.CANCELLED})
"""Reasons for which an agent that has the lease refuses for a moment to attach its client to it again."""
PAUSE_SECONDS = 1.0
"""The pause after an agent has refused for a moment to attach a client to its lease again."""
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

    def __init__(
        self, request: pb.Request, on_lost: Callable[[ClientError], None] | None, on_away: OnAway | None
    ) -> None:
        self._request = request
        self._on_lost = on_lost
        self._wait = WaitLimit(request.wait_seconds if request.HasField("wait_seconds") else None)
        self._absence = Absence(on_away)
        self._lease = ""
        """The lease's id once it is granted."""
        self.lost: ClientError | None = None
        """The error that ended the lease, unless it was closed here."""

    def _to_send(self) -> pb.HoldRequest:
        """Return the message that asks for the lease, or once it is granted, attaches to it."""
        message = pb.HoldRequest(request=self._request)
        if self._lease:
            # An agent that has the lease looks at neither. One that has lost it is not to grant another one later.
            message.request.ClearField("wait_seconds")
            message.request.ClearField("if_revision")
        elif message.request.HasField("wait_seconds") and math.isfinite(message.request.wait_seconds):
            message.request.wait_seconds = math.ceil(self._wait.left)
        return message

    def _granted(self, grant: Grant) -> None:
        """Note that the agent has granted the lease, or attached to it again. Raises ClientError if it is another."""
        if self._lease not in {"", grant.id}:
            raise ClientError(f"cannot hold lease {self._lease} any longer: the agent does not know it any more")
        self._lease = grant.id
        self._absence.over()

    def _is_passing(self, error: ClientError) -> bool:
        """Return True if the stream may be opened again after an error."""
        return is_interruption(error) or (isinstance(error, Refused) and error.reason in _PASSING)

    def _lose(self, error: ClientError) -> None:
        if isinstance(error, Refused) and error.reason not in _ABOUT_THE_LEASE:
            # It was refused as a new request would be.
            error = ClientError(
                f"cannot hold lease {self._lease} any longer: the agent does not know it any more",
                "`migctl recover` may bring it back, if the agent's ledger was lost",
            )
        self.lost = error
        if self._on_lost is not None:
            self._on_lost(error)


class Holding(Held):
    """A lease that lasts until this object is closed or this process ends."""

    def __init__(
        self,
        connection: Connection,
        request: pb.Request,
        *,
        on_lost: Callable[[ClientError], None] | None = None,
        on_away: OnAway | None = None,
    ) -> None:
        super().__init__(request, on_lost, on_away)
        self._connection = connection
        self._stream: GrantStream | None = None
        self._closing = threading.Event()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def open(self, on_queued: OnQueued | None) -> Grant:
        """Take the lease and keep the stream open. Raises Refused, NoAgent."""

        def report(position: QueuePosition) -> None:
            self._absence.over()
            if on_queued is not None:
                on_queued(position)

        grant = self._connection.call_safely_repeated(
            lambda _stub: self._attach(report), until=self._wait.moment, on_failure=self._absence.failed
        )
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

    def release_later(self, call: Call[None]) -> None:
        """Release the lease by `call` when the agent is back, from a thread that does not keep this process alive.

        Until then it would stay for as long as this process lives.
        """
        connection = self._connection.another()

        def release() -> None:
            with contextlib.suppress(ClientError):  # a refusal: it has ended
                connection.call_safely_repeated(call.on, until=math.inf)
            connection.close()

        threading.Thread(target=release, name=f"mig-agent-release-{self._lease}", daemon=True).start()

    def _attach(self, on_queued: OnQueued | None) -> Grant:
        stream: GrantStream = self._connection.stub.Hold(self._to_send())
        with self._lock:
            self._stream = stream
            if self._closing.is_set():
                stream.cancel()
        grant = first_grant(stream, on_queued)
        try:
            self._granted(grant)
        except ClientError:
            stream.cancel()
            raise
        return grant

    def _keep(self) -> None:
        """Wait for the stream's end, and reopen it, however long the agent is away; the thread's function."""
        error = self._end_of_stream()
        while not self._closing.is_set() and self._is_passing(error):
            self._absence.failed(error)
            try:
                self._connection.call_safely_repeated(
                    lambda _stub: self._attach(None),
                    until=math.inf,
                    unwanted=self._closing,
                    on_failure=self._absence.failed,
                )
                error = self._end_of_stream()
            except ClientError as failed:
                error = failed
                if self._is_passing(error):
                    self._closing.wait(PAUSE_SECONDS)
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

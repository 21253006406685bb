"""An Acquire stream: from the request to the confirmation that the lease was received."""

from __future__ import annotations

import contextlib
from queue import SimpleQueue
from typing import TYPE_CHECKING

import grpc

from mig_agent.client import api_methods
from mig_agent.client.connection import Connection
from mig_agent.client.errors import ClientError
from mig_agent.client.hold_stream import OnQueued, first_grant
from mig_agent.client.types import Grant
from mig_agent.pb.migagent.v1 import partition_manager_pb2 as pb

if TYPE_CHECKING:
    from mig_agent.client.request_args import RequestArgs
    from mig_agent.pb.migagent.v1.partition_manager_pb2_grpc import PartitionManagerStub

RECEIVED = pb.AcquireRequest(received=pb.Received())
GIVE_UP_SECONDS = 5.0
"""Time limit for releasing a lease whose caller was interrupted while confirming it."""


class AcquireCall:
    """A request for a lease, and whether another program can know its id."""

    def __init__(self, args: RequestArgs) -> None:
        """Raise UsageError for invalid arguments."""
        self.request = api_methods.request_for(args)
        self.message = pb.AcquireRequest(request=self.request)
        self.timeout = api_methods.acquire_seconds(self.request)
        self.is_own = not args.get("request_id")
        """True if the id was generated here, so that no other program can request the same lease."""


class Acquiring:
    """Takes one lease and confirms it. After a broken connection it repeats the request by its id."""

    def __init__(self, connection: Connection, args: RequestArgs) -> None:
        """Raise UsageError for invalid arguments."""
        self._connection = connection
        self._acquire = AcquireCall(args)
        self._stream: _Stream | None = None
        """The stream of a granted lease that is not confirmed yet."""

    def take(self, on_queued: OnQueued | None, *, confirm: bool) -> Grant:
        """Return the lease, confirmed or to be confirmed later. Raises Refused, NoAgent.

        If confirmed, the agent has acknowledged that: a connection that breaks just then would otherwise end the lease
        of a client that has it.
        """

        def attempt(stub: PartitionManagerStub) -> Grant:
            stream = self._stream = _Stream(stub, self._acquire)
            grant = stream.granted(on_queued)
            if confirm:
                self._finish(grant)
            return grant

        return self._connection.call_safely_repeated(attempt)

    def confirm(self) -> None:
        """Tell the agent that the lease was received. Raises Refused if it has ended meanwhile, NoAgent."""

        def attempt(stub: PartitionManagerStub) -> None:
            if self._stream is None:
                self._stream = _Stream(stub, self._acquire)
                self._stream.granted(None)
            self._finish(None)

        self._connection.call_safely_repeated(attempt)

    def close(self) -> None:
        """Leave the lease as it is: an unconfirmed one ends by itself."""
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.cancel()

    def _finish(self, grant: Grant | None) -> None:
        stream, self._stream = self._stream, None
        if stream is None:
            return
        try:
            stream.confirm()
        except grpc.RpcError:
            raise
        except BaseException:  # such as KeyboardInterrupt: the agent may take the lease for confirmed
            if grant is not None and self._acquire.is_own:
                self._give_up(grant)
            raise

    def _give_up(self, grant: Grant) -> None:
        release = pb.ReleaseRequest(lease=grant.id, token=grant.token)
        with contextlib.suppress(ClientError):
            self._connection.call(lambda stub: stub.Release(release, timeout=GIVE_UP_SECONDS))


class _Stream:
    """One Acquire call. gRPC reads its requests in a thread, which ends with the call."""

    def __init__(self, stub: PartitionManagerStub, acquire: AcquireCall) -> None:
        requests: SimpleQueue[pb.AcquireRequest | None] = SimpleQueue()
        requests.put(acquire.message)
        self._requests = requests
        self._call = stub.Acquire(iter(requests.get, None), timeout=acquire.timeout)
        if not self._call.add_callback(lambda: requests.put(None)):
            requests.put(None)

    def granted(self, on_queued: OnQueued | None) -> Grant:
        """Read until the lease is granted."""
        return first_grant(self._call, on_queued)

    def confirm(self) -> None:
        """Send `received` and wait until the agent has it. Raises grpc.RpcError."""
        try:
            self._requests.put(RECEIVED)
            for _ in self._call:
                pass
        except BaseException:
            self._call.cancel()
            raise

    def cancel(self) -> None:
        """End the call."""
        self._call.cancel()

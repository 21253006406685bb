"""One connection to the agent; failed calls become errors with messages, and interrupted ones are repeated."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count, takewhile
from typing import Any, Generic, TypeAlias, TypeVar

import grpc

from mig_agent.client import arg_checks
from mig_agent.client.addresses import Address, resolve
from mig_agent.client.api_methods import Answer, Call
from mig_agent.client.channels import Tls, Versions, open_channel, versions_of
from mig_agent.client.error_mapping import Dropped, TooSlow, failure_of
from mig_agent.client.errors import ClientError, NoAgent, Refused
from mig_agent.core.backoff import Backoff
from mig_agent.core.errors import UsageError
from mig_agent.pb.migagent.v1.partition_manager_pb2_grpc import PartitionManagerStub

PATIENCE_SECONDS = 15.0
"""Time during which an interrupted call is repeated, as when the agent restarts."""
_PAUSES = Backoff(first=0.1, longest=1.0)
_LONG_PAUSES = Backoff(first=0.1, longest=5.0)
"""For an agent that may be away for long."""
MOST_FORMER = 8
"""Limit of replaced channels kept open for their unfinished calls after certificates were renewed."""
_PASSING = frozenset({"shutting-down", "cancelled"})
"""Reasons of refusals worth repeating: `cancelled` comes from the broken connection before."""
OnFailure: TypeAlias = Callable[[ClientError], None]


class BaseConnection:
    """The part that blocking and asyncio connections share: the address, and which calls to repeat."""

    def __init__(self, address: Address, tls: Tls | None, *, patience: float) -> None:
        self.address = address
        self._tls = tls
        self._patience = patience
        self._answered = False
        """True once an agent has answered here."""
        self._files: Versions | None = None
        """Versions of the certificate files at the last check."""

    def are_files_new(self) -> bool:
        """Return True if the certificate files have changed since the last call."""
        now = versions_of(self.address, self._tls)
        before, self._files = self._files, now
        return before is not None and now != before

    def record_failure(self, failure: ClientError) -> ClientError:
        """Return the error of a failed call; a refusal proves that an agent is running."""
        self._answered = self._answered or isinstance(failure, Refused)
        return failure

    def record_answer(self) -> None:
        """Note that an agent has answered, if only in the middle of a call."""
        self._answered = True

    def is_worth_repeating(self, error: ClientError) -> bool:
        """Return True if a call may be repeated; False if no agent ever answered, so that NoAgent comes at once."""
        return is_interruption(error) and (self._answered or isinstance(error, Dropped))

    def pauses(self, until: float | None) -> Iterator[float]:
        """Return the pauses before further tries of an interrupted call, in seconds.

        They go on for the connection's patience, and on until the moment `until` of `time.monotonic`. They grow, and
        are random, so that the clients of an agent that restarts do not all come at once.
        """
        from random import random  # noqa: PLC0415 -- most runs never need it

        soon = time.monotonic() + self._patience
        last = soon if until is None else max(soon, until)
        backoff = _LONG_PAUSES if last > soon else _PAUSES
        growing = (backoff.pause(failures, random()) for failures in count(1))  # noqa: S311 -- nobody guesses it
        return takewhile(lambda _: time.monotonic() < last, growing)


class Connection(BaseConnection):
    """A channel that opens on first use, with the service's methods. Thread-safe."""

    def __init__(self, address: Address, tls: Tls | None, *, patience: float) -> None:
        super().__init__(address, tls, patience=patience)
        self._channel: grpc.Channel | None = None
        self._former: list[grpc.Channel] = []
        self._stub: PartitionManagerStub | None = None

    @property
    def stub(self) -> PartitionManagerStub:
        """The service's methods, on a channel with the present certificate files.

        Raises UsageError if TLS is missing or its files cannot be read.
        """
        new = self.are_files_new()
        if self._stub is None:
            self._channel = open_channel(self.address, self._tls)
            self._stub = PartitionManagerStub(self._channel)
        elif new:
            self._renew()
        return self._stub

    def _renew(self) -> None:
        try:
            channel = open_channel(self.address, self._tls)
        except UsageError:
            return  # files in the middle of a replacement: they will have changed again at the next call
        if self._channel is not None:
            self._former.append(self._channel)
        self._channel, self._stub = channel, PartitionManagerStub(channel)
        while len(self._former) > MOST_FORMER:
            self._former.pop(0).close()

    def another(self) -> Connection:
        """Return a connection to the same agent that is closed apart from this one."""
        another = Connection(self.address, self._tls, patience=self._patience)
        another._answered = self._answered
        return another

    def close(self) -> None:
        """Close the channel; calls in flight fail. Later calls open a new one."""
        for channel in (*self._former, self._channel):
            if channel is not None:
                channel.close()
        self._former.clear()
        self._channel = self._stub = None

    def call(self, work: Callable[[PartitionManagerStub], Answer]) -> Answer:
        """Return the answer of `work`, which calls one method. Raises Refused, NoAgent or another ClientError."""
        stub = self.stub
        try:
            answer = work(stub)
        except grpc.RpcError as error:
            raise self.record_failure(failure_of(error, self.address)) from error
        self._answered = True
        return answer

    def call_safely_repeated(
        self,
        work: Callable[[PartitionManagerStub], Answer],
        *,
        until: float | None = None,
        unwanted: threading.Event | None = None,
        on_failure: OnFailure | None = None,
    ) -> Answer:
        """Call `work`, which must be safe to repeat, and repeat it while the connection breaks.

        Repeats for the connection's patience with growing pauses, and on until the moment `until` of `time.monotonic`,
        but not once `unwanted` is set. `on_failure` is called before each further try, with why the last one failed.
        """
        unwanted = unwanted or threading.Event()
        try:
            return self.call(work)
        except ClientError as error:
            if not self.is_worth_repeating(error):
                raise
        pauses = self.pauses(until)
        while True:
            try:
                return self.call(work)
            except ClientError as error:
                pause = next(pauses, None) if is_interruption(error) else None
                if pause is None or unwanted.is_set():
                    raise
                if on_failure is not None:
                    on_failure(error)
            unwanted.wait(pause)


AnyConnection = TypeVar("AnyConnection", bound=BaseConnection)


class Connections(Generic[AnyConnection]):
    """A client's connections: to the agent, and to its administrators' socket once a call needs it."""

    def __init__(
        self,
        make: Callable[..., AnyConnection],
        address: str | Address | None,
        tls: Tls | None,
        patience: float,
    ) -> None:
        """Connect by `make`, the class of the connections. Raises UsageError for an invalid address."""
        if not isinstance(address, Address):
            arg_checks.ADDRESS.check("address", address)
        tls = tls or Tls.from_environment()
        self._open = partial(make, tls=tls, patience=patience)
        self.users = self._open(address if isinstance(address, Address) else resolve(address))
        self._admins: AnyConnection | None = None

    def of(self, call: Call[Any]) -> AnyConnection:
        """Return the connection for a call: to the administrators' socket only if this user may open it."""
        if not call.for_admin:
            return self.users
        if self._admins is None:
            address = self.users.address.for_admin
            self._admins = self.users if address == self.users.address else self._open(address)
        return self._admins

    def opened(self) -> tuple[AnyConnection, ...]:
        """Return all open connections."""
        return (self.users,) if self._admins in {None, self.users} else (self.users, self._admins)


def is_interruption(error: BaseException) -> bool:
    """Return True if a restarting agent or a broken connection explains the error."""
    if isinstance(error, Refused):
        return error.reason in _PASSING
    return isinstance(error, NoAgent) and not isinstance(error, TooSlow)

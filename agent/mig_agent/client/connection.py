"""One connection to the agent, and calls on it whose failures are errors in words; broken ones are repeated."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any, Generic, TypeVar

import grpc

from mig_agent.client import arg_checks
from mig_agent.client.addresses import Address, resolve
from mig_agent.client.calls import Answer, Call
from mig_agent.client.channels import Tls, Versions, open_channel, versions_of
from mig_agent.client.error_mapping import Dropped, TooSlow, failure_of
from mig_agent.client.errors import ClientError, NoAgent, Refused
from mig_agent.core.errors import UsageError
from mig_agent.pb.migagent.v1.partition_manager_pb2_grpc import PartitionManagerStub

PATIENCE_SECONDS = 15.0
"""How long a call is repeated whose connection broke, as it does when the agent restarts."""
MOST_FORMER = 8
"""Channels that stay for what still runs on them, when one with renewed certificates has taken their place."""
_PASSING = frozenset({"shutting-down", "cancelled"})
"""Reasons that a repeated call does not meet again: `cancelled` is for the broken connection that it comes after."""


class Line:
    """What connections have in common: where they lead, and when a call on them is worth repeating."""

    def __init__(self, address: Address, tls: Tls | None, *, patience: float) -> None:
        self.address = address
        self._tls = tls
        self._patience = patience
        self._answered = False
        """Whether an agent has ever answered here."""
        self._files: Versions | None = None
        """Those of the certificates, when they were last looked at."""

    def are_files_new(self) -> bool:
        """Whether those of the certificates have changed since this was asked the last time."""
        now = versions_of(self.address, self._tls)
        before, self._files = self._files, now
        return before is not None and now != before

    def heard(self, failure: ClientError) -> ClientError:
        """What a call failed with; a refusal shows that an agent is there."""
        self._answered = self._answered or isinstance(failure, Refused)
        return failure

    def is_worth_repeating(self, error: ClientError) -> bool:
        """An agent that never answered and is not there is not waited for: then NoAgent tells at once why."""
        return is_interruption(error) and (self._answered or isinstance(error, Dropped))

    def repeating(self, patience: float | None) -> dict[str, Any]:
        """For tenacity: repeated while the connection breaks, for so many seconds, with growing pauses."""
        # Only now: most runs never need it.
        from tenacity import retry_if_exception, stop_after_delay, wait_random_exponential  # noqa: PLC0415 -- see above

        return {
            "retry": retry_if_exception(is_interruption),
            "stop": stop_after_delay(self._patience if patience is None else patience),
            "wait": wait_random_exponential(multiplier=0.1, max=1),
            "reraise": True,
        }


class Connection(Line):
    """A channel that is opened when it is first used, and the service's methods on it. Safe to share by threads."""

    def __init__(self, address: Address, tls: Tls | None, *, patience: float) -> None:
        super().__init__(address, tls, patience=patience)
        self._channel: grpc.Channel | None = None
        self._former: list[grpc.Channel] = []
        self._stub: PartitionManagerStub | None = None

    @property
    def stub(self) -> PartitionManagerStub:
        """The service's methods, with certificates as their files are now.

        Raises UsageError where TLS is missing or cannot be read.
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
            return  # files that are just being replaced: they will have changed again at the next call
        if self._channel is not None:
            self._former.append(self._channel)
        self._channel, self._stub = channel, PartitionManagerStub(channel)
        while len(self._former) > MOST_FORMER:
            self._former.pop(0).close()

    def close(self) -> None:
        """Closes the channel; calls under way fail. Calls after it open a new one."""
        for channel in (*self._former, self._channel):
            if channel is not None:
                channel.close()
        self._former.clear()
        self._channel = self._stub = None

    def call(self, work: Callable[[PartitionManagerStub], Answer]) -> Answer:
        """The answer of `work`, which calls one method. Raises Refused, NoAgent or another ClientError."""
        stub = self.stub
        try:
            answer = work(stub)
        except grpc.RpcError as error:
            raise self.heard(failure_of(error, self.address)) from error
        self._answered = True
        return answer

    def call_safely_repeated(
        self,
        work: Callable[[PartitionManagerStub], Answer],
        *,
        patience: float | None = None,
        unwanted: threading.Event | None = None,
    ) -> Answer:
        """As `call`, for work that does no harm when done twice: repeated while the connection breaks.

        For `patience` seconds (the connection's own by default) with growing pauses, and only until `unwanted` is set.
        """
        unwanted = unwanted or threading.Event()
        try:
            return self.call(work)
        except ClientError as error:
            if not self.is_worth_repeating(error):
                raise
        from tenacity import Retrying, sleep_using_event, stop_when_event_set  # noqa: PLC0415 -- as above

        rules = self.repeating(patience)
        rules["stop"] |= stop_when_event_set(unwanted)
        answer: Answer = Retrying(sleep=sleep_using_event(unwanted), **rules)(self.call, work)
        return answer


AnyConnection = TypeVar("AnyConnection", bound=Line)


class Connections(Generic[AnyConnection]):
    """A client's connections: to the agent, and to its administrators' socket once something is asked there."""

    def __init__(
        self,
        make: Callable[..., AnyConnection],
        address: str | Address | None,
        tls: Tls | None,
        patience: float,
    ) -> None:
        """`make` is the class of the connections. Raises UsageError for an address that cannot be meant."""
        if not isinstance(address, Address):
            arg_checks.ADDRESS.check("address", address)
        tls = tls or Tls.from_environment()
        self._open = partial(make, tls=tls, patience=patience)
        self.users = self._open(address if isinstance(address, Address) else resolve(address))
        self._admins: AnyConnection | None = None

    def of(self, call: Call[Any]) -> AnyConnection:
        """Where a call belongs: the administrators' socket only where this person may open it."""
        if not call.for_admin:
            return self.users
        if self._admins is None:
            address = self.users.address.for_admin
            self._admins = self.users if address == self.users.address else self._open(address)
        return self._admins

    def opened(self) -> tuple[AnyConnection, ...]:
        """All that there are."""
        return (self.users,) if self._admins in {None, self.users} else (self.users, self._admins)


def is_interruption(error: BaseException) -> bool:
    """Whether an agent that restarts, or a connection that broke, explains the error."""
    if isinstance(error, Refused):
        return error.reason in _PASSING
    return isinstance(error, NoAgent) and not isinstance(error, TooSlow)

"""One connection to the agent, and calls on it whose failures are errors in words; broken ones are repeated."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

import grpc

from mig_agent.client.addresses import Address
from mig_agent.client.channels import Tls, open_channel
from mig_agent.client.errors import NoAgent, Refused
from mig_agent.client.failures import Dropped, TooSlow, failure_of
from mig_agent.pb.migagent.v1.partition_manager_pb2_grpc import PartitionManagerStub

_Answer = TypeVar("_Answer")
_PASSING = frozenset({"shutting-down", "cancelled"})
"""Reasons that a repeated call does not meet again: `cancelled` is for the broken connection that it comes after."""


class Connection:
    """A channel that is opened when it is first used, and the service's methods on it. Safe to share by threads."""

    def __init__(self, address: Address, tls: Tls | None, *, patience: float) -> None:
        self.address = address
        self._tls = tls
        self._patience = patience
        self._channel: grpc.Channel | None = None
        self._stub: PartitionManagerStub | None = None
        self._answered = False
        """Whether an agent has ever answered here."""

    @property
    def stub(self) -> PartitionManagerStub:
        """The service's methods. Raises UsageError where TLS is missing or cannot be read."""
        if self._stub is None:
            self._channel = open_channel(self.address, self._tls)
            self._stub = PartitionManagerStub(self._channel)
        return self._stub

    def close(self) -> None:
        """Closes the channel; calls under way fail. Calls after it open a new one."""
        if self._channel is not None:
            self._channel.close()
            self._channel = self._stub = None

    def call(self, work: Callable[[PartitionManagerStub], _Answer]) -> _Answer:
        """The answer of `work`, which calls one method. Raises Refused, NoAgent or another ClientError."""
        stub = self.stub
        try:
            answer = work(stub)
        except grpc.RpcError as error:
            failure = failure_of(error, self.address)
            self._answered = self._answered or isinstance(failure, Refused)
            raise failure from error
        self._answered = True
        return answer

    def call_safely_repeated(
        self,
        work: Callable[[PartitionManagerStub], _Answer],
        *,
        patience: float | None = None,
        unwanted: threading.Event | None = None,
    ) -> _Answer:
        """As `call`, for work that does no harm when done twice: repeated while the connection breaks.

        For `patience` seconds (the connection's own by default) with growing pauses, and only until `unwanted` is set.
        An agent that never answered and is not there is not waited for: then NoAgent tells at once why.
        """
        unwanted = unwanted or threading.Event()
        try:
            return self.call(work)
        except (NoAgent, Refused) as error:
            if not is_interruption(error) or not (self._answered or isinstance(error, Dropped)):
                raise
        # Only now: most runs never need it.
        from tenacity import (  # noqa: PLC0415 -- see above
            Retrying,
            retry_if_exception,
            sleep_using_event,
            stop_after_delay,
            stop_when_event_set,
            wait_random_exponential,
        )

        retrying = Retrying(
            retry=retry_if_exception(is_interruption),
            stop=stop_after_delay(self._patience if patience is None else patience) | stop_when_event_set(unwanted),
            sleep=sleep_using_event(unwanted),
            wait=wait_random_exponential(multiplier=0.1, max=1),
            reraise=True,
        )
        answer: _Answer = retrying(self.call, work)
        return answer


def is_interruption(error: BaseException) -> bool:
    """Whether an agent that restarts, or a connection that broke, explains the error."""
    if isinstance(error, Refused):
        return error.reason in _PASSING
    return isinstance(error, NoAgent) and not isinstance(error, TooSlow)

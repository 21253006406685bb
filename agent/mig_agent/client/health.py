"""The agent's health as probes check it: grpc.health.v1."""

from __future__ import annotations

import time
from enum import Enum, auto
from typing import Final

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from mig_agent.client.addresses import Address, diagnose
from mig_agent.client.channels import Tls, open_channel
from mig_agent.client.errors import NoAgent
from mig_agent.pb.migagent.v1 import partition_manager_pb2 as pb

_SERVING: Final[int] = health_pb2.HealthCheckResponse.ServingStatus.Value("SERVING")
_ALL: Final = ""
_SERVICE: Final[str] = pb.DESCRIPTOR.services_by_name["PartitionManager"].full_name
_POLL_SECONDS: Final = 0.2


class Health(Enum):
    """Health of an agent that answers."""

    READY = auto()
    SERVES = auto()
    """It answers calls, but the node's kubelet does not know its resources (yet)."""
    WAITS = auto()
    """It is starting or stopping."""


def health_of(address: Address, tls: Tls | None = None, *, seconds: float, patience: float = 0.0) -> Health:
    """Return the agent's health; ask again until it is READY or `patience` seconds are over.

    `seconds` is the time limit of one answer. `patience` also covers an agent that does not listen yet, or restarts.
    Raises NoAgent if nothing answers in time. An administrator is answered however many users are connected.
    """
    until = time.monotonic() + patience
    while True:
        try:
            found = _ask(address, tls, seconds)
        except grpc.RpcError as error:
            if error.code() is not grpc.StatusCode.UNAVAILABLE or time.monotonic() >= until:
                why = diagnose(address) or NoAgent(
                    f"cannot hear from the agent at {address} within {seconds:g} s", "look at its log; it may hang"
                )
                raise why from error
        else:
            if found is Health.READY or time.monotonic() >= until:
                return found
        time.sleep(_POLL_SECONDS)


def _ask(address: Address, tls: Tls | None, seconds: float) -> Health:
    """Ask once, over a new connection: a failed one would be retried only after a while."""
    with open_channel(address.for_admin, tls) as channel:
        stub = health_pb2_grpc.HealthStub(channel)

        def is_serving(name: str) -> bool:
            request = health_pb2.HealthCheckRequest(service=name)
            return bool(stub.Check(request, timeout=seconds).status == _SERVING)

        if is_serving(_ALL):
            return Health.READY
        return Health.SERVES if is_serving(_SERVICE) else Health.WAITS

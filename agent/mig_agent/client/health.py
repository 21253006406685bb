"""Whether an agent serves, as probes ask it: grpc.health.v1."""

from __future__ import annotations

from typing import Final

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from mig_agent.client.addresses import Address, diagnose
from mig_agent.client.channels import Tls, open_channel
from mig_agent.client.errors import NoAgent

_SERVING: Final[int] = health_pb2.HealthCheckResponse.ServingStatus.Value("SERVING")


def is_serving(address: Address, tls: Tls | None = None, *, seconds: float) -> bool:
    """False where it answers but does not serve (yet, or any more). Raises NoAgent where nothing answers in time.

    An administrator is answered however many users are connected.
    """
    with open_channel(address.for_admin, tls) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        try:
            answer = stub.Check(health_pb2.HealthCheckRequest(), timeout=seconds)
        except grpc.RpcError as error:
            why = diagnose(address) or NoAgent(
                f"cannot hear from the agent at {address} within {seconds:g} s", "look at its log; it may hang"
            )
            raise why from error
    return bool(answer.status == _SERVING)

"""The service `v1.DRAPlugin`: translates between the kubelet's messages and claims."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import grpc

from mig_agent.core.errors import MigAgentError
from mig_agent.core.owner import Claim
from mig_agent.frontends.kubernetes.dra.claims import Claims, PreparedDevice, message_of
from mig_agent.pb.kubelet.dra.v1 import dra_pb2 as pb

Context = grpc.aio.ServicerContext[Any, Any]
_MOST_CHARACTERS = 600
"""An event of Kubernetes takes 1024 bytes, and the kubelet puts its own text before this one."""


class DriverService:
    """Serves the kubelet's calls; every claim of a call gets its own answer."""

    def __init__(self, claims: Claims) -> None:
        self._claims = claims

    def methods(self) -> Mapping[str, grpc.RpcMethodHandler[Any, Any]]:
        """Return the handlers by method name, for a gRPC server."""
        return {
            "NodePrepareResources": grpc.unary_unary_rpc_method_handler(
                self.prepare,
                request_deserializer=pb.NodePrepareResourcesRequest.FromString,
                response_serializer=pb.NodePrepareResourcesResponse.SerializeToString,
            ),
            "NodeUnprepareResources": grpc.unary_unary_rpc_method_handler(
                self.unprepare,
                request_deserializer=pb.NodeUnprepareResourcesRequest.FromString,
                response_serializer=pb.NodeUnprepareResourcesResponse.SerializeToString,
            ),
        }

    async def prepare(
        self, request: pb.NodePrepareResourcesRequest, _context: Context
    ) -> pb.NodePrepareResourcesResponse:
        """Prepare all claims of a pod."""
        answers = await self._claims.prepare([_claim(each) for each in request.claims])
        return pb.NodePrepareResourcesResponse(claims={uid: _prepared(answer) for uid, answer in answers.items()})

    async def unprepare(
        self, request: pb.NodeUnprepareResourcesRequest, _context: Context
    ) -> pb.NodeUnprepareResourcesResponse:
        """Unprepare claims; those that are not known need nothing."""
        answers = await asyncio.gather(*(self._unprepare(_claim(each)) for each in request.claims))
        return pb.NodeUnprepareResourcesResponse(
            claims={each.uid: answer for each, answer in zip(request.claims, answers, strict=True)}
        )

    async def _unprepare(self, claim: Claim) -> pb.NodeUnprepareResourceResponse:
        try:
            await self._claims.unprepare(claim)
        except MigAgentError as error:
            return pb.NodeUnprepareResourceResponse(error=message_of(error)[:_MOST_CHARACTERS])
        return pb.NodeUnprepareResourceResponse()


def _prepared(answer: Sequence[PreparedDevice] | MigAgentError) -> pb.NodePrepareResourceResponse:
    if isinstance(answer, MigAgentError):
        return pb.NodePrepareResourceResponse(error=message_of(answer)[:_MOST_CHARACTERS])
    return pb.NodePrepareResourceResponse(
        devices=[
            pb.Device(
                request_names=[each.request],
                pool_name=each.pool,
                device_name=each.device,
                cdi_device_ids=[each.cdi],
            )
            for each in answer
        ]
    )


def _claim(each: pb.Claim) -> Claim:
    return Claim(namespace=each.namespace, name=each.name, uid=each.uid)

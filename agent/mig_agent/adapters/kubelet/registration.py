"""Offering a resource to the kubelet. It connects back to the plugin's socket before it answers, so listen first."""

from __future__ import annotations

from typing import cast

import grpc

from mig_agent.adapters.kubelet.channels import channel_to, why
from mig_agent.adapters.kubelet.paths import KubeletError, KubeletPaths
from mig_agent.pb.kubelet.deviceplugin.v1beta1 import deviceplugin_pb2 as pb
from mig_agent.pb.kubelet.deviceplugin.v1beta1 import deviceplugin_pb2_grpc as rpc

API_VERSION = "v1beta1"
_SECONDS = 15.0
"""The kubelet takes up to 10 s to connect back."""


async def register(paths: KubeletPaths, *, resource: str, socket_name: str, pre_start: bool) -> None:
    """Registers a resource that is served on a socket in the plugins' folder. Raises KubeletError."""
    request = pb.RegisterRequest(
        version=API_VERSION,
        endpoint=socket_name,
        resource_name=resource,
        options=pb.DevicePluginOptions(pre_start_required=pre_start),
    )
    async with channel_to(paths.registration) as channel:
        try:
            stub = cast("rpc.RegistrationAsyncStub", rpc.RegistrationStub(channel))
            await stub.Register(request, timeout=_SECONDS)
        except grpc.aio.AioRpcError as error:
            raise KubeletError(f"cannot register {resource}: {why(error, paths.registration)}") from error

"""The sockets of a DRA driver: found and registered as a kubelet does it, and gone afterwards."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import grpc
import pytest

from mig_agent.adapters.kubelet import DriverSockets, KubeletError, KubeletPaths
from mig_agent.adapters.kubelet.registration import channel_to
from mig_agent.pb.kubelet.dra.v1 import dra_pb2, dra_pb2_grpc
from mig_agent.pb.kubelet.pluginregistration.v1 import pluginregistration_pb2 as pb
from mig_agent.pb.kubelet.pluginregistration.v1 import pluginregistration_pb2_grpc as rpc
from support.agent import short_folder


async def unprepared(
    request: dra_pb2.NodeUnprepareResourcesRequest, _context: object
) -> dra_pb2.NodeUnprepareResourcesResponse:
    answers = {each.uid: dra_pb2.NodeUnprepareResourceResponse() for each in request.claims}
    return dra_pb2.NodeUnprepareResourcesResponse(claims=answers)


METHODS = {
    "NodeUnprepareResources": grpc.unary_unary_rpc_method_handler(
        unprepared,
        request_deserializer=dra_pb2.NodeUnprepareResourcesRequest.FromString,
        response_serializer=dra_pb2.NodeUnprepareResourcesResponse.SerializeToString,
    )
}


async def test_a_kubelet_finds_and_registers_the_driver() -> None:
    told: list[str] = []
    with short_folder() as folder:
        paths = KubeletPaths(folder)
        paths.plugin_registry.mkdir()
        stale = paths.plugin_registry / "mig-agent_012345-reg.sock"
        other = paths.plugin_registry / "gpu.nvidia.com-reg.sock"
        stale.touch()
        other.touch()
        sockets = DriverSockets(paths, "mig-agent.io", told.append)
        await sockets.start(METHODS)
        (found,) = set(paths.plugin_registry.iterdir()) - {other}
        assert found != stale
        async with channel_to(found) as channel:
            registration = cast("rpc.RegistrationAsyncStub", rpc.RegistrationStub(channel))
            info = await registration.GetInfo(pb.InfoRequest())
            assert (info.type, info.name) == ("DRAPlugin", "mig-agent.io")
            assert list(info.supported_versions) == ["v1.DRAPlugin"]
            await registration.NotifyRegistrationStatus(pb.RegistrationStatus(plugin_registered=True))
            await registration.NotifyRegistrationStatus(pb.RegistrationStatus(error="no such type"))
        async with channel_to(Path(info.endpoint)) as channel:
            request = dra_pb2.NodeUnprepareResourcesRequest(claims=[dra_pb2.Claim(uid="u-1")])
            stub = cast("dra_pb2_grpc.DRAPluginAsyncStub", dra_pb2_grpc.DRAPluginStub(channel))
            answer = await stub.NodeUnprepareResources(request)
            assert set(answer.claims) == {"u-1"}
        await sockets.stop()
        assert told == ["", "no such type"]
        assert list(paths.plugin_registry.iterdir()) == [other]
        assert not list(paths.driver_folder("mig-agent.io").iterdir())


async def test_a_folder_of_the_kubelet_that_is_missing_is_named() -> None:
    with short_folder() as folder:
        sockets = DriverSockets(KubeletPaths(folder), "mig-agent.io", lambda _words: None)
        with pytest.raises(KubeletError, match=r"cannot listen on .*plugins_registry"):
            await sockets.start(METHODS)
        await sockets.stop()

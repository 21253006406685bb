"""The service on the wire: what a kubelet's calls get, over a real Unix socket."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import pytest

from mig_agent.adapters.kubelet import KubeletError, KubeletPaths, PluginSocket, register, remove_stale_sockets
from mig_agent.adapters.kubelet.registration import channel_to
from mig_agent.core.errors import Reason, RefusedError, refuse
from mig_agent.core.owner import KubeletDevice
from mig_agent.core.requests import profile_want
from mig_agent.frontends.kubernetes.device_plugin.allocate import Allocated
from mig_agent.frontends.kubernetes.device_plugin.service import ResourceService
from mig_agent.frontends.kubernetes.resources import Resource
from mig_agent.pb.kubelet.deviceplugin.v1beta1 import deviceplugin_pb2 as pb
from mig_agent.pb.kubelet.deviceplugin.v1beta1 import deviceplugin_pb2_grpc as rpc

NAME = "nvidia.com/mig-1g.10gb"
SECONDS = 30.0


@dataclass
class Decided:
    asked: list[tuple[tuple[KubeletDevice, ...], float]] = field(default_factory=list)
    refusal: RefusedError | None = None

    async def allocate(self, containers: Sequence[Sequence[KubeletDevice]]) -> Sequence[Allocated]:
        return [Allocated(cdi_names=tuple(f"mig-agent.io/mig={each.id}" for each in devices)) for devices in containers]

    async def start_container(self, devices: Sequence[KubeletDevice], seconds: float) -> None:
        self.asked.append((tuple(devices), seconds))
        if self.refusal is not None:
            raise self.refusal


@dataclass
class Served:
    service: ResourceService
    decided: Decided
    stub: rpc.DevicePluginAsyncStub
    socket: PluginSocket
    paths: KubeletPaths


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder with a path that is short enough for sockets."""
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


@pytest.fixture
async def served(folder: Path) -> AsyncIterator[Served]:
    paths = KubeletPaths(folder)
    paths.plugins.mkdir()
    decided = Decided()
    resource = Resource(name=NAME, label="mig-1g.10gb", want=profile_want("1g.10gb"))
    service = ResourceService(resource, decided, start_deadline=25.0)
    socket = PluginSocket(paths, resource.label)
    await socket.start(service.methods())
    async with channel_to(paths.plugins / socket.name) as channel:
        yield Served(service, decided, rpc.DevicePluginStub(channel), socket, paths)  # type: ignore[arg-type] # one class for both kinds of channels
    await socket.stop()


async def test_list_is_sent_whole_at_each_change(served: Served) -> None:
    served.service.show(("mig-agent-0",))
    stream = served.stub.ListAndWatch(pb.Empty(), timeout=SECONDS)
    lists = aiter(stream)
    first = await anext(lists)
    assert [(each.ID, each.health) for each in first.devices] == [("mig-agent-0", "Healthy")]
    assert served.service.streams == 1
    served.service.show(("mig-agent-0", "mig-agent-1"))
    assert len((await anext(lists)).devices) == 2
    served.service.show(("mig-agent-7",))
    health = {each.ID: each.health for each in (await anext(lists)).devices}
    # A kubelet 1.36 panics where an id is gone from the list when it comes back from Allocate with it.
    assert health == {"mig-agent-0": "Unhealthy", "mig-agent-1": "Unhealthy", "mig-agent-7": "Healthy"}
    served.service.show(())
    assert {each.health for each in (await anext(lists)).devices} == {"Unhealthy"}
    assert served.service.known == {"mig-agent-0", "mig-agent-1", "mig-agent-7"}
    stream.cancel()
    async with asyncio.timeout(SECONDS):
        while served.service.streams:  # noqa: ASYNC110 -- the end of the stream is noticed when it is
            await asyncio.sleep(0.01)


async def test_plugin_requires_pre_start(served: Served) -> None:
    options = await served.stub.GetDevicePluginOptions(pb.Empty(), timeout=SECONDS)
    assert options.pre_start_required
    assert not options.get_preferred_allocation_available


async def test_allocate_answers_for_each_container(served: Served) -> None:
    request = pb.AllocateRequest(
        container_requests=[
            pb.ContainerAllocateRequest(devices_ids=["mig-agent-0", "mig-agent-1"]),
            pb.ContainerAllocateRequest(devices_ids=["mig-agent-2"]),
        ]
    )
    answer = await served.stub.Allocate(request, timeout=SECONDS)
    names = [[device.name for device in each.cdi_devices] for each in answer.container_responses]
    assert names == [["mig-agent.io/mig=mig-agent-0", "mig-agent.io/mig=mig-agent-1"], ["mig-agent.io/mig=mig-agent-2"]]


async def test_start_ends_before_the_kubelets_deadline(served: Served) -> None:
    request = pb.PreStartContainerRequest(devices_ids=["mig-agent-3"])
    await served.stub.PreStartContainer(request, timeout=SECONDS)
    await served.stub.PreStartContainer(request, timeout=10.0)
    await served.stub.PreStartContainer(request)
    devices, seconds = zip(*served.decided.asked, strict=True)
    assert set(devices) == {(KubeletDevice(resource=NAME, id="mig-agent-3"),)}
    assert seconds[0] == seconds[2] == 25.0
    assert 0.0 <= seconds[1] < 9.0, "gRPC rounds what is left a little"


async def test_refusal_has_message_and_hint(served: Served) -> None:
    served.decided.refusal = refuse(Reason.NO_CAPACITY, "cannot start pod a/b yet: all is taken", "wait")
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        await served.stub.PreStartContainer(pb.PreStartContainerRequest(devices_ids=["mig-agent-0"]), timeout=SECONDS)
    assert failed.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert failed.value.details() == "cannot start pod a/b yet: all is taken (wait)"


async def test_a_socket_that_was_removed_is_noticed(served: Served) -> None:
    """A kubelet that starts removes the sockets of all plugins."""
    assert served.socket.is_there
    path = served.paths.plugins / served.socket.name
    path.unlink()
    gone = served.socket.is_there
    path.touch()
    replaced = served.socket.is_there
    assert (gone, replaced) == (False, False), "another file in its place is not ours"


async def test_sockets_of_an_agent_that_was_killed_are_removed_and_no_others(served: Served) -> None:
    others = [
        served.paths.plugins / name for name in ("kubelet.sock", "nvidia-gpu.sock", "kubelet_internal_checkpoint")
    ]
    for path in others:
        path.touch()
    remove_stale_sockets(served.paths)
    assert sorted(served.paths.plugins.iterdir()) == sorted(others)


async def test_two_sockets_of_one_resource_have_two_names(served: Served) -> None:
    """A server of gRPC removes its socket's file some time after its server has stopped."""
    assert PluginSocket(served.paths, "mig-1g.10gb").name != PluginSocket(served.paths, "mig-1g.10gb").name


async def test_missing_kubelet_is_reported(folder: Path) -> None:
    paths = KubeletPaths(folder)
    with pytest.raises(KubeletError, match=r"cannot register nvidia\.com/mig-1g\.10gb: there is no .*kubelet\.sock"):
        await register(paths, resource=NAME, socket_name="mig-agent_x.sock", pre_start=True)
    service = ResourceService(Resource(name=NAME, label="x", want=profile_want("1g.10gb")), Decided(), 25.0)
    with pytest.raises(KubeletError, match="cannot listen on"):
        await PluginSocket(paths, "x").start(service.methods())
    with pytest.raises(KubeletError, match="at most 107 bytes"):
        await PluginSocket(KubeletPaths(folder / ("x" * 100)), "x").start(service.methods())

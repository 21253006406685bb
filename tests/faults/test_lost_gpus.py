"""A GPU that is lost, reset under our feet, or lists no more what was on it: who held leases there is told why."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from mig_agent.core.model import GpuState, InstanceState
from mig_agent.pb.migagent.v1 import partition_manager_pb2 as pb
from mig_agent.simulator import Code, Simulator
from support.agent import Agent, eventually, short_folder
from support.engine import engine
from support.service import TIMEOUT, Service, ask, detail_of, service

TROUBLES: dict[str, tuple[Callable[[Simulator], object], str]] = {
    "lost": (lambda simulator: simulator.lose_gpu(0), "gpu-lost"),
    # After XID 79 the driver answers every question about the GPU so, listing its processes included.
    "lost in one call": (lambda simulator: simulator.fail("nvmlDeviceGetMigMode", Code.GPU_IS_LOST, gpu=0), "gpu-lost"),
    "reset": (lambda simulator: simulator.reset_gpu(0), "gpu-reset"),
}


@pytest.fixture
def folder() -> Iterator[Path]:
    with short_folder() as path:
        yield path


async def watched(there: Service) -> tuple[Any, int]:
    """A stream of events from now on."""
    stream: Any = there.users.Watch(pb.WatchRequest(), timeout=TIMEOUT)
    return stream, (await stream.read()).revision


async def told(stream: Any, kind: str) -> pb.Event:
    """The next event of a kind."""
    event = pb.Event()
    async with asyncio.timeout(TIMEOUT):
        while event.kind != kind:
            event = (await stream.read()).event
    return event


@pytest.mark.parametrize("trouble", TROUBLES)
async def test_the_holders_are_told_on_the_watch_stream(tmp_path: Path, trouble: str) -> None:
    strike, reason = TROUBLES[trouble]
    async with service(tmp_path, "a100-40gb:2") as there:
        lost = await there.acquire(profile="1g.5gb", gpus=["0"])
        kept = await there.acquire(profile="1g.5gb", gpus=["1"])
        hold: Any = there.users.Hold(pb.HoldRequest(request=ask(profile="1g.5gb", gpus=["0"])), timeout=TIMEOUT)
        held = (await hold.read()).granted
        stream, _ = await watched(there)
        strike(there.node.simulator)
        await there.node.look()
        ended = [await told(stream, "lease-ended") for _ in range(2)]
        assert {event.lease for event in ended} == {lost.lease.id, held.lease.id}
        for event in ended:
            assert event.data["reason"].text == reason
            assert event.gpu_index == 0
            assert event.holder == "alice"
        with pytest.raises(grpc.aio.AioRpcError) as over:
            await hold.read()
        assert detail_of(over.value).reason == "lease-ended"
        assert "GPU" in detail_of(over.value).message
        status = await there.users.Status(pb.StatusRequest(), timeout=TIMEOUT)
        assert [each.id for each in status.leases] == [kept.lease.id]
        again = await there.acquire(profile="1g.5gb")
        assert again.lease.devices[0].gpu_index in {0, 1}


async def test_a_lost_gpu_is_used_again_when_it_was_reset(tmp_path: Path) -> None:
    async with engine(tmp_path, "a100-40gb:2") as node:
        await node.acquire("1g.5gb", gpus=("0",))
        idle = await node.acquire("2g.10gb", gpus=("0",))
        await node.release(idle)
        node.simulator.lose_gpu(0)
        await node.look()
        assert node.gpu(0).state is GpuState.LOST
        assert "lost" in node.gpu(0).reason
        node.simulator.reset_gpu(0)
        await node.look()
        assert node.gpu(0).state is GpuState.READY
        assert node.layout(0) == ""
        assert not (await node.acquire("7g.40gb", gpus=("0",))).devices[0].reused


async def test_a_lease_over_two_gpus_ends_when_one_of_them_is_lost(tmp_path: Path) -> None:
    async with engine(tmp_path, "a100-40gb:2") as node:
        both = await node.acquire("7g.40gb", "7g.40gb")
        node.simulator.lose_gpu(1)
        await node.look()
        assert both.lease.id not in node.leases
        assert [each.state for each in node.instances(gpu=0)] == [InstanceState.IDLE]


async def test_one_instance_that_is_gone_is_no_reset(tmp_path: Path) -> None:
    async with engine(tmp_path, "a100-40gb") as node:
        gone, kept = await node.acquire("1g.5gb"), await node.acquire("1g.5gb")
        node.simulator.destroy_foreign(node.where(gone))
        await node.look()
        assert list(node.leases) == [kept.lease.id]
        (ended,) = [event for event in node.happened if event.kind == "lease-ended"]
        assert ended.data["reason"] == "instance-lost"


async def test_a_gpu_that_needs_a_reset_is_set_aside_and_its_leases_stand(tmp_path: Path) -> None:
    """As after an uncorrectable error of its memory: who runs on it may still come to an end."""
    async with engine(tmp_path, "a100-40gb:2") as node:
        granted = await node.acquire("1g.5gb", gpus=("0",))
        node.simulator.fail("nvmlDeviceGetMigMode", Code.RESET_REQUIRED, gpu=0, times=None)
        for _ in range(3):
            await node.look()
        assert node.gpu(0).state is GpuState.CORDONED
        assert "reset-required" in node.gpu(0).reason
        assert granted.lease.id in node.leases
        assert (await node.acquire("1g.5gb")).devices[0].gpu_index == 1
        node.simulator.clear()
        node.simulator.reset_gpu(0)
        await node.look()
        assert node.gpu(0).state is GpuState.READY
        assert granted.lease.id not in node.leases


def test_a_real_agent_starts_without_a_lost_gpu_and_takes_it_up_when_it_was_reset(folder: Path) -> None:
    with Agent(folder, "a100-40gb:2", flags=["--reread", "1s"]) as agent:
        lost = agent.ask("request", "--mig-profile", "1g.5gb", "--gpu", "0")["lease"]
        kept = agent.ask("request", "--mig-profile", "1g.5gb", "--gpu", "1")["lease"]
        agent.kill()
        agent.simulator.lose_gpu(0)
        agent.start()
        status = agent.ask("status")
        assert [gpu["index"] for gpu in status["gpus"]] == [1]
        assert {each["lease"] for each in status["leases"]} == {lost, kept}
        assert "GPU 0 is set aside" in agent.log()
        agent.simulator.reset_gpu(0)
        eventually(
            lambda: [gpu["state"] for gpu in agent.ask("status")["gpus"]] == ["ready", "ready"], "it is taken up"
        )
        assert [each["lease"] for each in agent.ask("status")["leases"]] == [kept]
        ended = [each for each in agent.ask("events")["events"] if each["kind"] == "lease-ended"]
        assert [(each["lease"], each["data"]["reason"]) for each in ended] == [(lost, "gpu-reset")]
        assert agent.ask("request", "--mig-profile", "7g.40gb", "--gpu", "0")["devices"]
        locks = [
            each for each in (agent.state_dir / "host").rglob("*.lock") if status["gpus"][0]["uuid"] not in each.name
        ]
        assert locks
        assert {each.read_text().strip() for each in locks} == {str(agent.process.pid if agent.process else "")}

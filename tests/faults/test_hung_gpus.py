"""A GPU whose driver hangs is set aside, for all to see, while the others serve; and comes back when it answers."""

from __future__ import annotations

import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from mig_agent.adapters.filelock import LockedError
from mig_agent.core.events import EventKind
from mig_agent.core.model import GpuState
from mig_agent.simulator import STATE_FILE, Code, Simulator
from support.agent import GENEROUS_SECONDS, Agent, eventually, short_folder
from support.engine import Node, engine, start

CREATE = "nvmlDeviceCreateGpuInstanceWithPlacement"
NOT_LONG = 2.0
"""Seconds; what a driver that is well has to answer in, on a busy machine."""


@pytest.fixture
def folder() -> Iterator[Path]:
    with short_folder() as path:
        yield path


def test_a_real_agent_shows_it_and_serves_with_the_others(folder: Path) -> None:
    with Agent(folder, "h100-80gb:2", flags=["--call-deadline", "5s", "--metrics", "127.0.0.1:0"]) as agent:
        simulate(agent, "inject", "hang", CREATE, "--gpu", "0")
        client = agent.begin("request", "--mig-profile", "1g.10gb", "--gpu", "0")
        eventually(lambda: agent.ask("status")["gpus"][0]["state"] == "cordoned", "the GPU is set aside")
        sick, well = agent.ask("status")["gpus"]
        assert sick["reason"].startswith("the driver has not come back from: create 1g.10gb")
        assert (well["state"], well["reason"]) == ("ready", "")
        assert "has not come back" in agent.migctl("status").stdout
        assert agent.ask("request", "--mig-profile", "1g.10gb")["devices"][0]["gpu_index"] == 1
        scraped = metrics(agent)
        assert 'mig_agent_gpus{state="cordoned"} 1.0' in scraped
        (line,) = [each for each in scraped.splitlines() if each.startswith('mig_agent_gpu{gpu="0"')]
        assert 'state="cordoned"' in line
        assert "the driver has not come back from: create 1g.10gb" in line
        _, words = client.communicate(timeout=GENEROUS_SECONDS)
        assert client.returncode == 3
        assert "cannot" in words
        simulate(agent, "clear")
        eventually(lambda: agent.ask("status")["gpus"][0]["state"] == "ready", "it comes back by itself")
        assert agent.ask("request", "--mig-profile", "1g.10gb", "--gpu", "0")["devices"][0]["gpu_index"] == 0
        instances = agent.simulator.machine()["gpus"][0]["instances"]
        assert len(instances) == 1  # what the hung call made at last is not left behind


def simulate(agent: Agent, *arguments: str) -> None:
    """As a person does it, from another terminal."""
    command = [sys.executable, "-m", "mig_agent.simulator", "--state-dir", str(agent.state_dir), *arguments]
    subprocess.run(command, check=True, capture_output=True, timeout=GENEROUS_SECONDS, env=agent.person())


def metrics(agent: Agent) -> str:
    with urllib.request.urlopen(agent.serving()["metrics"], timeout=GENEROUS_SECONDS) as answer:  # noqa: S310 -- our own
        return str(answer.read().decode())


@pytest.mark.parametrize("call", ["nvmlDeviceGetMigMode", "nvmlDeviceGetGpuInstances"])
async def test_one_that_hangs_at_the_start_keeps_nobody_from_serving(tmp_path: Path, call: str) -> None:
    async with engine(tmp_path, "a100-40gb:2") as node:
        sick, well = [await node.acquire("1g.5gb", gpus=(gpu,)) for gpu in ("0", "1")]
    node.simulator.hang(call, gpu=0)
    after = await start(tmp_path, clock=node.clock, call_deadline_seconds=NOT_LONG)
    try:
        await managed(after, 1)
        assert [gpu.index for gpu in after.manager.snapshot.view.gpus] == [1]
        assert list(after.manager.snapshot.missing) == [0]
        assert "no answer in" in after.manager.snapshot.missing[0]
        assert (await after.acquire("1g.5gb")).devices[0].gpu_index == 1
        assert {sick.lease.id, well.lease.id} <= set(after.leases)
        recorded = await after.manager.history.events(0.0, None, 1000)
        told = [event.message for event in recorded if event.kind is EventKind.GPU_CORDONED]
        assert any(words.startswith("GPU 0 is set aside, and looked for from time to time: ") for words in told)
        after.simulator.clear()
        await managed(after, 0)
        assert after.gpu(0).state is GpuState.READY
        assert after.manager.snapshot.missing == {}
        (again,) = after.instances(gpu=0)
        assert again.lease == sick.lease.id
        assert (await after.acquire("1g.5gb", gpus=("0",))).devices[0].gpu_index == 0
        assert EventKind.GPU_RECOVERED in after.kinds()
    finally:
        after.simulator.clear()
        await after.manager.close()


async def test_one_that_another_agent_took_meanwhile_is_left_to_it(tmp_path: Path) -> None:
    async with engine(tmp_path, "a100-40gb:2"):
        pass
    simulator = Simulator(tmp_path / STATE_FILE)
    simulator.fail("nvmlDeviceGetMinorNumber", Code.UNKNOWN, gpu=0, times=None)

    def taken(index: int, _uuid: str) -> None:
        if index == 0:
            raise LockedError("cannot use GPU 0: the agent with pid 4711 uses it already")

    async with engine(tmp_path, claim=taken) as node:
        simulator.clear()
        await node.look()
        await node.quiet()
        assert [gpu.index for gpu in node.manager.snapshot.view.gpus] == [1]
        assert "the agent with pid 4711" in node.told(EventKind.GPU_CORDONED)[-1].message
        assert "the agent with pid 4711" in node.manager.snapshot.missing[0]


async def managed(node: Node, gpu: int) -> None:
    """Looks until the GPU is managed: that may take longer than the deadline on a busy machine."""
    for _ in range(10):
        if any(each.index == gpu for each in node.manager.snapshot.view.gpus):
            return
        await node.look()
    raise AssertionError(f"GPU {gpu} is not managed")

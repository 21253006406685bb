"""`mig-agent serve` on a machine with a real driver and a GPU whose MIG mode is off. Changes nothing on it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from support.agent import Agent

pytestmark = pytest.mark.gpu


@pytest.fixture
def agent(folder: Path) -> Iterator[Agent]:
    with Agent(folder, "", flags=["--lock-dir", str(folder / "locks")]) as running:
        yield running


def test_the_gpu_is_listed_with_the_reason_and_serves_whole(agent: Agent) -> None:
    gpus = [gpu for gpu in agent.ask("status")["gpus"] if not gpu["mig"]["current"]]
    if not gpus:
        pytest.skip("MIG mode is on on all GPUs of this machine")
    gpu = gpus[0]
    assert (gpu["state"], bool(gpu["reason"])) == ("whole", True)
    answer = agent.ask("request", "--gpu-memory", "4G", "--gpu", str(gpu["index"]), code=3)
    assert answer["error"]["message"].startswith("cannot ")
    lease = agent.ask("request", "--num-gpus", "1", "--gpu", str(gpu["index"]))
    assert lease["devices"][0]["uuid"] == gpu["uuid"]
    agent.restart_after_crash()
    agent.migctl("release", lease["lease"])

"""`mig-agent health`, as a probe runs it."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from support import nobodys
from support.agent import GENEROUS_SECONDS, PROCESS_SECONDS, Agent, environment, eventually, health, short_folder

NOT_SERVING = 2
SERVING = 1
SERVICE = "migagent.v1.PartitionManager"


@pytest.fixture
def folder() -> Iterator[Path]:
    with short_folder() as path:
        yield path


def command(address: str, *flags: str) -> list[str]:
    return [sys.executable, "-m", "mig_agent", "health", "--address", address, *flags]


def probe(folder: Path, address: str, *flags: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(address, *flags),
        env=environment(folder),
        capture_output=True,
        text=True,
        check=False,
        timeout=PROCESS_SECONDS,
    )


def test_an_agent_that_serves(folder: Path) -> None:
    with Agent(folder) as agent:
        for flags in ((), ("--live",)):
            done = probe(folder, agent.address, "--timeout", "60", *flags)
            assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_an_agent_that_is_gone(folder: Path) -> None:
    with Agent(folder) as agent:
        agent.kill()
        for flags in ((), ("--live",)):
            done = probe(folder, agent.address, *flags)
            assert done.returncode == 1
            assert done.stderr.startswith(f"mig-agent: cannot reach the agent at {agent.address}: nobody listens there")


def test_an_agent_that_hangs(folder: Path) -> None:
    """Its socket still takes connections; nobody answers on them."""
    with Agent(folder) as agent:
        assert agent.process is not None
        agent.process.send_signal(signal.SIGSTOP)
        try:
            done = probe(folder, agent.address, "--live", "--timeout", "0.5")
        finally:
            agent.process.send_signal(signal.SIGCONT)
        assert done.returncode == 1
        assert "within 0.5 s" in done.stderr


def test_an_agent_that_still_starts(folder: Path) -> None:
    """It listens from the start; the driver that hangs keeps it from serving."""
    with Agent(folder) as agent:
        agent.stop()
        agent.simulator.hang("nvmlDeviceGetCount_v2")
        agent.launch()
        eventually(lambda: probe(folder, agent.address, "--live", "--timeout", "60").returncode == 0)
        done = probe(folder, agent.address, "--timeout", "60")
        assert done.returncode == 1
        assert "cannot call the agent ready: it starts or stops. Hint: --live asks only" in done.stderr


def test_a_time_that_cannot_be_meant(folder: Path) -> None:
    for typed in (("--timeout", "-1"), ("--timeout", "0"), ("--wait", "-1"), ("--timeout", "x")):
        done = probe(folder, "unix:///nowhere", *typed)
        assert done.returncode == 2
        assert done.stderr.startswith(f"mig-agent: cannot take that for {typed[0]}: ")


def test_a_device_plugin_that_the_kubelet_does_not_know_yet(folder: Path) -> None:
    """It answers whoever calls, but a pod that were bound to the node now would be rejected there."""
    agent = Agent(folder, flags=nobodys.flags(folder))
    agent.launch()
    try:
        eventually(lambda: health(agent.address, SERVICE) == SERVING, "it serves")
        assert probe(folder, agent.address, "--live", "--timeout", "60").returncode == 0
        done = probe(folder, agent.address, "--timeout", "60", "--wait", "0.3")
        assert done.returncode == 1
        assert "the kubelet does not know its resources yet" in done.stderr
        assert agent.ask("request", "--gpu-memory", "4G")["lease"]
    finally:
        agent.kill()


def test_it_waits_for_an_agent_that_still_starts(folder: Path) -> None:
    with Agent(folder) as agent:
        agent.stop()
        agent.simulator.hang("nvmlDeviceGetCount_v2")
        agent.launch()
        eventually(lambda: health(agent.address) == NOT_SERVING, "it listens")
        waiting = subprocess.Popen(command(agent.address, "--timeout", "60", "--wait", "60"), env=environment(folder))
        try:
            agent.simulator.clear()
            assert waiting.wait(GENEROUS_SECONDS) == 0
        finally:
            waiting.kill()
            waiting.wait()


def test_an_address_that_is_none(folder: Path) -> None:
    done = probe(folder, "nonsense")
    assert done.returncode == 2
    assert "cannot take" in done.stderr


@pytest.mark.parametrize("left_by_one_that_died", [False, True])
def test_one_that_does_not_listen_yet_is_waited_for(folder: Path, left_by_one_that_died: bool) -> None:
    agent = Agent(folder)
    if left_by_one_that_died:
        with agent:
            agent.kill()
        assert agent.socket.is_socket()
    waiting = subprocess.Popen(
        command(agent.address, "--wait", "120"), env=environment(folder), stderr=subprocess.PIPE, text=True
    )
    with waiting:
        with pytest.raises(subprocess.TimeoutExpired):
            waiting.wait(3)  # one try takes far less
        with agent:
            assert waiting.wait(GENEROUS_SECONDS) == 0


def test_one_that_never_comes_is_not_waited_for_longer(folder: Path) -> None:
    done = probe(folder, f"unix://{folder}/agent.sock", "--wait", "1")
    assert done.returncode == 1
    assert "there is no such socket" in done.stderr

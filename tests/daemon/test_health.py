"""`mig-agent health`, as a probe runs it."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.agent import Agent, environment, eventually, short_folder


@pytest.fixture
def folder() -> Iterator[Path]:
    with short_folder() as path:
        yield path


def probe(folder: Path, address: str, *flags: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "mig_agent", "health", "--address", address, *flags],
        env=environment(folder),
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
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
        assert "does not serve" in done.stderr


def test_an_address_that_is_none(folder: Path) -> None:
    done = probe(folder, "nonsense")
    assert done.returncode == 2
    assert "cannot take" in done.stderr

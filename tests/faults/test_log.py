"""A real agent whose log cannot be written: it serves as though it could, and counts what it could not write."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest

from mig_agent.client import Client
from support.agent import GENEROUS_SECONDS, Agent, eventually, short_folder
from support.disks import small_disk

PAIRS = 40
AT_ONCE = 7
"""Leases that fit beside each other."""
METRIC = "mig_agent_log_lines_dropped_total"


class AgentWithLog(Agent):
    """Its standard error is what the test gives it."""

    def __init__(self, folder: Path, log: int, *flags: str) -> None:
        self.port = _free_port()
        flags = ("--metrics", f"127.0.0.1:{self.port}", "--log-format", "json", *flags)
        super().__init__(folder, "a100-40gb:1", flags=flags)
        self._log = log

    def launch(self) -> subprocess.Popen[bytes]:
        self.process = subprocess.Popen(
            self._command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=self._log,
            env=self._environment,
            cwd=self.folder,
        )
        return self.process

    def pairs(self, number: int = PAIRS, name: str = "alice") -> None:
        """Leases are asked for and given back."""
        with Client(self.address) as client:
            for _ in range(number):
                client.acquire(gpu_memory="4G", name=name).release()

    def dropped(self) -> int:
        """What the metric says."""
        with urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=GENEROUS_SECONDS) as page:
            lines = page.read().decode().splitlines()
        return int(float(next(line.split()[1] for line in lines if line.startswith(METRIC))))


def _free_port() -> int:
    import socket  # noqa: PLC0415 -- for this alone

    with socket.socket() as asked:
        asked.bind(("127.0.0.1", 0))
        return int(asked.getsockname()[1])


@pytest.fixture
def folder() -> Iterator[Path]:
    with short_folder() as path:
        yield path


def serves_on(agent: AgentWithLog) -> None:
    """And ends as it always does."""
    agent.pairs(5)
    assert agent.ask("status")["ledger_error"] == ""
    assert agent.stop() == 0


def told(lines: list[str]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in lines]


def test_a_log_that_is_always_full(folder: Path) -> None:
    full = os.open("/dev/full", os.O_WRONLY)
    with AgentWithLog(folder, full) as agent:
        os.close(full)
        agent.pairs()
        eventually(lambda: agent.dropped() > 2 * PAIRS, "the lines are counted")
        serves_on(agent)


def test_a_reader_that_went_away(folder: Path) -> None:
    """`mig-agent serve 2>&1 | head -2`."""
    reading, writing = os.pipe()
    with AgentWithLog(folder, writing) as agent:
        os.close(writing)
        assert os.read(reading, 10)
        os.close(reading)
        agent.pairs()
        eventually(lambda: agent.dropped() > PAIRS, "the lines are counted")
        serves_on(agent)


def test_a_log_on_a_disk_that_fills_up(folder: Path) -> None:
    with small_disk(folder / "log", mib=1) as disk:
        path = disk.path / "agent.log"
        log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        with AgentWithLog(folder, log) as agent:
            os.close(log)
            disk.fill()
            agent.pairs()
            lost = eventually(agent.dropped, "lines are counted")
            disk.empty()
            eventually(lambda: "were dropped" in path.read_text(), "the log says how many")
            lost = agent.dropped()
            serves_on(agent)
            # The last line before the disk was full may be torn.
            whole = [line for line in path.read_text().splitlines() if line.endswith("}")]
            assert lost in [each.get("dropped") for each in told(whole)]
            assert told(whole)[-1]["event"] == "stopped"


def small_pipe() -> tuple[int, int]:
    """Return the ends of a pipe that is full at once, where each lease costs commits to the disk."""
    reading, writing = os.pipe()
    fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, 4096)
    return reading, writing


def test_a_pipe_that_nobody_reads_until_its_reader_is_back(folder: Path) -> None:
    reading, writing = os.pipe()
    with AgentWithLog(folder, writing, "--log-level", "debug") as agent:
        os.close(writing)
        # More than the pipe and the queue take.
        while not agent.dropped():
            with ThreadPoolExecutor(AT_ONCE) as pool:  # whose commits meet
                list(pool.map(lambda _: agent.pairs(20, name="alice " * 40), range(AT_ONCE)))
        agent.pairs()
        assert agent.ask("status")["leases"] == []
        seen = b""
        while b" dropped" not in seen[-1000:]:
            seen += os.read(reading, 65_536)
        lost = agent.dropped()
        seen += os.read(reading, 65_536) if not seen.endswith(b"\n") else b""
        # At each place where lines are missing; where the reader is slow there are several.
        assert sum(each["dropped"] for each in told(seen.decode().splitlines()) if "dropped" in each) == lost
        serves_on(agent)
    os.close(reading)


def test_it_ends_on_a_signal_while_nobody_reads_the_log(folder: Path) -> None:
    reading, writing = small_pipe()
    with AgentWithLog(folder, writing, "--log-level", "debug") as agent:
        os.close(writing)
        agent.pairs(20, name="alice " * 40)  # the pipe is full
        serves_on(agent)
    os.close(reading)

"""A real agent whose disk fills up or turns read-only: nothing is given that is not recorded, what stands stays."""

from __future__ import annotations

import json
import os
import resource
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mig_agent.adapters.ledger.store import LEDGER_FILE
from mig_agent.simulator import STATE_FILE, Simulator
from support.agent import GENEROUS_SECONDS, Agent, eventually, short_folder
from support.disks import SmallDisk, small_disk

MOST_REQUESTS = 200
SMALL_FILES = """
import resource, sys
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv.pop(1)), resource.RLIM_INFINITY))
from mig_agent.__main__ import main
sys.exit(main())
"""
"""The agent, where no file can grow beyond a size: what a full disk is to whoever may not mount one."""


class AgentElsewhere(Agent):
    """Its simulated machine is not on the disk of its state, as hardware is not."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, "a100-40gb:1", flags=["--simulate-dir", str(folder / "machine")])

    @property
    def simulator(self) -> Simulator:
        return Simulator(self.folder / "machine" / STATE_FILE)


@pytest.fixture
def folder() -> Iterator[Path]:
    with short_folder() as path:
        yield path


@pytest.fixture
def disk(folder: Path) -> Iterator[SmallDisk]:
    with small_disk(folder / "state") as mounted:
        mounted.path.chmod(0o700)
        yield mounted


def refused(agent: Agent, *arguments: str) -> dict[str, Any]:
    error: dict[str, Any] = agent.ask(*arguments, code=3)["error"]
    assert error["reason"] == "ledger-failed", error
    assert error["retryable"]
    assert error["message"].startswith("cannot ")
    assert LEDGER_FILE in error["message"]
    return error


def nothing_new(agent: AgentElsewhere, kept: dict[str, Any], *why: str) -> None:
    """While nothing can be written: every verb that would have to be recorded is refused in words."""
    for asked in (["--gpu-memory", "4G"], ["--mig-profile", "3g.20gb"], ["--gpu-memory", "4G", "--wait", "1m"]):
        error = refused(agent, "request", *asked)
        assert any(each in error["message"] for each in why), error
        assert "the administrator" in error["hint"]
    refused(agent, "release", kept["lease"])
    refused(agent, "cordon", "--gpu", "0", "--address", f"unix://{agent.folder}/admin.sock")
    status = agent.ask("status")
    assert [each["lease"] for each in status["leases"]] == [kept["lease"]]
    # What was being made may stay, to be given when its lease can be recorded; nobody has it until then.
    assert [each["lease"] for each in agent.instances("leased")] == [kept["lease"]]
    assert agent.migctl("status").stdout.count("ledger") >= 1


def goes_on(agent: AgentElsewhere, kept: dict[str, Any]) -> None:
    """As soon as it can be written again, with no restart, and after one."""
    new = eventually(lambda: _answer(agent), "leases are given again")
    agent.restart_after_crash()
    assert {each["lease"] for each in agent.ask("status")["leases"]} == {kept["lease"], new["lease"]}
    agent.migctl("release", kept["lease"])
    agent.migctl("release", new["lease"])
    assert not agent.ask("status")["leases"]
    assert {each["state"] for each in agent.instances()} == {"idle"}
    assert len(agent.instances()) == sum(len(gpu["instances"]) for gpu in agent.simulator.machine()["gpus"])
    assert "Traceback" not in agent.log()


def _answer(agent: Agent) -> dict[str, Any] | None:
    answer: dict[str, Any] | None = None
    if agent.migctl("plan", "--gpu-memory", "4G", code=None).returncode == 0:
        done = agent.migctl("request", "--gpu-memory", "4G", "-o", "json", code=None)
        answer = json.loads(done.stdout) if done.returncode == 0 else None
    return answer


def with_one_lease_and_one_idle(agent: Agent) -> dict[str, Any]:
    kept: dict[str, Any] = agent.ask("request", "--mig-profile", "2g.10gb")
    agent.migctl("release", agent.ask("request", "--gpu-memory", "4G")["lease"])
    return kept


def test_the_disk_is_full(folder: Path, disk: SmallDisk) -> None:
    with AgentElsewhere(folder) as agent:
        kept = with_one_lease_and_one_idle(agent)
        disk.fill()
        nothing_new(agent, kept, "full")
        disk.empty()
        goes_on(agent, kept)


def test_the_disk_is_full_when_it_starts(folder: Path, disk: SmallDisk) -> None:
    """It refuses in words or serves what it knows; the leases are there when there is room again."""
    with AgentElsewhere(folder) as agent:
        kept = with_one_lease_and_one_idle(agent)
        agent.kill()
        disk.fill()
        process = agent.launch()
        assert process.wait(GENEROUS_SECONDS) == 1
        last = agent.log().splitlines()[-1]
        assert "cannot " in last
        assert "full" in last or "No space" in last
        disk.empty()
        agent.start()
        goes_on(agent, kept)


def test_the_disk_turns_read_only(folder: Path, disk: SmallDisk) -> None:
    """As a file system does after an error. The log cannot even be opened then."""
    with AgentElsewhere(folder) as agent:
        kept = with_one_lease_and_one_idle(agent)
        agent.kill()
        disk.read_only()
        process = agent.launch()
        assert process.wait(GENEROUS_SECONDS) == 1
        assert "cannot " in agent.log().splitlines()[-1]
        assert "ead-only" in agent.log().splitlines()[-1]
        disk.read_only(on=False)
        agent.start()
        goes_on(agent, kept)


def test_no_file_can_grow(folder: Path) -> None:
    """The disk's quota, for those who may not mount a disk."""
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[1] == resource.RLIM_INFINITY
    with AgentElsewhere(folder) as agent:
        kept = with_one_lease_and_one_idle(agent)
        agent.kill()
        usual = list(agent._command)
        log = folder / "state" / f"{LEDGER_FILE}-wal"
        most = max(log.stat().st_size, (folder / "state" / LEDGER_FILE).stat().st_size) + 40_000
        agent._command[:3] = [sys.executable, "-c", SMALL_FILES, str(most)]
        agent.log_file = Path(os.devnull)
        agent.start()
        answer: dict[str, Any] = {}
        for _ in range(MOST_REQUESTS):
            answer = json.loads(agent.migctl("request", "--gpu-memory", "4G", "-o", "json", code=None).stdout)
            if "error" in answer:
                break
            agent.migctl("release", answer["lease"], code=None)
        assert answer["error"]["reason"] == "ledger-failed"
        assert answer["error"]["message"].startswith("cannot ")
        standing = {each["lease"] for each in agent.ask("status")["leases"]}
        assert kept["lease"] in standing
        agent.kill()
        agent._command[:] = usual
        agent.log_file = folder / "agent.log"
        agent.start()
        assert {each["lease"] for each in agent.ask("status")["leases"]} == standing
        assert {each["state"] for each in agent.instances()} <= {"idle", "leased"}

"""A second agent where one is already: it refuses in words, and the first goes on."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path

import pytest

from support.agent import GENEROUS_SECONDS, Agent, eventually


def refused(second: Agent, *words: str) -> None:
    process = second.launch()
    assert process.wait(GENEROUS_SECONDS) == 1
    (line,) = [line for line in second.log().splitlines() if "cannot" in line]
    for each in words:
        assert each in line
    assert "Traceback" not in second.log()


def goes_on(first: Agent) -> None:
    lease = first.ask("request", "--gpu-memory", "4G")["lease"]
    first.migctl("release", lease)


@pytest.fixture
def elsewhere(folder: Path) -> Path:
    (folder / "b").mkdir()
    return folder / "b"


def test_on_one_state_directory(agent: Agent, elsewhere: Path) -> None:
    second = Agent(elsewhere, flags=["--state-dir", str(agent.state_dir)])
    assert agent.process is not None
    refused(second, "cannot use the state directory", str(agent.state_dir), str(agent.process.pid), "--state-dir")
    goes_on(agent)


def test_on_one_socket(agent: Agent, elsewhere: Path) -> None:
    second = Agent(elsewhere, listen=[agent.address])
    assert agent.process is not None
    refused(second, "cannot use the socket", str(agent.socket), str(agent.process.pid), "--listen")
    goes_on(agent)


def test_on_one_admin_socket(agent: Agent, elsewhere: Path) -> None:
    second = Agent(elsewhere, flags=["--admin-listen", f"unix://{agent.folder}/admin.sock"])
    refused(second, "cannot use the socket", "admin.sock")
    goes_on(agent)
    assert not (elsewhere / "agent.sock").exists()


def test_on_one_gpu(agent: Agent, elsewhere: Path) -> None:
    """Two agents with everything of their own but the machine."""
    second = Agent(elsewhere, flags=["--simulate-dir", str(agent.state_dir)])
    assert agent.process is not None
    refused(second, "cannot use GPU 0", str(agent.process.pid), "--gpus")
    goes_on(agent)


def test_each_on_gpus_of_its_own(folder: Path, elsewhere: Path) -> None:
    first = Agent(folder, flags=["--gpus", "0"])
    second = Agent(elsewhere, flags=["--gpus", "1", "--simulate-dir", str(folder / "state")])
    with first, second:
        assert [gpu["index"] for gpu in first.ask("status")["gpus"]] == [0]
        assert [gpu["index"] for gpu in second.ask("status")["gpus"]] == [1]
        goes_on(first)
        goes_on(second)


def test_one_after_the_other_takes_over_what_a_killed_one_left(agent: Agent, elsewhere: Path) -> None:
    lease = agent.ask("request", "--gpu-memory", "4G")
    agent.kill()
    assert agent.socket.is_socket()
    second = Agent(elsewhere, listen=[agent.address], flags=["--state-dir", str(agent.state_dir)])
    shutil.copytree(agent.folder / "person", elsewhere / "person")
    with second:
        assert [each["lease"] for each in second.ask("status")["leases"]] == [lease["lease"]]
        second.migctl("release", lease["lease"])


def test_an_agent_whose_folder_was_taken_over_leaves_the_ledger_there_alone(folder: Path, elsewhere: Path) -> None:
    """Its own folder is removed under it, with its lock, and another agent begins there, with GPUs of its own."""
    with Agent(elsewhere, "h100-80gb:1") as first:
        first.ask("request", "--gpu-memory", "4G")
        assert first.process is not None
        first.process.send_signal(signal.SIGSTOP)  # else it would notice, and lock the folder again
        shutil.rmtree(first.state_dir / "locks")
        for each in (*first.state_dir.glob("ledger*"), first.state_dir / "lock"):
            each.unlink(missing_ok=True)
        (folder / "c").mkdir()
        flags = ["--state-dir", str(first.state_dir), "--simulate-dir", str(folder / "c")]
        with Agent(folder / "c", "h100-80gb:1", flags=flags) as second:
            first.process.send_signal(signal.SIGCONT)
            leases = {second.ask("request", "--gpu-memory", "4G")["lease"] for _ in range(3)}
            eventually(lambda: "no new leases until it is writable" in first.log(), "the first one has noticed")
            second.kill()
            second.start()
            assert {each["lease"] for each in second.ask("status")["leases"]} == leases

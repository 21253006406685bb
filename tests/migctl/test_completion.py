"""Completion: what is offered at each place, and a real bash whose user presses Tab."""

from __future__ import annotations

import os
import pty
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.shell_completion import CompletionItem, ShellComplete

from mig_agent.migctl.cli import cli
from support.agent import GENEROUS_SECONDS, PROCESS_SECONDS, Agent, eventually, short_folder


def offered(*typed: str) -> list[CompletionItem]:
    """What is offered for the last word."""
    return ShellComplete(cli, {}, "migctl", "_MIGCTL_COMPLETE").get_completions(list(typed[:-1]), typed[-1])


def words(*typed: str) -> list[str]:
    return [each.value for each in offered(*typed)]


@pytest.fixture(scope="module")
def agent() -> Iterator[Agent]:
    with short_folder() as folder, Agent(folder) as running:
        yield running


@pytest.fixture
def lease(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> str:
    """The one lease of the agent that completion asks."""
    for name, value in agent.person().items():
        monkeypatch.setenv(name, value)
    agent.migctl("release", "--mine")
    found: str = agent.ask("request", "--mig-profile", "1g.10gb", "--gpu", "1", "--name", "train")["lease"]
    return found


@pytest.mark.parametrize("verb", ["release", "renew", "show", "events --lease"])
def test_leases(verb: str, lease: str) -> None:
    assert words(*verb.split(), "") == ["train"], "people know names better than ids"
    assert words(*verb.split(), lease[:3]) == [lease]
    assert words(*verb.split(), "tr") == ["train"]
    assert words(*verb.split(), "zz") == []
    (only,) = offered(*verb.split(), "")
    assert only.help == "train: 1g.10gb on GPU 1, slice 6", "zsh and fish show it beside the id"


@pytest.mark.usefixtures("lease")
def test_a_name_that_two_leases_have_is_not_offered_for_either(agent: Agent) -> None:
    twins = {agent.ask("request", "--gpu-memory", "4G", "--name", "twin")["lease"] for _ in range(2)}
    assert set(words("show", "")) == {"train", *twins}


@pytest.mark.usefixtures("lease")
def test_waiting_requests(agent: Agent) -> None:
    agent.ask("request", "--num-gpus", "1", "--gpu", "0")
    waits = ("request", "--num-gpus", "1", "--gpu", "0", "--wait", "10m", "--name", "sweep")
    process = agent.begin(*waits, "--request-id", "0123456789abcdef")
    eventually(lambda: bool(agent.ask("status")["queue"]), "it waits")
    assert words("cancel", "") == ["sweep"]
    assert words("cancel", "0") == ["0123456789abcdef"]
    assert words("cancel", "01") == ["0123456789abcdef"]
    assert words("cancel", "sw") == ["sweep"]
    assert words("cancel", "zz") == []
    agent.migctl("cancel", "sweep")
    process.communicate(timeout=PROCESS_SECONDS)


@pytest.mark.usefixtures("lease")
def test_profiles_and_gpus() -> None:
    assert {"1g.5gb", "1g.10gb", "3g.40gb"} <= set(words("request", "--mig-profile", ""))
    assert words("run", "--mig-profile", "7g.8") == ["7g.80gb"]
    assert "3g.40gb" in words("plan", "--device", "3g")
    for verb in ("request --gpu", "cordon", "mode enable --gpu", "events --gpu", "status --gpu"):
        assert words(*verb.split(), "") == ["0", "1"]


def test_words_that_need_no_agent() -> None:
    assert words("mode", "") == ["enable", "disable"]
    assert words("status", "-o", "") == ["text", "json", "svg"]
    assert words("request", "-o", "e") == ["env"]
    assert words("usage", "-o", "") == ["text", "json", "csv"]
    assert words("usage", "--by", "") == ["user", "tenant", "name", "profile"]
    assert words("usage", "--by", "p") == ["profile"]
    assert words("top", "--sort", "m") == ["memory"]
    assert words("completion", "z") == ["zsh"]
    assert words("help", "conn") == ["connection"]
    assert "show" in words("sh")
    assert {"--leases", "--mine", "--watch"} <= set(words("status", "--"))
    assert words("status", "--tls-c") == ["--tls-ca", "--tls-cert"], "left out of the help, not of completion"


@pytest.mark.parametrize(
    "typed",
    [
        ["status", "--tls-ca", "/et"],
        ["--tls-key", "/et", "status"][:2],
        ["run", "--gpu-memory", "4G", "--", "python", "tra"],
        ["run", "--gpu-memory", "4G", "--", "./tra"],
        ["run", "--gpu-memory", "4G", "--", ""],
    ],
)
def test_files_are_left_to_the_shell(typed: list[str]) -> None:
    assert [each.type for each in offered(*typed)] == ["file"]


def test_the_command_of_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "train-model"
    program.touch(0o755)
    (tmp_path / "train-data").touch(0o644)
    monkeypatch.setenv("PATH", f"{tmp_path}:/nowhere")
    assert words("run", "--gpu-memory", "4G", "--", "tra") == ["train-model"]


def test_without_an_agent_nothing_is_offered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MIG_AGENT_ADDRESS", f"unix://{tmp_path}/none.sock")
    assert words("release", "") == []
    assert words("request", "--mig-profile", "") == []


def test_an_agent_that_hangs_holds_nobody_up(folder: Path, agent: Agent) -> None:
    """The shell waits for a second, not for a minute."""
    import socket  # noqa: PLC0415 -- only here

    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(folder / "silent.sock"))
        silent.listen()
        variables = {
            "MIG_AGENT_ADDRESS": f"unix://{folder}/silent.sock",
            "_MIGCTL_COMPLETE": "bash_complete",
            "COMP_WORDS": "migctl release ",
            "COMP_CWORD": "2",
        }
        began = time.monotonic()
        command = [sys.executable, "-m", "mig_agent.migctl"]
        environment = agent.person() | variables
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, check=False, timeout=PROCESS_SECONDS
        )
        assert (done.stdout, done.stderr) == ("", "")
        assert time.monotonic() - began < 10


@pytest.fixture
def folder() -> Iterator[Path]:
    with short_folder() as path:
        yield path


class Bash:
    """A real interactive bash with migctl's completion."""

    def __init__(self, agent: Agent, folder: Path) -> None:
        (folder / "migctl").write_text(f'#!/bin/sh\nexec {sys.executable} -m mig_agent.migctl "$@"\n')
        (folder / "migctl").chmod(0o755)
        (folder / "training.py").touch()
        self._ours, theirs = pty.openpty()
        environment = agent.person() | {"PATH": f"{folder}:{os.environ['PATH']}", "PS1": "> ", "TERM": "dumb"}
        command = ["bash", "--noprofile", "--norc", "-i"]
        self._process = subprocess.Popen(
            command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment, cwd=folder, start_new_session=True
        )
        os.close(theirs)
        self.type('source <(migctl completion bash) && echo "re"ady\n', "ready")

    def type(self, keys: str, until: str) -> None:
        """Type, and wait for what the screen then shows."""
        os.write(self._ours, keys.encode())
        seen, deadline = "", time.monotonic() + GENEROUS_SECONDS
        while until not in seen:
            assert time.monotonic() < deadline, seen
            if select.select([self._ours], [], [], 0.1)[0]:
                seen += os.read(self._ours, 65536).decode(errors="replace")

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._ours)


def test_in_a_real_bash(agent: Agent, lease: str, folder: Path) -> None:
    bash = Bash(agent, folder)
    try:
        bash.type("migctl release \t", "train")
        bash.type(f"\x15migctl release {lease[:4]}\t", lease)
        bash.type("\x15migctl mode en\t", "enable ")
        bash.type("\x15migctl run --gpu-memory 4G -- python tra\t", "training.py")
        bash.type("\x15migctl --tls-ca ./tra\t", "training.py")
        bash.type("\x15migctl request --mig-profile 3g.4\t", "3g.40gb")
    finally:
        bash.close()

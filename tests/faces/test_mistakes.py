"""Everything that a person types wrong gets one line in words and the right exit code, never a traceback."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from support import forks
from support.agent import Agent, environment, short_folder

USAGE, REFUSED, NO_AGENT, RUN_FAILED = 2, 3, 4, 125

MISTAKES = [
    # What cannot be meant.
    ("request", USAGE, "nothing"),
    ("request --gpu-memory 4", USAGE, "4G"),
    ("request --gpu-memory 4X", USAGE, "unit"),
    ("request --gpu-memory 0G", USAGE, "zero"),
    ("request --gpu-memory -4G", USAGE, "negative"),
    ("request --gpu-memory nan", USAGE, "not a number"),
    ("request --gpu-memory 4,5G", USAGE, "comma"),
    ("request --gpu-memory", USAGE, "cannot"),
    ("request --gpu-memory 4G --mig-profile 1g.10gb", USAGE, "cannot"),
    ("request --gpu-fraction 0", USAGE, "zero"),
    ("request --gpu-fraction 1.5", USAGE, "more than a whole"),
    ("request --gpu 0.2", USAGE, "--gpu-fraction"),
    ("request --gpu-memory 4G --gpu 0.2", USAGE, "--gpu-fraction"),
    ("request --num-gpus 0", USAGE, "cannot"),
    ("request --num-gpus two", USAGE, "cannot"),
    ("request --gpu-memory 4G --wait 10", USAGE, "10s"),
    ("request --gpu-memory 4G --ttl soon", USAGE, "cannot"),
    ("request --gpu-memory 4G --pid x", USAGE, "cannot"),
    ("request --gpu-memory 4G -o yaml", USAGE, "json"),
    ("request --gpu-mem 4G --colour", USAGE, "cannot"),
    ("reqest --gpu-memory 4G", USAGE, "cannot"),
    ("release", USAGE, "LEASE"),
    ("events --since yesterday", USAGE, "cannot"),
    ("mode sideways --gpu 0", USAGE, "cannot"),
    ("run --gpu-memory 4G", USAGE, "cannot"),
    # What this node cannot do.
    ("request --gpu-memory 900G", REFUSED, "cannot"),
    ("request --mig-profile 9g.90gb", REFUSED, "1g.10gb"),
    ("request --mig-profile 1g.99gb", REFUSED, "cannot"),
    ("request --gpu-memory 4G --gpu 17", REFUSED, "17"),
    ("request --num-gpus 9", REFUSED, "cannot"),
    ("request --gpu-memory 4G --pid 999999999", REFUSED, "there is no such process"),
    ("release no-such-lease", REFUSED, "no-such-lease"),
    ("cordon --gpu 17", REFUSED, "17"),
    ("run --gpu-memory 900G -- true", RUN_FAILED, "cannot"),
]


@pytest.fixture(scope="module")
def agent() -> Iterator[Agent]:
    with short_folder() as folder, Agent(folder) as running:
        yield running


@pytest.mark.parametrize(("typed", "code", "words"), MISTAKES, ids=[typed for typed, _, _ in MISTAKES])
def test_a_mistake_is_told_in_words(typed: str, code: int, words: str, agent: Agent) -> None:
    done = agent.migctl(*typed.split(), code=code)
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
    assert done.stderr.startswith("migctl: cannot ")
    assert words in done.stderr
    assert not agent.ask("status")["leases"]


TOLD_TO_PROGRAMS = [each for each in MISTAKES if " -o " not in each[0]]


@pytest.mark.parametrize(("typed", "code", "words"), TOLD_TO_PROGRAMS, ids=[typed for typed, _, _ in TOLD_TO_PROGRAMS])
def test_a_mistake_is_told_to_programs(typed: str, code: int, words: str, agent: Agent) -> None:
    verb, *rest = typed.split()
    done = agent.migctl(verb, "-o", "json", *rest, code=code)
    error = json.loads(done.stdout)["error"]
    assert error["message"].startswith("cannot ")
    assert words in done.stderr
    assert {"reason", "message", "hint", "retryable", "blockers"} <= error.keys()


@pytest.mark.parametrize("typed", ["status", "request --gpu-memory 4G", "release x", "events", "top --once"])
def test_without_an_agent(typed: str, tmp_path: Path) -> None:
    with short_folder() as folder:
        nowhere = environment(tmp_path, MIG_AGENT_ADDRESS=f"unix://{folder}/none.sock")
        done = forks.run(*forks.MIGCTL, *typed.split(), env=nowhere)
    assert done.returncode == NO_AGENT
    assert "cannot reach the agent" in done.stderr
    assert "systemctl status mig-agent" in done.stderr
    assert "Traceback" not in done.stderr


SERVE = [
    ("--reread 5", 2, "5s"),
    ("--listen 0.0.0.0:7400", 2, "certificates"),
    ("--listen nonsense", 2, "unix:///path"),
    ("--socket-mode 9", 2, "0660"),
    ("--socket-group no-such-group-here", 1, "no such group"),
    ("--gpus 7", 1, "0 (GPU-"),
    ("--gpus GPU-ffffffff-0000", 1, "there is no such GPU"),
    ("--simulate riva128:2", 1, "a100-40gb"),
    ("--simulate h100-80gb:many", 1, "MODEL:COUNT"),
    ("--config /no/such/file.yaml", 2, "/no/such/file.yaml"),
    ("--state-dir /proc/nowhere", 1, "/proc/nowhere"),
    ("--listen unix:///proc/nowhere/a.sock", 1, "/proc/nowhere"),
    ("--profiles-dir /no/such/folder", 1, "/no/such/folder"),
    ("--no-such-flag", 2, "--no-such-flag"),
    ("--tls-cert /a --tls-key /b --tls-client-ca /c --listen 127.0.0.1:0", 1, "cannot read /a"),
]


@pytest.mark.parametrize(("typed", "code", "words"), SERVE, ids=[typed for typed, _, _ in SERVE])
def test_the_agent_itself_tells_of_mistakes(typed: str, code: int, words: str) -> None:
    with short_folder() as folder:
        defaults = {
            "--simulate": "a30:1",
            "--state-dir": str(folder / "state"),
            "--listen": f"unix://{folder}/agent.sock",
            "--admin-listen": f"unix://{folder}/admin.sock",
            "--metrics": "off",
        }
        given = typed.split()
        flags = [part for flag, value in defaults.items() if flag not in given for part in (flag, value)]
        done = forks.run(*forks.AGENT, "serve", *flags, *given, env=environment(folder))
    assert done.returncode == code, done.stderr
    assert words in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stderr.count("\n") == 1
    assert "cannot " in done.stderr


@pytest.mark.parametrize(
    ("typed", "words"),
    [
        ("frob", "no such command 'frob'"),
        ("serve --simulat a30", "--simulate"),
        ("serve --reread", "--reread"),
        ("--frob", "--frob"),
        ("demo --slow", "--slow"),
        ("serve something", "something"),
    ],
)
def test_its_command_line_is_judged_in_one_line(typed: str, words: str) -> None:
    done = forks.run(*forks.AGENT, *typed.split())
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("mig-agent: cannot understand ")
    assert words in done.stderr
    assert ". Hint: " in done.stderr
    assert "?." not in done.stderr
    assert done.stderr.count("\n") == 1


def test_without_a_verb_its_help_is_shown() -> None:
    done = subprocess.run([sys.executable, "-m", "mig_agent"], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 2
    assert "serve" in done.stderr


def test_without_a_driver_it_says_what_a_person_without_one_can_do() -> None:
    with short_folder() as folder:
        flags = ["--state-dir", str(folder / "state"), "--listen", f"unix://{folder}/a.sock", "--metrics", "off"]
        code = (
            "import ctypes, sys\n"
            "def none(*_): raise OSError('no library here')\n"
            "ctypes.CDLL = none\n"
            "from mig_agent.__main__ import main\n"
            "main()\n"
        )
        done = subprocess.run(
            [sys.executable, "-c", code, "serve", *flags],
            capture_output=True,
            text=True,
            check=False,
            env=environment(folder),
            timeout=60,
        )
    assert done.returncode == 1
    assert "--simulate" in done.stderr
    assert "Traceback" not in done.stderr

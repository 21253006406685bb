"""`migctl` as it is installed: a script that holds interrupts back until Python can end quietly by one."""

from __future__ import annotations

import itertools
import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from mig_agent import __version__
from mig_agent.bootstrap import INTERRUPTED
from support.agent import GENEROUS_SECONDS, PROCESS_SECONDS, Agent, short_folder
from support.wheel import libraries

pytestmark = pytest.mark.timeout(600)

STATUS = ("status", "--address", "unix:///nowhere/agent.sock")
NO_AGENT = 4
INTERRUPTS_ITSELF = "import os, signal; os.kill(os.getpid(), signal.SIGINT)"
"""As `sitecustomize`: the interpreter runs it before the first line of any program."""
TRIES = 40
LONGEST_SECONDS = 0.15
SHELLS = [
    pytest.param(tuple(shell.split()), marks=pytest.mark.skipif(not shutil.which(shell.split()[0]), reason="not here"))
    for shell in ("sh", "bash --posix", "busybox sh")
]
OLD_ENV = """#!/bin/sh
case $1 in --block-signal*) echo "env: unrecognized option" >&2; exit 125 ;; esac
exec env "$@"
"""


def end_of(*command: str | Path, at_start: Path | None = None) -> tuple[int, str, str]:
    """How a program ends, and what it says. Raises TimeoutExpired."""
    path = os.pathsep.join([*([str(at_start)] if at_start else []), *libraries().values()])
    done = subprocess.run(
        [str(each) for each in command],
        env=os.environ | {"PYTHONPATH": path},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=PROCESS_SECONDS,
    )
    return done.returncode, done.stdout, done.stderr


@pytest.fixture(scope="module")
def at_start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that has every Python interrupt itself while it starts."""
    folder = tmp_path_factory.mktemp("site")
    (folder / "sitecustomize.py").write_text(INTERRUPTS_ITSELF)
    return folder


@pytest.fixture
def copied(programs: Path, tmp_path: Path) -> Callable[[str], Path]:
    """Both files of `migctl` in another folder."""

    def copy(folder: str) -> Path:
        (tmp_path / folder).mkdir()
        for name in ("migctl", "migctl-python"):
            shutil.copy2(programs / name, tmp_path / folder / name)
        return tmp_path / folder / "migctl"

    return copy


@pytest.mark.parametrize("shell", SHELLS, ids=" ".join)
def test_interrupted_before_its_first_line_it_ends_without_a_word(
    programs: Path, at_start: Path, shell: Sequence[str]
) -> None:
    assert end_of(*shell, programs / "migctl", *STATUS, at_start=at_start) == (INTERRUPTED, "", "")


def test_so_it_does_behind_links(programs: Path, at_start: Path, tmp_path: Path) -> None:
    """As pipx and `uv tool` make them."""
    (tmp_path / "one").symlink_to(programs / "migctl")
    (tmp_path / "two").symlink_to("one")
    assert end_of(tmp_path / "two", *STATUS, at_start=at_start) == (INTERRUPTED, "", "")


def test_interrupted_at_any_moment_of_its_start_it_prints_no_traceback(programs: Path) -> None:
    moments = random.Random(7)  # noqa: S311 -- the same moments every time
    for _ in range(TRIES):
        started = subprocess.Popen(
            [programs / "migctl", *STATUS],
            env=os.environ | libraries(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        time.sleep(moments.uniform(0, LONGEST_SECONDS))
        started.send_signal(signal.SIGINT)
        words, _ = started.communicate(timeout=GENEROUS_SECONDS)
        # The shell and `env` end by the signal; who could finish before it came says that there is no agent.
        assert started.returncode in {INTERRUPTED, -signal.SIGINT, NO_AGENT}, words
        assert not words.strip() or started.returncode == NO_AGENT


def test_interrupts_that_are_ignored_stay_ignored(programs: Path, at_start: Path) -> None:
    """As under nohup, and in a script's job in the background."""
    ignoring = ("sh", "-c", """trap '' INT; exec "$@" """, "sh")
    code, _, words = end_of(*ignoring, programs / "migctl", *STATUS, at_start=at_start)
    assert (code, "cannot reach the agent" in words) == (NO_AGENT, True)


@pytest.fixture
def agent() -> Iterator[Agent]:
    with short_folder() as folder, Agent(folder) as running:
        yield running


def test_the_command_of_run_can_be_interrupted(programs: Path, agent: Agent) -> None:
    code, words, errors = end_of(
        *("env", f"MIG_AGENT_ADDRESS={agent.address}"),
        *(programs / "migctl", "run", "--gpu-memory", "4G", "--", "grep", "^Sig[BI]", "/proc/self/status"),
    )
    assert code == 0, errors
    masks = {name: int(mask, 16) for name, mask in (line.split(":") for line in words.splitlines())}
    assert not [name for name in ("SigBlk", "SigIgn") if masks[name] & 1 << signal.SIGINT - 1], words


@pytest.mark.parametrize("shell", SHELLS, ids=" ".join)
def test_closed_files_change_nothing(programs: Path, shell: Sequence[str]) -> None:
    for closed in itertools.product(("", "<&-"), ("", ">&-"), ("", "2>&-")):
        for arguments in (("--version",), STATUS):
            started = ("sh", "-c", " ".join(('"$@"', *closed)), "sh")
            ours = end_of(*started, *shell, programs / "migctl", *arguments)
            assert ours == end_of(*started, programs / "migctl-python", *arguments), (closed, arguments)


@pytest.mark.parametrize("arguments", [("--version",), ("--help",), ("no-such-verb",), ("plan", "--gpu-memory", "a b")])
def test_it_says_what_python_says(programs: Path, arguments: Sequence[str]) -> None:
    assert end_of(programs / "migctl", *arguments) == end_of(programs / "migctl-python", *arguments)


def test_nothing_is_imported_from_where_it_is_called(programs: Path, tmp_path: Path) -> None:
    for name in ("re", "click", "mig_agent"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('imported from the working directory')")
    called = ("sh", "-c", 'cd "$0" && exec "$@"', tmp_path, programs / "migctl", "--version")
    assert end_of(*called) == (0, f"{__version__}\n", "")


def test_without_variables(programs: Path) -> None:
    code, words, _ = end_of(
        "env", "-i", *(f"{k}={v}" for k, v in libraries().items()), programs / "migctl", "--version"
    )
    assert (code, words) == (0, f"{__version__}\n")


def test_it_runs_where_a_path_looks_like_a_variable(copied: Callable[[str], Path]) -> None:
    assert end_of(copied("a=b c"), "--version") == (0, f"{__version__}\n", "")


def test_it_runs_where_env_blocks_no_signals(copied: Callable[[str], Path], tmp_path: Path) -> None:
    """Unprotected then, as any program of Python's."""
    env = tmp_path / "env"
    env.write_text(OLD_ENV)
    env.chmod(0o755)
    migctl = copied("copy")
    migctl.write_text(migctl.read_text().replace("/usr/bin/env", str(env)))
    assert end_of(migctl, "--version") == (0, f"{__version__}\n", "")


def test_a_copy_of_it_alone_says_what_is_missing(copied: Callable[[str], Path]) -> None:
    migctl = copied("copy")
    python = migctl.with_name("migctl-python")
    python.unlink()
    code, _, words = end_of(migctl, "--version")
    assert (code, f"cannot start: there is no {python}. Hint: " in words) == (127, True)

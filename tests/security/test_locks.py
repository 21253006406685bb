"""No process without a right to the agent's files keeps it from starting; one that has it, and is alive, does."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from support.agent import GENEROUS_SECONDS, Agent

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user as well")

STRANGER = 61001
"""A user of nothing and nobody's group."""
GRAB = """
import fcntl, os, stat, sys

def grab(folder):
    try:
        names = os.listdir(folder)
    except OSError:
        return
    for name in names:
        path = os.path.join(folder, name)
        kind = os.lstat(path).st_mode
        if stat.S_ISDIR(kind):
            grab(path)
        elif stat.S_ISREG(kind):
            try:
                descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
            except OSError:
                continue
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                pass
            print(path, flush=True)

os.setgroups([])
os.setresgid(*3 * [int(sys.argv[2])])
os.setresuid(*3 * [int(sys.argv[2])])
grab(sys.argv[1])
print(flush=True)
sys.stdin.read()
"""
LOCK = """
import fcntl, os, sys
descriptor = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
os.ftruncate(descriptor, 0)
os.pwrite(descriptor, f"{os.getpid()}\\n".encode(), 0)
print("locked", flush=True)
sys.stdin.read()
"""
"""What versions did before locks had a folder of their own."""


@contextmanager
def stranger(folder: Path) -> Iterator[set[Path]]:
    """Another user who opens, locks and holds all that can be opened below a folder; what that is."""
    # It becomes the stranger by itself: Python may live where strangers cannot go.
    command = [sys.executable, "-I", "-S", "-c", GRAB, str(folder), str(STRANGER)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        found = {Path(line.rstrip("\n")) for line in iter(process.stdout.readline, "\n")}
        assert process.poll() is None
        yield found
        process.kill()


@contextmanager
def former_version(path: Path) -> Iterator[int]:
    """A process that holds a lock as an agent of a former version does; its pid."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", LOCK, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "locked\n"
        yield process.pid
        process.kill()


@pytest.fixture
def place(folder: Path) -> Path:
    """A folder that everybody may enter, as /run and /var/lib are."""
    folder.chmod(0o755)
    for name in ("run", "var"):
        (folder / name).mkdir()
        (folder / name).chmod(0o755)
    return folder


def agent_in(place: Path, *flags: str) -> Agent:
    """As it is installed: a folder for the sockets, another one for the state."""
    more = ["--state-dir", f"{place}/var/state", "--admin-listen", f"unix://{place}/run/admin.sock", *flags]
    agent = Agent(place, "a100-40gb:2", listen=[f"unix://{place}/run/agent.sock"], flags=more)
    agent.state_dir = place / "var/state"
    return agent


def left_by_a_former_version(agent: Agent) -> set[Path]:
    """Makes of what is there what a former version, and the chart's hostPath, would have left; the locks of it."""
    run, state = agent.folder / "run", agent.state_dir
    gpus = state / "host/run/mig-agent/locks"
    uuids = [each["uuid"] for each in agent.simulator.machine()["gpus"]]
    locks = {
        run / "agent.sock.lock",
        run / "admin.sock.lock",
        state / "lock",
        *(gpus / f"{each}.lock" for each in uuids),
    }
    for each in (run, state, state / "host", state / "host/run", gpus.parent, gpus):
        each.mkdir(exist_ok=True)
        each.chmod(0o755)
    for each in locks:
        each.write_text("4194304\n")  # one more than the largest pid
        each.chmod(0o644)
    return locks


def kinds_of_locks(agent: Agent) -> Sequence[tuple[str, Path]]:
    locks = agent.state_dir / "host/run/mig-agent/locks"
    gpu = agent.simulator.machine()["gpus"][1]["uuid"]
    return (
        ("the state directory", agent.state_dir / "lock"),
        ("the socket", agent.folder / "run/agent.sock.lock"),
        ("the socket", agent.folder / "run/admin.sock.lock"),
        ("GPU 1", locks / f"{gpu}.lock"),
    )


def test_a_stranger_can_open_nothing_that_the_agent_makes(place: Path) -> None:
    with agent_in(place) as agent:
        agent.ask("request", "--gpu-memory", "4G")
        for folder in (place / "run", place / "var"):
            with stranger(folder) as opened:
                assert opened == set()
        agent.restart_after_crash()
        assert agent.stop() == 0
        for folder in (place / "run", place / "var"):
            with stranger(folder) as opened:
                assert opened == set()


def test_a_stranger_who_holds_the_locks_of_a_former_version_delays_no_start(place: Path) -> None:
    with agent_in(place) as agent:
        lease = agent.ask("request", "--gpu-memory", "4G")["lease"]
        assert agent.stop() == 0
        locks = left_by_a_former_version(agent)
        with stranger(place) as opened:
            assert opened >= locks  # or it would prove nothing
            agent.start()
            assert [each["lease"] for each in agent.ask("status")["leases"]] == [lease]
            with stranger(place / "run") as now, stranger(place / "var") as beside:
                assert now | beside == set()
            agent.restart_after_crash()
            assert agent.stop() == 0
            agent.start()
        agent.restart_after_crash()
        assert [each["lease"] for each in agent.ask("status")["leases"]] == [lease]


def test_an_agent_of_a_former_version_that_runs_keeps_a_new_one_out(place: Path) -> None:
    with agent_in(place) as agent:
        assert agent.stop() == 0
        left_by_a_former_version(agent)
        for what, path in kinds_of_locks(agent):
            with former_version(path) as pid:
                agent.log_file.unlink()
                assert agent.launch().wait(GENEROUS_SECONDS) == 1
                assert f"cannot use {what}" in agent.log()
                assert f"the agent with pid {pid} uses it already" in agent.log()
        agent.start()


def test_an_agent_that_runs_keeps_a_former_version_out(place: Path) -> None:
    with agent_in(place) as agent:
        for _, path in kinds_of_locks(agent):
            with path.open("r+b") as file, pytest.raises(BlockingIOError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            assert agent.process is not None
            assert path.read_text() == f"{agent.process.pid}\n"


@pytest.mark.parametrize("kind", ["folder", "link", "pipe", "another's"])
def test_what_lies_where_a_former_version_had_its_lock_is_in_nobodys_way(kind: str, place: Path) -> None:
    path = place / "run/agent.sock.lock"
    match kind:
        case "folder":
            path.mkdir()
        case "link":
            path.symlink_to("/etc/shadow")
        case "pipe":
            os.mkfifo(path)
        case _:
            path.touch()
            os.chown(path, STRANGER, STRANGER)
    before = path.lstat()
    with agent_in(place) as agent, stranger(place / "run"):
        agent.restart_after_crash()
        assert path.lstat().st_mode == before.st_mode


def test_a_refusal_names_a_holder_that_lives(place: Path) -> None:
    """Not the one whose pid was left in the file."""
    with agent_in(place) as first:
        lock = first.state_dir / "locks/state.lock"
        lock.write_text("4194304\n")
        (place / "second").mkdir()
        second = Agent(place / "second", flags=["--state-dir", str(first.state_dir)])
        assert second.launch().wait(GENEROUS_SECONDS) == 1
        assert first.process is not None
        assert f"the agent with pid {first.process.pid} uses it already" in second.log()

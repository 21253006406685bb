"""The control daemon of MPS: the stand-in always, and NVIDIA's own with `pytest -m mps` where it is installed.

The real one needs no GPU. Both are told that there is none.
"""

from __future__ import annotations

import os
import shutil
import signal
import stat
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.mps import Mps, differences, real, stand_in
from support.simulated import machine

DRIVERS = ("535.261.03", "550.163.01", "555.58.02", "615.71.03")


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder that other users may enter, with a path that is short enough for a pipe folder."""
    made = Path(tempfile.mkdtemp(prefix="mps-"))
    made.chmod(0o755)
    yield made
    shutil.rmtree(made)


@pytest.fixture(params=[*DRIVERS, pytest.param("real", marks=pytest.mark.mps)])
def mps(request: pytest.FixtureRequest, folder: Path) -> Iterator[Mps]:
    yield from made_of(request.param, folder)


@pytest.fixture(params=[DRIVERS[1], pytest.param("real", marks=pytest.mark.mps)])
def one(request: pytest.FixtureRequest, folder: Path) -> Iterator[Mps]:
    """A daemon of one version, for what all of them do alike."""
    yield from made_of(request.param, folder)


def made_of(version: str, folder: Path) -> Iterator[Mps]:
    made = real(folder) if version == "real" else stand_in(machine(folder, f"l40s,driver={version}"), folder)
    made.env["CUDA_VISIBLE_DEVICES"] = ""
    yield made
    for pid in made.pids():
        os.kill(pid, signal.SIGKILL)


@pytest.fixture
def running(mps: Mps) -> Mps:
    assert mps.start().returncode == 0
    return mps


def test_every_command_answers_as_in_the_table(running: Mps) -> None:
    assert differences(running) == []


def test_several_commands_and_a_last_line_without_its_end(one: Mps) -> None:
    assert one.start().returncode == 0
    answers = one.say("get_server_list\nget_default_active_thread_percentage\nps")
    assert answers == (0, "100.0\nServer not found\n", "")
    logged = [
        *("Accepting connection...", "NEW UI", "Cmd:get_server_list", "Cmd:get_default_active_thread_percentage"),
        *("100.0", "Cmd:ps", "Server not found", "UI closed"),
    ]
    deadline = time.monotonic() + 2
    while (lines := [line.split("] ")[1] for line in one.log().splitlines()])[-8:] != logged:
        assert time.monotonic() < deadline, lines
        time.sleep(0.01)


def test_without_a_daemon(one: Mps) -> None:
    assert one.say("get_server_list\n") == (1, "", "Cannot find MPS control daemon process\n")


def test_files_from_the_start_to_quit(running: Mps) -> None:
    modes = {path.name: stat.filemode(path.stat().st_mode) for path in running.pipe.iterdir()}
    assert modes.pop("nvidia-cuda-mps-control.pid", "-rw-rw-rw-" if running.branch < 550 else "") == "-rw-rw-rw-"
    assert modes == {
        "control": "srw-rw-rw-",
        "control_lock": "-rw-rw-rw-",
        "control_privileged": "srwxr-xr-x",
        "log": "prwxrwxrwx",
    }
    assert stat.filemode(running.pipe.stat().st_mode) == "drwxrwxrwx"
    assert stat.filemode(running.logs.stat().st_mode) == "drwx------"
    assert sorted(path.name for path in running.logs.iterdir()) == ["control.log", "server.log"]
    if running.branch >= 550:
        assert (running.pipe / "nvidia-cuda-mps-control.pid").read_text() == str(*running.pids())
    assert running.say("quit -t 5\n") == (0, "", "")
    ended(running)
    assert sorted(path.name for path in running.pipe.iterdir()) == ["control", "control_lock", "control_privileged"]
    assert running.start().returncode == 0  # over what it has left
    assert running.say("quit\n") == (0, "", "")


def ended(mps: Mps) -> None:
    deadline = time.monotonic() + 5
    while mps.pids():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_killed_daemon_leaves_all_its_files_and_the_next_one_knows_no_limit(one: Mps, number: int) -> None:
    assert one.start().returncode == 0
    one.say("set_default_device_pinned_mem_limit 0 2G\n")
    before = sorted(path.name for path in one.pipe.iterdir())
    os.kill(one.pids()[0], number)
    ended(one)
    assert sorted(path.name for path in one.pipe.iterdir()) == before
    assert one.say("ps\n")[0] == 1
    assert one.start().returncode == 0
    assert one.say("get_default_device_pinned_mem_limit 0\n") == (0, "", "")


def test_daemon_and_servers_end_with_the_simulated_machine(folder: Path) -> None:
    simulator = machine(folder, f"l40s,driver={DRIVERS[1]}")
    programs = stand_in(simulator, folder)
    assert programs.start().returncode == 0
    simulator.state_file.unlink()
    ended(programs)


def test_a_second_daemon_of_one_folder_is_refused_also_while_the_first_is_stopped(one: Mps) -> None:
    assert one.start().returncode == 0
    pid = one.pids()[0]
    for number in (signal.SIGCONT, signal.SIGSTOP):
        os.kill(pid, number)
        second = one.start()
        assert (second.returncode, second.stdout + second.stderr) == (
            1,
            "An instance of this daemon is already running\n",
        )
    with pytest.raises(subprocess.TimeoutExpired):
        one.say("ps\n", seconds=0.5)
    os.kill(pid, signal.SIGCONT)
    assert one.say("ps\n") == (0, "Server not found\n", "")


def test_the_pipe_folder_has_87_bytes_at_most(one: Mps) -> None:
    longest = one.folder / ("x" * (87 - len(f"{one.folder}/")))
    one.pipe = Path(f"{longest}x")
    assert one.start().returncode == 1
    assert sorted(path.name for path in one.pipe.iterdir()) == ["control_lock", "log"]
    one.pipe = longest
    assert one.start().returncode == 0
    assert one.say("ps\n") == (0, "Server not found\n", "")


def test_parents_of_the_folders_are_not_made(one: Mps) -> None:
    one.pipe = one.folder / "none/pipe"
    told = one.start()
    assert told.returncode == 1
    assert told.stdout + told.stderr == f"Cannot access CUDA_MPS_PIPE_DIRECTORY={one.pipe}\n"
    one.pipe, one.logs = one.folder / "pipe", one.folder / "none/log"
    told = one.start()
    assert told.returncode == 0
    assert f"Warning: Failed writing log files to directory [{one.logs}]" in told.stdout + told.stderr


def test_one_server_for_all_users_is_an_option_from_555_on(mps: Mps) -> None:
    assert mps.start("-d", "-multiuser-server").returncode == int(mps.branch < 555)

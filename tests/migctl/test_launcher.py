"""`migctl run`'s launcher as a process of its own, without an agent: signals, terminals, ends."""

from __future__ import annotations

import contextlib
import os
import pty
import select
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from mig_agent.migctl import supervisor
from support.agent import GENEROUS_SECONDS, PROCESS_SECONDS, eventually
from support.people import ALICE, needs_root

LAUNCH = """
import os, sys
from mig_agent.migctl.launcher import Launcher, die_of_interrupt
with Launcher(float(sys.argv[2])) as launcher:
    code = launcher.run(sys.argv[3:], [os.environ | {"NUMBER": str(n)} for n in range(int(sys.argv[1]))])
print("interrupted" if launcher.interrupted else "ended", file=sys.stderr, flush=True)
if launcher.interrupted:
    die_of_interrupt()
sys.exit(code)
"""


def launch(
    *command: str,
    times: int = 1,
    kill_after: float = 10.0,
    program: str = LAUNCH,
    on: Sequence[str] = (),
    **options: object,
) -> subprocess.Popen[str]:
    streams: dict[str, object] = {
        "stdin": subprocess.DEVNULL,
        "stdout": subprocess.PIPE,
        "stderr": subprocess.PIPE,
        "text": True,
    }
    arguments = [*on, sys.executable, "-c", program, str(times), str(kill_after), *command]
    return subprocess.Popen(arguments, **(streams | options))  # type: ignore[call-overload,no-any-return] # any options


def ended(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=PROCESS_SECONDS)
    return process.returncode, out, err


@pytest.mark.parametrize(
    ("script", "code"), [("exit 0", 0), ("exit 7", 7), ("kill -TERM $$", 143), ("kill -9 $$", 137)]
)
def test_the_commands_end_is_ours(script: str, code: int) -> None:
    assert ended(launch("sh", "-c", script))[0] == code


def test_several_run_side_by_side_and_the_first_failure_counts() -> None:
    code, out, _ = ended(launch("sh", "-c", "echo $NUMBER; exit $NUMBER", times=3))
    assert code == 1
    assert sorted(out.split()) == ["0", "1", "2"]


def test_what_cannot_be_run_is_125() -> None:
    code, _, err = ended(launch("/no/such/program"))
    assert code == 125
    assert "cannot run /no/such/program" in err


def test_the_command_gets_the_usual_signals() -> None:
    """The interpreter ignores SIGPIPE; a command that inherited that would not end with its reader."""
    code, out, _ = ended(launch("sh", "-c", "grep -E 'Sig(Ign|Blk)' /proc/self/status"))
    assert code == 0
    ignored, blocked = sorted(out.split("\n")[:2], reverse=True)
    assert int(ignored.split()[1], 16) & (1 << (signal.SIGPIPE - 1)) == 0
    assert int(blocked.split()[1], 16) == 0


@pytest.fixture
def ready(tmp_path: Path) -> Path:
    return tmp_path / "ready"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1], ids=str)
def test_signals_reach_the_command(number: signal.Signals, ready: Path) -> None:
    name = number.name.removeprefix("SIG")
    script = f"trap 'echo got {name}; exit 5' {name}; touch {ready}; while :; do sleep 0.05; done"
    process = launch("sh", "-c", script)
    eventually(ready.exists)
    process.send_signal(number)
    code, out, _ = ended(process)
    assert (code, out) == (5, f"got {name}\n")


def test_signals_reach_what_the_command_has_started(ready: Path) -> None:
    process = launch("sh", "-c", f"sleep 1000 & echo $!; touch {ready}; wait")
    eventually(ready.exists)
    assert process.stdout is not None
    grandchild = psutil.Process(int(process.stdout.readline()))
    process.terminate()
    assert ended(process)[0] == 143
    eventually(lambda: not grandchild.is_running() or grandchild.status() == psutil.STATUS_ZOMBIE)


def test_the_command_does_not_outlive_a_launcher_that_is_killed(ready: Path) -> None:
    """The agent gives its device to others at once then."""
    process = launch("sh", "-c", f"echo $$; touch {ready}; trap '' TERM HUP; while :; do sleep 0.05; done")
    eventually(ready.exists)
    assert process.stdout is not None
    command = psutil.Process(int(process.stdout.readline()))
    process.kill()
    process.wait(GENEROUS_SECONDS)
    eventually(lambda: not command.is_running() or command.status() == psutil.STATUS_ZOMBIE)
    for stream in (process.stdout, process.stderr):
        assert stream is not None
        stream.close()


def test_what_is_ignored_stays_ignored(ready: Path) -> None:
    """As under nohup."""
    script = f"touch {ready}; while [ -e {ready} ]; do sleep 0.05; done; echo done"
    nohup = "import signal, sys; signal.signal(signal.SIGHUP, signal.SIG_IGN)\n" + LAUNCH
    process = subprocess.Popen(
        [sys.executable, "-c", nohup, "1", "10", "sh", "-c", script],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    eventually(ready.exists)
    process.send_signal(signal.SIGHUP)
    ready.unlink()
    assert ended(process)[:2] == (0, "done\n")


class Terminal:
    """A terminal with the launcher on it."""

    def __init__(self, *command: str, on_it: Sequence[str] = (), **variables: str) -> None:
        """Start this command on it instead, such as a shell, with these variables beside the usual ones."""
        self.master, slave = pty.openpty()
        self.process = subprocess.Popen(
            on_it or [sys.executable, "-c", LAUNCH, "1", "10", *command],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
            env=os.environ | variables,
            preexec_fn=lambda: os.close(os.open(os.ttyname(0), os.O_RDWR)),  # noqa: PLW1509 -- makes it controlling; no threads
        )
        os.close(slave)
        self.seen = ""
        self._found = 0
        """Length of the part of `seen` that was searched already."""

    def type(self, keys: bytes) -> None:
        os.write(self.master, keys)

    def read_until(self, text: str) -> str:
        """Everything shown so far, when the text is in it after what was read before."""
        while text not in self.seen[self._found :]:
            ready, _, _ = select.select([self.master], [], [], GENEROUS_SECONDS)
            assert ready, f"{text!r} is not shown, but: {self.seen!r}"
            try:
                chunk = os.read(self.master, 1024)
            except OSError:  # the other end is closed
                chunk = b""
            assert chunk, f"{text!r} was never shown, but: {self.seen}"
            self.seen += chunk.decode(errors="replace")
        self._found = self.seen.index(text, self._found) + len(text)
        return self.seen

    def close(self) -> None:
        self.process.kill()
        self.process.wait(GENEROUS_SECONDS)
        os.close(self.master)


@pytest.fixture
def terminals() -> Iterator[list[Terminal]]:
    opened: list[Terminal] = []
    yield opened
    for each in opened:
        each.close()


def test_on_a_terminal_the_command_may_read_what_is_typed(terminals: list[Terminal]) -> None:
    terminal = Terminal("sh", "-c", "echo ready; read line; echo got $line")
    terminals.append(terminal)
    terminal.read_until("ready")
    terminal.type(b"this\n")
    terminal.read_until("got this")
    assert terminal.process.wait(GENEROUS_SECONDS) == 0


def test_ctrl_c_on_a_terminal_ends_the_command_and_shows_in_how_we_end(terminals: list[Terminal]) -> None:
    """A shell's loop around us ends as well only when we die of the signal."""
    # Not a shell: one that is hit between two of its commands starts the second all the same. Short naps: the same is
    # true of an interpreter that is hit on its way into a long one.
    program = "import time; print('ready', flush=True); [time.sleep(0.02) for _ in range(100_000)]"
    terminal = Terminal(sys.executable, "-c", program)
    terminals.append(terminal)
    terminal.read_until("ready")
    terminal.type(b"\x03")
    terminal.read_until("interrupted")
    assert terminal.process.wait(GENEROUS_SECONDS) == -signal.SIGINT


def test_ctrl_c_that_the_command_deals_with_is_its_own_business(terminals: list[Terminal]) -> None:
    terminal = Terminal("sh", "-c", "trap 'echo saved; exit 0' INT; echo ready; while :; do sleep 0.05; done")
    terminals.append(terminal)
    terminal.read_until("ready")
    terminal.type(b"\x03")
    terminal.read_until("ended")
    assert terminal.seen.count("saved") == 1, "it comes from the terminal alone, not from us again"
    assert terminal.process.wait(GENEROUS_SECONDS) == 0


def test_a_signal_that_is_sent_to_us_on_a_terminal_reaches_the_command(terminals: list[Terminal]) -> None:
    terminal = Terminal("sh", "-c", "trap 'echo told; exit 3' TERM; echo ready; while :; do sleep 0.05; done")
    terminals.append(terminal)
    terminal.read_until("ready")
    terminal.process.terminate()
    terminal.read_until("told")
    assert terminal.process.wait(GENEROUS_SECONDS) == 3


# What the command has started


def alive(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


def pid_in(file: Path) -> int:
    """The number that a script has written to a file."""
    return int(eventually(lambda: file.exists() and file.read_text().strip(), f"{file} is written"))


DEAF = "trap '' TERM HUP INT; echo $$ > {0}.new; mv {0}.new {0}; while :; do sleep 0.05; done"
"""A shell that only SIGKILL ends."""


def deaf(file: Path, *, apart: bool = False) -> str:
    """A shell's command that starts DEAF in the background, `apart` in a session of its own, and waits for its pid."""
    script = shlex.quote(DEAF.format(file))
    return f"{'setsid' if apart else ''} sh -c {script} & until [ -e {file} ]; do sleep 0.01; done"


@pytest.mark.parametrize("apart", [False, True], ids=["child", "daemon"])
@pytest.mark.parametrize("terminal", [False, True], ids=["batch", "terminal"])
def test_nothing_that_the_command_has_started_outlives_a_launcher_that_is_killed(
    terminal: bool, apart: bool, ready: Path, terminals: list[Terminal]
) -> None:
    """The usual job is a shell script; its python would run on with the device of whoever is next."""
    script = f"{deaf(ready, apart=apart)}; wait"
    if terminal:
        terminals.append(Terminal("sh", "-c", script))
        process: subprocess.Popen[Any] = terminals[0].process
    else:
        process = launch("sh", "-c", script, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    grandchild = pid_in(ready)
    process.kill()
    process.wait(GENEROUS_SECONDS)
    eventually(lambda: not alive(grandchild), "it has ended")


@pytest.mark.parametrize("apart", [False, True], ids=["child", "daemon"])
def test_what_the_command_leaves_behind_has_ended_before_the_launcher_does(apart: bool, ready: Path) -> None:
    process = launch("sh", "-c", f"{deaf(ready, apart=apart)}; exit 3", kill_after=0.2)
    code, _, err = ended(process)
    assert code == 3, err
    assert not alive(pid_in(ready))
    assert f"migctl: ending what the command has left behind: sh (pid {pid_in(ready)})" in err


def test_what_the_command_leaves_behind_may_clean_up(ready: Path) -> None:
    left = f"trap 'sleep 0.1; echo saved; exit' TERM; touch {ready}; while :; do sleep 0.05; done"
    script = f"sh -c {shlex.quote(left)} & until [ -e {ready} ]; do sleep 0.01; done"
    assert ended(launch("sh", "-c", script))[:2] == (0, "saved\n")


def test_what_still_writes_the_last_lines_is_left_to_it() -> None:
    """As `tee` in `train > >(tee log)`, which bash does not wait for."""
    code, out, err = ended(launch("sh", "-c", "(sleep 0.3; echo last line) & exit 0"))
    assert (code, out, err) == (0, "last line\n", "ended\n")


def test_what_the_command_has_started_does_not_outlive_a_supervisor_that_is_killed(ready: Path) -> None:
    process = launch("sh", "-c", f"{deaf(ready, apart=True)}; wait")
    grandchild = pid_in(ready)
    (supervising,) = psutil.Process(process.pid).children()
    supervising.kill()
    assert ended(process)[0] == 137
    assert not alive(grandchild)


def test_a_process_that_was_there_before_is_none_of_the_launchers(ready: Path) -> None:
    """As in `prepare & exec migctl run ...`."""
    mine = ready.with_name("mine")
    launcher = shlex.join([sys.executable, "-c", LAUNCH, "1", "10", "sh", "-c", f"{deaf(ready)}; wait"])
    script = f"sleep 600 & echo $! > {mine}; exec {launcher}"
    process = subprocess.Popen(
        ["sh", "-c", script],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    grandchild = pid_in(ready)
    (supervising,) = [each for each in psutil.Process(process.pid).children() if each.pid != pid_in(mine)]
    supervising.kill()
    process.wait(GENEROUS_SECONDS)
    assert not alive(grandchild)
    assert alive(pid_in(mine))
    os.kill(pid_in(mine), signal.SIGKILL)
    process.communicate(timeout=GENEROUS_SECONDS)


END = LAUNCH.replace("code = ", "import threading; threading.Timer(0.3, launcher.end, [0.3]).start(); code = ")
"""A launcher whose time is over after 0.3 s."""


@pytest.mark.parametrize(("script", "code"), [("trap 'exit 9' TERM", 9), ("trap '' TERM", 137)], ids=["TERM", "KILL"])
def test_a_command_whose_time_is_over_is_ended_with_all_that_it_has_started(
    script: str, code: int, ready: Path
) -> None:
    command = f"{deaf(ready)}; {script}; while :; do sleep 0.05; done"
    process = launch("sh", "-c", command, program=END)
    assert ended(process)[0] == code
    assert not alive(pid_in(ready))


def test_a_second_interrupt_does_not_wait_for_what_is_being_ended(ready: Path) -> None:
    process = launch("sh", "-c", f"{deaf(ready)}; exit 0", kill_after=600.0)
    assert process.stderr is not None
    assert "left behind" in process.stderr.readline()
    process.send_signal(signal.SIGINT)
    assert ended(process)[0] == 0
    assert not alive(pid_in(ready))


BRIEFLY = """
import os, threading, time
from pathlib import Path
from mig_agent.migctl import launcher, supervisor
launcher._SUPERVISOR, supervisor.GIVE_UP_SECONDS, supervisor.SAY_AFTER_SECONDS = Path("{briefly}"), 0.3, 0.1
def end_later():
    while not os.path.exists("{end}"):
        time.sleep(0.02)
    running.end(0.1)
"""
"""Makes the launcher and its supervisor, of which this is a copy, soon give up what they cannot end."""
SETPRIV = shutil.which("setpriv")
WITHOUT_KILL = (SETPRIV or "setpriv", "--bounding-set", "-kill")
"""Capability without which root sends signals to its own processes alone, as other users do."""


@needs_root
@pytest.mark.skipif(SETPRIV is None, reason="needs setpriv, of util-linux")
@pytest.mark.parametrize("killed", [False, True], ids=["time-over", "killed"])
def test_a_command_that_becomes_another_user_stops_nothing_from_being_ended(ready: Path, killed: bool) -> None:
    """The command does what `sudo -u` does. Refused signals neither end the supervisor nor save what may be ended."""
    theirs, end, briefly = (ready.with_name(name) for name in ("theirs", "end", "supervisor.py"))
    text = Path(supervisor.__file__).read_text()
    assert "GIVE_UP_SECONDS = 10.0" in text
    assert "SAY_AFTER_SECONDS = 2.0" in text
    text = text.replace("GIVE_UP_SECONDS = 10.0", "GIVE_UP_SECONDS = 0.3")
    briefly.write_text(text.replace("SAY_AFTER_SECONDS = 2.0", "SAY_AFTER_SECONDS = 0.1"))
    script = f"{deaf(ready)}; echo $$ > {theirs}; exec {SETPRIV} --reuid {ALICE} sleep 600 >/dev/null 2>&1"
    run = LAUNCH.replace(
        "code = ", "running = launcher; threading.Thread(target=end_later, daemon=True).start(); code = "
    )
    program = BRIEFLY.format(briefly=briefly, end=end) + run
    process = launch("sh", "-c", script, program=program, on=WITHOUT_KILL)
    own, other = pid_in(ready), pid_in(theirs)
    try:
        eventually(lambda: psutil.Process(other).uids().real == ALICE, "it is another user's")
        process.send_signal(signal.SIGKILL if killed else signal.SIGTERM)  # SIGTERM is passed on, and refused
        end.touch()
        code, _, err = ended(process)
        eventually(lambda: not alive(own), "what may be ended is ended")
        assert alive(other)
        assert "Traceback" not in err
        if not killed:
            assert code == 128 + signal.SIGKILL, "what is left counts as killed"
            assert f"cannot end sleep (pid {other}); the lease is released all the same" in err
            waiting = (
                f"migctl: waiting for sleep (pid {other}) to end, at most 1s more: killed, but it hangs in a driver"
            )
            assert err.count(waiting) == 2, "by the supervisor, and by the launcher in case that had failed"
    finally:
        os.kill(other, signal.SIGKILL)


def test_stopping_and_going_on_in_a_shells_job_control(terminals: list[Terminal], tmp_path: Path) -> None:
    """Ctrl-Z stops all of it, and the shell has its terminal again.

    What is typed while bash changes the terminal's modes may be lost, so it waits for the prompt each time, and for the
    job to run.
    """
    program = tmp_path / "launch.py"
    program.write_text(LAUNCH)
    terminal = Terminal(on_it=["bash", "--norc", "--noprofile", "-i"], PS1="prompt ")
    terminals.append(terminal)
    terminal.read_until("prompt ")
    terminal.type(f"{sys.executable} {program} 1 10 sh -c 'echo on; read x; echo got $x'\n".encode())
    terminal.read_until("on\r\n")
    job = psutil.Process(terminal.process.pid).children(recursive=True)
    assert len(job) == 3, "launcher, supervisor and the command"
    terminal.type(b"\x1a")
    terminal.read_until("Stopped")
    terminal.read_until("prompt ")
    eventually(lambda: {each.status() for each in job} == {psutil.STATUS_STOPPED}, "all of it has stopped")
    terminal.type(b"echo here$((1+1))\n")
    terminal.read_until("here2")
    terminal.read_until("prompt ")
    terminal.type(b"fg\n")
    eventually(lambda: psutil.STATUS_STOPPED not in {each.status() for each in job}, "it goes on")
    terminal.type(b"this\n")
    terminal.read_until("got this")
    terminal.read_until("ended")
    terminal.read_until("prompt ")
    terminal.type(b"exit 5\n")
    assert terminal.process.wait(GENEROUS_SECONDS) == 5

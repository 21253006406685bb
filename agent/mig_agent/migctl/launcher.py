"""Starts commands for `migctl run`: forwards signals to them, leaves them the terminal, and returns their exit code.

On a terminal the commands stay in migctl's process group, so that Ctrl-C, Ctrl-Z and the shell's job control reach them
from the kernel as if migctl were not there, in a pipeline, too; migctl does not react to those itself. Without a
terminal they get a group of their own, so that a signal that is sent to migctl reaches all that they have started.

The commands are children of the supervisor (`supervisor.py`), a process of its own: it ends what outlives them, and
everything when migctl is killed. It starts before the lease is granted and ends after its release, so that the agent
can put it, and with it whatever it starts, into the cgroup of a share, and take that away when no command is left.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import TYPE_CHECKING

from mig_agent.migctl import supervisor

if TYPE_CHECKING:
    from typing_extensions import Self  # noqa: UP035 -- mig-agent-client is also for Python 3.10

FROM_TERMINAL = frozenset({signal.SIGINT, signal.SIGQUIT, signal.SIGWINCH, signal.SIGCONT})
"""On a terminal the kernel sends these to the whole group, so they are not forwarded."""
KILL_AFTER_SECONDS = 10.0
"""Time after SIGTERM at which what is to end gets SIGKILL, unless the user says otherwise."""
_ENDING = frozenset({signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGQUIT})
_SUPERVISOR = Path(supervisor.__file__)
_SIGNALLED = 128


class Launcher:
    """Runs commands side by side, once: a context, in which the supervisor lives."""

    def __init__(self, kill_after: float = KILL_AFTER_SECONDS) -> None:
        """`kill_after`: how many seconds after SIGTERM what has outlived the commands gets SIGKILL."""
        self._kill_after = kill_after
        self._caught: list[int] = []
        self._shares_group = _on_a_terminal()
        self._before: frozenset[int] = frozenset()
        """The children of this process from before the supervisor."""
        self._process: subprocess.Popen[bytes] | None = None
        """The supervisor."""
        self._writing = -1
        """The pipe to the supervisor."""
        self._report = -1
        """The pipe from the supervisor, with the exit code when no command is left."""
        self._orders: int | None = None
        """The pipe to the supervisor while it may be written to."""
        self._end_order = b""
        self._lock = threading.Lock()
        """Held to write to the pipe or to close it."""
        self.is_ending = False
        """True once this process was sent a signal that asks for its end, or `end` was called."""
        self.interrupted = False
        """True if Ctrl-C on the terminal ended a command."""

    def __enter__(self) -> Self:
        """Start the supervisor. Raises OSError."""
        self._before = supervisor.children_here()
        supervisor.become_subreaper()
        self._start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """End the supervisor, with all that is left."""
        with self._lock:
            self._orders = None
            os.close(self._writing)  # while it runs it kills everything then
        os.close(self._report)
        if self._process is not None:
            self._process.wait()
        # A supervisor that did its work has left nothing; one that was killed, or failed, may have.
        _kill_descendants(self._before)

    @property
    def pid(self) -> int:
        """The process that starts the commands: those and whatever they start are below it."""
        if self._process is None:
            raise AssertionError("a launcher has a process only as a context")
        return self._process.pid

    def run(self, command: Sequence[str], environments: Sequence[Mapping[str, str]]) -> int:
        """Run the command once in each environment, side by side, and wait until nothing of them is left.

        Return the exit code of the first that failed, in order; 128 + n for one that signal n killed.
        """
        with self._catching() as wake:
            self._send_job(command, environments)
            code = self._wait(wake)
        self.interrupted = self._shares_group and code == -signal.SIGINT
        return _SIGNALLED - code if code < 0 else code

    def end(self, grace_seconds: float) -> None:
        """End the commands and all that they have started: by SIGTERM, and by SIGKILL after the grace period.

        Thread-safe; may be called before `run`.
        """
        self.is_ending = True
        with self._lock:
            self._end_order = f"end {grace_seconds}\n".encode()
            self._write(self._end_order)

    def _start(self) -> None:
        reading, writing = os.pipe2(os.O_CLOEXEC)
        report, reporting = os.pipe2(os.O_CLOEXEC)
        try:
            self._process = subprocess.Popen(  # noqa: S603 -- a program of ours
                [sys.executable, "-I", "-S", str(_SUPERVISOR), str(reading), str(reporting)],
                pass_fds=[reading, reporting],
                # In a group of its own it gets no signal twice: migctl's group may be sent one as a whole.
                process_group=None if self._shares_group else 0,
            )
        except BaseException:
            os.close(writing)
            os.close(report)
            raise
        finally:
            os.close(reading)
            os.close(reporting)
        self._writing, self._report = writing, report

    def _send_job(self, command: Sequence[str], environments: Sequence[Mapping[str, str]]) -> None:
        job = {
            "command": list(command),
            "environments": [dict(each) for each in environments],
            "shares_group": self._shares_group,
            "kill_after": self._kill_after,
        }
        left = json.dumps(job).encode() + b"\n"
        with contextlib.suppress(BrokenPipeError):  # its exit code tells
            while left:
                left = left[os.write(self._writing, left) :]
        with self._lock:
            self._orders = self._writing
            self._write(self._end_order)

    def _write(self, order: bytes) -> None:
        """Write an order to the supervisor, if it runs; the lock is held."""
        if self._orders is not None and order:
            with contextlib.suppress(BrokenPipeError):  # it has ended meanwhile
                os.write(self._orders, order)

    @contextlib.contextmanager
    def _catching(self) -> Iterator[int]:
        """Catch signals, and yield a file descriptor that becomes readable whenever one has come.

        Waiting for that instead of for the supervisor leaves no moment at which a caught signal goes unnoticed.
        """
        reading, writing = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        # Ignored signals stay ignored for the commands, too: `nohup migctl run ...`.
        numbers = [each for each in supervisor.FORWARDED if signal.getsignal(each) is not signal.SIG_IGN]
        numbers += [signal.SIGCHLD] if self._shares_group else [signal.SIGCHLD, signal.SIGTSTP]
        handlers = {number: signal.signal(number, self._catch) for number in numbers}
        woken_before = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
        try:
            yield reading
        finally:
            signal.set_wakeup_fd(woken_before)
            for number, handler in handlers.items():
                signal.signal(number, handler)
            os.close(reading)
            os.close(writing)

    def _catch(self, number: int, _frame: FrameType | None) -> None:
        self._caught.append(number)

    def _wait(self, wake: int) -> int:
        """Forward signals until no command is left; return the exit code, negative for a signal."""
        while True:
            while self._caught:
                self._handle(self._caught.pop(0))
            ready, _, _ = select.select([wake, self._report], [], [])
            if self._report in ready:
                return self._reported()
            with contextlib.suppress(BlockingIOError):
                os.read(wake, 4096)

    def _reported(self) -> int:
        """Return the exit code that the supervisor has reported, or its own if it ended without a report."""
        said = os.read(self._report, 64)
        if said:
            return int(said)
        if self._process is None:
            raise AssertionError("a launcher runs commands only as a context")
        code = self._process.wait()
        _kill_descendants(self._before)  # while the lease is held
        return code

    def _handle(self, number: int) -> None:
        self.is_ending = self.is_ending or number in _ENDING
        if number == signal.SIGCHLD or (self._shares_group and number in FROM_TERMINAL):
            return
        if number == signal.SIGTSTP:
            self._forward(signal.SIGSTOP)
            os.kill(os.getpid(), signal.SIGSTOP)
        else:
            self._forward(number)

    def _forward(self, number: int) -> None:
        with self._lock:
            self._write(f"signal {int(number)}\n".encode())


def _kill_descendants(before: frozenset[int]) -> None:
    """Kill what has become of this process's children in place of a supervisor that was killed; `before` is not its."""
    began, is_said = time.monotonic(), False
    until = began + supervisor.GIVE_UP_SECONDS
    while (now := time.monotonic()) < until:
        left = supervisor.descendants(os.getpid(), without=before)
        if not left:
            return
        if not is_said and now - began > supervisor.SAY_AFTER_SECONDS:
            is_said = True
            supervisor.say_waiting(left, until - now)
        for each in left:
            each.send(signal.SIGKILL)
        time.sleep(0.02)


def _on_a_terminal() -> bool:
    return any(os.isatty(number) for number in (0, 1, 2))


def die_of_interrupt() -> None:
    """End this process as Ctrl-C would have, so that a shell script that got the same Ctrl-C ends as well."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGINT)

"""Starts commands for `migctl run`: forwards signals to them, leaves them the terminal, and returns their exit code.

On a terminal the commands stay in migctl's process group, so that Ctrl-C, Ctrl-Z and the shell's job control reach them
from the kernel as if migctl were not there, in a pipeline, too; migctl does not react to those itself. Without a
terminal they get a group of their own, so that a signal that is sent to migctl reaches all that they have started.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType

FORWARDED = (
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGINT,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGWINCH,
    signal.SIGCONT,
)
FROM_TERMINAL = frozenset({signal.SIGINT, signal.SIGQUIT, signal.SIGWINCH, signal.SIGCONT})
"""On a terminal the kernel sends these to the whole group, so they are not forwarded."""
_EXEC_CHILD = Path(__file__).with_name("exec_child.py")
"""The program that becomes the command."""
_SIGNALLED = 128


class Launcher:
    """Runs commands side by side."""

    def __init__(self) -> None:
        self._commands: list[subprocess.Popen[bytes]] = []
        self._caught: list[int] = []
        self._shares_group = _on_a_terminal()
        self.interrupted = False
        """True if Ctrl-C on the terminal ended a command."""

    def run(self, command: Sequence[str], environments: Sequence[Mapping[str, str]]) -> int:
        """Run the command once in each environment, side by side, and wait for all.

        Return the exit code of the first that failed, in order; 128 + n for one that signal n killed. Raises OSError if
        one cannot be started; none is left running then.
        """
        with self._catching() as wake:
            try:
                for environment in environments:
                    self._start(command, environment)
                self._wait(wake)
            finally:
                self._kill()
        codes = [each.returncode for each in self._commands]
        self.interrupted = self._shares_group and any(code == -signal.SIGINT for code in codes)
        return next((_code(each) for each in codes if each), 0)

    def _start(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        group = None if self._shares_group else self._commands[0].pid if self._commands else 0
        self._commands.append(
            subprocess.Popen(  # noqa: S603 -- running the command is what this is for
                [sys.executable, "-I", "-S", str(_EXEC_CHILD), str(os.getpid()), *command],
                env=environment,
                process_group=group,
            )
        )

    @contextlib.contextmanager
    def _catching(self) -> Iterator[int]:
        """Catch signals, and yield a file descriptor that becomes readable whenever one has come.

        Waiting for that instead of for the commands leaves no moment at which a caught signal goes unnoticed.
        """
        reading, writing = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        # Ignored signals stay ignored for the commands, too: `nohup migctl run ...`.
        numbers = [number for number in FORWARDED if signal.getsignal(number) is not signal.SIG_IGN]
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

    def _wait(self, wake: int) -> None:
        """Wait until all commands have ended; forward signals until then."""
        while True:
            while self._caught:
                self._handle(self._caught.pop(0))
            if not self._running():
                return
            select.select([wake], [], [])
            with contextlib.suppress(BlockingIOError):
                os.read(wake, 4096)

    def _handle(self, number: int) -> None:
        if number == signal.SIGCHLD or (self._shares_group and number in FROM_TERMINAL):
            return
        if number == signal.SIGTSTP:
            self._forward(signal.SIGSTOP)
            os.kill(os.getpid(), signal.SIGSTOP)
        else:
            self._forward(number)

    def _forward(self, number: int) -> None:
        running = self._running()
        if self._shares_group:
            for each in running:
                each.send_signal(number)
        elif running:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._commands[0].pid, number)

    def _running(self) -> list[subprocess.Popen[bytes]]:
        return [each for each in self._commands if each.poll() is None]

    def _kill(self) -> None:
        """Kill commands that still run after one could not be started or migctl was interrupted."""
        for each in self._running():
            each.kill()
            each.wait()


def _on_a_terminal() -> bool:
    return any(os.isatty(number) for number in (0, 1, 2))


def _code(returned: int) -> int:
    return _SIGNALLED - returned if returned < 0 else returned


def die_of_interrupt() -> None:
    """End this process as Ctrl-C would have, so that a shell script that got the same Ctrl-C ends as well."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGINT)

"""Reads single keys from a terminal, and wakes up for a new size of it."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import termios
import tty
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Final, Self

_SEQUENCES: Final = {
    b"\x1b[A": "up",
    b"\x1b[B": "down",
    b"\x1bOA": "up",
    b"\x1bOB": "down",
    b"\x1b[5~": "page-up",
    b"\x1b[6~": "page-down",
    b"\x1b[H": "home",
    b"\x1b[F": "end",
    b"\x1b[1~": "home",
    b"\x1b[4~": "end",
    b"\x1bOH": "home",
    b"\x1bOF": "end",
    b"\r": "enter",
    b"\n": "enter",
    b"\x7f": "backspace",
    b"\x08": "backspace",
    b"\x1b": "escape",
}
"""What terminals send for the keys that have names here: ECMA-48 and xterm's control sequences."""


def decode(data: bytes) -> Iterator[str]:
    """Yield the keys in what a terminal sent at once; unknown sequences are skipped."""
    while data:
        known = max((each for each in _SEQUENCES if data.startswith(each)), key=len, default=b"")
        if known == b"\x1b" and len(data) > 1:
            data = data[_length_of_sequence(data) :]  # a key without a name here
        elif known:
            yield _SEQUENCES[known]
            data = data[len(known) :]
        else:
            # The first character, which may be of several bytes.
            text = data.decode(errors="ignore")
            if text:
                yield text[0]
            data = text[1:].encode()


def _length_of_sequence(data: bytes) -> int:
    """Return the length of a control sequence: its final byte is a letter or a tilde."""
    for position in range(2, len(data)):
        if chr(data[position]).isalpha() or data[position] == ord("~"):
            return position + 1
    return len(data)


class Keyboard:
    """The keys of this process's terminal, one by one and not echoed, while it is open; none without a terminal."""

    def __init__(self, on_suspend: Callable[[], None], on_resume: Callable[[], None]) -> None:
        """`on_suspend` is called before Ctrl-Z stops the process, and `on_resume` when it continues."""
        self._on_suspend = on_suspend
        self._on_resume = on_resume
        self._descriptor = sys.stdin.fileno() if sys.stdin is not None and sys.stdin.isatty() else None
        self._before: list[object] | None = None
        self._wake_reader, self._wake_writer = os.pipe()
        for each in (self._wake_reader, self._wake_writer):
            os.set_blocking(each, False)

    def __enter__(self) -> Self:
        """Take the terminal over."""
        signal.set_wakeup_fd(self._wake_writer, warn_on_full_buffer=False)
        signal.signal(signal.SIGWINCH, lambda _number, _frame: None)
        signal.signal(signal.SIGTSTP, self._suspend)
        self._take()
        return self

    def __exit__(self, *_: object) -> None:
        """Leave the terminal as it was."""
        self._give_back()
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGWINCH, signal.SIG_DFL)
        signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        for each in (self._wake_reader, self._wake_writer):
            os.close(each)

    def wake(self) -> None:
        """End the current or next `wait`; from any thread."""
        with contextlib.suppress(OSError):  # full, or closed
            os.write(self._wake_writer, b"\0")

    def wait(self, seconds: float) -> list[str] | None:
        """Wait for keys, at most this long, and return them.

        None if the time is over, `wake` was called, or the screen has another size.
        """
        sources = [self._wake_reader] + ([] if self._descriptor is None else [self._descriptor])
        ready, _, _ = select.select(sources, (), (), max(0.0, seconds))
        if self._wake_reader in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(self._wake_reader, 1024)
        if self._descriptor is None or self._descriptor not in ready:
            return None
        data = os.read(self._descriptor, 1024)
        if not data:  # the terminal is gone
            self._descriptor = None
        return list(decode(data))

    def _take(self) -> None:
        if self._descriptor is not None:
            self._before = termios.tcgetattr(self._descriptor)
            tty.setcbreak(self._descriptor)

    def _give_back(self) -> None:
        if self._descriptor is not None and self._before is not None:
            with contextlib.suppress(termios.error):
                termios.tcsetattr(self._descriptor, termios.TCSADRAIN, self._before)  # type: ignore[arg-type]  # as it was read

    def _suspend(self, _number: int, _frame: FrameType | None) -> None:
        self._on_suspend()
        self._give_back()
        signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTSTP)
        # Here the process has been continued.
        signal.signal(signal.SIGTSTP, self._suspend)
        self._take()
        self._on_resume()

"""Writes log lines from a thread of its own: a log that cannot be written never ends, blocks or slows the agent."""

from __future__ import annotations

import os
import queue
import select
import threading
from collections.abc import Callable
from dataclasses import dataclass

MOST_BYTES = 1 << 20
"""Limit of queued lines; further lines are dropped."""
_EACH_BYTES = 100
"""Memory cost of a line beside its text."""
_BATCH_BYTES = 1 << 16
"""Size of one write, so that a burst of lines needs few system calls."""
_RETRY_SECONDS = 1.0
"""Interval of attempts to report dropped lines while no other line comes."""
_WRITABLE_MS = 1000
_NEWLINE = ord("\n")


@dataclass(slots=True)
class _Gap:
    """Marks dropped lines in the queue."""

    lines: int = 1


class _End:
    """Marks the end of the queue."""


class LogWriter:
    """A bounded queue of lines, and the daemonic thread that writes them to a file descriptor.

    `write` holds its lock only briefly and never while writing, so it may be called on any thread, on the event loop,
    and in a finaliser that the garbage collector runs in the middle of another `write` (hence an RLock and a
    SimpleQueue, which both allow that). Lines that cannot be written are counted; no error is raised: the reader of a
    pipe may be gone or not read, the disk full, the descriptor closed or not writable now.
    """

    def __init__(self, descriptor: int, format_dropped: Callable[[int], str], most_bytes: int = MOST_BYTES) -> None:
        """`format_dropped` makes the line that reports dropped lines. Raises RuntimeError if no thread can start."""
        self._descriptor = descriptor
        self._format_dropped = format_dropped
        self._most_bytes = most_bytes
        self._queue: queue.SimpleQueue[bytes | _Gap | _End] = queue.SimpleQueue()
        self._lock = threading.RLock()
        self._waiting_bytes = 0
        self._gap: _Gap | None = None
        """The gap at the end of the queue, if there is one."""
        self._overflowed = 0
        self._failed = 0
        # The rest is used by the thread alone.
        self._unreported = 0
        """Dropped lines that the log does not report yet."""
        self._failing = False
        """True if the last write failed."""
        self._mid_line = False
        """True if the last write ended within a line."""
        self._thread = threading.Thread(target=self._run, name="log", daemon=True)
        self._thread.start()

    @property
    def dropped(self) -> int:
        """Number of lines dropped so far."""
        return self._overflowed + self._failed

    def write(self, line: str) -> None:
        """Queue a line, which ends with a newline; drop it if too much is queued."""
        data = line.encode("utf-8", "backslashreplace")
        size = len(data) + _EACH_BYTES
        with self._lock:
            if self._waiting_bytes + size <= self._most_bytes:
                self._waiting_bytes += size
                self._gap = None
                self._queue.put(data)
                return
            self._overflowed += 1
            if self._gap is None:
                self._gap = _Gap()
                self._queue.put(self._gap)
            else:
                self._gap.lines += 1

    def close(self, seconds: float) -> None:
        """Write what is queued, for at most `seconds`. Nothing is written afterwards."""
        self._queue.put(_End())
        self._thread.join(seconds)

    # The thread

    def _run(self) -> None:
        while True:
            lines, behind = self._next_lines()
            if self._unreported and not self._report_dropped():
                self._fail(len(lines))
            elif lines:
                self._write_lines(lines)
            if isinstance(behind, _Gap):
                with self._lock:
                    self._unreported += behind.lines
                    if self._gap is behind:
                        self._gap = None
            elif isinstance(behind, _End):
                if self._unreported:
                    self._report_dropped()
                return

    def _next_lines(self) -> tuple[list[bytes], _Gap | _End | None]:
        """Wait for lines; return those to write at once, and the gap or end behind them, if any."""
        try:
            # Do not wait without limit while dropped lines are unreported.
            if self._unreported:
                each = self._queue.get(timeout=_RETRY_SECONDS) if self._failing else self._queue.get_nowait()
            else:
                each = self._queue.get()
        except queue.Empty:
            return [], None
        lines: list[bytes] = []
        size = 0
        behind: _Gap | _End | None = None
        while True:
            if not isinstance(each, bytes):
                behind = each
                break
            lines.append(each)
            size += len(each) + _EACH_BYTES
            if size >= _BATCH_BYTES:
                break
            try:
                each = self._queue.get_nowait()
            except queue.Empty:
                break
        with self._lock:
            self._waiting_bytes -= size
        return lines, behind

    def _report_dropped(self) -> bool:
        """Write how many lines were dropped; return True if that worked."""
        if self._write_out(self._format_dropped(self._unreported).encode("utf-8", "backslashreplace")) is None:
            self._unreported = 0
            return True
        return False

    def _write_lines(self, lines: list[bytes]) -> None:
        written = self._write_out(b"".join(lines))
        if written is None:
            return
        for number, line in enumerate(lines):
            written -= len(line)
            if written < 0:
                self._fail(len(lines) - number)
                return

    def _fail(self, lines: int) -> None:
        self._failed += lines
        self._unreported += lines

    def _write_out(self, data: bytes) -> int | None:
        """Write all data, however long that takes; return None, or the bytes written before it failed."""
        # A torn line must not be joined with this one.
        begin = b"\n" if self._mid_line else b""
        left = memoryview(begin + data)
        done = 0
        while left:
            try:
                count = os.write(self._descriptor, left)
            except BlockingIOError:
                _wait_until_writable(self._descriptor)
            except OSError:
                self._failing = True
                return max(0, done - len(begin))
            else:
                self._mid_line = left[count - 1] != _NEWLINE if count else self._mid_line
                done += count
                left = left[count:]
        self._failing = False
        return None


def _wait_until_writable(descriptor: int) -> None:
    poll = select.poll()
    poll.register(descriptor, select.POLLOUT)
    poll.poll(_WRITABLE_MS)

"""Writes log lines from a thread of its own: a log that cannot be written never ends, blocks or slows the agent."""

from __future__ import annotations

import os
import queue
import select
import threading
from collections.abc import Callable
from dataclasses import dataclass

MOST_BYTES = 1 << 20
"""Lines that wait to be written. Lines that come beyond it are dropped."""
_EACH_BYTES = 100
"""What a line costs in memory beside its text."""
_BATCH_BYTES = 1 << 16
"""Written with one system call, so that a burst of lines costs few of them."""
_RETRY_SECONDS = 1.0
"""Between two tries to say how many lines were dropped, while no other line comes."""
_WRITABLE_MS = 1000
_NEWLINE = ord("\n")


@dataclass(slots=True)
class _Gap:
    """Stands in the queue where lines were dropped."""

    lines: int = 1


class _End:
    """Stands in the queue behind the last line."""


class LogWriter:
    """A bounded queue of lines, and the daemonic thread that writes them to a file descriptor.

    `write` takes a lock only for a moment in which nothing is written, so it may be called on any thread, on the event
    loop, and in a finaliser that the garbage collector runs in the middle of another `write` (hence an RLock and a
    SimpleQueue, which both allow that). What cannot be written is counted and never raised: the reader of a pipe is
    gone or does not read, the disk is full, the descriptor is closed or takes nothing now.
    """

    def __init__(self, descriptor: int, say_dropped: Callable[[int], str], most_bytes: int = MOST_BYTES) -> None:
        """`say_dropped` makes the line that says how many were dropped. Raises RuntimeError if no thread can start."""
        self._descriptor = descriptor
        self._say_dropped = say_dropped
        self._most_bytes = most_bytes
        self._queue: queue.SimpleQueue[bytes | _Gap | _End] = queue.SimpleQueue()
        self._lock = threading.RLock()
        self._waiting_bytes = 0
        self._gap: _Gap | None = None
        """The last thing in the queue, where that is a gap."""
        self._overflowed = 0
        self._failed = 0
        # What follows belongs to the thread.
        self._unsaid = 0
        """How many lines were dropped that the log does not tell of yet."""
        self._failing = False
        """Whether the last write failed."""
        self._mid_line = False
        """Whether what was written last is a part of a line."""
        self._thread = threading.Thread(target=self._run, name="log", daemon=True)
        self._thread.start()

    @property
    def dropped(self) -> int:
        """How many lines were dropped so far."""
        return self._overflowed + self._failed

    def write(self, line: str) -> None:
        """Queues a line, which ends with a newline. Drops it where too much is queued already."""
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
        """Writes what is queued, for at most so long. Nothing is written afterwards."""
        self._queue.put(_End())
        self._thread.join(seconds)

    # The thread

    def _run(self) -> None:
        while True:
            lines, behind = self._next_lines()
            if self._unsaid and not self._say_how_many():
                self._fail(len(lines))
            elif lines:
                self._put_out(lines)
            if isinstance(behind, _Gap):
                with self._lock:
                    self._unsaid += behind.lines
                    if self._gap is behind:
                        self._gap = None
            elif isinstance(behind, _End):
                if self._unsaid:
                    self._say_how_many()
                return

    def _next_lines(self) -> tuple[list[bytes], _Gap | _End | None]:
        """Wait for lines; return those to be written at once, and what ended them if that was no line."""
        try:
            # The queue is not waited for without end while something is left to say.
            if self._unsaid:
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

    def _say_how_many(self) -> bool:
        """Write how many lines were dropped; return whether that worked."""
        if self._write_out(self._say_dropped(self._unsaid).encode("utf-8", "backslashreplace")) is None:
            self._unsaid = 0
            return True
        return False

    def _put_out(self, lines: list[bytes]) -> None:
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
        self._unsaid += lines

    def _write_out(self, data: bytes) -> int | None:
        """Write all of it, however long that takes. Return None, or how many bytes were written before it failed."""
        # Where the line before was torn, it must not become one with this one.
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

"""Limits what one user's connections can cost gRPC, by reading the frames that pass through the relay (RFC 9113).

gRPC itself limits headers only after a client has acknowledged its settings, and does not count what all connections of
one user have open. The relay sees every byte on a Unix socket, so it counts here: header bytes before the
acknowledgement, open calls, and bytes of requests. The relay reads later from a user at a limit, and closes a
connection that breaks a rule. Behind TLS the relay sees ciphertext, and only gRPC's own options limit a client.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from functools import partial
from struct import Struct

import structlog

_HEAD = Struct(">HBBBI")
"""A frame's header: its length in 16 and 8 bits, type, flags, stream."""
_DATA, _HEADERS, _RST_STREAM, _SETTINGS, _CONTINUATION = 0, 1, 3, 4, 9
_END_STREAM = _ACK = 0x1
_PREFACE_BYTES = 24
_STREAM_BITS = 0x7FFF_FFFF

_MOST_EARLY_BYTES = 1024
"""Limit of header bytes until a client acknowledges gRPC's settings, which libraries do before their first call."""
_AGAIN_SECONDS = 0.1
"""Delay before gRPC is asked again, after asking it failed."""

_log = structlog.get_logger(__name__)


class LimitError(Exception):
    """A connection broke a limit and has to be closed. The message says which limit."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What one user may have open in all connections together."""

    calls: int
    """Above it, further calls are read later.

    Must exceed what the API allows to stay open, or they could wait for ever.
    """
    unseen_calls: int
    """Limit of calls that Python has not yet taken from gRPC. Above it, further calls are read later."""
    request_bytes: int
    """Limit of request bytes of open calls.

    Above it, further calls are read later; above twice that, connections are closed.
    """


class Usage:
    """Counts what all connections of one user have open. Not thread-safe; use from the event loop."""

    def __init__(self, limits: Limits, catch_up: Callable[[], None], on_idle: Callable[[], object]) -> None:
        """`catch_up` starts finding out which calls Python has taken; `on_idle` is called when nothing is counted."""
        self._limits = limits
        self._catch_up = catch_up
        self._on_idle = on_idle
        self.connections = 0
        self.calls = 0
        self.request_bytes = 0
        self.unseen_calls = 0
        self._waiting: dict[Callable[[], None], None] = {}
        """Callbacks of paused connections, first come first served."""

    @property
    def is_full(self) -> bool:
        """True if further calls have to wait."""
        limits = self._limits
        return (
            self.calls >= limits.calls
            or self.unseen_calls >= limits.unseen_calls
            or self.request_bytes >= limits.request_bytes
        )

    @property
    def wants_to_catch_up(self) -> bool:
        """True once half the limit of unseen calls is reached: early enough that no call has to wait for the answer."""
        return 2 * self.unseen_calls >= self._limits.unseen_calls

    def begin(self) -> None:
        """Count a call that begins."""
        self.calls += 1
        self.unseen_calls += 1
        if self.wants_to_catch_up:
            self._catch_up()

    def add_bytes(self, number: int) -> None:
        """Count bytes of a request. Raises LimitError above twice the limit."""
        self.request_bytes += number
        if self.request_bytes > 2 * self._limits.request_bytes:
            raise LimitError(f"requests of this user that are not answered yet take {self.request_bytes} bytes")

    def end(self, calls: int, request_bytes: int) -> None:
        """Subtract calls that have ended, with the bytes of their requests."""
        self.calls -= calls
        self.request_bytes -= request_bytes
        self._resume_waiting()

    def seen(self, calls: int) -> None:
        """Subtract calls that Python has taken from gRPC, or that ended before."""
        self.unseen_calls -= calls
        self._resume_waiting()

    def disconnect(self) -> None:
        """Subtract a connection."""
        self.connections -= 1
        self._resume_waiting()

    def wait(self, resume: Callable[[], None]) -> None:
        """Call `resume` once, when a further call may be allowed."""
        self._waiting[resume] = None

    def stop_waiting(self, resume: Callable[[], None]) -> None:
        """Cancel `wait`; harmless if it was not waiting."""
        self._waiting.pop(resume, None)

    def _resume_waiting(self) -> None:
        if self._waiting:
            # Each resumes at most once: one that has to wait again comes last.
            for resume in tuple(self._waiting):
                if self.is_full:
                    return
                if resume in self._waiting:
                    del self._waiting[resume]
                    resume()
        # A user who reconnects keeps what is still counted.
        elif not (self.connections or self.calls or self.unseen_calls):
            self._on_idle()


class Usages:
    """The usage of each user who has connections. Not thread-safe; use from the event loop."""

    def __init__(self, limits: Limits, caught_up: Callable[[], Awaitable[bool]]) -> None:
        """`caught_up` returns True once Python has all calls that had reached gRPC, False if asking failed."""
        self._limits = limits
        self._caught_up = caught_up
        self._by_user: dict[int | str | None, Usage] = {}
        self._catching_up: asyncio.Task[None] | None = None

    def connect(self, user: int | str | None, on_broken: Callable[[str], None]) -> Http2Limits:
        """Limit one more connection of this user; `on_broken` gets the reason if it breaks a limit."""
        usage = self._by_user.get(user)
        if usage is None:
            usage = Usage(self._limits, self._catch_up, partial(self._by_user.pop, user, None))
            self._by_user[user] = usage
        usage.connections += 1
        return Http2Limits(usage, on_broken)

    def __len__(self) -> int:
        """Return the number of users with something counted."""
        return len(self._by_user)

    def close(self) -> None:
        """Stop asking gRPC."""
        if self._catching_up is not None:
            self._catching_up.cancel()

    def _catch_up(self) -> None:
        if self._catching_up is None:
            task = asyncio.get_running_loop().create_task(self._wait_until_seen(), name="catching up")
            self._catching_up = task
            task.add_done_callback(self._ended)

    async def _wait_until_seen(self) -> None:
        before = [(each, each.unseen_calls) for each in self._by_user.values()]
        while not await self._caught_up():  # noqa: ASYNC110 -- gRPC is asked
            await asyncio.sleep(_AGAIN_SECONDS)
        for usage, calls in before:
            usage.seen(calls)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._catching_up = None
        if not task.cancelled() and task.exception() is not None:
            _log.error("cannot count calls", exc_info=task.exception())
        # As many calls may have begun meanwhile, and would wait for ever.
        if not task.cancelled() and any(each.wants_to_catch_up for each in self._by_user.values()):
            self._catch_up()


class Http2Limits:
    """Counts the frames of one connection. Not thread-safe; use from the event loop."""

    __slots__ = ("_acknowledged", "_client", "_early_bytes", "_last", "_open", "_server", "on_broken", "usage")

    def __init__(self, usage: Usage, on_broken: Callable[[str], None]) -> None:
        self.usage = usage
        self.on_broken = on_broken
        self._client = _FramePosition(_PREFACE_BYTES)
        self._server = _FramePosition(0)
        self._acknowledged = False
        self._early_bytes = 0
        self._last = 0
        self._open: dict[int, int] = {}
        """Open calls by stream, each with the bytes of its request so far."""

    def from_client(self, data: bytes | memoryview) -> int:
        """Count bytes from the client and return how many may be passed on now; offer the rest again after a wait.

        Raises LimitError.
        """
        for at, length, kind, flags, stream in self._client.heads(data):
            if kind in {_HEADERS, _CONTINUATION}:
                if not self._count_headers(stream, length):
                    return at
            elif kind == _DATA:
                self._count_data(stream, length)
            elif kind == _RST_STREAM:
                self._count_end(stream)
            elif kind == _SETTINGS and flags & _ACK:
                self._acknowledged = True
        return len(data)

    def from_server(self, data: memoryview) -> None:
        """Count bytes from gRPC: calls that have ended."""
        for _, _, kind, flags, stream in self._server.heads(data):
            if kind == _RST_STREAM or (kind <= _HEADERS and flags & _END_STREAM):
                self._count_end(stream)

    def close(self) -> None:
        """Subtract everything open, since the connection has ended."""
        self.usage.end(len(self._open), sum(self._open.values()))
        self._open.clear()
        self.usage.disconnect()

    def _count_headers(self, stream: int, length: int) -> bool:
        """Count a header frame; return False if it may not be passed on yet."""
        if stream > self._last:  # or these are more headers, or trailers
            if self.usage.is_full:
                return False
            self._last = stream
            self._open[stream] = 0
            self.usage.begin()
        if not self._acknowledged:
            self._early_bytes += length
            if self._early_bytes > _MOST_EARLY_BYTES:
                raise LimitError("it sent too many headers before it acknowledged the settings of HTTP/2")
        return True

    def _count_end(self, stream: int) -> None:
        request_bytes = self._open.pop(stream, None)
        if request_bytes is not None:
            self.usage.end(1, request_bytes)

    def _count_data(self, stream: int, length: int) -> None:
        so_far = self._open.get(stream)
        if so_far is not None:
            self._open[stream] = so_far + length
            self.usage.add_bytes(length)


class _FramePosition:
    """Position within the frames of one direction of a connection."""

    __slots__ = ("_partial", "_payload_left")

    def __init__(self, left: int) -> None:
        self._payload_left = left
        """Bytes of a payload that have not arrived yet."""
        self._partial = b""
        """The part of a frame's header that has arrived."""

    def heads(self, data: bytes | memoryview) -> Iterator[tuple[int, int, int, int, int]]:
        """Yield each frame that the next bytes begin: offset of its header, payload length, type, flags and stream.

        A frame counts as passed once the next one is asked for: to stop at a frame is to offer its bytes again.
        """
        size = len(data)
        at = min(self._payload_left, size)
        self._payload_left -= at
        while at < size:
            missing = _HEAD.size - len(self._partial)
            if missing > size - at:
                self._partial += bytes(data[at:])
                return
            if self._partial:
                high, low, kind, flags, stream = _HEAD.unpack(self._partial + bytes(data[at : at + missing]))
            else:
                high, low, kind, flags, stream = _HEAD.unpack_from(data, at)
            length = high << 8 | low
            yield at, length, kind, flags, stream & _STREAM_BITS
            self._partial = b""
            at += missing + length
        self._payload_left += max(at - size, 0)

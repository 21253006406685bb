"""Limits what one user's connections can cost gRPC, by reading the frames that pass through the relay (RFC 9113).

gRPC itself limits headers only once a client has acknowledged its settings, and does not count what the connections of
one user have open together. The relay sees every byte on a Unix socket, so it counts here: header bytes before the
acknowledgement, open calls, and bytes of requests. A user at a limit is read from later; a connection that breaks a
rule is closed. Behind TLS the relay sees ciphertext, and gRPC's own options are all that limits a client.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from struct import Struct

import structlog

_HEAD = Struct(">HBBBI")
"""Of a frame: its length in 16 and 8 bits, type, flags, stream."""
_DATA, _HEADERS, _RST_STREAM, _SETTINGS, _CONTINUATION = 0, 1, 3, 4, 9
_END_STREAM = _ACK = 0x1
_PREFACE_BYTES = 24
_STREAM_BITS = 0x7FFF_FFFF

_MOST_EARLY_BYTES = 1024
"""Of header blocks before a client has acknowledged gRPC's settings. Libraries acknowledge before their first call."""
_AGAIN_SECONDS = 0.1
"""After gRPC could not say that it has caught up."""

_log = structlog.get_logger(__name__)


class LimitError(Exception):
    """A connection broke a limit and has to be closed. The message says which."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What one user may have open in all connections together."""

    calls: int
    """Beyond, further calls are read later. Has to be more than the API lets stay open, or they could wait for ever."""
    unseen_calls: int
    """Calls that Python has not taken from gRPC yet. Beyond, further calls are read later."""
    request_bytes: int
    """Of requests whose calls are open. Beyond, further calls are read later; beyond twice that, connections close."""


class Usage:
    """What the connections of one user have open together. Belongs to the event loop."""

    def __init__(self, limits: Limits, catch_up: Callable[[], None], on_idle: Callable[[], object]) -> None:
        """`catch_up` begins to find out what has been seen; `on_idle` hears that nothing is left to be counted."""
        self._limits = limits
        self._catch_up = catch_up
        self._on_idle = on_idle
        self.connections = 0
        self.calls = 0
        self.request_bytes = 0
        self.unseen_calls = 0
        self._waiting: dict[Callable[[], None], None] = {}
        """In their order."""

    @property
    def is_full(self) -> bool:
        """Whether further calls have to wait."""
        limits = self._limits
        return (
            self.calls >= limits.calls
            or self.unseen_calls >= limits.unseen_calls
            or self.request_bytes >= limits.request_bytes
        )

    @property
    def wants_to_catch_up(self) -> bool:
        """Whether it is time to find out which calls were seen: early enough that nobody has to wait for it."""
        return 2 * self.unseen_calls >= self._limits.unseen_calls

    def begin(self) -> None:
        """Counts a call."""
        self.calls += 1
        self.unseen_calls += 1
        if self.wants_to_catch_up:
            self._catch_up()

    def add_bytes(self, number: int) -> None:
        """Counts bytes of a request. Raises LimitError."""
        self.request_bytes += number
        if self.request_bytes > 2 * self._limits.request_bytes:
            raise LimitError(f"requests of this user that are not answered yet take {self.request_bytes} bytes")

    def end(self, calls: int, request_bytes: int) -> None:
        """Counts calls off."""
        self.calls -= calls
        self.request_bytes -= request_bytes
        self._go_on()

    def seen(self, calls: int) -> None:
        """So many calls were taken from gRPC, or have ended before they were."""
        self.unseen_calls -= calls
        self._go_on()

    def disconnect(self) -> None:
        """Counts a connection off."""
        self.connections -= 1
        self._go_on()

    def wait(self, resume: Callable[[], None]) -> None:
        """Calls `resume` once when there may be room for a further call."""
        self._waiting[resume] = None

    def stop_waiting(self, resume: Callable[[], None]) -> None:
        """Does not call it; harmless when it does not wait."""
        self._waiting.pop(resume, None)

    def _go_on(self) -> None:
        if self._waiting:
            # Each goes at most once: one that has to wait again comes last.
            for resume in tuple(self._waiting):
                if self.is_full:
                    return
                if resume in self._waiting:
                    del self._waiting[resume]
                    resume()
        # A user who only connects anew keeps what is still counted.
        elif not (self.connections or self.calls or self.unseen_calls):
            self._on_idle()


class Usages:
    """The usage of each user who has connections. Belongs to the event loop."""

    def __init__(self, limits: Limits, caught_up: Callable[[], Awaitable[bool]]) -> None:
        """`caught_up` returns True when gRPC has handed all calls to Python that had reached it, False if it failed."""
        self._limits = limits
        self._caught_up = caught_up
        self._by_user: dict[int | str | None, Usage] = {}
        self._catching_up: asyncio.Task[None] | None = None

    def connect(self, user: int | str | None, on_broken: Callable[[str], None]) -> Http2Limits:
        """Limits one more connection of this user. `on_broken` hears why a connection is closed that broke a limit."""
        usage = self._by_user.get(user)
        if usage is None:
            usage = Usage(self._limits, self._catch_up, partial(self._by_user.pop, user, None))
            self._by_user[user] = usage
        usage.connections += 1
        return Http2Limits(usage, on_broken)

    def __len__(self) -> int:
        """Users who are remembered."""
        return len(self._by_user)

    def close(self) -> None:
        """Asks gRPC no more."""
        if self._catching_up is not None:
            self._catching_up.cancel()

    def _catch_up(self) -> None:
        if self._catching_up is None:
            task = asyncio.get_running_loop().create_task(self._see(), name="catching up")
            self._catching_up = task
            task.add_done_callback(self._ended)

    async def _see(self) -> None:
        before = [(each, each.unseen_calls) for each in self._by_user.values()]
        while not await self._caught_up():  # noqa: ASYNC110 -- gRPC is asked
            await asyncio.sleep(_AGAIN_SECONDS)
        for usage, calls in before:
            usage.seen(calls)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._catching_up = None
        if not task.cancelled() and task.exception() is not None:
            _log.error("cannot count calls", exc_info=task.exception())
        # Others may have begun as many meanwhile, and would wait for ever.
        if not task.cancelled() and any(each.wants_to_catch_up for each in self._by_user.values()):
            self._catch_up()


class Http2Limits:
    """Counts the frames of one connection. Belongs to the event loop."""

    __slots__ = ("_acknowledged", "_client", "_early_bytes", "_last", "_open", "_server", "on_broken", "usage")

    def __init__(self, usage: Usage, on_broken: Callable[[str], None]) -> None:
        self.usage = usage
        self.on_broken = on_broken
        self._client = _Position(_PREFACE_BYTES)
        self._server = _Position(0)
        self._acknowledged = False
        self._early_bytes = 0
        self._last = 0
        self._open: dict[int, int] = {}
        """Open calls by stream, each with the bytes of its request so far."""

    def from_client(self, data: bytes | memoryview) -> int:
        """Counts bytes from the client; returns how many may be passed on now. Give the rest again after a wait.

        Raises LimitError.
        """
        position = self._client
        size = len(data)
        at = position.skip(size)
        while at < size:
            head = position.head(data, at, size)
            if head is None:
                return size
            high, low, kind, flags, stream = head
            length = high << 8 | low
            if kind in {_HEADERS, _CONTINUATION}:
                if not self._count_headers(stream & _STREAM_BITS, length):
                    return at
            elif kind == _DATA:
                self._count_data(stream & _STREAM_BITS, length)
            elif kind == _RST_STREAM:
                request_bytes = self._open.pop(stream & _STREAM_BITS, None)
                if request_bytes is not None:
                    self.usage.end(1, request_bytes)
            elif kind == _SETTINGS and flags & _ACK:
                self._acknowledged = True
            at = position.payload(length, at, size)
        return size

    def from_server(self, data: memoryview) -> None:
        """Counts bytes from gRPC: calls that have ended."""
        position = self._server
        size = len(data)
        at = position.skip(size)
        while at < size:
            head = position.head(data, at, size)
            if head is None:
                return
            high, low, kind, flags, stream = head
            if kind == _RST_STREAM or (kind <= _HEADERS and flags & _END_STREAM):
                request_bytes = self._open.pop(stream & _STREAM_BITS, None)
                if request_bytes is not None:
                    self.usage.end(1, request_bytes)
            at = position.payload(high << 8 | low, at, size)

    def close(self) -> None:
        """Counts off what is open: the connection has ended."""
        self.usage.end(len(self._open), sum(self._open.values()))
        self._open.clear()
        self.usage.disconnect()

    def _count_headers(self, stream: int, length: int) -> bool:
        """Whether they may be passed on now."""
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

    def _count_data(self, stream: int, length: int) -> None:
        so_far = self._open.get(stream)
        if so_far is not None:
            self._open[stream] = so_far + length
            self.usage.add_bytes(length)


class _Position:
    """Where in a frame one direction of a connection is."""

    __slots__ = ("_left", "_partial")

    def __init__(self, left: int) -> None:
        self._left = left
        """Bytes of a payload that are still to come."""
        self._partial = b""
        """The beginning of a frame's head."""

    def skip(self, size: int) -> int:
        """Where in the next `size` bytes the first head begins or goes on."""
        skipped = min(self._left, size)
        self._left -= skipped
        return skipped

    def head(self, data: bytes | memoryview, at: int, size: int) -> tuple[int, ...] | None:
        """Reads the head at this place, if it is whole by now. `payload` has to follow."""
        partial = self._partial
        if not partial and size - at >= _HEAD.size:
            return _HEAD.unpack_from(data, at)
        whole = partial + bytes(data[at : at + _HEAD.size - len(partial)])
        if len(whole) == _HEAD.size:
            return _HEAD.unpack(whole)
        self._partial = whole
        return None

    def payload(self, length: int, at: int, size: int) -> int:
        """Goes past the head at this place and its payload; where the next head is."""
        at += _HEAD.size - len(self._partial)
        self._partial = b""
        end = min(at + length, size)
        self._left = at + length - end
        return end

"""One connection passed on: a client's socket and ours to gRPC, joined until both directions have ended.

Bytes are passed on as they are, in both directions, on the event loop. What one side does not take is kept, at most one
piece, and no more is read from the other until it does. Who takes nothing for minutes loses the connection. A client
that does not read is not read from either, or gRPC would have to keep its answers; and one whose user has as many calls
open as may be (`adapters.transport.http2_limits`) is read on when some of them have ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable
from enum import Enum

from mig_agent.adapters.transport.http2_limits import Http2Limits, LimitError
from mig_agent.adapters.transport.peer_credentials import is_ours

PIECE = 64 * 1024
"""Bytes that are passed on at once, and that wait at most for a slow reader."""
_LAST_WORDS_SECONDS = 5.0
"""For a client to end its half after gRPC has ended its own."""
_STUCK_SECONDS = 120.0
"""For a reader to take something of what waits for it: longer than an answer to gRPC's pings may take."""


class Ending(Enum):
    """How a connection came to its end."""

    HUNG_UP = "hung up"
    """By the client, or by the kernel for a process that has ended."""
    BROKEN = "broken"
    """By the network, or by this side because the client did not answer: it may not know yet."""


class ConnectionEnd:
    """What became of a connection, for those who were served on it."""

    __slots__ = ("_told", "ending")

    def __init__(self) -> None:
        self.ending: Ending | None = None
        """None while both ends are there."""
        self._told: asyncio.Event | None = None

    def sealed(self, ending: Ending) -> None:
        """It has come to its end; what is said later counts for nothing."""
        if self.ending is None:
            self.ending = ending
            if self._told is not None:
                self._told.set()

    async def within(self, seconds: float) -> Ending | None:
        """How it ends within so long; None when it does not."""
        if self.ending is None:
            self._told = self._told or asyncio.Event()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._told.wait(), seconds)
        return self.ending


class ConnectionEnds:
    """Those of all open connections, by the name that gRPC shows."""

    def __init__(self) -> None:
        self._open: dict[str, ConnectionEnd] = {}

    def begin(self, name: str, fate: ConnectionEnd) -> None:
        """A connection stands."""
        self._open[name] = fate

    def end(self, name: str) -> None:
        """It stands no more; who has asked for its fate keeps that."""
        self._open.pop(name, None)

    def of(self, name: str) -> ConnectionEnd | None:
        """That of a connection; None where none of ours is between gRPC and its client."""
        fate = self._open.get(name)
        if fate is None and is_ours(name):
            fate = ConnectionEnd()
            fate.sealed(Ending.HUNG_UP)  # while its call was on the way
        return fate


class ProxyConnection:
    """A client's connection and ours to gRPC. Belongs to the event loop."""

    __slots__ = ("_client", "_limits", "_local", "_on_close", "_requests", "_responses", "_server", "fate")

    def __init__(
        self,
        client: socket.socket,
        server: socket.socket,
        buffer: memoryview,
        on_close: Callable[[ProxyConnection], None],
        limits: Http2Limits | None = None,
    ) -> None:
        """`buffer` has PIECE bytes and may be shared by all links. `limits` are for bytes that are HTTP/2."""
        self._client = client
        self._server = server
        self._local = client.family == socket.AF_UNIX
        self._on_close: Callable[[ProxyConnection], None] | None = on_close
        self.fate = ConnectionEnd()
        self._limits = limits
        self._requests = _Requests(client, server, buffer, self, limits)
        self._responses = _Responses(server, client, buffer, self, limits)

    def close(self) -> None:
        """Ends it at once; harmless when it has ended."""
        on_close, self._on_close = self._on_close, None
        if on_close is None:
            return
        self.fate.sealed(Ending.BROKEN)
        self._requests.stop()
        self._responses.stop()
        self._client.close()
        self._server.close()
        if self._limits is not None:
            self._limits.close()
        on_close(self)

    def client_reads(self, *, reads: bool) -> None:
        """For its directions: the client takes what is sent to it, or does not."""
        self._requests.hold(on=not reads)

    def direction_ended(self, by: socket.socket, *, error: bool) -> None:
        """For its directions: `by` has said its last or listens no more, with an error or without."""
        # A process that dies with unread bytes ends its connection with an error, too; only a network breaks one.
        hung_up = by is self._client and (self._local or not error)
        self.fate.sealed(Ending.HUNG_UP if hung_up else Ending.BROKEN)
        if self._requests.ended and self._responses.ended:
            self.close()
        elif self._responses.ended:
            # gRPC has ended it, and a client that says nothing more would keep its place for ever.
            asyncio.get_running_loop().call_later(_LAST_WORDS_SECONDS, self.close)


class _Direction:
    """Bytes from one socket to another. Its end is passed on, too: a client may end its half and still listen."""

    __slots__ = ("_buffer", "_held", "_left", "_link", "_loop", "_reading", "_sink", "_source", "_stuck", "ended")

    def __init__(self, source: socket.socket, sink: socket.socket, buffer: memoryview, link: ProxyConnection) -> None:
        self._source = source
        self._sink = sink
        self._buffer = buffer
        self._left = b""
        self._link = link
        self._loop = asyncio.get_running_loop()
        self._stuck: asyncio.TimerHandle | None = None
        self._held = False
        self._reading = False
        self.ended = False
        self._read_if_possible()

    def stop(self) -> None:
        """Passes nothing on any more."""
        if not self.ended:
            self.ended = True
            self._read_if_possible()
            self._loop.remove_writer(self._sink)
            self._left = b""
            self._set_timer(on=False)

    def hold(self, *, on: bool) -> None:
        """Reads nothing, or reads again."""
        self._held = on
        self._read_if_possible()

    def _read_if_possible(self) -> None:
        can = self._can_read()
        if can != self._reading:
            self._reading = can
            if can:
                self._loop.add_reader(self._source, self._readable)
            else:
                self._loop.remove_reader(self._source)

    def _can_read(self) -> bool:
        return not (self.ended or self._held or self._left)

    def _readable(self) -> None:
        buffer = self._buffer
        try:
            count = self._source.recv_into(buffer)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            self._end(self._source, error=True)
            return
        if not count:
            self._end(self._source)
            return
        self._pass_on(buffer[:count])

    def _pass_on(self, data: memoryview) -> None:
        try:
            sent = self._send(data)
        except OSError:
            self._end(self._sink, error=True)
            return
        if sent < len(data):
            self._left = bytes(data[sent:])
            self._read_if_possible()
            self._begin_writing()

    def _begin_writing(self) -> None:
        self._loop.add_writer(self._sink, self._writable)
        self._set_timer(on=True)

    def _writable(self) -> None:
        try:
            sent = self._send(self._left)
        except OSError:
            self._end(self._sink, error=True)
            return
        self._left = self._left[sent:]
        if sent:
            self._set_timer(on=bool(self._left))
        if not self._left:
            self._loop.remove_writer(self._sink)
            self._written()

    def _written(self) -> None:
        """All that was left is passed on."""
        self._read_if_possible()

    def _send(self, data: memoryview | bytes) -> int:
        try:
            return self._sink.send(data)
        except (BlockingIOError, InterruptedError):
            return 0

    def _set_timer(self, *, on: bool) -> None:
        """From now on, or no more."""
        if self._stuck is not None:
            self._stuck.cancel()
        self._stuck = self._loop.call_later(_STUCK_SECONDS, self._link.close) if on else None

    def _end(self, by: socket.socket, *, error: bool = False) -> None:
        """Its source has said its last, or its sink listens no more."""
        self.stop()
        with contextlib.suppress(OSError):
            self._sink.shutdown(socket.SHUT_WR)
        with contextlib.suppress(OSError):
            self._source.shutdown(socket.SHUT_RD)
        self._link.direction_ended(by, error=error)


class _Requests(_Direction):
    """From a client to gRPC."""

    __slots__ = ("_limits", "_waiting")

    def __init__(
        self,
        source: socket.socket,
        sink: socket.socket,
        buffer: memoryview,
        link: ProxyConnection,
        limits: Http2Limits | None,
    ) -> None:
        self._limits = limits
        self._waiting = b""
        """What may not be passed on yet."""
        super().__init__(source, sink, buffer, link)

    def stop(self) -> None:
        """Passes nothing on any more."""
        if self._waiting and self._limits is not None:
            self._limits.usage.stop_waiting(self._resume)
            self._waiting = b""
        super().stop()

    def _can_read(self) -> bool:
        return not self._waiting and super()._can_read()

    def _pass_on(self, data: memoryview) -> None:
        if self._limits is not None:
            try:
                allowed = self._limits.from_client(data)
            except LimitError as error:
                self._limits.on_broken(str(error))
                self._link.close()
                return
            if allowed < len(data):
                self._waiting = bytes(data[allowed:])
                self._read_if_possible()
                self._limits.usage.wait(self._resume)
                data = data[:allowed]
        super()._pass_on(data)

    def _written(self) -> None:
        if self._waiting:
            self._resume()
        else:
            super()._written()

    def _resume(self) -> None:
        """There may be room for a further call."""
        if self._waiting and not self._left:
            waiting, self._waiting = self._waiting, b""
            self._pass_on(memoryview(waiting))
            self._read_if_possible()


class _Responses(_Direction):
    """From gRPC to a client."""

    __slots__ = ("_limits",)

    def __init__(
        self,
        source: socket.socket,
        sink: socket.socket,
        buffer: memoryview,
        link: ProxyConnection,
        limits: Http2Limits | None,
    ) -> None:
        self._limits = limits
        super().__init__(source, sink, buffer, link)

    def _pass_on(self, data: memoryview) -> None:
        super()._pass_on(data)
        if self._limits is not None:
            self._limits.from_server(data)

    def _begin_writing(self) -> None:
        super()._begin_writing()
        self._link.client_reads(reads=False)

    def _written(self) -> None:
        super()._written()
        self._link.client_reads(reads=True)

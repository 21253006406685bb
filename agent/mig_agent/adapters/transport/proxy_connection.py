"""A proxied connection: a client's socket and the relay's to gRPC, joined until both directions have ended.

Bytes are copied unchanged in both directions on the event loop. What one side does not accept is buffered, at most one
piece, and the other side is not read until it does. A peer that accepts nothing for minutes loses the connection. A
client that does not read is not read from either, or gRPC would have to buffer its answers; a client whose user has as
many calls open as allowed (`adapters.transport.http2_limits`) is read again when some of them have ended.
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
"""Bytes copied at once, and the most that is buffered for a slow reader."""
_LAST_WORDS_SECONDS = 5.0
"""Time for a client to close its half after gRPC has closed its own."""
_STUCK_SECONDS = 120.0
"""Time for a reader to accept some of its buffered bytes: longer than an answer to gRPC's pings may take."""


class Ending(Enum):
    """The ways in which a connection can end."""

    HUNG_UP = "hung up"
    """Closed by the client, or by the kernel for a process that has ended."""
    BROKEN = "broken"
    """Lost by the network, or closed here because the client did not answer: it may not know yet."""


class ConnectionEnd:
    """Tells how a client connection ended (closed by the peer, or lost), for calls that were in progress on it."""

    __slots__ = ("_changed", "ending")

    def __init__(self) -> None:
        self.ending: Ending | None = None
        """None while the connection is open."""
        self._changed: asyncio.Event | None = None

    def set(self, ending: Ending) -> None:
        """Record how the connection ended; later calls have no effect."""
        if self.ending is None:
            self.ending = ending
            if self._changed is not None:
                self._changed.set()

    async def within(self, seconds: float) -> Ending | None:
        """Wait at most `seconds` for the end and return how it ended; None if it is still open."""
        if self.ending is None:
            self._changed = self._changed or asyncio.Event()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), seconds)
        return self.ending


class ConnectionEnds:
    """The ends of all open connections, by the name that gRPC shows."""

    def __init__(self) -> None:
        self._open: dict[str, ConnectionEnd] = {}

    def begin(self, name: str, end: ConnectionEnd) -> None:
        """Register an open connection."""
        self._open[name] = end

    def end(self, name: str) -> None:
        """Unregister a connection; a caller that has its ConnectionEnd keeps it."""
        self._open.pop(name, None)

    def of(self, name: str) -> ConnectionEnd | None:
        """Return the end of a connection; None if the connection does not go through the relay."""
        end_state = self._open.get(name)
        if end_state is None and is_ours(name):
            end_state = ConnectionEnd()
            end_state.set(Ending.HUNG_UP)  # while its call was in flight
        return end_state


class ProxyConnection:
    """A client's connection and the relay's to gRPC. Not thread-safe; use from the event loop."""

    __slots__ = ("_client", "_limits", "_local", "_on_close", "_requests", "_responses", "_server", "end_state")

    def __init__(
        self,
        client: socket.socket,
        server: socket.socket,
        buffer: memoryview,
        on_close: Callable[[ProxyConnection], None],
        limits: Http2Limits | None = None,
    ) -> None:
        """`buffer` has PIECE bytes and may be shared by connections. `limits` apply to bytes that are plain HTTP/2."""
        self._client = client
        self._server = server
        self._local = client.family == socket.AF_UNIX
        self._on_close: Callable[[ProxyConnection], None] | None = on_close
        self.end_state = ConnectionEnd()
        self._limits = limits
        self._requests = _Requests(client, server, buffer, self, limits)
        self._responses = _Responses(server, client, buffer, self, limits)

    def close(self) -> None:
        """Close both sockets at once; harmless if closed."""
        on_close, self._on_close = self._on_close, None
        if on_close is None:
            return
        self.end_state.set(Ending.BROKEN)
        self._requests.stop()
        self._responses.stop()
        self._client.close()
        self._server.close()
        if self._limits is not None:
            self._limits.close()
        on_close(self)

    def client_reads(self, *, reads: bool) -> None:
        """Pause or resume reading requests while the client does not accept responses; called by the directions."""
        self._requests.hold(on=not reads)

    def direction_ended(self, by: socket.socket, *, error: bool) -> None:
        """Record that `by` closed its half or stopped accepting, with an error or without; called by the directions."""
        # A process that dies with unread bytes ends its connection with an error, too; only a network breaks one.
        hung_up = by is self._client and (self._local or not error)
        self.end_state.set(Ending.HUNG_UP if hung_up else Ending.BROKEN)
        if self._requests.ended and self._responses.ended:
            self.close()
        elif self._responses.ended:
            # gRPC has closed it, and an idle client would otherwise keep its slot for ever.
            asyncio.get_running_loop().call_later(_LAST_WORDS_SECONDS, self.close)


class _Direction:
    """Copies bytes from one socket to another, and the end of them: a client may close its half and still read."""

    __slots__ = ("_buffer", "_held", "_link", "_loop", "_reading", "_sink", "_source", "_stuck", "_unsent", "ended")

    def __init__(self, source: socket.socket, sink: socket.socket, buffer: memoryview, link: ProxyConnection) -> None:
        self._source = source
        self._sink = sink
        self._buffer = buffer
        self._unsent = b""
        self._link = link
        self._loop = asyncio.get_running_loop()
        self._stuck: asyncio.TimerHandle | None = None
        self._held = False
        self._reading = False
        self.ended = False
        self._read_if_possible()

    def stop(self) -> None:
        """Stop copying."""
        if not self.ended:
            self.ended = True
            self._read_if_possible()
            self._loop.remove_writer(self._sink)
            self._unsent = b""
            self._set_timer(on=False)

    def hold(self, *, on: bool) -> None:
        """Pause or resume reading."""
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
        return not (self.ended or self._held or self._unsent)

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
            self._unsent = bytes(data[sent:])
            self._read_if_possible()
            self._begin_writing()

    def _begin_writing(self) -> None:
        self._loop.add_writer(self._sink, self._writable)
        self._set_timer(on=True)

    def _writable(self) -> None:
        try:
            sent = self._send(self._unsent)
        except OSError:
            self._end(self._sink, error=True)
            return
        self._unsent = self._unsent[sent:]
        if sent:
            self._set_timer(on=bool(self._unsent))
        if not self._unsent:
            self._loop.remove_writer(self._sink)
            self._written()

    def _written(self) -> None:
        """Continue after all buffered bytes were sent."""
        self._read_if_possible()

    def _send(self, data: memoryview | bytes) -> int:
        try:
            return self._sink.send(data)
        except (BlockingIOError, InterruptedError):
            return 0

    def _set_timer(self, *, on: bool) -> None:
        """Restart the timeout, or cancel it."""
        if self._stuck is not None:
            self._stuck.cancel()
        self._stuck = self._loop.call_later(_STUCK_SECONDS, self._link.close) if on else None

    def _end(self, by: socket.socket, *, error: bool = False) -> None:
        """Stop, since the source has closed or the sink no longer accepts."""
        self.stop()
        with contextlib.suppress(OSError):
            self._sink.shutdown(socket.SHUT_WR)
        with contextlib.suppress(OSError):
            self._source.shutdown(socket.SHUT_RD)
        self._link.direction_ended(by, error=error)


class _Requests(_Direction):
    """Copies from a client to gRPC, within the user's limits."""

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
        """Bytes that may not be passed on yet."""
        super().__init__(source, sink, buffer, link)

    def stop(self) -> None:
        """Stop copying, and stop waiting for the limits."""
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
        """Try again to pass on what waited for the limits."""
        if self._waiting and not self._unsent:
            waiting, self._waiting = self._waiting, b""
            self._pass_on(memoryview(waiting))
            self._read_if_possible()


class _Responses(_Direction):
    """Copies from gRPC to a client."""

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

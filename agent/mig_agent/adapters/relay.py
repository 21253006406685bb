"""Passes the connections of a Unix socket on to gRPC, which then sees who is at the other end (`adapters.peers`).

Each connection becomes two: the client's and one of ours to gRPC, whose own end is bound to a name that tells the
client's user and process. Bytes are passed on as they are, in both directions, on the event loop: that is quicker here
than a thread, which would wait for the interpreter's lock. What one side does not take is kept, at most one piece, and
no more is read from the other until it does.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable
from dataclasses import replace

import structlog

from mig_agent.adapters.peers import Peer, bound_name, peer_of
from mig_agent.adapters.places import Places
from mig_agent.adapters.users import Users

_PIECE = 64 * 1024
"""Bytes that are passed on at once, and that wait at most for a slow reader."""
_ACCEPTED_AT_ONCE = 16
"""Connections that are accepted before other work of the event loop gets its turn."""
_PAUSE_SECONDS = 0.5
"""After the kernel would not give us one more connection."""
_MOST_SURPLUS = 64
"""Connections without a place whose calls are answered nonetheless."""
_SURPLUS_SECONDS = 5.0
_LAST_WORDS_SECONDS = 5.0
"""For a client to end its half after gRPC has ended its own."""
_AGAIN_SECONDS = 0.01
_MOST_TRIES = 200

_log = structlog.get_logger(__name__)


class Relay:
    """One listening socket. Belongs to the event loop."""

    def __init__(self, listener: socket.socket, target: str, *, places: Places, users: Users) -> None:
        """`listener` listens already and is ours from now on; `target` is the path of gRPC's socket."""
        self._listener = listener
        self._listener.setblocking(False)
        self._target = target
        self._places = places
        self._users = users
        self._loop = asyncio.get_running_loop()
        self._links: set[_Link] = set()
        self._surplus: set[_Link] = set()
        self._emptied = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._pause: asyncio.TimerHandle | None = None
        self._turned_away = 0
        self._closing = False
        self._buffer = memoryview(bytearray(_PIECE))

    def __len__(self) -> int:
        """Open connections."""
        return len(self._links)

    def start(self) -> None:
        """Accepts from now on."""
        self._loop.add_reader(self._listener, self._accept)

    def stop_accepting(self) -> None:
        """Takes no new connections; those that are open go on. Harmless when done before."""
        if not self._closing:
            self._closing = True
            self._loop.remove_reader(self._listener)
            self._listener.close()
            if self._pause is not None:
                self._pause.cancel()

    async def close(self, seconds: float) -> None:
        """Ends all connections, after what gRPC has said last has reached its readers, or after so long."""
        self.stop_accepting()
        for task in self._tasks:
            task.cancel()
        if self._links:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._emptied.wait(), seconds)
        for link in (*self._links, *self._surplus):
            link.close()

    def _accept(self) -> None:
        for _ in range(_ACCEPTED_AT_ONCE):
            try:
                client, _address = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:  # no more files or memory: they wait, and so do we
                _log.error("cannot accept a connection now", error=error.strerror)
                self._loop.remove_reader(self._listener)
                self._pause = self._loop.call_later(_PAUSE_SECONDS, self.start)
                return
            self._take(client)

    def _take(self, client: socket.socket) -> None:
        try:
            client.setblocking(False)
            peer = peer_of(client)
        except OSError:
            client.close()
            return
        refusal = self._places.take(peer.uid)
        if refusal:
            self._turn_away(client, peer, refusal)
        elif peer.uid is not None and not self._users.is_fresh(peer.uid):
            task = self._loop.create_task(self._learn_and_link(client, peer, peer.uid), name=f"name of {peer.uid}")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        else:
            self._link(client, peer)

    async def _learn_and_link(self, client: socket.socket, peer: Peer, uid: int) -> None:
        """The first connection of a user, or the first in a while."""
        try:
            await self._users.learn(uid)
        except BaseException:
            self._forget(client, peer)
            raise
        self._link(client, peer)

    def _link(self, client: socket.socket, peer: Peer, tries: int = 1) -> None:
        if self._closing:
            self._forget(client, peer)
            return
        try:
            server = self._connect(peer)
        except BlockingIOError:  # gRPC has not accepted those before it yet
            if tries < _MOST_TRIES:
                self._loop.call_later(_AGAIN_SECONDS, self._link, client, peer, tries + 1)
            else:
                self._forget(client, peer)
        except OSError as error:
            _log.error("cannot pass a connection on", error=error.strerror)
            self._forget(client, peer)
        else:
            self._emptied.clear()
            self._links.add(_Link(client, server, self._buffer, lambda link: self._ended(link, peer)))

    def _connect(self, peer: Peer) -> socket.socket:
        server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            server.bind(bound_name(peer))
            server.connect(self._target)
        except BaseException:
            server.close()
            raise
        return server

    def _ended(self, link: _Link, peer: Peer) -> None:
        self._links.discard(link)
        if not self._links:
            self._emptied.set()
        self._places.give_back(peer.uid)

    def _forget(self, client: socket.socket, peer: Peer) -> None:
        client.close()
        self._places.give_back(peer.uid)

    def _turn_away(self, client: socket.socket, peer: Peer, words: str) -> None:
        """A client of gRPC that finds its connection closed only tries again: its calls are answered, with a refusal.

        That takes a place, too. Where even those are taken, the connection is closed.
        """
        self._turned_away += 1
        if self._turned_away.bit_count() == 1:  # the 1st, 2nd, 4th, 8th: whoever floods us does not fill the log
            _log.warning("a connection was turned away", why=words, uid=peer.uid, so_far=self._turned_away)
        if len(self._surplus) < _MOST_SURPLUS:
            with contextlib.suppress(OSError):
                server = self._connect(replace(peer, surplus=True))
                link = _Link(client, server, self._buffer, self._surplus.discard)
                self._surplus.add(link)
                self._loop.call_later(_SURPLUS_SECONDS, link.close)
                return
        client.close()


class _Link:
    """A client's connection and ours to gRPC, until both directions have ended."""

    __slots__ = ("_client", "_directions", "_on_end", "_server")

    def __init__(
        self, client: socket.socket, server: socket.socket, buffer: memoryview, on_end: Callable[[_Link], None]
    ) -> None:
        self._client = client
        self._server = server
        self._on_end: Callable[[_Link], None] | None = on_end
        self._directions = (
            _Direction(client, server, buffer, self._direction_ended),
            _Direction(server, client, buffer, self._direction_ended),
        )

    def _direction_ended(self) -> None:
        if all(each.ended for each in self._directions):
            self.close()
        elif self._directions[1].ended:
            # gRPC has ended it, and a client that says nothing more would keep its place for ever.
            asyncio.get_running_loop().call_later(_LAST_WORDS_SECONDS, self.close)

    def close(self) -> None:
        """Ends it at once; harmless when it has ended."""
        on_end, self._on_end = self._on_end, None
        if on_end is None:
            return
        for each in self._directions:
            each.stop()
        self._client.close()
        self._server.close()
        on_end(self)


class _Direction:
    """Bytes from one socket to another. Its end is passed on, too: a client may end its half and still listen."""

    __slots__ = ("_buffer", "_left", "_loop", "_on_end", "_sink", "_source", "ended")

    def __init__(
        self, source: socket.socket, sink: socket.socket, buffer: memoryview, on_end: Callable[[], None]
    ) -> None:
        self._source = source
        self._sink = sink
        self._buffer = buffer
        self._left = b""
        self._on_end = on_end
        self._loop = asyncio.get_running_loop()
        self.ended = False
        self._loop.add_reader(source, self._readable)

    def stop(self) -> None:
        """Passes nothing on any more."""
        if not self.ended:
            self.ended = True
            self._loop.remove_reader(self._source)
            if self._left:
                self._loop.remove_writer(self._sink)
                self._left = b""

    def _readable(self) -> None:
        buffer = self._buffer
        try:
            count = self._source.recv_into(buffer)
            if not count:
                self._end()
                return
            sent = self._send(buffer[:count])
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            self._end()
            return
        if sent < count:
            self._left = bytes(buffer[sent:count])
            self._loop.remove_reader(self._source)
            self._loop.add_writer(self._sink, self._writable)

    def _writable(self) -> None:
        try:
            sent = self._send(self._left)
        except OSError:
            self._end()
            return
        self._left = self._left[sent:]
        if not self._left:
            self._loop.remove_writer(self._sink)
            self._loop.add_reader(self._source, self._readable)

    def _send(self, data: memoryview | bytes) -> int:
        try:
            return self._sink.send(data)
        except (BlockingIOError, InterruptedError):
            return 0

    def _end(self) -> None:
        """Its source has said its last, or its sink listens no more."""
        self.stop()
        with contextlib.suppress(OSError):
            self._sink.shutdown(socket.SHUT_WR)
        with contextlib.suppress(OSError):
            self._source.shutdown(socket.SHUT_RD)
        self._on_end()

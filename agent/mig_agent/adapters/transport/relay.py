"""Relays the connections of a socket to gRPC, so that gRPC sees who the client is (`peer_credentials`).

Each connection becomes two: the client's, and the relay's to gRPC, whose own end is bound to a name that carries the
client's user and process. Bytes are copied (`proxy_connection`) on the event loop: that is faster here than in a
thread, which would wait for the interpreter's lock. TCP connections are relayed too, so that they are counted before
their certificates are checked, and so that it is known how each of them ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial

import structlog

from mig_agent.adapters.transport.connection_limits import ConnectionLimits
from mig_agent.adapters.transport.http2_limits import Usages
from mig_agent.adapters.transport.peer_credentials import Peer, bound_name, shown_by_grpc
from mig_agent.adapters.transport.proxy_connection import PIECE, ConnectionEnds, ProxyConnection
from mig_agent.adapters.users import Users

_ACCEPTED_AT_ONCE = 16
"""Connections accepted before other work of the event loop gets its turn."""
_PAUSE_SECONDS = 0.5
"""Pause after the kernel refused to accept a connection."""
_MOST_SURPLUS = 64
"""Connections without a place whose calls are answered nonetheless."""
_SURPLUS_SECONDS = 5.0
_AGAIN_SECONDS = 0.01
_MOST_TRIES = 200

_log = structlog.get_logger(__name__)


class Relay:
    """Relays one listening socket. Not thread-safe; use from the event loop."""

    def __init__(
        self,
        listener: socket.socket,
        target: str,
        *,
        who: Callable[[socket.socket], Peer],
        limits: ConnectionLimits,
        users: Users,
        ends: ConnectionEnds,
        before: Callable[[], Awaitable[None]] | None = None,
        usages: Usages | None = None,
    ) -> None:
        """Relay from `listener`, which listens already and is owned from now on, to gRPC's socket at `target`.

        `who` returns the peer of a connection and may raise OSError. `ends` records each connection's end. `before` is
        awaited before a connection is relayed. `usages` limits what users may have open; None if the bytes are
        encrypted.
        """
        self._listener = listener
        self._listener.setblocking(False)
        self._target = target
        self._who = who
        self._limits = limits
        self._users = users
        self._ends = ends
        self._before = before
        self._usages = usages
        self._loop = asyncio.get_running_loop()
        self._links: set[ProxyConnection] = set()
        self._surplus: set[ProxyConnection] = set()
        self._emptied = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._pause: asyncio.TimerHandle | None = None
        self._turned_away = 0
        self._cut_off = 0
        self._closing = False
        self._buffer = memoryview(bytearray(PIECE))

    def __len__(self) -> int:
        """Return the number of open connections."""
        return len(self._links)

    def start(self) -> None:
        """Start accepting."""
        self._loop.add_reader(self._listener, self._accept)

    def listen_on(self, listener: socket.socket) -> None:
        """Accept from another listening socket from now on, owned by the relay. Open connections go on."""
        if self._closing:
            listener.close()
            return
        self._accept()  # clients that connected before
        self._loop.remove_reader(self._listener)
        self._listener.close()
        if self._pause is not None:
            self._pause.cancel()
        self._listener = listener
        self._listener.setblocking(False)
        self.start()

    def stop_accepting(self) -> None:
        """Stop accepting; open connections go on. Harmless if done before."""
        if not self._closing:
            self._closing = True
            self._loop.remove_reader(self._listener)
            self._listener.close()
            if self._pause is not None:
                self._pause.cancel()

    def drop(self) -> None:
        """Close all open connections at once, as the network might; new ones are accepted."""
        for link in tuple(self._links):
            link.close()

    async def close(self, seconds: float) -> None:
        """Close all connections, after gRPC's last bytes have reached their readers or after `seconds`."""
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
            except OSError as error:  # no more files or memory: clients and accepting wait
                _log.error("cannot accept a connection now", error=error.strerror)
                self._loop.remove_reader(self._listener)
                self._pause = self._loop.call_later(_PAUSE_SECONDS, self.start)
                return
            self._admit(client)

    def _admit(self, client: socket.socket) -> None:
        try:
            client.setblocking(False)
            peer = self._who(client)
        except OSError:
            client.close()
            return
        refusal = self._limits.acquire(peer.counted_as)
        if refusal:
            self._turn_away(client, peer, refusal)
        elif peer.uid is not None and not self._users.is_fresh(peer.uid):
            # First connection of this user, or first in a while.
            self._link_after(partial(self._users.learn, peer.uid), client, peer)
        elif self._before is not None:
            self._link_after(self._before, client, peer)
        else:
            self._link(client, peer)

    def _link_after(self, first: Callable[[], Awaitable[None]], client: socket.socket, peer: Peer) -> None:
        task = self._loop.create_task(self._wait_and_link(first, client, peer), name=f"a connection of {peer}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _wait_and_link(self, first: Callable[[], Awaitable[None]], client: socket.socket, peer: Peer) -> None:
        try:
            await first()
        except BaseException:
            self._forget(client, peer)
            raise
        self._link(client, peer)

    def _link(self, client: socket.socket, peer: Peer, tries: int = 1) -> None:
        if self._closing:
            self._forget(client, peer)
            return
        name = bound_name(peer)
        try:
            server = self._connect(name)
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
            shown = shown_by_grpc(name)
            link = self._join(client, server, peer, lambda link: self._ended(link, peer, shown))
            self._links.add(link)
            self._ends.begin(shown, link.end_state)

    def _join(
        self, client: socket.socket, server: socket.socket, peer: Peer, on_close: Callable[[ProxyConnection], None]
    ) -> ProxyConnection:
        if self._usages is None:
            return ProxyConnection(client, server, self._buffer, on_close)
        limits = self._usages.connect(peer.counted_as, partial(self._broken, peer))
        return ProxyConnection(client, server, self._buffer, on_close, limits)

    def _broken(self, peer: Peer, why: str) -> None:
        self._cut_off += 1
        if self._cut_off.bit_count() == 1:
            _log.warning("a connection was cut off", why=why, who=str(peer), so_far=self._cut_off)

    def _connect(self, name: bytes) -> socket.socket:
        server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            server.bind(name)
            server.connect(self._target)
        except BaseException:
            server.close()
            raise
        return server

    def _ended(self, link: ProxyConnection, peer: Peer, shown: str) -> None:
        self._links.discard(link)
        self._ends.end(shown)
        if not self._links:
            self._emptied.set()
        self._limits.release(peer.counted_as)

    def _forget(self, client: socket.socket, peer: Peer) -> None:
        client.close()
        self._limits.release(peer.counted_as)

    def _turn_away(self, client: socket.socket, peer: Peer, words: str) -> None:
        """Serve a surplus connection only to refuse its calls: a gRPC client that finds it closed just tries again.

        The number of such connections is limited, too. Beyond it, and over TCP, where the handshake would cost more
        than the refusal is worth, the connection is closed.
        """
        self._turned_away += 1
        if self._turned_away.bit_count() == 1:  # the 1st, 2nd, 4th, 8th: a flood does not fill the log
            _log.warning("a connection was turned away", why=words, who=str(peer), so_far=self._turned_away)
        if not peer.host and len(self._surplus) < _MOST_SURPLUS:
            with contextlib.suppress(OSError):
                server = self._connect(bound_name(replace(peer, surplus=True)))
                link = self._join(client, server, peer, self._surplus.discard)
                self._surplus.add(link)
                self._loop.call_later(_SURPLUS_SECONDS, link.close)
                return
        client.close()

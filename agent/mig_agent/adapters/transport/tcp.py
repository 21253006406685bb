"""TCP ports that the agent listens on, and the hosts that connect to them."""

from __future__ import annotations

import contextlib
import errno
import socket
from collections.abc import Sequence

from mig_agent.adapters.transport.peer_credentials import Peer
from mig_agent.core.errors import ConfigError

_BACKLOG = 4096
"""Connections that the kernel queues for accept; the kernel may allow fewer."""
_MAPPED = bytes(10) + b"\xff\xff"
"""Prefix of an IPv6 address that represents an IPv4 address (RFC 4291, 2.5.5.2)."""
_ABSENT = frozenset({errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT})
"""Errors for an address that the machine lacks: `localhost` has an IPv6 address even on machines without IPv6."""
_NETWORK_BYTES = 8
"""Network part of an IPv6 address in bytes: its owner chooses the rest (RFC 4291, 2.5.4)."""


def listen(host: str, port: int) -> tuple[Sequence[socket.socket], int]:
    """Return a listening socket for each address of the host, and their port; the kernel chooses one for 0.

    An IPv6 host may have its brackets. Raises ConfigError if the host has no address, or another program listens on
    one.
    """
    listeners: list[socket.socket] = []
    absent: OSError | None = None
    with contextlib.ExitStack() as undo:
        try:
            for family, address in _addresses(host, port):
                try:
                    # The first socket's port is used for all.
                    listener = _listener(family, (str(address[0]), port, *address[2:]))
                except OSError as error:
                    if error.errno not in _ABSENT:
                        raise
                    absent = error
                else:
                    undo.callback(listener.close)
                    listeners.append(listener)
                    port = listener.getsockname()[1]
            if not listeners:
                raise absent or OSError(errno.EADDRNOTAVAIL, "it has no address")
        except OSError as error:
            why = (error.strerror or str(error)).lower()
            raise ConfigError(
                f"cannot listen on {host}:{port}: {why}", "is another program listening there?"
            ) from error
        undo.pop_all()
    return listeners, port


def _addresses(host: str, port: int) -> dict[tuple[socket.AddressFamily, tuple[str | int | bytes, ...]], None]:
    """Return the host's addresses by family, each once. Raises OSError for an unknown host."""
    bare = host.removeprefix("[").removesuffix("]")
    found = socket.getaddrinfo(bare, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    return dict.fromkeys((family, address) for family, _, _, _, address in found)


def _listener(family: socket.AddressFamily, address: tuple[str | int | bytes, ...]) -> socket.socket:
    both = family == socket.AF_INET6 and address[0] == "::"
    return socket.create_server(address, family=family, backlog=_BACKLOG, dualstack_ipv6=both)


def client_of(connection: socket.socket) -> Peer:
    """Return the host at the other end of a TCP connection as a Peer. Raises OSError."""
    address = connection.getpeername()
    # What gRPC writes is a whole message: to wait for more would only delay it.
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return Peer(uid=None, pid=None, host=_host(connection.family, str(address[0])))


def _host(family: int, address: str) -> str:
    """Return the key of a host's connection limit: an IPv4 address, or the /64 network of an IPv6 address.

    The owner of an IPv6 address has the whole network.
    """
    if family == socket.AF_INET:
        return address
    packed = socket.inet_pton(socket.AF_INET6, address.partition("%")[0])
    if packed.startswith(_MAPPED):
        return socket.inet_ntop(socket.AF_INET, packed[len(_MAPPED) :])
    return socket.inet_ntop(socket.AF_INET6, packed[:_NETWORK_BYTES].ljust(len(packed), b"\0")) + "/64"

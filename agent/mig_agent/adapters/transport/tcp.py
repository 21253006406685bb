"""TCP ports that the agent listens on, and from where their clients come."""

from __future__ import annotations

import contextlib
import errno
import socket
from collections.abc import Sequence

from mig_agent.adapters.transport.peer_credentials import Peer
from mig_agent.core.errors import ConfigError

_BACKLOG = 4096
"""Connections that the kernel keeps for us to accept; it may keep fewer."""
_MAPPED = bytes(10) + b"\xff\xff"
"""How an IPv6 address that stands for one of IPv4 begins (RFC 4291, 2.5.5.2)."""
_ABSENT = frozenset({errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT})
"""`localhost` has an IPv6 address also on machines without IPv6."""
_NETWORK_BYTES = 8
"""Of an IPv6 address: the rest is for its owner to choose (RFC 4291, 2.5.4)."""


def listen(host: str, port: int) -> tuple[Sequence[socket.socket], int]:
    """A listening socket for each address of the host, and their port: one that the kernel chose for 0.

    An IPv6 host may have its brackets. Raises ConfigError where there is none, or another program has one of them.
    """
    listeners: list[socket.socket] = []
    absent: OSError | None = None
    with contextlib.ExitStack() as undo:
        try:
            for family, address in _addresses(host, port):
                try:
                    # The port that the first one got serves for all.
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
    """By family, each once. Raises OSError for a host that is not known."""
    bare = host.removeprefix("[").removesuffix("]")
    found = socket.getaddrinfo(bare, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    return dict.fromkeys((family, address) for family, _, _, _, address in found)


def _listener(family: socket.AddressFamily, address: tuple[str | int | bytes, ...]) -> socket.socket:
    both = family == socket.AF_INET6 and address[0] == "::"
    return socket.create_server(address, family=family, backlog=_BACKLOG, dualstack_ipv6=both)


def client_of(connection: socket.socket) -> Peer:
    """From where it was made. Raises OSError."""
    address = connection.getpeername()
    # What gRPC writes is a whole message: to wait for more would only delay it.
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return Peer(uid=None, pid=None, host=_host(connection.family, str(address[0])))


def _host(family: int, address: str) -> str:
    """Who shares one bound: an IPv4 address, or the network of an IPv6 address, which its owner has all of."""
    if family == socket.AF_INET:
        return address
    packed = socket.inet_pton(socket.AF_INET6, address.partition("%")[0])
    if packed.startswith(_MAPPED):
        return socket.inet_ntop(socket.AF_INET, packed[len(_MAPPED) :])
    return socket.inet_ntop(socket.AF_INET6, packed[:_NETWORK_BYTES].ljust(len(packed), b"\0")) + "/64"

"""The peer of a Unix socket as the kernel reports it, and how that reaches gRPC's handlers.

gRPC's Python server does not expose the credentials of its peers, but it does expose the address that a peer has bound
its own end to. The relay binds its end to an abstract name that carries the kernel's answer. Only the relay can reach
the socket that gRPC listens on, so no other process can have such a name there. A client over TCP is known by its
certificate, so its name carries nothing; it only distinguishes connections.
"""

from __future__ import annotations

import functools
import os
import re
import secrets
import socket
import struct
from dataclasses import dataclass
from pathlib import Path

_UCRED = struct.Struct("iII")
"""unix(7): pid_t, uid_t, gid_t."""
_NAME = re.compile(r"unix-abstract:mig-agent\.([0-9]+|none)\.([0-9]+|none)\.(kept|surplus)\.[0-9a-f]{16}", re.ASCII)
_NONCE_BYTES = 8
_MOST_REMEMBERED = 1024
"""Limit of addresses whose peers are remembered: each call of a connection asks for the same one several times."""
_OVERFLOW_UID = 65534
"""proc_sys_kernel(5): the uid that the kernel shows for users without a number here, unless configured otherwise."""


@dataclass(frozen=True, slots=True)
class Peer:
    """The process at the other end of a connection, at the time it connected."""

    uid: int | None
    """None for a user of another user namespace without a number in the agent's: all of those look the same."""
    pid: int | None
    """None for a process of another PID namespace without a number in the agent's."""
    surplus: bool = False
    """Whether its connection is beyond the limit, so that its calls are only refused."""
    host: str = ""
    """The host it connects from over TCP, where neither user nor process is known."""

    @property
    def counted_as(self) -> int | str | None:
        """The key under which its connections are counted: host or user."""
        return self.host or self.uid

    def __str__(self) -> str:
        """Return the peer as the log names it: its host over TCP, otherwise its uid."""
        if self.host:
            return self.host
        return "a user of another namespace" if self.uid is None else f"uid {self.uid}"


def peer_of(connection: socket.socket) -> Peer:
    """Return the process that connected, from SO_PEERCRED. Raises OSError."""
    pid, uid, _ = _UCRED.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    return Peer(uid=None if uid == _overflow_uid() else uid, pid=pid or None)


def bound_name(peer: Peer) -> bytes:
    """Return an abstract address that carries the peer; never the same twice."""
    if peer.host:
        return f"\0mig-agent.tcp.{secrets.token_hex(_NONCE_BYTES)}".encode()
    uid = "none" if peer.uid is None else peer.uid
    pid = "none" if peer.pid is None else peer.pid
    standing = "surplus" if peer.surplus else "kept"
    return f"\0mig-agent.{uid}.{pid}.{standing}.{secrets.token_hex(_NONCE_BYTES)}".encode()


def shown_by_grpc(name: bytes) -> str:
    """Return a bound name as gRPC's `peer()` writes it."""
    return "unix-abstract:" + name.removeprefix(b"\0").decode()


def is_ours(address: str) -> bool:
    """Return True if an address, as gRPC writes it, is one that the relay bound."""
    return address.startswith("unix-abstract:mig-agent.")


@functools.lru_cache(maxsize=_MOST_REMEMBERED)
def peer_from(address: str) -> Peer | None:
    """Return the peer that a bound name carries, as gRPC writes it; None for any other address."""
    match = _NAME.fullmatch(address)
    if match is None:
        return None
    uid, pid = (None if each == "none" else int(each) for each in match.groups()[:2])
    return Peer(uid=uid, pid=pid, surplus=match[3] == "surplus")


@functools.cache
def _overflow_uid() -> int:
    try:
        return int(Path("/proc/sys/kernel/overflowuid").read_text(encoding="ascii"))
    except (OSError, ValueError):
        return _OVERFLOW_UID


def own_uid() -> int:
    """Return the effective uid of this process."""
    return os.geteuid()

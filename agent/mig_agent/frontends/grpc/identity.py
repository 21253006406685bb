"""Who is calling, as the transport knows it: the kernel on a Unix socket, the certificate over TCP.

Which Unix socket was opened decides who is an administrator there; the file's mode decides who can open it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

from mig_agent.adapters.transport.peer_credentials import Peer, peer_from
from mig_agent.core.errors import Reason, RefusedError, refuse
from mig_agent.engine.callers import Caller, Role

_LONGEST_NAME = 256
"""Bytes; as long as any other name that a caller gives. X.520 allows 64 characters."""
_ESCAPED = re.compile(rb"\\(?:([0-9A-Fa-f]{2})|(.))", re.DOTALL)
_ATTRIBUTE = re.compile(rb"((?:[^\\,+]|\\.)+)", re.DOTALL)
"""One of a subject (RFC 2253), `CN=alice`: what could end its value too early is behind a backslash."""
_COMMON_NAME = b"CN="


class Transport(Protocol):
    """What is asked of a gRPC context here."""

    def auth_context(self) -> Mapping[str, Iterable[bytes]]:
        """Properties of the authenticated peer by name; without TLS there is nothing about a certificate."""
        ...

    def peer(self) -> str:
        """The peer's address."""
        ...


def _number(uid: int) -> str:
    return f"uid {uid}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Roles:
    """Who may do what, by the names in certificates and by the users of this machine."""

    admins: frozenset[str] = frozenset()
    """Names in certificates."""
    schedulers: frozenset[str] = frozenset()
    users: frozenset[str] | None = None
    """None: every certificate of the authority, that has no other role."""
    local_schedulers: frozenset[int] = frozenset()
    """Users of this machine, by number, who may act for others on the users' socket."""
    unidentified: Role = Role.USER
    """Of callers of whom the transport tells nothing. There are none behind the agent's own sockets."""
    user_name: Callable[[int], str] = _number
    """What a user of this machine is called."""

    def by_certificate(self, name: str) -> Caller:
        """Raises RefusedError (NOT_PERMITTED) for a name that has no role."""
        admin, scheduler = name in self.admins, name in self.schedulers
        if not (admin or scheduler or self.users is None or name in self.users):
            raise refuse(
                Reason.NOT_PERMITTED,
                f"cannot serve the certificate of {name or 'nobody'}: it has no role here",
                "the administrator can give it one with tls_users, tls_schedulers (the chart's scheduler.names) or "
                "tls_admins",
            )
        return Caller(name=name, admin=admin, scheduler=scheduler)

    def by_kernel(self, peer: Peer, *, admin: bool) -> Caller:
        """A process of this machine."""
        uid = peer.uid
        return Caller(
            name="" if uid is None else self.user_name(uid),
            uid=uid,
            pid=peer.pid,
            admin=admin,
            scheduler=uid in self.local_schedulers,
        )


def caller_of(context: Transport, *, admin: bool, roles: Roles) -> Caller:
    """The caller. `admin` is for the administrators' socket.

    Raises RefusedError for a certificate without a role, and for a connection too many.
    """
    peer = peer_from(context.peer())
    if peer is not None and peer.surplus:
        raise refuse(
            Reason.QUEUE_FULL,
            "cannot serve this connection: as many are open as there may be, in all or of one user",
            "close others, use one connection for many calls, or try again later",
        )
    if peer is not None:
        return roles.by_kernel(peer, admin=admin)
    properties = context.auth_context()
    if properties.get("transport_security_type") == [b"ssl"]:
        name, fault = common_name(properties)
        if fault:
            raise refuse(
                Reason.NOT_PERMITTED,
                f"cannot serve this certificate: {fault}",
                "clients are known by the one common name (CN) in the subject of their certificates",
            )
        return roles.by_certificate(name)
    role = roles.unidentified
    return Caller(admin=admin or role is Role.ADMIN, scheduler=role is Role.SCHEDULER)


def caller_named(context: Transport, *, admin: bool, roles: Roles) -> Caller:
    """The same for the record of who did what: also where that is refused."""
    try:
        return caller_of(context, admin=admin, roles=roles)
    except RefusedError:
        return Caller(name=common_name(context.auth_context())[0])


def common_name(properties: Mapping[str, Iterable[bytes]]) -> tuple[str, str]:
    """Return the common name in a certificate, as gRPC tells of its subject, and why it is no name to go by.

    One of the two is empty. Other names in a certificate (host names, addresses) say where it may be used, not who
    holds it: they give no role. A name with characters that cannot be seen would look like another one's.
    """
    first = next(iter(properties.get("x509_common_name", ())), b"")
    attributes = _ATTRIBUTE.findall(next(iter(properties.get("x509_subject", ())), b""))
    names = [_unescaped(each[len(_COMMON_NAME) :]) for each in attributes if each.startswith(_COMMON_NAME)]
    if not any(names):
        return "", "it has no common name"
    if len(names) > 1:
        return "", "it has several common names"
    if len(names[0]) > _LONGEST_NAME:
        return "", f"its common name is longer than {_LONGEST_NAME} bytes"
    name = names[0].decode(errors="replace")
    # gRPC's own property ends at a NUL: `ops` of `ops\\0.example`. And U+FFFD stands for what is no text.
    if first != names[0] or not name.isprintable() or name != name.strip() or "\ufffd" in name:
        return "", "its common name has characters in it that cannot be seen"
    return name, ""


def _unescaped(value: bytes) -> bytes:
    """Undo what RFC 2253 does to a value."""
    return _ESCAPED.sub(lambda found: bytes.fromhex(found[1].decode()) if found[1] else found[2], value)


def require_admin(caller: Caller, what: str) -> None:
    """Raises RefusedError (NOT_PERMITTED) unless an administrator calls. `what` completes "cannot ..."."""
    if not caller.admin:
        raise refuse(
            Reason.NOT_PERMITTED,
            f"cannot {what}: that is for administrators",
            "use the administrators' socket, which root may open: sudo migctl ...",
        )

"""Authentication: the caller by the kernel's peer credentials on a Unix socket, by the client certificate over TCP.

On Unix sockets, a caller is an administrator if it uses the administrators' socket; the mode of the socket's file
decides who can open it.
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
"""The longest common name, in bytes: as long as any other name that a caller gives. X.520 allows 64 characters."""
_ESCAPED = re.compile(rb"\\(?:([0-9A-Fa-f]{2})|(.))", re.DOTALL)
_ATTRIBUTE = re.compile(rb"((?:[^\\,+]|\\.)+)", re.DOTALL)
"""One attribute of a subject (RFC 2253), `CN=alice`: separators within its value are escaped by a backslash."""
_COMMON_NAME = b"CN="


class Transport(Protocol):
    """The part of a gRPC context that identifies the caller."""

    def auth_context(self) -> Mapping[str, Iterable[bytes]]:
        """Return the properties of the authenticated peer by name; without TLS there are none of a certificate."""
        ...

    def peer(self) -> str:
        """Return the peer's address."""
        ...


def _number(uid: int) -> str:
    return f"uid {uid}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Roles:
    """The configured roles: by common name of a certificate, and by uid of this machine."""

    admins: frozenset[str] = frozenset()
    """Common names of administrators."""
    schedulers: frozenset[str] = frozenset()
    """Common names of schedulers, which may act for others."""
    users: frozenset[str] | None = None
    """Common names of users. None: every certificate of the authority that has no other role."""
    local_schedulers: frozenset[int] = frozenset()
    """The uids on this machine that may act for others on the users' socket."""
    unidentified: Role = Role.USER
    """The role of callers that the transport does not identify. The agent's own sockets have no such callers."""
    user_name: Callable[[int], str] = _number
    """Returns the name of a uid of this machine."""

    def by_certificate(self, name: str) -> Caller:
        """Return the caller with this common name. Raises RefusedError (NOT_PERMITTED) if the name has no role."""
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
        """Return the caller for a process of this machine; `admin`: it uses the administrators' socket."""
        uid = peer.uid
        return Caller(
            name="" if uid is None else self.user_name(uid),
            uid=uid,
            pid=peer.pid,
            admin=admin,
            scheduler=uid in self.local_schedulers,
        )


def caller_of(context: Transport, *, admin: bool, roles: Roles) -> Caller:
    """Return the caller of this call; `admin`: it came over the administrators' socket.

    Raises RefusedError: NOT_PERMITTED for a certificate without a role or without one readable common name, QUEUE_FULL
    for a connection above the limit.
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
    """Return the caller for the audit log: as `caller_of`, but by the common name alone if that refuses the call."""
    try:
        return caller_of(context, admin=admin, roles=roles)
    except RefusedError:
        return Caller(name=common_name(context.auth_context())[0])


def common_name(properties: Mapping[str, Iterable[bytes]]) -> tuple[str, str]:
    """Return the common name in a certificate, by gRPC's properties of its subject, and why it cannot be used.

    One of the two is empty. Other names in a certificate (host names, addresses) say where it may be used, not who
    holds it: they give no role. A name with invisible characters is rejected, since it would look like another name.
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
    """Undo the escaping of RFC 2253 in an attribute's value."""
    return _ESCAPED.sub(lambda found: bytes.fromhex(found[1].decode()) if found[1] else found[2], value)


def require_admin(caller: Caller, what: str) -> None:
    """Raise RefusedError (NOT_PERMITTED) unless the caller is an administrator. `what` completes "cannot ..."."""
    if not caller.admin:
        raise refuse(
            Reason.NOT_PERMITTED,
            f"cannot {what}: that is for administrators",
            "use the administrators' socket, which root may open: sudo migctl ...",
        )

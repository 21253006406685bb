"""Who is calling, as the transport knows it.

gRPC's Python server does not tell the peer's credentials on a Unix socket; which socket was opened is what counts
there, and the file's mode decided that. Over TCP there is no caller without a client certificate.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol

from mig_agent.core.errors import Reason, refuse
from mig_agent.engine.callers import Caller


class Transport(Protocol):
    """What is asked of a gRPC context here."""

    def auth_context(self) -> Mapping[str, Iterable[bytes]]:
        """Properties of the authenticated peer by name; without TLS there is nothing about a certificate."""
        ...


def caller_of(context: Transport, *, admin: bool) -> Caller:
    """The caller: by its certificate's name where it has one, and an administrator on the administrators' socket."""
    properties = context.auth_context()
    for name in ("x509_common_name", "x509_subject_alternative_name"):
        for value in properties.get(name, ()):
            return Caller(name=value.decode("utf-8", "replace"), admin=admin)
    return Caller(admin=admin)


def require_admin(caller: Caller, what: str) -> None:
    """Raises RefusedError (NOT_PERMITTED) unless an administrator calls. `what` completes "cannot ..."."""
    if not caller.admin:
        raise refuse(
            Reason.NOT_PERMITTED,
            f"cannot {what}: that is for administrators",
            "use the administrators' socket, which root may open: sudo migctl ...",
        )

"""Callers: their identity and role, as the transport knows them and never as the request says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from mig_agent.adapters.tokens import Tokens
from mig_agent.core.model import CallerId, Holder, Lease, LeaseId


class Role(StrEnum):
    """The roles of callers; each role may also do what those before it may. The values are in logs and events."""

    USER = "user"
    """Requests leases for itself, and changes those that it holds or has the token of."""
    SCHEDULER = "scheduler"
    """Requests leases for others, under any tenant and name, and sees their requests in full."""
    ADMIN = "admin"
    """Changes any lease, and calls the administration methods."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """The client at the other end of a connection, or a component of the agent itself."""

    name: str = ""
    """The user name, such as `alice`, or the name in the certificate; empty where the transport knows none."""
    uid: int | None = None
    """The uid of the client's process, from the kernel; None where the connection is not a Unix socket."""
    pid: int | None = None
    """The pid of the client's process, from the kernel; None where the connection is not a Unix socket."""
    admin: bool = False
    scheduler: bool = False
    inside: bool = False
    """Whether this is a component of the agent, such as its device plugin; a client whose certificate has the same name
    is another caller."""

    @property
    def role(self) -> Role:
        """The highest role that it has."""
        if self.admin:
            return Role.ADMIN
        return Role.SCHEDULER if self.scheduler else Role.USER

    @property
    def acts_for_others(self) -> bool:
        """True if the tenant and name in its requests are taken as given, since it requests leases for others."""
        return self.admin or self.scheduler

    @property
    def tenant(self) -> str:
        """The tenant of its own leases: its name, else its uid; empty where neither is known."""
        return self.name or ("" if self.uid is None else f"uid {self.uid}")

    @property
    def caller_id(self) -> CallerId:
        """The owner of its request ids: the user or the certificate's name, on any connection and in any role."""
        if self.inside:
            return CallerId(f"inside {self.name}")
        if self.uid is not None:
            return CallerId(f"uid {self.uid}")
        return CallerId(f"name {self.name}" if self.name else "nobody")

    def may_see(self, holder: Holder) -> bool:
        """Return whether it sees this holder's leases and requests in full."""
        return self.acts_for_others or (self.uid is not None and self.uid == holder.uid)

    def facts(self) -> Mapping[str, str | int]:
        """Return what an event records of it: name, role, uid and pid, as far as they are known."""
        known = {"by": str(self), "role": self.role.value, "uid": self.uid, "pid": self.pid}
        return {name: value for name, value in known.items() if value is not None}

    def __str__(self) -> str:
        """Return what messages and events call it."""
        if self.name:
            return self.name
        if self.uid is not None:
            return f"uid {self.uid}"
        return "an administrator" if self.admin else "somebody"


def may_change(tokens: Tokens, lease: LeaseId, known: Lease | None, token: str, caller: Caller) -> bool:
    """Return whether the caller may change a lease: an administrator, its holder, or a caller that has its token.

    A wrong token is refused even for the holder. `known` is the lease as it is remembered, None for one that is not.
    """
    if caller.admin or tokens.matches(lease, token):
        return True
    return not token and known is not None and caller.uid is not None and known.holder.uid == caller.uid

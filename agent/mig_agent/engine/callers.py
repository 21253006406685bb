"""Who is calling, as the transport knows it and never as the request says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from mig_agent.adapters.tokens import Tokens
from mig_agent.core.model import CallerId, Holder, Lease, LeaseId


class Role(StrEnum):
    """What a caller may do; each may do what those before it may. The words are in logs and events."""

    USER = "user"
    """Asks for itself, and changes what it holds itself or has the token of."""
    SCHEDULER = "scheduler"
    """Asks for others, under any tenant and name, and sees their requests in full."""
    ADMIN = "admin"
    """Changes any lease, and what concerns everybody."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """The other end of a connection."""

    name: str = ""
    """`alice`, or the name in a certificate; empty where the transport knows none."""
    uid: int | None = None
    """The kernel's, on a Unix socket."""
    pid: int | None = None
    admin: bool = False
    scheduler: bool = False
    inside: bool = False
    """A part of the agent itself, such as its device plugin: whatever it is called, no certificate is it."""

    @property
    def role(self) -> Role:
        """The highest that it has."""
        if self.admin:
            return Role.ADMIN
        return Role.SCHEDULER if self.scheduler else Role.USER

    @property
    def acts_for_others(self) -> bool:
        """Whether the tenant and the name in its requests count."""
        return self.admin or self.scheduler

    @property
    def tenant(self) -> str:
        """Its own; empty where nothing tells it from others."""
        return self.name or ("" if self.uid is None else f"uid {self.uid}")

    @property
    def asker(self) -> CallerId:
        """Whose its request ids are: the user's or the certificate's, over any connection and in any role."""
        if self.inside:
            return CallerId(f"inside {self.name}")
        if self.uid is not None:
            return CallerId(f"uid {self.uid}")
        return CallerId(f"name {self.name}" if self.name else "nobody")

    def may_see(self, holder: Holder) -> bool:
        """Whether it sees in full what this holder holds or asks for."""
        return self.acts_for_others or (self.uid is not None and self.uid == holder.uid)

    def facts(self) -> Mapping[str, str | int]:
        """For the record of who did what."""
        known = {"by": str(self), "role": self.role.value, "uid": self.uid, "pid": self.pid}
        return {name: value for name, value in known.items() if value is not None}

    def __str__(self) -> str:
        """For messages and the record of who did what."""
        if self.name:
            return self.name
        if self.uid is not None:
            return f"uid {self.uid}"
        return "an administrator" if self.admin else "somebody"


def may_change(tokens: Tokens, lease: LeaseId, known: Lease | None, token: str, caller: Caller) -> bool:
    """Whether the caller may release or renew a lease: an administrator, who has its token, or whose it is."""
    if caller.admin or tokens.matches(lease, token):
        return True
    return not token and known is not None and caller.uid is not None and known.holder.uid == caller.uid

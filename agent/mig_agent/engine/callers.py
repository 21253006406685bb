"""Who is calling, as the transport knows it and never as the request says."""

from __future__ import annotations

from dataclasses import dataclass

from mig_agent.adapters.tokens import Tokens
from mig_agent.core.model import Lease, LeaseId


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """The other end of a connection."""

    name: str = ""
    """`alice`, or the name in a certificate; empty where the transport knows none."""
    uid: int | None = None
    """The kernel's, on a Unix socket."""
    pid: int | None = None
    admin: bool = False

    def __str__(self) -> str:
        """For messages and the record of who did what."""
        if self.name:
            return self.name
        if self.admin:
            return "an administrator"
        return "somebody" if self.uid is None else f"uid {self.uid}"


def may_change(tokens: Tokens, lease: LeaseId, known: Lease | None, token: str, caller: Caller) -> bool:
    """Whether the caller may release or renew a lease: an administrator, who has its token, or whose it is."""
    if caller.admin or tokens.matches(lease, token):
        return True
    return not token and known is not None and caller.uid is not None and known.holder.uid == caller.uid

"""What a node's administrator may set about planning."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

from mig_agent.core.model import Instance, Request


class Reuse(StrEnum):
    """Whose idle instances may serve a request as they are. The words are in the settings."""

    ANY = "any"
    SAME_TENANT = "same-tenant"
    """Those that the same tenant held last, and those that nobody has held."""
    NEVER = "never"
    """Only those that nobody has held."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """How plans are weighed. Costs are in units of remaining capacity: memory slices summed over free windows."""

    creation_cost: float = 2.0
    """What creating an instance costs against reusing an idle one; towards 8 where creating is slow."""
    search_limit: int = 1000
    """How many GPUs are looked at, again and again, to better a plan of several devices. It bounds optimising, never
    whether a plan is found."""
    reuse: Reuse = Reuse.ANY
    tenant: str = ""
    """Who asks; `of` sets it."""

    def of(self, request: Request) -> Policy:
        """The policy for this request."""
        return self if self.reuse is Reuse.ANY else replace(self, tenant=request.holder.tenant)

    def may_reuse(self, idle: Instance) -> bool:
        """Whether an idle instance may serve as it is; if not, it may only be destroyed to make room."""
        if self.reuse is Reuse.ANY or idle.last_tenant is None:
            return True
        if idle.slot.profile.is_whole_gpu:
            return True  # it cannot be made anew, and would serve nobody ever again
        return self.reuse is Reuse.SAME_TENANT and idle.last_tenant != "" and idle.last_tenant == self.tenant


DEFAULT_POLICY = Policy()

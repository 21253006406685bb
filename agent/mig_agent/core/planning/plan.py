"""Plans as values: the steps that would serve a request, the policy they are weighed by, and how long they take."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

from mig_agent.core.errors import Refusal
from mig_agent.core.model import GpuUuid, Instance, Request, Slot

COST_IN_SCORE = 1e-3
"""Wasted memory, in MiB, is compared first; the policy's cost decides between plans that waste the same."""


@dataclass(frozen=True, slots=True)
class ReuseInstance:
    """Reuse an idle instance as it is, without a driver call that changes anything."""

    instance: Instance

    def describe(self) -> str:
        """Return the line that a dry run prints."""
        return f"reuse {self.instance.slot} ({self.instance.uuid})"


@dataclass(frozen=True, slots=True)
class DestroyInstance:
    """Destroy an idle instance that is in the way."""

    instance: Instance

    def describe(self) -> str:
        """Return the line that a dry run prints."""
        return f"destroy idle {self.instance.slot} ({self.instance.uuid})"


@dataclass(frozen=True, slots=True)
class CreateInstance:
    """Create a GPU instance and its one compute instance at an explicit placement."""

    slot: Slot

    def describe(self) -> str:
        """Return the line that a dry run prints."""
        return f"create {self.slot}"


Step = ReuseInstance | DestroyInstance | CreateInstance


@dataclass(frozen=True, slots=True, kw_only=True)
class DevicePlan:
    """How one wanted device is served. `serve` yields it; `victims` are destroyed before, on the same GPU."""

    gpu: GpuUuid
    serve: ReuseInstance | CreateInstance
    victims: tuple[DestroyInstance, ...] = ()

    @property
    def slot(self) -> Slot:
        """The slot of the device, existing or to be created."""
        return self.serve.instance.slot if isinstance(self.serve, ReuseInstance) else self.serve.slot


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A way to serve a request, one DevicePlan for each want and in the same order. No step is named twice."""

    devices: tuple[DevicePlan, ...]
    wasted_mib: float
    """Memory beyond what is wanted, in MiB; 0 if no amount was named."""
    cost: float
    """The policy's cost: capacity that is lost, and creating."""
    creation_cost: float
    """The part of `cost` that is for creating and destroying; 0 if all is reused."""
    notes: tuple[str, ...] = ()
    """Hints for people, such as a near miss: `10Gi costs two slices here, 9.5Gi one`."""

    @property
    def score(self) -> float:
        """Lower is better; comparable between nodes and GPU models."""
        return self.wasted_mib + COST_IN_SCORE * self.cost

    @property
    def capacity_lost(self) -> float:
        """The part of `cost` for windows that were free and no longer are: their sizes in slices, summed."""
        return self.cost - self.creation_cost

    @property
    def steps(self) -> tuple[Step, ...]:
        """The steps in an order in which they can be executed: on each GPU victims before what needs their slices."""
        destroys: list[Step] = [victim for device in self.devices for victim in device.victims]
        return (*destroys, *(device.serve for device in self.devices))


Outcome = Plan | Refusal


class Reuse(StrEnum):
    """Says by their last tenant which idle instances may be reused as they are. The values are in the settings."""

    ANY = "any"
    SAME_TENANT = "same-tenant"
    """Those that the same tenant held last, and those that were never leased."""
    NEVER = "never"
    """Only those that were never leased."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """How plans are weighed. Costs are in units of remaining capacity: memory slices summed over free windows."""

    creation_cost: float = 2.0
    """The cost of creating an instance rather than reusing an idle one; towards 8 where creating is slow."""
    search_limit: int = 1000
    """How many GPUs the search may examine, repeats counted, to improve a plan of several devices.

    It bounds optimising, never whether a plan is found.
    """
    reuse: Reuse = Reuse.ANY
    tenant: str = ""
    """The tenant of the request; set by `of`."""

    def of(self, request: Request) -> Policy:
        """Return the policy for this request."""
        return self if self.reuse is Reuse.ANY else replace(self, tenant=request.holder.tenant)

    def may_reuse(self, idle: Instance) -> bool:
        """Return True if an idle instance may serve as it is; if False, it may only be destroyed to free its slices."""
        if self.reuse is Reuse.ANY or idle.last_tenant is None:
            return True
        if not idle.kind.is_created:
            return True  # it could not be created again, so its capacity would be lost
        return self.reuse is Reuse.SAME_TENANT and idle.last_tenant != "" and idle.last_tenant == self.tenant


DEFAULT_POLICY = Policy()


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """Mean durations of driver steps, in seconds."""

    create: float
    """Creating a GPU instance with its compute instance."""
    destroy: float


def expected_seconds(plan: Plan, times: StepTimes) -> float:
    """Return how many seconds the driver needs for a plan: 0 where all is reused.

    GPUs work in parallel, each step by step.
    """
    seconds: dict[GpuUuid, float] = {}
    for device in plan.devices:
        if isinstance(device.serve, CreateInstance):
            taken = times.create + times.destroy * len(device.victims)
            seconds[device.gpu] = seconds.get(device.gpu, 0.0) + taken
    return max(seconds.values(), default=0.0)

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
    """Take an idle instance as it is; no call to the driver that changes anything."""

    instance: Instance

    def describe(self) -> str:
        """As a dry run prints it."""
        return f"reuse {self.instance.slot} ({self.instance.uuid})"


@dataclass(frozen=True, slots=True)
class DestroyInstance:
    """Destroy an idle instance that is in the way."""

    instance: Instance

    def describe(self) -> str:
        """As a dry run prints it."""
        return f"destroy idle {self.instance.slot} ({self.instance.uuid})"


@dataclass(frozen=True, slots=True)
class CreateInstance:
    """Create a GPU instance and its one compute instance at an explicit placement."""

    slot: Slot

    def describe(self) -> str:
        """As a dry run prints it."""
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
        """Where the device stands or will stand."""
        return self.serve.instance.slot if isinstance(self.serve, ReuseInstance) else self.serve.slot


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A way to serve a request, one DevicePlan for each want and in the same order. No step is named twice."""

    devices: tuple[DevicePlan, ...]
    wasted_mib: float
    """Memory beyond what is wanted; 0 where no amount was named."""
    cost: float
    """Of the policy: capacity that is lost, and creating."""
    creation_cost: float
    """The part of `cost` that is for creating and destroying; 0 where all is reused."""
    notes: tuple[str, ...] = ()
    """For the person, such as a near miss: `10Gi costs two slices here, 9.5Gi one`."""

    @property
    def score(self) -> float:
        """Lower is better; comparable between nodes and GPU models."""
        return self.wasted_mib + COST_IN_SCORE * self.cost

    @property
    def capacity_lost(self) -> float:
        """The part of `cost` that is for what can be placed no more: slices, summed over the windows that were free."""
        return self.cost - self.creation_cost

    @property
    def steps(self) -> tuple[Step, ...]:
        """In an order in which they can be executed: on each GPU victims before what needs their slices."""
        destroys: list[Step] = [victim for device in self.devices for victim in device.victims]
        return (*destroys, *(device.serve for device in self.devices))


Outcome = Plan | Refusal


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
        if not idle.kind.is_created:
            return True  # it cannot be made anew, and would serve nobody ever again
        return self.reuse is Reuse.SAME_TENANT and idle.last_tenant != "" and idle.last_tenant == self.tenant


DEFAULT_POLICY = Policy()


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """Means, in seconds."""

    create: float
    """For a GPU instance with its compute instance."""
    destroy: float


def expected_seconds(plan: Plan, pace: StepTimes) -> float:
    """How long the driver will take over a plan: 0 where all is reused. GPUs work side by side, each step by step."""
    seconds: dict[GpuUuid, float] = {}
    for device in plan.devices:
        if isinstance(device.serve, CreateInstance):
            taken = pace.create + pace.destroy * len(device.victims)
            seconds[device.gpu] = seconds.get(device.gpu, 0.0) + taken
    return max(seconds.values(), default=0.0)

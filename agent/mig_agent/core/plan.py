"""What the planner answers: a Plan made of steps that are values, or a Refusal."""

from __future__ import annotations

from dataclasses import dataclass

from mig_agent.core.errors import Refusal
from mig_agent.core.model import GpuUuid, Instance, Slot

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

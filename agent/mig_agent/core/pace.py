"""How long a plan will take, by how long the driver takes on this node."""

from __future__ import annotations

from dataclasses import dataclass

from mig_agent.core.model import GpuUuid
from mig_agent.core.plan import CreateInstance, Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """Means, in seconds."""

    create: float
    """For a GPU instance with its compute instance."""
    destroy: float


def expected_seconds(plan: Plan, pace: Pace) -> float:
    """How long the driver will take over a plan: 0 where all is reused. GPUs work side by side, each step by step."""
    seconds: dict[GpuUuid, float] = {}
    for device in plan.devices:
        if isinstance(device.serve, CreateInstance):
            taken = pace.create + pace.destroy * len(device.victims)
            seconds[device.gpu] = seconds.get(device.gpu, 0.0) + taken
    return max(seconds.values(), default=0.0)

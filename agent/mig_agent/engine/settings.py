"""What of the configuration concerns the engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """Durations are seconds."""

    node: str = "localhost"
    """The name of this node, as status shows it."""
    gpus: tuple[str, ...] = ()
    """The GPUs to manage, each by index or UUID; empty: all."""
    creation_cost: float = 2.0
    """What creating an instance costs against reusing an idle one (`core.planning.plan`)."""
    strict_fifo: bool = False
    """Whether only the first in the queue may start."""
    reservation_after_seconds: float | None = None
    """How long a request waits before it keeps GPUs from those behind it; None: by how long leases last."""
    idle_limit_seconds: float | None = None
    """After so long an idle instance is destroyed; None: never."""
    foreign: Literal["respect", "adopt"] = "respect"
    """What is done with instances that somebody else made: leave them alone, or take idle ones over."""
    reuse: Literal["any", "same-tenant", "never"] = "any"
    """Whose idle instances may serve whom (`core.planning.plan`)."""
    max_waiting: int = 1000
    """Requests that may wait at once."""
    reread_seconds: float = 30.0
    """Between two comparisons of ledger and hardware."""
    call_deadline_seconds: float = 30.0
    """How long a call of the driver may take before its GPU is cordoned."""
    grace_seconds: float = 60.0
    """How long a lease lives that its client has not confirmed, or whose stream the agent ended."""
    follows_pods: bool = False
    """Whether the kubelet is asked which pods there are: then their leases end with them, and by nobody else."""
    listen_to_driver: bool = True
    """Whether changes by others are heard of at once, where the driver tells; else the slow look finds them."""
    request_memory_hours: float = 24.0
    """How long after a lease's end its request id is remembered."""
    check_threads: bool = False
    """Whether using the engine off the event loop fails (`engine.loopbound`): for tests, since it costs time."""

"""What the parts of the engine share: made once by `start_manager`, handed to each of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Protocol

from mig_agent.adapters.clock import Clock
from mig_agent.adapters.host import Host
from mig_agent.adapters.nvml import Driver
from mig_agent.adapters.threads import CallThread
from mig_agent.adapters.tokens import Tokens
from mig_agent.core.backfill import MeanLeaseTime
from mig_agent.core.catalog import Catalog
from mig_agent.core.errors import Reason, Refusal, refuse
from mig_agent.core.model import Generation, GpuUuid, Instance, Request
from mig_agent.core.planning.plan import Outcome, Policy
from mig_agent.engine.events import Events
from mig_agent.engine.gate import Gate
from mig_agent.engine.journal import Journal
from mig_agent.engine.lanes import Lane
from mig_agent.engine.pace import Timing
from mig_agent.engine.settings import EngineSettings
from mig_agent.engine.state import GpuRecord, State
from mig_agent.engine.tasks import Tasks
from mig_agent.engine.turns import Turns


class Telemetry(Protocol):
    """Hears how long things take, in seconds; what happens is told by events."""

    def planned(self, seconds: float) -> None:
        """One run of the planner."""

    def acquired(self, seconds: float, outcome: str) -> None:
        """One request from its arrival to its answer: `reused`, `created`, or the reason of the refusal."""


class NoTelemetry:
    """For those who do not measure."""

    def planned(self, seconds: float) -> None:
        """Not kept."""

    def acquired(self, seconds: float, outcome: str) -> None:
        """Not kept."""


@dataclass(slots=True, kw_only=True)
class Context:
    """Belongs to the event loop."""

    driver: Driver
    host: Host
    catalog: Catalog
    clock: Clock
    settings: EngineSettings
    policy: Policy
    tokens: Tokens
    telemetry: Telemetry
    state: State
    events: Events
    journal: Journal
    tasks: Tasks
    patience: MeanLeaseTime
    aside: CallThread
    """For calls that belong to no GPU: reading events, looking at processes."""
    gate: Gate = field(default_factory=Gate)
    turns: Turns = field(default_factory=Turns)
    """For planning what takes long: several devices in one request, or many requests."""
    timing: Timing = field(default_factory=Timing)
    lanes: dict[GpuUuid, Lane] = field(default_factory=dict)
    never_made: set[Generation] = field(default_factory=set)
    """Instances whose creation failed for certain: what stands in their place is somebody else's."""
    missing: dict[int, str] = field(default_factory=dict)
    """GPUs that have not answered since the start, by index, and why."""
    closing: bool = False
    freed: Callable[[], None] = lambda: None
    """To be called when something was freed, so that a waiting request may start."""
    also_freed: Callable[[], None] = lambda: None
    """Called then as well."""

    @property
    def reservation_after_seconds(self) -> float:
        """How long a request waits, as things are now, before it keeps GPUs from those behind it."""
        configured = self.settings.reservation_after_seconds
        return self.patience.bounded_limit_seconds if configured is None else configured

    def with_changes(self, outcome: Outcome, request: Request) -> Outcome:
        """An answer of the planner; a refusal because of the revision also says what has changed since then."""
        if request.if_revision is None or not isinstance(outcome, Refusal):
            return outcome
        if outcome.reason is not Reason.REVISION_CHANGED:
            return outcome
        return replace(outcome, changed=self.events.changed_since(request.if_revision, self.state.revision))

    def place(self, instance: Instance) -> str:
        """An instance in messages: `1g.10gb on slices 0-1 of GPU 0`."""
        record = self.state.gpus.get(instance.slot.gpu)
        gpu = f"GPU {record.index if record is not None else instance.slot.gpu}"
        return gpu if instance.slot.profile.is_whole_gpu else f"{instance.slot} of {gpu}"

    async def processes(self, instance: Instance) -> tuple[str, ...]:
        """The processes on an instance, in words: `python train.py (pid 4711)`. Raises DriverError."""
        gpu, gi = instance.slot.gpu, instance.gpu_instance_id

        def look() -> tuple[str, ...]:
            return tuple(self.host.describe_process(each.pid) for each in self.driver.processes(gpu, gi))

        return await self.lanes[gpu].read(f"look who is on {instance.slot}", look)

    async def users(self, instance: Instance) -> tuple[str, ...]:
        """The processes on an instance; where there are none, those that hold it open. Raises DriverError."""
        gpu, gi = instance.slot.gpu, instance.gpu_instance_id
        minor = self.state.gpus[gpu].minor

        def look() -> tuple[str, ...]:
            pids = [process.pid for process in self.driver.processes(gpu, gi)]
            if pids:
                return tuple(self.host.describe_process(pid) for pid in pids)
            if minor is None or gi is None:
                return ()
            return tuple(str(process) for process in self.host.holders(minor, gi))

        return await self.lanes[gpu].read(f"look who uses {instance.slot}", look)

    def gpu_named(self, name: str) -> GpuRecord:
        """A managed GPU by index or UUID. Raises RefusedError."""
        for record in self.state.gpus.values():
            if name in {str(record.index), record.uuid}:
                return record
        there = ", ".join(str(record.index) for record in self.state.gpus.values()) or "none"
        raise refuse(
            Reason.UNKNOWN_GPU,
            f"cannot find GPU {name}",
            f"this agent manages {there} by index; a UUID, GPU-..., names one too",
        )

    def refuse_when_closing(self) -> None:
        """Raises RefusedError when the agent is stopping."""
        if self.closing:
            raise refuse(
                Reason.SHUTTING_DOWN,
                "cannot serve new requests: the agent is shutting down",
                "try again when it is back; leases stay",
            )

"""What the parts of the engine share: settings, clock, driver, state, and who is using the driver."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol

from mig_agent.adapters.clock import Clock
from mig_agent.adapters.devices import DeviceBackend
from mig_agent.adapters.host import Host
from mig_agent.adapters.nvml import Driver
from mig_agent.adapters.threads import CallThread
from mig_agent.adapters.tokens import Tokens
from mig_agent.core.backfill import MeanLeaseTime
from mig_agent.core.catalog import Catalog
from mig_agent.core.errors import Reason, Refusal, RefusedError, refuse
from mig_agent.core.model import DeviceKind, Generation, GpuUuid, Instance, Request
from mig_agent.core.planning.plan import Outcome, Policy
from mig_agent.engine.events import Events
from mig_agent.engine.gpu_worker import GpuWorker, StepTimer
from mig_agent.engine.journal import Journal
from mig_agent.engine.state import GpuRecord, State
from mig_agent.engine.tasks import Fairness, Tasks


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
    """Whether using the engine off the event loop fails (`engine.thread_check`): for tests, since it costs time."""


class DriverUse:
    """Counts the current users of the driver.

    Not thread-safe; use from the event loop. Whatever uses the driver does so inside; a part of it may go inside again.
    """

    def __init__(self) -> None:
        self.paused: tuple[str, ...] = ()
        """Why it is closed, in words; empty while it is open."""
        self._inside = 0
        self._empty = asyncio.Event()
        self._empty.set()

    def enter(self) -> None:
        """Begins to use the driver; `leave` ends it."""
        self._inside += 1
        self._empty.clear()

    def leave(self) -> None:
        """Ends what `enter` began."""
        self._inside -= 1
        if not self._inside:
            self._empty.set()

    @contextmanager
    def inside(self) -> Iterator[None]:
        """While the driver is used."""
        self.enter()
        try:
            yield
        finally:
            self.leave()

    async def empty(self) -> None:
        """Returns when nobody is inside."""
        await self._empty.wait()

    def refusal(self, what: str) -> Refusal:
        """Why it is not done while the agent is paused; `what` completes "cannot ..."."""
        return Refusal(
            reason=Reason.PAUSED,
            message=f"cannot {what}: the agent is paused ({'; '.join(self.paused)})",
            hint="leases stay; ask again when it goes on, `migctl status` shows it",
        )

    def refuse_when_paused(self, what: str) -> None:
        """Raises RefusedError (PAUSED) while it is closed; `what` completes "cannot ..."."""
        if self.paused:
            raise RefusedError(self.refusal(what))


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
    """Holds what the parts of the engine share. Not thread-safe; use from the event loop."""

    driver: Driver
    """For whole GPUs: their number, mode, layout and what is on them."""
    backends: Mapping[DeviceKind, DeviceBackend]
    """For devices, each by its kind."""
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
    gate: DriverUse = field(default_factory=DriverUse)
    turns: Fairness = field(default_factory=Fairness)
    """For planning what takes long: several devices in one request, or many requests."""
    timing: StepTimer = field(default_factory=StepTimer)
    lanes: dict[GpuUuid, GpuWorker] = field(default_factory=dict)
    never_made: set[Generation] = field(default_factory=set)
    """Instances whose creation failed for certain: what stands in their place is somebody else's."""
    missing: dict[int, str] = field(default_factory=dict)
    """GPUs that have not answered since the start, by index, and why."""
    closing: bool = False

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
        return gpu if instance.kind.takes_whole_gpu else f"{instance.slot} of {gpu}"

    async def processes(self, instance: Instance) -> tuple[str, ...]:
        """The processes on an instance, in words: `python train.py (pid 4711)`. Raises DriverError."""
        backend = self.backends[instance.kind]

        def look() -> tuple[str, ...]:
            return tuple(self.host.describe_process(each.pid) for each in backend.processes(instance))

        return await self.lanes[instance.slot.gpu].read(f"look who is on {instance.slot}", look)

    async def users(self, instance: Instance) -> tuple[str, ...]:
        """The processes on an instance; where there are none, those that hold it open. Raises DriverError."""
        gpu, backend = instance.slot.gpu, self.backends[instance.kind]
        minor = self.state.gpus[gpu].minor

        def look() -> tuple[str, ...]:
            found = backend.processes(instance)
            if found:
                return tuple(self.host.describe_process(process.pid) for process in found)
            return tuple(map(str, backend.holders(instance, minor)))

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

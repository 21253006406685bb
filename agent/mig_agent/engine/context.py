"""What the parts of the engine share: settings, clock, driver, state, and who is using the driver."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Final, Literal, Protocol

from mig_agent.adapters.clock import Clock
from mig_agent.adapters.device_backends import DeviceBackend, share_of
from mig_agent.adapters.host import Host
from mig_agent.adapters.nvml import Driver
from mig_agent.adapters.shares.enforcer import Share
from mig_agent.adapters.shares.survey import ShareSurvey
from mig_agent.adapters.threads import CallThread
from mig_agent.adapters.tokens import Tokens
from mig_agent.core.backfill import delay_for
from mig_agent.core.catalog import Catalog
from mig_agent.core.errors import DriverError, DriverErrorKind, Reason, Refusal, RefusedError, refuse
from mig_agent.core.limits import NO_LIMITS, UsageLimits
from mig_agent.core.load_history import LeaseTimes, RecentRequests
from mig_agent.core.model import DeviceKind, Generation, GpuUuid, Instance, Isolation, Request
from mig_agent.core.observation import ComputeReading, ObservedGpu, ObservedSharing, ProcessUsage
from mig_agent.core.planning.plan import Outcome, Policy
from mig_agent.core.shares import WAYS, Enforcement, Fractions, ShareRules
from mig_agent.engine.accounting import Accounting
from mig_agent.engine.event_bus import Events
from mig_agent.engine.gpu_worker import GpuWorker, StepTimer
from mig_agent.engine.journal import Journal
from mig_agent.engine.state import GpuRecord, State
from mig_agent.engine.tasks import Fairness, Tasks


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """The engine's settings. Durations are in seconds, except where they say hours."""

    node: str = "localhost"
    """The name of this node, as status shows it."""
    gpus: tuple[str, ...] = ()
    """The GPUs to manage, each by index or UUID; empty: all."""
    creation_cost: float = 2.0
    """What creating an instance costs against reusing an idle one (`core.planning.plan`)."""
    strict_fifo: bool = False
    """Whether only the first in the queue may start."""
    reservation_after_seconds: float | None = None
    """The reservation delay: after such a wait GPUs are reserved for a request; None: the mean lease time."""
    idle_limit_seconds: float | None = None
    """How long an instance may be idle before it is destroyed; None: for ever."""
    foreign: Literal["respect", "adopt"] = "respect"
    """What is done with foreign instances: they are left alone, or those that are not in use are taken over."""
    reuse: Literal["any", "same-tenant", "never"] = "any"
    """Whose idle instances may serve whom (`core.planning.plan`)."""
    isolation: Isolation = Isolation.ANY
    """The isolation of requests that name none."""
    fractions: Fractions = Fractions.AUTO
    """The ways in which GPUs without MIG mode may be shared."""
    fractions_by_gpu: Mapping[str, Fractions] = field(default_factory=lambda: MappingProxyType({}))
    """The same for single GPUs, each by index or UUID."""
    share_headroom_mib: int = 512
    """Memory of each shared GPU that stays free, beside what the driver reserves."""
    least_share_mib: int = 1024
    """The smallest memory limit of a share."""
    max_waiting: int = 1000
    """How many requests may wait at once."""
    limits: UsageLimits = NO_LIMITS
    """What each user and each tenant may hold, wait for and ask for; read at each use, so that it can be replaced."""
    fair_share_half_life_seconds: float | None = None
    """After this time what a tenant used counts half in the order of the queue; None: first come within a priority."""
    idle_after_seconds: float = 3600.0
    """After this time without a process on its devices a lease counts as idle."""
    end_idle_after_seconds: float | None = None
    """After this time without a process on its devices a lease ends; None: never."""
    reread_seconds: float = 30.0
    """The pause between two comparisons of the ledger with the hardware."""
    call_deadline_seconds: float = 30.0
    """How long a driver call may take before its GPU is cordoned."""
    grace_seconds: float = 60.0
    """How long a lease survives that its client has not confirmed, or whose stream did not end by its client."""
    follows_pods: bool = False
    """Whether the agent follows the node's pods: then a bound lease ends with its pod alone, or by force."""
    listen_to_driver: bool = True
    """Whether the driver's events are used to find changes by others at once; without them the timer finds them."""
    sample_usage_seconds: float | None = 30.0
    """Interval at which the memory in use on leased devices is read, for their peaks; None: never."""
    keep_accounting_seconds: float = 400 * 86_400.0
    """Time for which accounting keeps a lease that has ended."""
    request_memory_hours: float = 24.0
    """How long after a lease's end its request id is remembered."""
    check_threads: bool = False
    """Whether using the engine off the event loop fails (`engine.thread_check`): for tests, since it takes time."""

    def share_rules(self, index: int, uuid: GpuUuid) -> ShareRules:
        """Return the rules for sharing one GPU."""
        by_gpu = self.fractions_by_gpu
        fractions = by_gpu.get(uuid, by_gpu.get(str(index), self.fractions))
        return ShareRules(ways=WAYS[fractions], headroom_mib=self.share_headroom_mib, least_mib=self.least_share_mib)


FIXED_SETTINGS: Final = (
    "node",
    "gpus",
    "call_deadline_seconds",
    "fair_share_half_life_seconds",
    "follows_pods",
    "listen_to_driver",
    "sample_usage_seconds",
    "check_threads",
)
"""Settings that are used while the engine is constructed, and so cannot change while it runs."""


class DriverUse:
    """Counts driver operations in progress, so that a pause can wait until there are none.

    Not thread-safe; use from the event loop. Every operation that uses the driver is counted; a step of it may be
    counted again.
    """

    def __init__(self) -> None:
        self.paused: tuple[str, ...] = ()
        """The reasons for which the agent is paused; empty while it serves."""
        self._inside = 0
        self._empty = asyncio.Event()
        self._empty.set()

    def enter(self) -> None:
        """Count the beginning of a driver operation; `leave` counts its end."""
        self._inside += 1
        self._empty.clear()

    def leave(self) -> None:
        """Count the end of a driver operation."""
        self._inside -= 1
        if not self._inside:
            self._empty.set()

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Count a driver operation for as long as the context lasts."""
        self.enter()
        try:
            yield
        finally:
            self.leave()

    async def empty(self) -> None:
        """Wait until no driver operation is in progress."""
        await self._empty.wait()

    def refusal(self, what: str) -> Refusal:
        """Return the refusal of a call while the agent is paused; `what` completes "cannot ..."."""
        return Refusal(
            reason=Reason.PAUSED,
            message=f"cannot {what}: the agent is paused ({'; '.join(self.paused)})",
            hint="leases stay; ask again when it goes on, `migctl status` shows it",
        )

    def refuse_when_paused(self, what: str) -> None:
        """Raise RefusedError (PAUSED) while the agent is paused; `what` completes "cannot ..."."""
        if self.paused:
            raise RefusedError(self.refusal(what))


class Telemetry(Protocol):
    """Measures how long requests and plans take, in seconds; all else is reported by events."""

    def planned(self, seconds: float) -> None:
        """Count one run of the planner."""

    def acquired(self, seconds: float, outcome: str) -> None:
        """Count one answered request and the time since its arrival.

        `outcome` is `reused`, `created`, or the reason of the refusal.
        """


class NoTelemetry:
    """Measures nothing."""

    def planned(self, seconds: float) -> None:
        """Do nothing."""

    def acquired(self, seconds: float, outcome: str) -> None:
        """Do nothing."""


@dataclass(slots=True, kw_only=True)
class Context:
    """Holds what the components of the engine share. Not thread-safe; use from the event loop."""

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
    lease_times: LeaseTimes
    recent_requests: RecentRequests
    accounting: Accounting
    blocking_calls: CallThread
    """The thread for blocking calls that belong to no GPU, such as reading events from the ledger."""
    share_survey: ShareSurvey
    """Finds out how GPUs without MIG mode can be shared."""
    driver_use: DriverUse = field(default_factory=DriverUse)
    fairness: Fairness = field(default_factory=Fairness)
    """Turns for plans that take long: of several devices in one request, or of many requests."""
    step_timer: StepTimer = field(default_factory=StepTimer)
    gpu_workers: dict[GpuUuid, GpuWorker] = field(default_factory=dict)
    never_made: set[Generation] = field(default_factory=set)
    """Instances whose creation has certainly failed: what exists in their placements was created by others."""
    missing: dict[int, str] = field(default_factory=dict)
    """The error of each GPU that has not answered since the start, by index."""
    compute_readings: Mapping[Generation, ComputeReading] = field(default_factory=dict)
    """Compute use of each instance at the last reading; replaced as a whole."""
    closing: bool = False

    @property
    def reservation_after_seconds(self) -> float:
        """The reservation delay now, in seconds: as configured, or by the mean lease time."""
        configured = self.settings.reservation_after_seconds
        return delay_for(self.lease_times.mean) if configured is None else configured

    def as_configured(self, request: Request) -> Request:
        """Return a request whose wants name the isolation that holds for them, and whether a process is handed over.

        Pods get no shares: nothing brings what enforces the limit into their containers.
        """
        if not self._hands_over(request):
            request = replace(request, wants=tuple(replace(each, has_process=False) for each in request.wants))
        isolation = Isolation.MIG if request.owner.runs_in_containers else self.settings.isolation
        if isolation is Isolation.ANY or all(each.isolation is Isolation.MIG for each in request.wants):
            return request
        wants = (
            replace(each, isolation=isolation) if each.isolation is None or request.owner.runs_in_containers else each
            for each in request.wants
        )
        return replace(request, wants=tuple(wants))

    def _hands_over(self, request: Request) -> bool:
        """Return True if the request names a process that its client has started, and that will use the devices.

        Any other process only says how long the lease lasts: a share ends its processes when it ends.
        """
        process, holder = request.owner.process, request.holder
        if process is None or holder.pid is None or holder.uid is None:
            return False
        return self.host.is_clients_child(process.pid, holder.pid, holder.uid)

    def with_sharing(self, observed: ObservedGpu, shares: Sequence[Instance] = ()) -> ObservedGpu:
        """Return a reading of a GPU with how it can be shared; blocking, on the thread that read it.

        `shares` are the leased ones on it. Raises DriverError where the GPU is lost; after other errors there are no
        new shares, and the GPU goes on without.
        """
        if observed.mode.current:
            return observed
        rules = self.settings.share_rules(observed.index, observed.uuid)
        try:
            sharing = self.share_survey.look(observed, _enforced(shares), rules)
        except DriverError as error:
            if error.kind is DriverErrorKind.GPU_LOST:
                raise
            sharing = ObservedSharing(terms=None, why_not=str(error), users={each.generation: () for each in shares})
        return replace(observed, sharing=sharing)

    def share_users(
        self, gpu: GpuUuid, shares: Sequence[Instance]
    ) -> tuple[Mapping[Generation, tuple[ProcessUsage, ...]], tuple[ProcessUsage, ...]]:
        """Return the processes that use each leased share of a GPU, and those that use none; blocking.

        May raise DriverError.
        """
        return self.share_survey.users(gpu, _enforced(shares))

    def with_changes(self, outcome: Outcome, request: Request) -> Outcome:
        """Return a plan or refusal; one because of the revision gets what has changed since then added."""
        if request.if_revision is None or not isinstance(outcome, Refusal):
            return outcome
        if outcome.reason is not Reason.REVISION_CHANGED:
            return outcome
        return replace(outcome, changed=self.events.changed_since(request.if_revision, self.state.revision))

    def place(self, instance: Instance) -> str:
        """Return what messages call an instance: `1g.10gb on slices 0-1 of GPU 0`."""
        record = self.state.gpus.get(instance.slot.gpu)
        gpu = f"GPU {record.index if record is not None else instance.slot.gpu}"
        return gpu if instance.kind.takes_whole_gpu else f"{instance.slot} of {gpu}"

    async def processes(self, instance: Instance) -> tuple[str, ...]:
        """Return the processes on an instance, such as `python train.py (pid 4711)`. Raises DriverError."""
        backend = self.backends[instance.kind]

        def look() -> tuple[str, ...]:
            return tuple(self.host.describe_process(each.pid) for each in backend.processes(instance))

        return await self.gpu_workers[instance.slot.gpu].read(f"look who is on {instance.slot}", look)

    async def users(self, instance: Instance) -> tuple[str, ...]:
        """Return the processes on an instance; if there are none, those that hold it open. Raises DriverError."""
        gpu, backend = instance.slot.gpu, self.backends[instance.kind]
        minor = self.state.gpus[gpu].minor

        def look() -> tuple[str, ...]:
            found = backend.processes(instance)
            if found:
                return tuple(self.host.describe_process(process.pid) for process in found)
            return tuple(map(str, backend.holders(instance, minor)))

        return await self.gpu_workers[gpu].read(f"look who uses {instance.slot}", look)

    def gpu_named(self, name: str) -> GpuRecord:
        """Return a managed GPU by index or UUID. Raises RefusedError (UNKNOWN_GPU)."""
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
        """Raise RefusedError (SHUTTING_DOWN) when the agent is stopping."""
        if self.closing:
            raise refuse(
                Reason.SHUTTING_DOWN,
                "cannot serve new requests: the agent is shutting down",
                "try again when it is back; leases stay",
            )


def _enforced(shares: Sequence[Instance]) -> list[tuple[Share, Enforcement | None]]:
    return [(share_of(each), each.enforced_by) for each in shares]

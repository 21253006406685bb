"""The agent's answers as frozen, typed values.

Memory is in MiB, placements are in memory slices, times are seconds since the Unix epoch. None: unknown or absent.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from mig_agent.core.errors import Blocker
from mig_agent.core.quantities import format_mib

SHARE = "share"
"""The kind of a device that is a share of a GPU without MIG mode."""


def _label(kind: str, profile: str, memory_mib: int) -> str:
    return f"share {format_mib(memory_mib)}" if kind == SHARE else profile


@dataclass(frozen=True, slots=True)
class Placement:
    """A window on a GPU's memory-slice axis."""

    start: int
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One device of a lease. `placement` and both ids are None for a whole GPU and a share."""

    uuid: str
    """Empty if the device was lost: a pod's lease goes on with the others."""
    gpu: str
    gpu_index: int
    profile: str
    memory_mib: int
    placement: Placement | None
    gpu_instance_id: int | None
    compute_instance_id: int | None
    reused: bool
    kind: str = ""
    """`mig`, `whole` or `share`; empty from an older agent."""
    enforced_by: str = ""
    """The way in which the memory limit of a share is enforced: `cgroup`, `mps` or `preload`; empty for other kinds."""
    promise: str = ""
    """What a share isolates and what not, for people; empty for other kinds."""
    compute_percent: int | None = None
    """The most of the GPU's multiprocessors that each process of a share uses; None: all."""

    @property
    def is_mig(self) -> bool:
        """True for a MIG device, False for a whole GPU and a share."""
        return self.placement is not None

    @property
    def is_share(self) -> bool:
        """True for a share of a GPU without MIG mode."""
        return self.kind == SHARE

    @property
    def label(self) -> str:
        """The device as tables name it: `1g.10gb`, `whole`, `share 4 GiB`."""
        return _label(self.kind, self.profile, self.memory_mib)


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    """A lease as granted to this caller."""

    id: str
    token: str
    devices: tuple[Device, ...]
    env: Mapping[str, str]
    expires_at: float | None
    request_id: str
    notes: tuple[str, ...] = ()
    revision: int = 0
    confirm_by: float | None = None
    """When the lease ends unless it is confirmed before; None if no confirmation is due."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pod:
    """A Kubernetes pod. `uid` is empty if unknown."""

    namespace: str
    name: str
    uid: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class KubeletDevice:
    """A device as the kubelet counts it: `nvidia.com/mig-1g.10gb`, `mig-agent-3`."""

    resource: str
    id: str

    def __str__(self) -> str:
        """Return a text for messages: `nvidia.com/mig-1g.10gb mig-agent-3`."""
        return f"{self.resource} {self.id}"


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseInfo:
    """A lease as everybody may see it."""

    id: str
    holder: str
    tenant: str
    devices: tuple[Device, ...]
    created_at: float
    expires_at: float | None
    pid: int | None
    """The process whose end ends the lease."""
    hold: bool
    unused: bool
    holder_uid: int | None = None
    """The uid that requested it on the agent's machine, as the kernel reported it; None over TCP."""
    holder_pid: int | None = None
    """The process that requested it."""
    pod: Pod | None = None
    """The pod that the lease is for, if any: once the pod is on the node, the lease ends with it."""
    arrived: bool = False
    """True once the pod is on the node. Until then the lease is reserved for it, and ends at its deadline."""
    kubelet_devices: tuple[KubeletDevice, ...] = ()
    """For each device of a pod's lease the kubelet's id of it; empty if no kubelet allocated it."""
    warning: str = ""
    """Reason why the lease will or may end without its holder's doing (idle, a drained GPU); empty if it will not."""
    idle_since: float | None = None
    """Time at which a process last used its devices, in epoch seconds; None if the lease is not idle."""
    request_id: str = ""
    """The id of its request; empty unless the reader requested it, or is an administrator."""

    @property
    def promised(self) -> bool:
        """True while the lease is reserved for a pod that has not started."""
        return self.pod is not None and not self.arrived


LeaseRef: TypeAlias = "str | LeaseInfo | Grant"
"""A lease as methods take it: its id, or a value that has it. A Grant has its token, too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovered:
    """A lease of a lost ledger that its token restored."""

    lease: LeaseInfo
    anew: bool
    """False if the lease was there already."""
    notes: tuple[str, ...] = ()
    """What differs from before, for people."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Instance:
    """An instance on a GPU. `state` is leased, idle, foreign, blocked, creating or destroying."""

    uuid: str
    generation: int
    profile: str
    memory_mib: int
    placement: Placement | None
    gpu_instance_id: int | None
    compute_instance_id: int | None
    state: str
    lease: str
    holder: str
    tenant: str
    since: float
    reason: str
    gpu: str
    gpu_index: int
    kind: str = ""
    """`mig`, `whole` or `share`; empty from an older agent."""
    enforced_by: str = ""
    """What enforces the memory limit of a share: `cgroup`, `mps` or `preload`; empty for other kinds."""
    compute_percent: int | None = None
    """Of a share: the most of the GPU's multiprocessors that each process uses; None: all."""

    @property
    def is_share(self) -> bool:
        """True for a share of a GPU without MIG mode."""
        return self.kind == SHARE

    @property
    def label(self) -> str:
        """The instance as tables name it: `1g.10gb`, `whole`, `share 4 GiB`."""
        return _label(self.kind, self.profile, self.memory_mib)


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedMemory:
    """The account of the memory of a GPU without MIG mode, in MiB."""

    enforced_by: str
    """The way in which the limits of new shares are enforced: `cgroup`, `mps` or `preload`."""
    usable_mib: int
    """The GPU's memory without what the driver reserves and the headroom that stays free."""
    taken_mib: int
    """The part of that which its shares take, with what each takes beside its limit; 0 in `profiles`."""
    overhead_mib: int
    """The memory that one share takes beside its limit."""
    least_mib: int
    """The smallest limit of a share."""
    promise: str
    """What a share isolates and what not, for people."""
    others_mib: int = 0
    """The part of that which processes outside of its shares use; 0 in `profiles`."""
    without_process: str = ""
    """The way for requests that hand over no process, as `migctl run` does; empty: they get none."""

    @property
    def largest_mib(self) -> int:
        """The limit of the largest share that fits beside what is taken; 0 if none does."""
        limit = self.usable_mib - self.taken_mib - self.others_mib - self.overhead_mib
        return limit if limit >= self.least_mib else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class MigMode:
    """MIG mode now, and after the GPU's next reset."""

    capable: bool
    current: bool
    pending: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """A GPU. `state` is ready, whole, cordoned or lost, and `reason` says why it is not ready."""

    index: int
    uuid: str
    model: str
    mig: MigMode
    state: str
    reason: str
    memory_slices: int
    memory_mib: int
    instances: tuple[Instance, ...]
    unusable_slices: tuple[int, ...] = ()
    """Free memory slices that no profile can use beside what is on the GPU; empty from an older agent."""
    draining: bool = False
    """True if it is cordoned to become empty."""
    drain_deadline: float | None = None
    """Time at which what is leased there ends at the latest, in seconds since the epoch; None: by itself."""
    shared_memory: SharedMemory | None = None
    """The account of its shares; None if it is not shared."""

    @property
    def is_shared(self) -> bool:
        """True while there is a share of it."""
        return any(each.is_share for each in self.instances)


@dataclass(frozen=True, slots=True, kw_only=True)
class Drained:
    """GPUs that are being drained, and the leases that are still there."""

    gpus: tuple[Gpu, ...]
    leases: tuple[LeaseInfo, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Available:
    """Number of devices of one profile that could be leased now if nothing else were."""

    profile: str
    memory_mib: int
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StartEstimate:
    """The likely start of a waiting request, in seconds from when it was asked. None: not known."""

    earliest: float | None
    """It starts between `earliest` and `latest` with a probability of 80 %; by deadlines, before `latest`."""
    median: float | None
    """Half of such requests start before."""
    latest: float | None
    basis: str
    """`leases`: how long the last leases lasted, with deadlines as upper bounds. `deadlines`: these alone."""
    leases: int = 0
    """Number of past leases that it goes by."""


class QueuePosition(int):
    """A waiting request's position in the queue, 1 for the next one, with what else is known of its wait."""

    estimate: StartEstimate | None
    """Time at which it is likely to start; None: not known, or not yet."""
    blockers: tuple[Blocker, ...]
    """What blocks it, and who holds that; empty while a limit of its own does."""
    limit: str
    """Which limit of its caller or tenant keeps it waiting, for people; empty if none does."""

    def __new__(  # noqa: PYI034 -- typing.Self is not in Python 3.10
        cls,
        position: int,
        estimate: StartEstimate | None = None,
        blockers: tuple[Blocker, ...] = (),
        limit: str = "",
    ) -> QueuePosition:
        """Return the position."""
        made = super().__new__(cls, position)
        made.estimate = estimate
        made.blockers = blockers
        made.limit = limit
        return made


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """A request in the queue; position 1 is the next one."""

    request_id: str
    holder: str
    tenant: str
    priority: int
    position: int
    since: float
    wants: str
    estimate: StartEstimate | None = None
    """Time at which it is likely to start; None: not known."""
    blockers: tuple[Blocker, ...] = ()
    """What blocks it, and who holds that; empty while a limit of its own does."""
    limit: str = ""
    """Which limit of its caller or tenant keeps it waiting, for people; empty if none does, or to other readers."""
    holder_uid: int | None = None
    """The uid that requested it on the agent's machine, as the kernel reported it; None over TCP."""
    caller: str = ""
    """The caller, `uid 1000` or `name alice`, since two callers may use the same request id; empty where the id is."""
    reserved_gpus: tuple[int, ...] = ()
    """The GPUs that are reserved for it, by index: requests behind it get nothing there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerDoubt:
    """The ledger was damaged and replaced by an empty one, or an administrator restored an older one."""

    since: float
    why: str
    """Completes "the ledger ..."."""
    kept_as: str
    """Where the former ledger is kept, on the agent's machine; empty if there was nothing to keep."""
    restored: bool
    recoverable: int = 0
    """Number of lost leases that their tokens can restore, as far as is known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """The node at one revision."""

    node: str
    revision: int
    gpus: tuple[Gpu, ...]
    leases: tuple[LeaseInfo, ...]
    queue: tuple[Waiting, ...]
    started_at: float
    ledger_error: str
    version: str
    driver_version: str
    strict_fifo: bool
    reservation_after: float | None = None
    """Seconds after which GPUs are reserved for a waiting request, at present; None from an older agent."""
    paused: tuple[str, ...] = ()
    """Messages why nothing is granted and the driver is released; empty while the agent serves."""
    missing_gpus: Mapping[int, str] = field(default_factory=dict)
    """GPUs that have not answered since the agent started, by index, and why."""
    ledger_doubt: LedgerDoubt | None = None
    """Why the ledger does not account for everything that may be leased; None if it does."""
    socket_problems: tuple[str, ...] = ()
    """Messages about sockets of the agent that cannot be reached by their paths."""
    problems: tuple[str, ...] = ()
    """Messages about what does not work though leases are given, such as `metrics: off (...)`."""
    boot_id: str = ""
    """Boot id of the kernel that the agent runs on: a program with the same one is on its machine. Empty: not known."""
    available: tuple[Available, ...] = ()
    """What fits now, one kind at a time, the smallest profile first; empty while paused, and from an older agent."""
    largest_share_mib: int = 0
    """The limit of the largest share of a GPU that could be leased now; 0: none."""

    def _repr_svg_(self) -> str:
        """Return the map as SVG: notebooks draw a value by this method."""
        from mig_agent.client.slice_maps import status_svg  # noqa: PLC0415 -- which needs these types

        return status_svg(self)

    def _repr_html_(self) -> str:
        """Return the map as a part of a page, which notebooks prefer to a picture: texts can be selected."""
        return f'<div style="overflow-x: auto">{self._repr_svg_()}</div>'


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """A kind of instance that a GPU model offers."""

    id: int
    name: str
    compute_slices: int
    memory_slices: int
    memory_mib: int
    placements: tuple[Placement, ...]
    attributes: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuModel:
    """The profiles of the node's GPUs of one model, the smallest first."""

    model: str
    gpus: tuple[int, ...]
    memory_slices: int
    memory_mib: int
    profiles: tuple[Profile, ...]
    shared_memory: SharedMemory | None = None
    """The account of their shared memory; None if they are not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One step of a plan: `kind` is reuse, destroy or create."""

    kind: str
    gpu: str
    gpu_index: int
    profile: str
    placement: Placement | None
    uuid: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedDevice:
    """A dry run of one device of a request; `uuid` only if an idle instance is reused."""

    gpu: str
    gpu_index: int
    profile: str
    memory_mib: int
    placement: Placement | None
    reused: bool
    uuid: str
    kind: str = ""
    """`mig`, `whole` or `share`; empty from an older agent, like the two below for other kinds than a share."""
    enforced_by: str = ""
    promise: str = ""
    compute_percent: int | None = None
    """Of a share: the most of the GPU's multiprocessors that each process uses; None: all."""

    @property
    def is_share(self) -> bool:
        """True for a share of a GPU without MIG mode."""
        return self.kind == SHARE


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How a request would be served. A lower score is better, and scores compare between nodes."""

    devices: tuple[PlannedDevice, ...]
    steps: tuple[Step, ...]
    score: float
    notes: tuple[str, ...]
    revision: int
    explanation: tuple[str, ...] = ()
    """If requested: the placements that were considered, with their costs, and what blocks the other GPUs."""
    expected_seconds: float | None = None
    """Expected duration of the driver's work; 0 if all is reused. None from an older agent, as for the next three."""
    wasted_mib: float | None = None
    """A part of the score: memory beyond what was requested."""
    capacity_lost: float | None = None
    """A part of the score: what can no longer be placed on the GPUs, in memory slices over all windows."""
    creation_cost: float | None = None
    """A part of the score: the cost of creating and destroying, in the same unit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NoPlan:
    """Why a request would be refused."""

    reason: str
    message: str
    hint: str
    retryable: bool
    blockers: tuple[Blocker, ...]
    explanation: tuple[str, ...] = ()
    """If requested: what blocks each GPU, and who holds it."""
    estimate: StartEstimate | None = None
    """If requested: when it would be likely to start if it waited; None: not known."""
    revision: int | None = None
    """With `revision-changed`: the node's present revision; `changed` has the kinds of events that matter to plans."""
    changed: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """An event: `kind` for programs, `message` for people."""

    kind: str
    at: float
    revision: int
    message: str
    gpu: str = ""
    gpu_index: int | None = None
    lease: str = ""
    generation: int | None = None
    holder: str = ""
    data: Mapping[str, str | int | float | bool] = field(default_factory=dict)
    number: int = 0
    """Its number in the agent's ledger, which rises; 0 for an event of `watch`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EventPage:
    """Recorded events, the oldest first, and how many older ones match that were left out."""

    events: tuple[Event, ...]
    earlier: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Usage of one instance; None is what the driver does not report."""

    generation: int
    memory_used_mib: int | None
    memory_total_mib: int | None
    utilization_percent: int | None
    """Share of the time in which a kernel ran, for a whole GPU."""
    processes: tuple[int, ...] | None
    """The pids."""
    process_details: tuple[ProcessUsage, ...] = ()
    """The same processes with what is known of each; empty for callers over TCP without the admin role."""
    compute: ComputeUsage | None = None
    """Compute use of a MIG instance; None also on GPUs before Hopper, and at the first reading under a lease."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeUsage:
    """Compute use of a MIG instance between two readings, in percent; None is what the driver does not report."""

    seconds: float
    """The time between the two readings."""
    sm_percent: float
    """The mean share of its multiprocessors (SMs) that were busy."""
    tensor_percent: float | None
    """The share of the time in which its multiprocessors did tensor operations."""
    memory_bandwidth_percent: float | None
    """Memory bandwidth used, of the most that is possible."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessUsage:
    """A process on an instance; None is what is not known."""

    pid: int
    uid: int | None
    command: str
    memory_used_mib: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class AccountRow:
    """Sums over the leases of one user, tenant, name or profile. `key` is "(others)" for the smallest of too many."""

    key: str
    leases: int
    devices: int
    memory_mib_seconds: float
    slice_seconds: float
    waited_seconds: float
    """From asking to having the lease."""
    measured_mib_seconds: float
    """The part of `memory_mib_seconds` on devices whose use was measured."""
    peak_mib_seconds: float | None
    """The peak of each of these devices, over all the time that it was leased; None if none was measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """Sums of what was leased in a period, the largest first."""

    rows: tuple[AccountRow, ...]
    total: AccountRow
    since: float | None
    until: float
    complete_since: float | None
    """Since when the records are complete; leases that ended before may be missing. None from a ledger without."""

    @property
    def is_cut(self) -> bool:
        """True if the period begins before the records do."""
        return self.complete_since is not None and (self.since is None or self.since < self.complete_since)


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """Compares what leases of one name asked for with what they used. `verdict` is smaller, fits or too-few-runs."""

    name: str
    user: str
    verdict: str
    message: str
    runs: int
    measured_runs: int
    asked: str
    peak_mib: int | None
    suggestion: str
    """The smaller request, as `gpu_memory` takes it; empty if there is none."""
    replayed: int
    """Number of leases of the node that were replayed."""
    waited_seconds: float | None
    """What these runs waited in the replay as they asked; None where nothing was replayed."""
    waited_less_seconds: float | None
    """What they waited in the replay with the suggestion."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModeChange:
    """Result of a switch of MIG mode: `needs` is "", reset or reboot."""

    gpu: str
    mig: MigMode
    needs: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Paused:
    """Result of pausing or resuming."""

    paused: tuple[str, ...]
    """Messages why the agent is paused now; empty while it serves."""
    driver_released: bool
    """True if nothing of the driver is open any more, so that it can be unloaded."""
    message: str
    """Why the driver is not yet released or reopened; empty if it is. The agent retries by itself."""

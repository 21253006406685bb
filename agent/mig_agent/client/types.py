"""What the agent answers, as frozen values with types.

Memory is MiB, placements are memory slices, moments are seconds since the Unix epoch. None: not known or not there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from mig_agent.core.errors import Blocker


@dataclass(frozen=True, slots=True)
class Placement:
    """A window on a GPU's memory-slice axis."""

    start: int
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One device of a lease. `placement` and both ids are None for a whole GPU."""

    uuid: str
    """Empty where it is lost: a pod's lease goes on with what is left of it."""
    gpu: str
    gpu_index: int
    profile: str
    memory_mib: int
    placement: Placement | None
    gpu_instance_id: int | None
    compute_instance_id: int | None
    reused: bool

    @property
    def is_mig(self) -> bool:
        """Whether this is a MIG device, rather than a whole GPU."""
        return self.placement is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    """A lease as it was given to this caller."""

    id: str
    token: str
    devices: tuple[Device, ...]
    env: Mapping[str, str]
    expires_at: float | None
    request_id: str
    notes: tuple[str, ...] = ()
    revision: int = 0
    confirm_by: float | None = None
    """When the lease ends unless it is confirmed before; None where nothing is awaited."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pod:
    """A pod of Kubernetes. `uid` is empty where it is not known."""

    namespace: str
    name: str
    uid: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class KubeletDevice:
    """A device as the kubelet counts it: `nvidia.com/mig-1g.10gb`, `mig-agent-3`."""

    resource: str
    id: str

    def __str__(self) -> str:
        """For messages: `nvidia.com/mig-1g.10gb mig-agent-3`."""
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
    """The process whose end ends it."""
    hold: bool
    unused: bool
    holder_uid: int | None = None
    """Who asked for it on the agent's machine, as the kernel told; None for one over TCP."""
    holder_pid: int | None = None
    """The process that asked."""
    pod: Pod | None = None
    """Whose lease it is, where that is a pod: once the pod is there it ends with the pod."""
    arrived: bool = False
    """The pod has come to the node. Until then the lease is promised to it, and ends at its deadline."""
    kubelet_devices: tuple[KubeletDevice, ...] = ()
    """Of a pod's lease: for each device what it is to the kubelet; empty where no kubelet gave it."""

    @property
    def promised(self) -> bool:
        """Whether it was taken for a pod that has not come yet."""
        return self.pod is not None and not self.arrived


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovered:
    """A lease of before that its token has brought back."""

    lease: LeaseInfo
    anew: bool
    """False where it was there already."""
    notes: tuple[str, ...] = ()
    """For the person: what is not as it was."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerDoubt:
    """The ledger was damaged and an empty one took its place, or an administrator restored an older one."""

    since: float
    why: str
    """Completes "the ledger ..."."""
    kept_as: str
    """Where the former ledger is kept, on the agent's machine; empty where there was nothing to keep."""
    restored: bool
    recoverable: int = 0
    """So many leases of before come back when their tokens are presented, as far as is known."""


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
    """Seconds after which GPUs are kept for who waits, as things are now; None: an older agent does not tell."""
    paused: tuple[str, ...] = ()
    """Why nothing is granted and the driver is let go, in words; empty while the agent serves."""
    missing_gpus: Mapping[int, str] = field(default_factory=dict)
    """GPUs that have not answered since the agent started, by index, and why."""
    ledger_doubt: LedgerDoubt | None = None
    """Why the ledger does not account for everything that may be leased; None where it does."""
    socket_problems: tuple[str, ...] = ()
    """Sockets of the agent that cannot be reached by their paths, in words."""


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
    """What the node's GPUs of one model can be cut into, the smallest first."""

    model: str
    gpus: tuple[int, ...]
    memory_slices: int
    memory_mib: int
    profiles: tuple[Profile, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One thing that would be done: `kind` is reuse, destroy or create."""

    kind: str
    gpu: str
    gpu_index: int
    profile: str
    placement: Placement | None
    uuid: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedDevice:
    """How one wanted device would be served; `uuid` only when an idle instance is reused."""

    gpu: str
    gpu_index: int
    profile: str
    memory_mib: int
    placement: Placement | None
    reused: bool
    uuid: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How a request would be served. A lower score is better, and scores compare between nodes."""

    devices: tuple[PlannedDevice, ...]
    steps: tuple[Step, ...]
    score: float
    notes: tuple[str, ...]
    revision: int
    explanation: tuple[str, ...] = ()
    """When asked for: the places that were weighed, with what each costs, and what blocks the other GPUs."""
    expected_seconds: float | None = None
    """How long the driver is expected to take; 0 where all is reused. None: an older agent, as for those below."""
    wasted_mib: float | None = None
    """The parts of the score: memory beyond what was asked for,"""
    capacity_lost: float | None = None
    """what can be placed no more on the GPUs, in memory slices over all windows,"""
    creation_cost: float | None = None
    """and what creating and destroying count for, in the same unit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NoPlan:
    """Why a request would be refused."""

    reason: str
    message: str
    hint: str
    retryable: bool
    blockers: tuple[Blocker, ...]
    explanation: tuple[str, ...] = ()
    """When asked for: what blocks each GPU, and whose it is."""
    revision: int | None = None
    """With `revision-changed`: where the node is now, and what has changed of what plans go by, as kinds of events."""
    changed: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Something that happened: `kind` for programs, `message` for people."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """What is used on one instance; None is what the driver does not tell."""

    generation: int
    memory_used_mib: int | None
    memory_total_mib: int | None
    utilization_percent: int | None
    processes: tuple[int, ...] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModeChange:
    """How a switch of MIG mode went: `needs` is "", reset or reboot."""

    gpu: str
    mig: MigMode
    needs: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Paused:
    """How pausing or resuming went."""

    paused: tuple[str, ...]
    """Why the agent is paused now, in words; empty while it serves."""
    driver_released: bool
    """Whether nothing of the driver is open any more, so that it can be unloaded."""
    message: str
    """Why the driver is not as it is wanted yet; empty when it is. The agent tries again by itself."""

"""The results of the manager's calls: granted leases with their devices, and the node at one moment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from mig_agent.adapters.ledger.reader import Doubt
from mig_agent.core.accounting import TenantTotal
from mig_agent.core.errors import Blocker
from mig_agent.core.forecast import StartEstimate
from mig_agent.core.model import (
    DeviceKind,
    Generation,
    GpuUuid,
    Holder,
    Lease,
    LeaseId,
    MigMode,
    NodeView,
    Placement,
    RequestId,
    RequestKey,
    Want,
)
from mig_agent.core.observation import ComputeReading
from mig_agent.core.planning.capacity import Available
from mig_agent.core.shares import Enforcement


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One device of a lease."""

    generation: Generation
    uuid: str
    """The UUID of the MIG instance, `MIG-...`; the GPU's for a whole GPU."""
    gpu: GpuUuid
    gpu_index: int
    kind: DeviceKind
    profile: str
    memory_mib: int
    placement: Placement | None
    """None for a whole GPU and a share."""
    gpu_instance_id: int | None
    compute_instance_id: int | None
    reused: bool
    """Whether an idle instance was leased again, so that none had to be created."""
    enforced_by: Enforcement | None = None
    """The way in which the memory limit of a share is enforced; None for other kinds of devices."""
    compute_percent: int | None = None
    """The most of the GPU's multiprocessors that each process of a share uses; None: all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Granted:
    """A granted lease with its token, which only the lease's holder may see."""

    lease: Lease
    token: str
    devices: tuple[Device, ...]
    environment: Mapping[str, str]
    """By which a process finds its devices."""
    notes: tuple[str, ...] = ()
    """Hints for people, such as a near miss: a little less memory would have fitted a smaller profile."""
    revision: int
    confirm_by: float | None = None
    """When the lease ends unless its client confirms this answer, in seconds since the epoch; None if it need not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovered:
    """A lease that was recovered by its token, by this call or before it."""

    lease: Lease
    anew: bool
    """Whether this call recovered the lease; False where it was active already."""
    notes: tuple[str, ...] = ()
    """Hints for people: what of the lease is not as it was."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QueuePlace:
    """The known facts of a request's wait, for its client and for status."""

    position: int
    """The position in the queue, 1 for the first."""
    at: float
    """Time at which it was reported, in seconds since the epoch."""
    estimate: StartEstimate | None = None
    """Time at which it is likely to start; None: not known, or not yet."""
    blockers: tuple[Blocker, ...] = ()
    """What blocks it, and who holds that; empty while a limit of its own does."""
    limit: str = ""
    """Which limit of its caller or tenant keeps it waiting, as a message; empty where none does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueEntry:
    """A request in the queue, as status shows it."""

    request: RequestKey
    who: Holder
    priority: int
    since: float
    """When the request began to wait, in seconds since the epoch."""
    wants: tuple[Want, ...]
    place: QueuePlace
    reserved: tuple[int, ...] = ()
    """The GPUs that are reserved for it, by index: requests behind it get nothing there."""

    @property
    def request_id(self) -> RequestId:
        """The id that the caller gave the request."""
        return self.request.id


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The node as last published, with the queue and all else that a status shows."""

    view: NodeView
    at: float
    """Time at which it was taken, in seconds since the epoch."""
    queue: tuple[QueueEntry, ...]
    started_at: float
    driver_version: str
    strict_fifo: bool
    reservation_after_seconds: float
    """The reservation delay now, in seconds: after such a wait GPUs are reserved for a request."""
    ledger_error: str = ""
    """Why the ledger cannot be written now; empty when it can."""
    doubt: Doubt | None = None
    """Why the ledger may not account for everything that is leased; None where it does."""
    socket_problems: tuple[str, ...] = ()
    """One message for each socket of the agent that cannot be reached by its path."""
    problems: tuple[str, ...] = ()
    """What does not work though leases are granted, such as `metrics: off (...)`; one message for each part."""
    recoverable: int = 0
    """How many leases of a lost ledger their tokens can still recover, as far as is known."""
    unused: frozenset[LeaseId] = frozenset()
    """Leases on whose instances no process has been seen for `idle_after`."""
    idle_since: Mapping[LeaseId, float] = field(default_factory=dict)
    """Time at which a process was last seen on any device of an idle lease, in seconds since the epoch."""
    warnings: Mapping[LeaseId, str] = field(default_factory=dict)
    """Reasons why leases will or may end without their holders' doing, as messages."""
    missing: Mapping[int, str] = field(default_factory=dict)
    """The error of each GPU that has not answered since the start, by index."""
    paused: tuple[str, ...] = ()
    """The reasons for which the agent is paused, each once; empty while it serves."""
    silent: frozenset[LeaseId] = frozenset()
    """Leases with a device on a GPU that has not answered since the start, or is not managed now."""
    left: frozenset[LeaseId] = frozenset()
    """Leases whose holder's process has ended; another process may have its pid by now."""
    boot_id: str = ""
    """The boot id of the kernel that the agent runs on; empty if it is not known."""
    available: tuple[Available, ...] = ()
    """Number of devices of each profile that could be leased now; empty while the agent is paused or stops."""
    largest_share_mib: int = 0
    """The limit of the largest share of a GPU that could be leased now; 0: none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """The node as other threads may read it: a finished value, built on the event loop and replaced as a whole."""

    view: NodeView
    started_at: float
    queue_length: int = 0
    oldest_waiting_since: float | None = None
    """Time at which the request that waits longest arrived, in seconds since the epoch; None if no request waits."""
    reservation_after_seconds: float = 0.0
    """The reservation delay now, in seconds: after such a wait GPUs are reserved for a request."""
    ledger_error: str = ""
    """Why the ledger cannot be written now; empty when it can."""
    idle: frozenset[LeaseId] = frozenset()
    """Leases none of whose devices had shown a process for `idle_after` at the last reconciliation.

    Some may have ended since."""
    unused: frozenset[LeaseId] = frozenset()
    """Leases that had shown no process for an hour at the last reconciliation; some may have ended since."""
    paused: tuple[str, ...] = ()
    """The reasons for which the agent is paused; empty while it serves."""
    sockets_missing: int = 0
    """How many sockets of the agent cannot be reached by their paths."""
    problems: Mapping[str, str] = field(default_factory=dict)
    """What does not work though leases are granted, by the part that it is about; without words it works again."""
    in_doubt: bool = False
    """Whether the ledger may not account for everything that is leased: it was damaged, or restored from a backup."""
    tenants: Mapping[str, TenantTotal] = field(default_factory=dict)
    """What each tenant has leased so far."""
    compute: Mapping[Generation, ComputeReading] = field(default_factory=dict)
    """Compute use of each instance at the last reading, where that is known."""

    @property
    def problem_lines(self) -> tuple[str, ...]:
        """One message for each part that does not work: `metrics: off (...)`."""
        return tuple(f"{part}: {words}" for part, words in self.problems.items() if words)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModeAnswer:
    """The result of switching MIG mode."""

    gpu: GpuUuid
    gpu_index: int
    mode: MigMode
    needs: Literal["", "reset", "reboot"]
    """What the change needs to come into effect; empty where it is in effect."""
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PauseAnswer:
    """The result of pausing or resuming."""

    paused: tuple[str, ...]
    """The reasons for which the agent is paused now; empty while it serves."""
    driver_released: bool
    """Whether the driver is released: this process has nothing of it open, and it can be unloaded."""
    message: str
    """Why the driver could not be released or opened, as a message; empty when it could."""

"""What the engine answers: granted leases with their devices, and a node at one moment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from mig_agent.adapters.ledger.reader import Doubt
from mig_agent.core.model import (
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One device of a lease."""

    generation: Generation
    uuid: str
    """`MIG-...`; the GPU's own for a whole GPU."""
    gpu: GpuUuid
    gpu_index: int
    profile: str
    memory_mib: int
    placement: Placement | None
    """None for a whole GPU."""
    gpu_instance_id: int | None
    compute_instance_id: int | None
    reused: bool
    """Whether an idle instance served, with no creation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Granted:
    """A lease for its holder; the token is for nobody else's eyes."""

    lease: Lease
    token: str
    devices: tuple[Device, ...]
    environment: Mapping[str, str]
    """By which a process finds its devices."""
    notes: tuple[str, ...] = ()
    """For the person, such as a near miss."""
    revision: int
    confirm_by: float | None = None
    """When the lease ends unless its client confirms that it has this answer; None where nothing is awaited."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovered:
    """A lease that its token has brought back, or that had come back before."""

    lease: Lease
    anew: bool
    """False where it was there already."""
    notes: tuple[str, ...] = ()
    """For the person: what is not as it was."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueEntry:
    """A request that waits."""

    request: RequestKey
    who: Holder
    priority: int
    position: int
    """1 for the first."""
    since: float
    wants: tuple[Want, ...]

    @property
    def request_id(self) -> RequestId:
        """As who asks knows it."""
        return self.request.id


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The node as last published, and what is around it."""

    view: NodeView
    queue: tuple[QueueEntry, ...]
    started_at: float
    driver_version: str
    strict_fifo: bool
    reservation_after_seconds: float
    """How long a request waits now before it keeps GPUs from those behind it."""
    ledger_error: str = ""
    """Why the ledger cannot be written now; empty when it can."""
    doubt: Doubt | None = None
    """Why the ledger does not account for everything that may be leased; None where it does."""
    socket_problems: tuple[str, ...] = ()
    """Sockets of the agent that cannot be reached by their paths, in words."""
    recoverable: int = 0
    """Leases of before that their tokens bring back, as far as is known."""
    unused: frozenset[LeaseId] = frozenset()
    """Leases on whose instances no process has been seen for an hour."""
    missing: Mapping[int, str] = field(default_factory=dict)
    """GPUs that have not answered since the start, by index, and why."""
    paused: tuple[str, ...] = ()
    """Why nothing is granted and the driver is left alone, in words, each reason once; empty while it serves."""
    silent: frozenset[LeaseId] = frozenset()
    """Leases with a device on a GPU that has not answered since the start, or is not managed now."""
    left: frozenset[LeaseId] = frozenset()
    """Leases whose holder's process has ended: its pid may be another one's by now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """What other threads may read of the node: built on the event loop, finished, and replaced as a whole."""

    view: NodeView
    started_at: float
    queue_length: int = 0
    reservation_after_seconds: float = 0.0
    """How long a request waits now before it keeps GPUs from those behind it."""
    ledger_error: str = ""
    """Why the ledger cannot be written now; empty when it can."""
    unused: frozenset[LeaseId] = frozenset()
    """Leases on whose instances no process had been seen for an hour at the last look; some may have ended since."""
    paused: tuple[str, ...] = ()
    """Why nothing is granted and the driver is left alone, in words; empty while it serves."""
    sockets_missing: int = 0
    """Sockets of the agent that cannot be reached by their paths."""
    in_doubt: bool = False
    """True while the ledger does not account for everything: it was damaged, or restored from a backup."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModeAnswer:
    """How switching MIG mode went."""

    gpu: GpuUuid
    gpu_index: int
    mode: MigMode
    needs: Literal["", "reset", "reboot"]
    """What it still takes to come into effect."""
    words: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PauseAnswer:
    """How pausing or resuming went."""

    paused: tuple[str, ...]
    """Why the agent is paused now, in words; empty while it serves."""
    let_go: bool
    """Whether the driver is let go: nothing of it is open, and it can be unloaded."""
    words: str
    """Why the driver is not as it is wanted, in words; empty when it is."""

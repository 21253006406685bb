"""Events as frozen values: the manager emits them; logs, metrics, Watch and the ledger consume them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from mig_agent.core.model import Generation, GpuUuid, LeaseId


class EventKind(StrEnum):
    """The kinds of events. The values are on the wire and in the ledger; never rename one."""

    AGENT_STARTED = "agent-started"
    AGENT_STOPPING = "agent-stopping"
    AGENT_PAUSED = "agent-paused"
    AGENT_RESUMED = "agent-resumed"
    DRIVER_RELEASED = "driver-released"
    DRIVER_OPENED = "driver-opened"
    DRIVER_UNAVAILABLE = "driver-unavailable"
    REQUEST_QUEUED = "request-queued"
    REQUEST_REFUSED = "request-refused"
    REQUEST_DEQUEUED = "request-dequeued"
    LEASE_GRANTED = "lease-granted"
    LEASE_RENEWED = "lease-renewed"
    LEASE_BOUND = "lease-bound"
    LEASE_DEGRADED = "lease-degraded"
    """A pod's lease goes on without one of its devices, which is lost."""
    LEASE_RECOVERED = "lease-recovered"
    """A client's token brought back a lease from before the ledger was lost."""
    LEASE_WARNED = "lease-warned"
    """A lease is idle, or its GPU is drained: it may end without its holder's doing."""
    LEASE_ENDED = "lease-ended"
    INSTANCE_CREATED = "instance-created"
    INSTANCE_DESTROYED = "instance-destroyed"
    INSTANCE_REUSED = "instance-reused"
    INSTANCE_BLOCKED = "instance-blocked"
    INSTANCE_UNBLOCKED = "instance-unblocked"
    INSTANCE_LOST = "instance-lost"
    INSTANCE_FOUND = "instance-found"
    STEP_FAILED = "step-failed"
    PROCESS_ENDED = "process-ended"
    """A process lost the GPU: the processes of its lease used more than their share allows."""
    PROCESS_FOUND = "process-found"
    """A process uses a shared GPU without a share of it."""
    GPU_CORDONED = "gpu-cordoned"
    GPU_UNCORDONED = "gpu-uncordoned"
    GPU_DRAINED = "gpu-drained"
    """The last lease on a GPU that is being drained has ended."""
    GPU_LOST = "gpu-lost"
    GPU_RECOVERED = "gpu-recovered"
    GPU_MODE_CHANGED = "gpu-mode-changed"
    GPU_MODE_REQUESTED = "gpu-mode-requested"
    ACCESS_DENIED = "access-denied"
    PROFILE_DIFFERS = "profile-differs"
    LEDGER_FAILED = "ledger-failed"
    LEDGER_RECOVERED = "ledger-recovered"
    LEDGER_QUARANTINED = "ledger-quarantined"
    LEDGER_RESTORED = "ledger-restored"
    """An administrator restored a backup of the ledger, which does not account for what came after it."""
    SOCKET_LOST = "socket-lost"
    """A socket of the agent was removed or replaced, and could not be bound again yet."""
    SOCKET_RESTORED = "socket-restored"
    """A socket that was removed or replaced is bound again."""
    CERTIFICATES_RENEWED = "certificates-renewed"
    CERTIFICATE_RELOAD_FAILED = "certificate-reload-failed"
    CONFIG_RELOADED = "config-reloaded"
    """The configuration was read again; what can change while the agent runs has changed."""
    CONFIG_RELOAD_FAILED = "config-reload-failed"
    """The configuration was read again and cannot be used; the former one stays in use."""


IRRELEVANT_TO_PLANS = frozenset(
    {
        EventKind.AGENT_STARTED,
        EventKind.AGENT_STOPPING,
        EventKind.REQUEST_QUEUED,
        EventKind.REQUEST_REFUSED,
        EventKind.REQUEST_DEQUEUED,
        EventKind.LEASE_RENEWED,
        EventKind.LEASE_BOUND,
        EventKind.LEASE_WARNED,
        EventKind.GPU_DRAINED,
        EventKind.STEP_FAILED,
        EventKind.ACCESS_DENIED,
        EventKind.PROFILE_DIFFERS,
        EventKind.LEDGER_FAILED,
        EventKind.LEDGER_RECOVERED,
        EventKind.LEDGER_QUARANTINED,
        EventKind.LEDGER_RESTORED,
        EventKind.SOCKET_LOST,
        EventKind.SOCKET_RESTORED,
        EventKind.CONFIG_RELOAD_FAILED,
        EventKind.CERTIFICATES_RENEWED,
        EventKind.CERTIFICATE_RELOAD_FAILED,
    }
)
"""Kinds that do not change how a request is planned."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One thing that happened. `message` is a whole sentence for people; `data` holds plain facts for programs."""

    kind: EventKind
    at: float
    revision: int
    message: str
    gpu: GpuUuid | None = None
    gpu_index: int | None = None
    lease: LeaseId | None = None
    generation: Generation | None = None
    holder: str = ""
    data: Mapping[str, str | int | float | bool] = field(default_factory=dict)
    number: int = field(default=0, compare=False)
    """Its number in the ledger, which rises; 0 until it is read from there."""

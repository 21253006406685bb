"""What can go wrong, on two axes: may the same request succeed later, and what is it about.

Messages start with "cannot", name the thing and who holds it; the hint says what would work.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field

from mig_agent.core.strenum import StrEnum


class Reason(StrEnum):
    """The reasons for which a request is refused. The values are on the wire and in metrics; never rename one."""

    # The request itself is wrong.
    INVALID_REQUEST = "invalid-request"
    # This node can never serve it.
    UNKNOWN_PROFILE = "unknown-profile"
    UNKNOWN_GPU = "unknown-gpu"
    TOO_LARGE = "too-large"
    TOO_MANY_DEVICES = "too-many-devices"
    NO_MIG_GPU = "no-mig-gpu"
    OUTSIDE_LIMITS = "outside-limits"
    # It could be served at another moment.
    NO_CAPACITY = "no-capacity"
    GPU_UNAVAILABLE = "gpu-unavailable"
    REVISION_CHANGED = "revision-changed"
    WAITED_TOO_LONG = "waited-too-long"
    QUEUE_FULL = "queue-full"
    LIMIT_EXCEEDED = "limit-exceeded"
    DRIVER_FAILED = "driver-failed"
    LEDGER_FAILED = "ledger-failed"
    SHUTTING_DOWN = "shutting-down"
    PAUSED = "paused"
    CANCELLED = "cancelled"
    CANCEL_REQUESTED = "cancel-requested"
    # About leases and requests.
    UNKNOWN_REQUEST = "unknown-request"
    UNKNOWN_LEASE = "unknown-lease"
    LEASE_ENDED = "lease-ended"
    WRONG_TOKEN = "wrong-token"  # noqa: S105 -- the name of a reason, not a secret
    REQUEST_ID_REUSED = "request-id-reused"
    # About administration.
    IN_USE = "in-use"
    NOT_SUPPORTED = "not-supported"
    RESET_REQUIRED = "reset-required"
    NOT_PERMITTED = "not-permitted"


RETRYABLE = frozenset(
    {
        Reason.NO_CAPACITY,
        Reason.GPU_UNAVAILABLE,
        Reason.REVISION_CHANGED,
        Reason.WAITED_TOO_LONG,
        Reason.QUEUE_FULL,
        Reason.LIMIT_EXCEEDED,
        Reason.DRIVER_FAILED,
        Reason.LEDGER_FAILED,
        Reason.SHUTTING_DOWN,
        Reason.PAUSED,
        Reason.CANCELLED,
        Reason.IN_USE,
    }
)


THE_GPU = "the GPU"
"""What a blocker is that is no instance but the GPU as a whole, such as a cordoned one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocker:
    """One thing on one GPU that blocks a request."""

    gpu_index: int
    what: str
    """`3g.40gb on slices 0-3`"""
    state: str
    """An InstanceState or GpuState."""
    lease: str = ""
    holder: str = ""
    expires_at: float | None = None
    """Time at which the lease ends unless it is renewed, in seconds since the epoch; None: it has no deadline."""

    def describe(self) -> str:
        """Return the text that messages list: `GPU 0: 3g.40gb on slices 0-3 is leased, held by ann (lease ...)`."""
        if self.what == THE_GPU:
            return f"GPU {self.gpu_index} {self.condition}"
        return f"GPU {self.gpu_index}: {self.what} {self.condition}"

    @property
    def condition(self) -> str:
        """Its state, to follow what it is: `is leased, held by ann (lease ...)`."""
        held = f", held by {self.holder}" if self.holder else ""
        lease = f" (lease {self.lease})" if self.lease else ""
        return f"is {self.state}{held}{lease}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """The answer "no", as a message for people and data for programs."""

    reason: Reason
    message: str
    """Starts with "cannot"."""
    hint: str = ""
    blockers: tuple[Blocker, ...] = ()
    explanation: tuple[str, ...] = ()
    """What was weighed and what blocks each GPU, as `core.planning.explain` writes it; empty where there is none."""
    revision: int | None = None
    """With REVISION_CHANGED: the current revision of the node."""
    changed: tuple[str, ...] = ()
    """With REVISION_CHANGED: kinds of events since then that affect plans; `unknown` if they are no longer known."""
    end_reason: str = ""
    """With LEASE_ENDED: why the lease ended, a word as in the ledger; empty if that is not known."""

    @property
    def retryable(self) -> bool:
        """True if the same request may succeed at another moment."""
        return self.reason in RETRYABLE


class MigAgentError(Exception):
    """The base of all errors of this project."""

    def _show_hint(self, hint: str) -> None:
        """Have tracebacks end with the hint."""
        if hint:
            with suppress(AttributeError):  # exceptions take notes since Python 3.11
                self.add_note(f"Hint: {hint}")


class RefusedError(MigAgentError):
    """Carries a refusal through code that raises."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.message)
        self.refusal = refusal


def refuse(
    reason: Reason, message: str, hint: str = "", blockers: tuple[Blocker, ...] = (), *, end_reason: str = ""
) -> RefusedError:
    """Return a RefusedError made of these parts, to be raised."""
    return RefusedError(
        Refusal(reason=reason, message=message, hint=hint, blockers=blockers, end_reason=end_reason),
    )


class UsageError(MigAgentError, ValueError):
    """User input that cannot be understood. Carries a hint; no agent is needed to detect it."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self._show_hint(hint)


class ConfigError(UsageError):
    """The configuration is invalid."""


class DriverErrorKind(StrEnum):
    """The meanings that an NVML error can have for the agent."""

    NOT_SUPPORTED = "not-supported"
    NO_PERMISSION = "no-permission"
    INVALID_ARGUMENT = "invalid-argument"
    NOT_FOUND = "not-found"
    INSUFFICIENT_RESOURCES = "insufficient-resources"
    IN_USE = "in-use"
    GPU_LOST = "gpu-lost"
    RESET_REQUIRED = "reset-required"
    TIMEOUT = "timeout"
    """The agent's own: the call did not return before its deadline."""
    READ_BACK = "read-back"
    """The agent's own: the call reported success but the hardware shows otherwise."""
    LIBRARY = "library"
    """The library is missing, too old, or not initialised."""
    OUTDATED = "outdated"
    """The library is of another version than the driver: one of them was replaced."""
    UNKNOWN = "unknown"


@dataclass(eq=False)  # an exception that compares by value is unhashable, and sets of exceptions then fail
class DriverError(MigAgentError):
    """A failed call of the driver, in the terms of `DriverErrorKind`."""

    kind: DriverErrorKind
    call: str
    """The NVML function."""
    detail: str = ""
    gpu_index: int | None = None
    holders: tuple[str, ...] = field(default=())
    """With IN_USE: the processes that hold the resource, where known."""
    left_behind: bool = False
    """True if something that the call made may still exist."""

    def __str__(self) -> str:
        """Return the message, which starts with "cannot"."""
        where = f" on GPU {self.gpu_index}" if self.gpu_index is not None else ""
        held = f"; held by {', '.join(self.holders)}" if self.holders else ""
        return f"cannot complete {self.call}{where}: {self.kind}{': ' + self.detail if self.detail else ''}{held}"


class LedgerError(MigAgentError):
    """The ledger cannot be read or written; the message says which and why."""

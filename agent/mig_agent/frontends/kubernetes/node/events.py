"""Translates events of the manager that matter to an administrator to Kubernetes Events on the node or a pod; pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from mig_agent.core.events import Event, EventKind
from mig_agent.core.owner import Pod
from mig_agent.engine.lifecycle import EndReason


@dataclass(frozen=True, slots=True, kw_only=True)
class Notice:
    """A Kubernetes Event to send, about the node or a pod."""

    reason: str
    """The Event's reason: one word in CamelCase."""
    words: str
    warning: bool
    about: Pod | None = None
    """The pod that the Event is about; None: the node."""


_REASONS: Final[Mapping[EventKind, tuple[str, bool]]] = MappingProxyType(
    {
        EventKind.GPU_CORDONED: ("GpuCordoned", True),
        EventKind.GPU_UNCORDONED: ("GpuUncordoned", False),
        EventKind.GPU_DRAINED: ("GpuDrained", False),
        EventKind.GPU_LOST: ("GpuLost", True),
        EventKind.GPU_RECOVERED: ("GpuRecovered", False),
        EventKind.GPU_MODE_CHANGED: ("GpuModeChanged", False),
        EventKind.AGENT_PAUSED: ("MigAgentPaused", False),
        EventKind.AGENT_RESUMED: ("MigAgentResumed", False),
        EventKind.DRIVER_UNAVAILABLE: ("DriverNotReady", True),
        EventKind.LEDGER_FAILED: ("LedgerFailed", True),
        EventKind.LEDGER_RECOVERED: ("LedgerRecovered", False),
        EventKind.LEDGER_QUARANTINED: ("LedgerQuarantined", True),
        EventKind.LEDGER_RESTORED: ("LedgerRestored", True),
        EventKind.CERTIFICATES_RENEWED: ("CertificatesRenewed", False),
        EventKind.CERTIFICATE_RELOAD_FAILED: ("CertificateReloadFailed", True),
    }
)


_LOST: Final = frozenset({"gpu-lost", "gpu-reset", "instance-lost"})
"""Reasons for which a lease ends or is degraded while its pod still runs: the pod has lost a device."""
_FORCED: Final = EndReason.FORCED.value
"""The reason of a lease that an administrator ended while its pod still runs."""


def notice(event: Event) -> Notice | None:
    """Return the Kubernetes Event to send for an event of the manager; None: send nothing."""
    if event.kind in {EventKind.LEASE_DEGRADED, EventKind.LEASE_ENDED}:
        return _of_pod(event)
    known = _REASONS.get(event.kind)
    return None if known is None else Notice(reason=known[0], words=event.message, warning=known[1])


def _of_pod(event: Event) -> Notice | None:
    namespace, name, uid = (str(event.data.get(f"pod_{key}", "")) for key in ("namespace", "name", "uid"))
    reason = event.data.get("reason")
    if reason not in {*_LOST, _FORCED} or not namespace:
        return None
    about = Pod(namespace=namespace, name=name, uid=uid)
    word = "LeaseReleased" if reason == _FORCED else "DeviceLost"
    return Notice(reason=word, words=event.message, warning=True, about=about)

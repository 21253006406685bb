"""Which of the manager's events an administrator should see on the node or on a pod, and under which word; pure."""

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
    """An Event on the node or on a pod, to be sent."""

    reason: str
    """One word in CamelCase."""
    words: str
    warning: bool
    about: Pod | None = None
    """None: the node."""


_REASONS: Final[Mapping[EventKind, tuple[str, bool]]] = MappingProxyType(
    {
        EventKind.GPU_CORDONED: ("GpuCordoned", True),
        EventKind.GPU_UNCORDONED: ("GpuUncordoned", False),
        EventKind.GPU_LOST: ("GpuLost", True),
        EventKind.GPU_RECOVERED: ("GpuRecovered", False),
        EventKind.GPU_MODE_CHANGED: ("GpuModeChanged", False),
        EventKind.AGENT_PAUSED: ("MigAgentPaused", False),
        EventKind.AGENT_RESUMED: ("MigAgentResumed", False),
        EventKind.DRIVER_AWAITED: ("DriverNotReady", True),
        EventKind.LEDGER_FAILED: ("LedgerFailed", True),
        EventKind.LEDGER_RECOVERED: ("LedgerRecovered", False),
        EventKind.LEDGER_SET_ASIDE: ("LedgerSetAside", True),
        EventKind.CERTIFICATES_RENEWED: ("CertificatesRenewed", False),
        EventKind.CERTIFICATES_KEPT: ("CertificatesKept", True),
    }
)


_LOST: Final = frozenset({"gpu-lost", "gpu-reset", "instance-lost"})
"""Why a lease ends, or goes on with less: its pod still runs and has lost what it computes on."""
_FORCED: Final = EndReason.FORCED.value
"""An administrator has ended it, and the pod still runs."""


def notice(event: Event) -> Notice | None:
    """What to tell of it; None: nothing."""
    if event.kind in {EventKind.LEASE_REDUCED, EventKind.LEASE_ENDED}:
        return _of_pod(event)
    known = _REASONS.get(event.kind)
    return None if known is None else Notice(reason=known[0], words=event.words, warning=known[1])


def _of_pod(event: Event) -> Notice | None:
    namespace, name, uid = (str(event.data.get(f"pod_{key}", "")) for key in ("namespace", "name", "uid"))
    reason = event.data.get("reason")
    if reason not in {*_LOST, _FORCED} or not namespace:
        return None
    about = Pod(namespace=namespace, name=name, uid=uid)
    word = "LeaseReleased" if reason == _FORCED else "DeviceLost"
    return Notice(reason=word, words=event.words, warning=True, about=about)

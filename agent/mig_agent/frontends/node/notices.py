"""Which of the manager's events an administrator should see on the node, and under which word; pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from mig_agent.core.event import Event, EventKind


@dataclass(frozen=True, slots=True, kw_only=True)
class Notice:
    """An Event on the node, to be sent."""

    reason: str
    """One word in CamelCase."""
    words: str
    warning: bool


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
    }
)


def notice(event: Event) -> Notice | None:
    """What to tell of it on the node; None: nothing."""
    known = _REASONS.get(event.kind)
    return None if known is None else Notice(reason=known[0], words=event.words, warning=known[1])

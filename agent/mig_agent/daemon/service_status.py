"""What `systemctl status` shows: what the agent serves, and what is wrong."""

from __future__ import annotations

import asyncio

from mig_agent.core.quantities import counted
from mig_agent.daemon.sd_notify import is_service, notify
from mig_agent.engine.manager import Manager
from mig_agent.engine.results import Published

_LOOK_SECONDS = 5.0
"""Interval at which a changed line is sent: systemd keeps only the last, and tells everybody who watches it."""


def status_line(node: Published) -> str:
    """Return the line for this state of the node: `8 GPUs, 52 leases, 3 waiting`."""
    parts = [counted(len(node.view.gpus), "GPU"), counted(len(node.view.leases), "lease")]
    if node.queue_length:
        parts.append(f"{node.queue_length} waiting")
    words = [", ".join(parts)]
    if node.paused:
        words.append(f"paused: {'; '.join(node.paused)}")
    if node.ledger_error:
        words.append(f"no new leases: {node.ledger_error}")
    words += node.problem_lines
    # A line end would begin another variable of sd_notify(3).
    return "; ".join(words).replace("\n", " ")


class ServiceStatus:
    """Keeps the service manager informed. Not thread-safe; use from the event loop."""

    def __init__(self, manager: Manager, look_seconds: float = _LOOK_SECONDS) -> None:
        self._manager = manager
        self._look_seconds = look_seconds
        self._sent = ""

    def ready(self) -> None:
        """Report that the agent serves, or that a reload has ended."""
        self._sent = status_line(self._manager.published)
        notify(f"READY=1\nSTATUS={self._sent}")

    async def keep(self) -> None:
        """Send the line whenever it has changed, until cancelled; return where there is no service manager."""
        while is_service():
            line = status_line(self._manager.published)
            if line != self._sent:
                notify(f"STATUS={line}", timeout_seconds=0.0)
                self._sent = line
            await asyncio.sleep(self._look_seconds)

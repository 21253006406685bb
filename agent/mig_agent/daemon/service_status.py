"""The line that `systemctl status` shows: what the agent serves, and what is wrong."""

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
    words += node.problems
    # A line end would begin another variable of sd_notify(3).
    return "; ".join(words).replace("\n", " ")


async def keep_status(manager: Manager) -> None:
    """Send the line to the service manager whenever it has changed, until cancelled; return where there is none."""
    if not is_service():
        return
    sent = ""
    while True:
        line = status_line(manager.published)
        if line != sent:
            notify(f"STATUS={line}", timeout_seconds=0.0)
            sent = line
        await asyncio.sleep(_LOOK_SECONDS)

"""The line that `systemctl status` shows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from mig_agent.daemon.service_status import status_line
from support.engine import engine


async def test_it_counts_what_is_served_and_says_what_is_wrong(tmp_path: Path) -> None:
    async with engine(tmp_path, "a100-40gb:2") as node:
        await node.acquire("1g.5gb")
        published = node.manager.published
        assert status_line(published) == "2 GPUs, 1 lease"
        assert status_line(replace(published, queue_length=3)) == "2 GPUs, 1 lease, 3 waiting"
        assert (
            status_line(replace(published, paused=("by root: driver",))) == "2 GPUs, 1 lease; paused: by root: driver"
        )
        node.manager.report_problem("metrics", "off\nMAINPID=1")
        told = status_line(replace(node.manager.published, ledger_error="disk full"))
        assert told == "2 GPUs, 1 lease; no new leases: disk full; metrics: off MAINPID=1"
        node.manager.report_problem("metrics", "")
        assert status_line(node.manager.published) == "2 GPUs, 1 lease"

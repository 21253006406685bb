"""The line that `systemctl status` shows."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from mig_agent.daemon.service_status import ServiceStatus, status_line
from support.agent import short_folder
from support.engine import engine
from support.service_manager import service_manager


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


async def test_it_is_sent_when_it_has_changed_and_only_then(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with short_folder() as folder, service_manager(folder) as systemd:
        monkeypatch.setenv("NOTIFY_SOCKET", systemd.variables["NOTIFY_SOCKET"])
        async with engine(tmp_path, "a100-40gb:1") as node:
            status = ServiceStatus(node.manager, look_seconds=0.001)
            status.ready()
            keeping = asyncio.create_task(status.keep())
            assert await asyncio.to_thread(systemd.next) == {"READY": "1", "STATUS": "1 GPU, 0 leases"}
            await node.acquire("1g.5gb")
            assert await asyncio.to_thread(systemd.next) == {"STATUS": "1 GPU, 1 lease"}
            await asyncio.sleep(0.05)
            assert systemd.drain() == []
            keeping.cancel()


async def test_without_a_service_manager_nothing_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    async with engine(tmp_path, "a100-40gb:1") as node:
        await asyncio.wait_for(ServiceStatus(node.manager).keep(), 30)

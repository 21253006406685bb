"""What systemd hears; that it hears it at the right moments is shown in tests/faces."""

from __future__ import annotations

import asyncio
import os
import re
import socket
import time
from pathlib import Path

import pytest

from mig_agent.daemon.sd_notify import keep_alive, notify, reloading
from support.agent import short_folder
from support.service_manager import service_manager


def test_without_a_listener_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    for address in ("", "nonsense", "/no/such/socket", "@nobody-listens-here"):
        monkeypatch.setenv("NOTIFY_SOCKET", address)
        notify("READY=1")


def test_an_abstract_socket_is_understood(monkeypatch: pytest.MonkeyPatch) -> None:
    name = f"mig-agent-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(f"\0{name}")
        systemd.settimeout(10)
        monkeypatch.setenv("NOTIFY_SOCKET", f"@{name}")
        notify("READY=1")
        assert systemd.recv(100) == b"READY=1"


def test_a_listener_that_does_not_read_holds_nothing_up(monkeypatch: pytest.MonkeyPatch) -> None:
    with short_folder() as folder, socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(str(folder / "s"))
        monkeypatch.setenv("NOTIFY_SOCKET", str(folder / "s"))
        for _ in range(2000):  # far more than its queue holds
            notify("WATCHDOG=1", timeout_seconds=0.0)
        notify("STOPPING=1", timeout_seconds=0.01)


@pytest.mark.parametrize("variables", [{}, {"WATCHDOG_USEC": "x"}, {"WATCHDOG_USEC": "1000", "WATCHDOG_PID": "1"}])
async def test_nobody_who_does_not_watch_is_told_again_and_again(
    variables: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WATCHDOG_USEC", raising=False)
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "none"))
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    await asyncio.wait_for(keep_alive(), 30)


async def test_a_blocked_event_loop_sends_no_sign_of_life(monkeypatch: pytest.MonkeyPatch) -> None:
    with short_folder() as folder, service_manager(folder) as systemd:
        monkeypatch.setenv("NOTIFY_SOCKET", systemd.variables["NOTIFY_SOCKET"])
        monkeypatch.setenv("WATCHDOG_USEC", "40000")
        monkeypatch.delenv("WATCHDOG_PID", raising=False)
        watchdog = asyncio.create_task(keep_alive())
        for _ in range(3):
            assert (await asyncio.to_thread(systemd.next)) == {"WATCHDOG": "1"}
        systemd.drain()
        time.sleep(0.3)  # noqa: ASYNC251 -- that is what is tested
        assert systemd.drain() == []
        watchdog.cancel()


def test_a_reload_says_when_it_began() -> None:
    assert re.fullmatch(r"RELOADING=1\nMONOTONIC_USEC=[0-9]+", reloading())

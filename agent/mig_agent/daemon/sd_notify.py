"""Reports the agent's state to systemd, as sd_notify(3) does."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import time

_TIMEOUT_SECONDS = 1.0


def notify(state: str, *, timeout_seconds: float = _TIMEOUT_SECONDS) -> None:
    """Send `READY=1`, `STOPPING=1` or the like to the service manager, if there is one; never fails.

    Waits at most `timeout_seconds` for one that does not read.
    """
    if not is_service():
        return
    address = os.environ["NOTIFY_SOCKET"]
    name = "\0" + address[1:] if address.startswith("@") else address
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
        sender.settimeout(timeout_seconds)
        sender.sendto(state.encode(), name)


def is_service() -> bool:
    """Return True if a service manager started this process and waits for its state (Type=notify)."""
    return os.environ.get("NOTIFY_SOCKET", "").startswith(("/", "@"))


def reloading() -> str:
    """Return the state that a reload has begun; `READY=1` ends it."""
    return f"RELOADING=1\nMONOTONIC_USEC={time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000}"


async def keep_alive() -> None:
    """Send systemd's watchdog signal while the event loop runs, if systemd asks for it (WatchdogSec=)."""
    microseconds = os.environ.get("WATCHDOG_USEC", "")
    if not microseconds.isdigit() or os.environ.get("WATCHDOG_PID", str(os.getpid())) != str(os.getpid()):
        return
    while True:
        notify("WATCHDOG=1", timeout_seconds=0.0)
        await asyncio.sleep(int(microseconds) / 1_000_000 / 2)

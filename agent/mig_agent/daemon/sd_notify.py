"""Tells systemd how it goes, as sd_notify(3) does."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket

_PATIENCE_SECONDS = 1.0


def notify(state: str, *, patience_seconds: float = _PATIENCE_SECONDS) -> None:
    """Sends `READY=1`, `STOPPING=1` or the like to whoever started us, where they listen; never fails.

    One who does not read what was sent before is waited for no longer than `patience_seconds`.
    """
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address.startswith(("/", "@")):
        return
    name = "\0" + address[1:] if address.startswith("@") else address
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
        sender.settimeout(patience_seconds)
        sender.sendto(state.encode(), name)


async def keep_alive() -> None:
    """Says again and again that the event loop turns, where systemd wants to hear it (WatchdogSec=)."""
    microseconds = os.environ.get("WATCHDOG_USEC", "")
    if not microseconds.isdigit() or os.environ.get("WATCHDOG_PID", str(os.getpid())) != str(os.getpid()):
        return
    while True:
        notify("WATCHDOG=1", patience_seconds=0.0)
        await asyncio.sleep(int(microseconds) / 1_000_000 / 2)

"""Finds out which process listens on a TCP port of this machine, for messages."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

from mig_agent.core.texts import visible

_LISTEN = "0A"
"""TCP_LISTEN in proc_net_tcp(5)."""
_SEARCH_SECONDS = 1.0


def port_holder(port: int) -> str:
    """Return who listens on the port, such as `dcgm-exporter (pid 4711)`; empty if that cannot be seen. Blocks.

    Finds only processes of this PID and network namespace whose open files this process may see: as root all. The
    search ends after a second.
    """
    sockets = {f"socket:[{inode}]" for inode in _listening(port)}
    until = time.monotonic() + _SEARCH_SECONDS
    if not sockets:
        return ""
    for folder in Path("/proc").iterdir():
        if time.monotonic() >= until:
            break
        if folder.name.isdigit() and _has_open(folder, sockets):
            return _described(folder)
    return ""


def _listening(port: int) -> Iterator[int]:
    """Yield the inodes of the sockets that listen on the port."""
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            for line in Path("/proc/self/net", table).read_text(encoding="ascii").splitlines()[1:]:
                _, local, _, state, *_, inode = line.split()[:10]
                if state == _LISTEN and int(local.rpartition(":")[2], 16) == port:
                    yield int(inode)


def _has_open(process: Path, sockets: set[str]) -> bool:
    with contextlib.suppress(OSError):
        for each in (process / "fd").iterdir():
            with contextlib.suppress(OSError):
                if str(each.readlink()) in sockets:
                    return True
    return False


def _described(process: Path) -> str:
    if int(process.name) == os.getpid():
        return "this agent itself"
    with contextlib.suppress(OSError):
        name = (process / "comm").read_text(encoding="utf-8", errors="replace").strip()
        return f"{visible(name)} (pid {process.name})"
    return f"pid {process.name}"

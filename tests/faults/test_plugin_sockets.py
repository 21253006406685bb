"""Killed while a socket for the kubelet is made or removed: the next agent removes it and listens on one of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from mig_agent.adapters.failpoints import VARIABLE
from mig_agent.adapters.kubelet import KubeletPaths
from support.agent import PROCESS_SECONDS
from support.figures import Figure
from support.reached import KUBELET, REACHED

PROGRAM = """
import asyncio, sys
from pathlib import Path
from mig_agent.adapters.kubelet import KubeletPaths, PluginSocket, remove_stale_sockets

async def main():
    paths = KubeletPaths(Path(sys.argv[1]))
    remove_stale_sockets(paths)
    socket = PluginSocket(paths, "mig-1g.10gb")
    await socket.start({})
    assert socket.is_there
    await socket.stop()

asyncio.run(main())
"""


@pytest.fixture
def paths() -> Iterator[KubeletPaths]:
    """In a folder whose path is short enough for sockets."""
    with tempfile.TemporaryDirectory() as folder:
        found = KubeletPaths(Path(folder))
        found.plugins.mkdir()
        yield found


def run(paths: KubeletPaths, place: str = "") -> int:
    environment = os.environ | ({VARIABLE: place} if place else {})
    return subprocess.run(
        [sys.executable, "-c", PROGRAM, str(paths.folder)], env=environment, check=False, timeout=PROCESS_SECONDS
    ).returncode


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("door", sorted(door for kind in KUBELET for door in REACHED[kind]))
def test_killed_at_a_door(paths: KubeletPaths, door: str, when: str, figure: Figure) -> None:
    stale = paths.plugins / "mig-agent_mig-1g.10gb_012345.sock"
    stale.touch()
    other = paths.plugins / "nvidia-gpu.sock"
    other.touch()
    assert run(paths, f"{when}-{door}") == -signal.SIGKILL
    assert stale.exists() == (door == "stale-plugin-socket" and when == "before")
    assert run(paths) == 0
    assert list(paths.plugins.iterdir()) == [other]
    figure("crash points x kinds, each killed for real", 1)
    figure("kills of a process with one adapter", 1)

"""Killed while the sockets of the DRA driver are made or removed: the next agent removes them and makes its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from mig_agent.adapters.failpoints import VARIABLE
from mig_agent.adapters.kubelet import KubeletPaths
from support.agent import short_folder
from support.figures import Figure
from support.reached import DRIVER, REACHED

PROGRAM = """
import asyncio, sys
from pathlib import Path
from mig_agent.adapters.kubelet import DriverSockets, KubeletPaths

async def main():
    sockets = DriverSockets(KubeletPaths(Path(sys.argv[1])), "mig-agent.io", print)
    await sockets.start({})
    await sockets.stop()

asyncio.run(main())
"""


@pytest.fixture
def paths() -> Iterator[KubeletPaths]:
    with short_folder() as folder:
        found = KubeletPaths(Path(folder))
        found.plugin_registry.mkdir()
        yield found


def run(paths: KubeletPaths, place: str = "") -> int:
    environment = os.environ | ({VARIABLE: place} if place else {})
    command = [sys.executable, "-c", PROGRAM, str(paths.folder)]
    return subprocess.run(command, env=environment, check=False, timeout=120).returncode


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("door", sorted(door for kind in DRIVER for door in REACHED[kind]))
def test_killed_at_a_door(paths: KubeletPaths, door: str, when: str, figure: Figure) -> None:
    stale = paths.plugin_registry / "mig-agent_012345-reg.sock"
    stale.touch()
    other = paths.plugin_registry / "gpu.nvidia.com-reg.sock"
    other.touch()
    assert run(paths, f"{when}-{door}") == -signal.SIGKILL
    assert run(paths) == 0
    assert list(paths.plugin_registry.iterdir()) == [other]
    assert not list(paths.driver_folder("mig-agent.io").iterdir())
    figure("crash points x kinds, each killed for real", 1)
    figure("kills of a process with one adapter", 1)

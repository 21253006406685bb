"""Killed while a CDI file is written or removed: the container runtime finds the old one, the new one, or none."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from mig_agent.adapters.cdi import CdiFolder
from mig_agent.adapters.failpoints import VARIABLE
from support import forks
from support.cdi import KIND, mig_device, simulated, valid
from support.figures import Figure
from support.reached import CDI, REACHED

NAME = "mig-1g.5gb-0"
PROGRAM = """
import sys
from pathlib import Path
from mig_agent.adapters.cdi import CdiFolder
from mig_agent.adapters.device_backends import DeviceAccess
from mig_agent.adapters.host import Host

host, folder, kind, verb, name, who = sys.argv[1:]
cdi = CdiFolder(Path(folder), kind, Host(Path(host), simulated=True), simulated=True)
if verb == "write":
    device = DeviceAccess(gpu_minor=0, gpu_instance_id=13, compute_instance_id=0, environment={})
    cdi.write(name, [device], {"WHO": who})
else:
    cdi.remove(name)
"""
VERBS = {"CDI file": "write", "CDI file removed": "remove"}


def run(root: Path, folder: CdiFolder, verb: str, who: str, place: str = "") -> int:
    environment = os.environ | ({VARIABLE: place} if place else {})
    return forks.run("-c", PROGRAM, str(root), str(folder.folder), KIND, verb, NAME, who, env=environment).returncode


def who(folder: CdiFolder) -> str:
    """The variable in the file, as a runtime would take it; empty where there is no file."""
    files = list(folder.folder.glob("*.json")) if folder.folder.exists() else []
    if not files:
        return ""
    (path,) = files
    return str(valid(path)["devices"][0]["containerEdits"]["env"][0]).removeprefix("WHO=")


def test_the_table_is_that_of_this_test() -> None:
    assert set(CDI) == set(VERBS)


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize(("kind", "door"), [(kind, door) for kind in VERBS for door in sorted(REACHED[kind])])
def test_killed_at_a_door(tmp_path: Path, kind: str, door: str, when: str, figure: Figure) -> None:
    simulator, host = simulated(tmp_path)
    mig_device(simulator)
    host.make_caps_nodes(0, 13, 0)
    folder = CdiFolder(tmp_path / "cdi", KIND, host, simulated=True)
    before = ""
    if door != "cdi-folder":
        before = "old"
        assert run(simulator.host_root, folder, "write", before) == 0
    assert run(simulator.host_root, folder, VERBS[kind], "new", f"{when}-{door}") == -signal.SIGKILL
    done = {"cdi-folder": "", "cdi-file": "new", "cdi-removal": ""}[door]
    assert who(folder) == (before if when == "before" else done)
    # Whatever was left, the same again does it.
    assert run(simulator.host_root, folder, VERBS[kind], "new") == 0
    assert who(folder) == ("new" if VERBS[kind] == "write" else "")
    assert folder.names() == ((NAME,) if VERBS[kind] == "write" else ())
    figure("crash points x kinds, each killed for real", 1)
    figure("kills of a process with one adapter", 1)

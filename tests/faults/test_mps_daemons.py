"""Kills while an MPS daemon is started or ended: the end that comes after it leaves no daemon, server or folder."""

from __future__ import annotations

import os
import signal

import pytest

from mig_agent.adapters.failpoints import VARIABLE
from mig_agent.adapters.shares.mps import MpsDaemons, MpsTerms
from mig_agent.core.model import Generation, GpuUuid
from support import forks
from support.agent import short_folder
from support.figures import Figure
from support.mps import stand_in
from support.reached import MPS, REACHED
from support.simulated import machine

SHARE = Generation(7)
PROGRAM = """
import sys
from pathlib import Path
from mig_agent.adapters.shares.mps import MpsDaemons, MpsTerms
from mig_agent.core.model import Generation, GpuUuid

folder, path, verb, gpu = sys.argv[1:]
daemons = MpsDaemons(Path(folder), search_path=path)
if verb == "start":
    daemons.start(Generation(7), MpsTerms(gpu=GpuUuid(gpu), limit_mib=1024, uid=4321))
else:
    daemons.stop(Generation(7))
"""
VERBS = {"MPS daemon": "start", "MPS daemon ended": "stop"}
TIMES = {("start", "mps-program"): 3}
"""Number of times that a door is passed, where it is more than once: the daemon, its limit, and the limit read back."""

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root starts daemons for others")


def test_the_table_is_that_of_this_test() -> None:
    assert set(MPS) == set(VERBS)


@pytest.mark.parametrize(("kind", "door"), [(kind, door) for kind in VERBS for door in sorted(REACHED[kind])])
def test_killed_at_a_door(kind: str, door: str, figure: Figure) -> None:
    verb = VERBS[kind]
    with short_folder() as folder:
        simulator = machine(folder, "l40s,driver=550.163.01")
        programs = stand_in(simulator, folder / "mps" / str(SHARE))
        daemons = MpsDaemons(folder / "mps", search_path=programs.path)
        terms = MpsTerms(gpu=GpuUuid(simulator.machine()["gpus"][0]["uuid"]), limit_mib=1024, uid=4321)
        arguments = (str(folder / "mps"), programs.path, verb, terms.gpu)
        for when in ("before", "after"):
            for count in range(1, TIMES.get((verb, door), 1) + 1):
                if verb == "stop":
                    daemons.start(SHARE, terms)
                place = os.environ | {VARIABLE: f"{when}-{door}:{count}"}
                assert forks.run("-c", PROGRAM, *arguments, env=place).returncode == -signal.SIGKILL
                daemons.stop(SHARE)
                assert (daemons.existing(), daemons.pids(SHARE)) == ((), ())
                figure("crash points x kinds, each killed for real", 1 if count == 1 else 0)
                figure("kills of a process with one adapter", 1)
        assert forks.run("-c", PROGRAM, *arguments).returncode == 0, "the same again does it"
        daemons.stop(SHARE)

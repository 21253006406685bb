"""Kills while the cgroup of a share is made or ended: the end that comes after leaves nothing, and nothing reserved."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mig_agent.adapters import processes
from mig_agent.adapters.failpoints import FAILPOINTS, VARIABLE
from mig_agent.adapters.host import Host
from mig_agent.adapters.nvml import Driver
from mig_agent.adapters.shares.cgroup import CgroupEnforcer
from mig_agent.adapters.shares.enforcer import HolderProcess, Share
from mig_agent.core.model import Generation, GpuUuid
from mig_agent.simulator import Simulator, open_library
from support import forks
from support.figures import Figure
from support.reached import CGROUP, REACHED
from support.simulated import machine

GPUS = "l40s:2,driver=615.71.03"
SHARE = Generation(7)
PROGRAM = """
import sys
from pathlib import Path
from mig_agent.adapters.host import Host
from mig_agent.adapters.nvml import Driver
from mig_agent.adapters.shares.cgroup import CgroupEnforcer
from mig_agent.adapters.shares.enforcer import HolderProcess, Share
from mig_agent.core.model import Generation, GpuUuid
from mig_agent.simulator import open_library

state_file, root, verb, gpu, pid, started = sys.argv[1:]
enforcer = CgroupEnforcer(Driver.open(open_library(Path(state_file))), Host(Path(root), simulated=True), "a")
process = HolderProcess(pid=int(pid), started=int(started))
if verb == "begin":
    enforcer.begin(Share(generation=Generation(7), gpu=GpuUuid(gpu), limit_mib=1024, process=process))
else:
    enforcer.end(GpuUuid(gpu), Generation(7))
"""
VERBS = {"cgroup of a share": "begin", "cgroup of a share ended": "end"}
TIMES = {("begin", "cgroup-controller"): 2, ("begin", "cgroup-folder"): 2, ("begin", "cgroup-join"): 2}
"""Number of times that a door is passed, where it is more than once: parent and leaf, a process and its child."""


@dataclass(kw_only=True)
class World:
    """A simulated machine, and the enforcer of an agent on it."""

    simulator: Simulator
    enforcer: CgroupEnforcer
    gpus: tuple[GpuUuid, ...]
    living: dict[Generation, Share] = field(default_factory=dict)

    def recover(self) -> None:
        """Does what a second agent does at its start: it ends what has no lease."""
        for gpu, generation in self.enforcer.existing():
            if generation not in self.living:
                self.enforcer.end(gpu or self.gpus[0], generation)

    def check(self) -> None:
        """Nothing is left but the living shares, and the sums of the kernel are theirs."""
        assert not self.simulator.leaked_guarantees()
        assert {generation for _, generation in self.enforcer.existing()} == set(self.living)
        cgroups = self.simulator.host_root / "sys/fs/cgroup/mig-agent-a"
        assert {each.name for each in cgroups.glob("*/")} == {str(each) for each in self.living}
        for number, gpu in enumerate(self.gpus):
            sums = self.simulator.machine()["gpus"][number].get("guaranteed", {})
            held = {f"/mig-agent-a/{each.generation}": each.limit_mib << 20 for each in self.of(gpu)}
            total = {"/mig-agent-a": sum(held.values())} if held else {}
            assert sums == held | total
        for share in self.living.values():
            self.enforcer.check(share)
            assert share.process is not None
            assert self.enforcer.processes(share) == (share.process.pid,)

    def of(self, gpu: GpuUuid) -> Iterator[Share]:
        return (each for each in self.living.values() if each.gpu == gpu)


@contextmanager
def world(folder: Path) -> Iterator[World]:
    simulator = machine(folder, GPUS)
    driver = Driver.open(open_library(simulator.state_file))
    try:
        yield World(
            simulator=simulator,
            enforcer=CgroupEnforcer(driver, Host(simulator.host_root, simulated=True), "a"),
            gpus=tuple(GpuUuid(each["uuid"]) for each in simulator.machine()["gpus"]),
        )
    finally:
        driver.close()


@contextmanager
def sleeping(*, with_child: bool = False) -> Iterator[HolderProcess]:
    """A process, with a child where it is asked for."""
    words = ["sh", "-c", "sleep 1000 & echo; wait"] if with_child else ["sh", "-c", "echo; exec sleep 1000"]
    with subprocess.Popen(words, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        below = processes.descendants(process.pid)
        started = processes.started(process.pid)
        assert started is not None
        try:
            yield HolderProcess(pid=process.pid, started=started)
        finally:
            process.kill()
            for child in below:
                if processes.started(child) is not None:
                    os.kill(child, signal.SIGKILL)


def test_the_table_is_that_of_this_test() -> None:
    assert set(CGROUP) == set(VERBS)


@pytest.mark.parametrize(("kind", "door"), [(kind, door) for kind in VERBS for door in sorted(REACHED[kind])])
def test_killed_at_a_door(kind: str, door: str, figure: Figure) -> None:
    verb = VERBS[kind]
    for when in ("before", "after"):
        for count in range(1, TIMES.get((verb, door), 1) + 1):
            with (
                tempfile.TemporaryDirectory() as folder,
                world(Path(folder)) as there,
                sleeping(with_child=True) as own,
            ):
                share = Share(generation=SHARE, gpu=there.gpus[0], limit_mib=1024, process=own)
                if verb == "end":
                    there.enforcer.begin(share)
                kill_at(f"{when}-{door}:{count}", verb, there, own)
                assert_never_inside_without_a_limit(there, share)
                there.recover()
                there.check()
                figure("crash points x kinds, each killed for real", 1 if count == 1 else 0)
                figure("kills of a process with one adapter", 1)


def kill_at(place: str, verb: str, there: World, process: HolderProcess) -> None:
    simulator = there.simulator
    arguments = (simulator.state_file, simulator.host_root, verb, there.gpus[0], process.pid, process.started)
    done = forks.run("-c", PROGRAM, *map(str, arguments), env=os.environ | {VARIABLE: place})
    assert done.returncode == -signal.SIGKILL


def assert_never_inside_without_a_limit(there: World, share: Share) -> None:
    if there.enforcer.processes(share):
        there.enforcer.check(share)


def test_the_same_again_does_it() -> None:
    """After each kill of `begin`, the next `begin` of the same share is as good as the first."""
    for door in sorted(REACHED["cgroup of a share"]):
        with tempfile.TemporaryDirectory() as folder, world(Path(folder)) as there, sleeping() as own:
            share = Share(generation=SHARE, gpu=there.gpus[0], limit_mib=1024, process=own)
            kill_at(f"after-{door}", "begin", there, own)
            there.enforcer.begin(share)
            there.living[SHARE] = share
            there.check()


class _Crash(BaseException):
    """The end of the agent's process, in a test that goes on."""


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["begin", "end"]),
        st.integers(1, 4),
        st.integers(0, 1),
        st.one_of(st.none(), st.integers(1, 14)),
    ),
    max_size=8,
)


@contextmanager
def dying_at(failpoint: int | None) -> Iterator[None]:
    """Ends what is inside at the failpoint with this number, counted from here; None: at none."""
    left = itertools.count(1)

    def count(_name: str) -> None:
        if next(left) == failpoint:
            raise _Crash

    with contextlib.suppress(_Crash), mock.patch.object(FAILPOINTS, "listener", count):
        yield


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(STEPS)
def test_the_sum_of_each_ancestor_is_that_of_the_living_shares(steps: list[tuple[str, int, int, int | None]]) -> None:
    """Steps: begin or end, a number for the limit or the share, a GPU, and the failpoint at which the agent dies."""
    with contextlib.ExitStack() as stack:
        there = stack.enter_context(world(Path(stack.enter_context(tempfile.TemporaryDirectory()))))
        for generation, (verb, number, gpu, dies_at) in enumerate(steps, 1):
            with dying_at(dies_at):
                if verb == "begin":
                    share = Share(
                        generation=Generation(generation),
                        gpu=there.gpus[gpu],
                        limit_mib=number * 1024,
                        process=stack.enter_context(sleeping()),
                    )
                    there.enforcer.begin(share)
                    there.living[share.generation] = share
                elif there.living:
                    share = there.living.pop(sorted(there.living)[number % len(there.living)])
                    there.enforcer.end(share.gpu, share.generation)
            there.recover()
            there.check()

"""Shares on the simulated GPU always, and with `-m gpu` on a real one without MIG: what a CUDA program gets.

On a real machine no setting changes: daemons of MPS and cgroups are this test's own, and are gone at its end. Each test
is skipped with its reason where the machine cannot.
"""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import pytest

from mig_agent.adapters import processes
from mig_agent.adapters.host import Host
from mig_agent.adapters.nvml import ComputeMode, Driver
from mig_agent.adapters.shares.cgroup import CgroupEnforcer
from mig_agent.adapters.shares.enforcer import HolderProcess, Share
from mig_agent.adapters.shares.mps_enforcer import MpsEnforcer
from mig_agent.core.errors import DriverError
from mig_agent.core.model import Generation, GpuUuid
from mig_agent.simulator import open_library
from support.agent import short_folder
from support.figures import Figure
from support.simulated import machine

LIMIT_MIB = 3072
FIRST, SECOND = Generation(1), Generation(2)
SECONDS = 60
INFO = re.compile(r"info: free (\d+) MiB, total (\d+) MiB")
OUT_OF_MEMORY = "CUDA_ERROR_OUT_OF_MEMORY (2)"

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root limits memory and starts daemons for others")


_Way = TypeVar("_Way", CgroupEnforcer, MpsEnforcer)


@dataclass(frozen=True, kw_only=True)
class Ground:
    """A machine with a GPU whose MIG mode is off."""

    driver: Driver
    host: Host
    gpu: GpuUuid
    folder: Path
    program: Sequence[str]
    """A CUDA program that takes steps."""
    path: str
    is_real: bool

    def cgroups(self) -> CgroupEnforcer:
        return self._usable(CgroupEnforcer(self.driver, self.host, "test"))

    def mps(self) -> MpsEnforcer:
        return self._usable(MpsEnforcer(self.folder / "mps", self.driver, search_path=self.path))

    def _usable(self, way: _Way) -> _Way:
        why_not = way.why_not(self.gpu)
        if why_not:
            pytest.skip(f"{way.enforcement}: {why_not}")
        return way

    def environment(self, more: Mapping[str, str]) -> dict[str, str]:
        # libcuda itself comes from where the loader of this process looks.
        kept = {name: os.environ[name] for name in ("LD_LIBRARY_PATH",) if name in os.environ}
        return {"PATH": self.path, "CUDA_VISIBLE_DEVICES": self.gpu, **kept, **more}

    def cuda(self, *steps: str, **more: str) -> list[str]:
        """What a program prints that takes these steps."""
        words = [*self.program, *steps]
        done = subprocess.run(
            words, env=self.environment(more), capture_output=True, text=True, timeout=SECONDS, check=False
        )
        return done.stdout.splitlines()


@pytest.fixture(params=["simulated", pytest.param("real", marks=pytest.mark.gpu)])
def ground(request: pytest.FixtureRequest) -> Iterator[Ground]:
    with short_folder() as folder:
        folder.chmod(0o711)
        is_real = request.param == "real"
        driver, made = (_real if is_real else _simulated)(folder)
        yield made
        driver.close()


def _simulated(folder: Path) -> tuple[Driver, Ground]:
    simulator = machine(folder, "l40s,driver=615.71")
    driver = Driver.open(open_library(simulator.state_file))
    return driver, Ground(
        driver=driver,
        host=Host(simulator.host_root, simulated=True),
        gpu=GpuUuid(simulator.machine()["gpus"][0]["uuid"]),
        folder=folder,
        program=["simulated-cuda"],
        path=f"{simulator.host_root / 'usr/bin'}:{os.environ['PATH']}",
        is_real=False,
    )


def _real(folder: Path) -> tuple[Driver, Ground]:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        pytest.skip("libcuda.so.1 is not installed")
    driver = Driver.open()
    free = [each for each in driver.observe().gpus if not each.mode.current and not each.processes]
    if not free:
        pytest.skip("no GPU has MIG mode off and no process on it")
    if driver.compute_mode(free[0].uuid) is not ComputeMode.DEFAULT:
        pytest.skip("the compute mode of the GPU is not DEFAULT")
    return driver, Ground(
        driver=driver,
        host=Host(),
        gpu=free[0].uuid,
        folder=folder,
        program=[sys.executable, str(Path(__file__).parent.parent / "support/real_cuda.py")],
        path=os.environ["PATH"],
        is_real=True,
    )


def share(ground: Ground, generation: Generation, process: HolderProcess | None = None) -> Share:
    return Share(generation=generation, gpu=ground.gpu, limit_mib=LIMIT_MIB, uid=0, process=process)


def held_to_the_limit(lines: Sequence[str]) -> tuple[int, int]:
    """Checks the answer to `info alloc=1024 alloc=LIMIT`; returns what was free of which total, in MiB."""
    found = INFO.fullmatch(lines[1])
    assert found is not None, lines
    assert lines[2:] == ["alloc=1024: ok", f"alloc={LIMIT_MIB}: {OUT_OF_MEMORY}"]
    return int(found[1]), int(found[2])


STEPS = ("info", "alloc=1024", f"alloc={LIMIT_MIB}")


@contextmanager
def handed_over(ground: Ground) -> Iterator[tuple[subprocess.Popen[str], HolderProcess]]:
    """A shell that waits for what it is to run."""
    pipe = subprocess.PIPE
    with subprocess.Popen(["sh"], stdin=pipe, stdout=pipe, text=True, env=ground.environment({})) as shell:
        started = processes.started(shell.pid)
        assert started is not None
        yield shell, HolderProcess(pid=shell.pid, started=started)
        shell.kill()


def test_a_cgroup_holds_a_process_and_its_children_to_the_limit(ground: Ground, figure: Figure) -> None:
    """The limit is the total that the program sees; a context is within it."""
    enforcer = ground.cgroups()
    with handed_over(ground) as (shell, process):
        one = share(ground, FIRST, process)
        try:
            enforcer.begin(one)
            enforcer.check(one)
            words = " ".join([*ground.program, *STEPS])
            output = shell.communicate(f"{words}\n", timeout=SECONDS)[0]
        finally:
            enforcer.end(ground.gpu, FIRST)
        free, total = held_to_the_limit(output.splitlines())
        assert total == LIMIT_MIB
        assert free < LIMIT_MIB
    assert enforcer.existing() == ()
    if ground.is_real:
        figure(f"MiB of {LIMIT_MIB} that a cgroup's limit leaves on driver {ground.driver.version}", free)


def test_two_shares_by_mps_have_limits_of_their_own(ground: Ground, figure: Figure) -> None:
    """Two daemons on one GPU in DEFAULT compute mode; each limits its own clients."""
    enforcer = ground.mps()
    shares = [share(ground, FIRST), share(ground, SECOND)]
    free = 0
    try:
        for each in shares:
            enforcer.begin(each)
        for each in shares:
            free, _ = held_to_the_limit(ground.cuda(*STEPS, **enforcer.environment(each)))
            assert free <= LIMIT_MIB
    finally:
        for each in shares:
            enforcer.end(ground.gpu, each.generation)
    assert enforcer.existing() == ()
    if ground.is_real:
        figure(f"MiB of {LIMIT_MIB} that MPS's limit leaves on driver {ground.driver.version}", free)


def test_a_client_that_names_a_device_it_cannot_see_drops_its_limit(ground: Ground) -> None:
    """Why MPS is nothing for people who distrust each other: the agent has to watch what is really used."""
    enforcer = ground.mps()
    one = share(ground, FIRST)
    try:
        enforcer.begin(one)
        environment = {**enforcer.environment(one), "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": f"0={LIMIT_MIB}M,7=1024M"}
        lines = ground.cuda(f"alloc={LIMIT_MIB + 1024}", **environment)
        if ground.is_real and OUT_OF_MEMORY in lines[-1]:
            pytest.skip(f"driver {ground.driver.version} holds the limit all the same")
        assert lines[-1] == f"alloc={LIMIT_MIB + 1024}: ok"
    finally:
        enforcer.end(ground.gpu, FIRST)


def test_a_daemon_that_is_killed_is_noticed(ground: Ground) -> None:
    enforcer = ground.mps()
    one = share(ground, FIRST)
    try:
        enforcer.begin(one)
        daemons = [pid for pid in processes.descendants(1) if f"/{FIRST}/pipe" in _environment_of(pid)]
        assert daemons
        for pid in daemons:
            os.kill(pid, 9)
        with pytest.raises(DriverError, match="its MPS daemon has ended"):
            enforcer.check(one)
    finally:
        enforcer.end(ground.gpu, FIRST)


def _environment_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/environ").read_text(errors="replace")
    except OSError:
        return ""


def test_what_mps_costs_at_the_start_of_a_program(ground: Ground, figure: Figure) -> None:
    """From the start of the program to its end, with a context and nothing else; the daemon runs already."""
    enforcer = ground.mps()
    one = share(ground, FIRST)
    try:
        enforcer.begin(one)
        ground.cuda("info", **enforcer.environment(one))  # starts the server
        seconds = {}
        for way, environment in (("MPS", enforcer.environment(one)), ("no MPS", {})):
            began = time.monotonic()
            assert INFO.fullmatch(ground.cuda("info", **environment)[-1])
            seconds[way] = time.monotonic() - began
    finally:
        enforcer.end(ground.gpu, FIRST)
    if ground.is_real:
        for way, took in seconds.items():
            figure(f"milliseconds of a program with a context, {way}, driver {ground.driver.version}", int(took * 1000))

"""Memory limits of cgroups as the agent sets them, over the simulator's driver and its folder that plays cgroup v2."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pynvml
import pytest

from mig_agent.adapters import processes
from mig_agent.adapters.cgroupfs import Cgroups
from mig_agent.adapters.host import Host
from mig_agent.adapters.nvml import Driver
from mig_agent.adapters.shares.cgroup import CgroupEnforcer
from mig_agent.adapters.shares.enforcer import HolderProcess, Share
from mig_agent.core.errors import DriverError, DriverErrorKind
from mig_agent.core.model import Generation, GpuUuid
from mig_agent.simulator import Simulator, open_library
from support.mps import StandIn, stand_in
from support.simulated import machine

R615 = "615.71.03"
SHARE = Generation(7)


@pytest.fixture
def simulator(request: pytest.FixtureRequest, tmp_path: Path) -> Simulator:
    return machine(tmp_path, getattr(request, "param", f"l40s:2,driver={R615}"))


@pytest.fixture
def driver(simulator: Simulator) -> Iterator[Driver]:
    opened = Driver.open(open_library(simulator.state_file))
    yield opened
    opened.close()


@pytest.fixture
def enforcer(simulator: Simulator, driver: Driver) -> CgroupEnforcer:
    return CgroupEnforcer(driver, Host(simulator.host_root, simulated=True), "a", deadline_seconds=4)


@pytest.fixture
def gpu(simulator: Simulator) -> GpuUuid:
    return GpuUuid(simulator.machine()["gpus"][0]["uuid"])


@pytest.fixture
def programs(simulator: Simulator, tmp_path: Path) -> StandIn:
    return stand_in(simulator, tmp_path / "mps")


@pytest.fixture
def shell(programs: StandIn) -> Iterator[subprocess.Popen[str]]:
    """A shell that runs what is written to it, after it was handed over."""
    pipe = subprocess.PIPE
    with subprocess.Popen(["sh"], stdin=pipe, stdout=pipe, text=True, env=programs.environment()) as started:
        yield started
        started.kill()


@pytest.fixture
def share(gpu: GpuUuid, shell: subprocess.Popen[str]) -> Share:
    return Share(generation=SHARE, gpu=gpu, limit_mib=4096, process=holder(shell.pid))


def holder(pid: int) -> HolderProcess:
    started = processes.started(pid)
    assert started is not None
    return HolderProcess(pid=pid, started=started)


def folder(simulator: Simulator, generation: int = SHARE) -> Path:
    return simulator.host_root / "sys/fs/cgroup/mig-agent-a" / str(generation)


def said(shell: subprocess.Popen[str], command: str) -> list[str]:
    return shell.communicate(f"{command}\n", timeout=20)[0].splitlines()


def answer(shell: subprocess.Popen[str], command: str) -> str:
    """The first line of what a command prints that goes on."""
    assert shell.stdin is not None
    assert shell.stdout is not None
    shell.stdin.write(f"{command}\n")
    shell.stdin.flush()
    return shell.stdout.readline().strip()


def refused(kind: DriverErrorKind, words: str, call: Callable[[], object]) -> DriverError:
    with pytest.raises(DriverError) as caught:
        call()
    assert caught.value.kind is kind
    assert words in str(caught.value)
    return caught.value


def write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def test_a_process_and_its_children_get_no_more_than_the_limit(
    enforcer: CgroupEnforcer, share: Share, shell: subprocess.Popen[str]
) -> None:
    assert enforcer.why_not(share.gpu) == ""
    enforcer.begin(share)
    enforcer.check(share)
    assert enforcer.processes(share) == (shell.pid,)
    assert enforcer.environment(share) == {}
    lines = said(shell, "simulated-cuda info alloc=3584 info alloc=1; simulated-cuda alloc=3G alloc=1G")
    assert lines[1] == "info: free 3584 MiB, total 4096 MiB"
    assert lines[3] == "info: free 0 MiB, total 4096 MiB"
    assert lines[4] == "alloc=1: CUDA_ERROR_OUT_OF_MEMORY (2)"
    assert lines[6:] == ["alloc=3G: ok", "alloc=1G: CUDA_ERROR_OUT_OF_MEMORY (2)"]


def test_the_processes_of_a_share_have_one_limit_together(
    enforcer: CgroupEnforcer, share: Share, shell: subprocess.Popen[str]
) -> None:
    """The first of them runs already when its parent is handed over, and is moved with it."""
    child = int(answer(shell, "sleep 1000 & echo $!"))
    enforcer.begin(share)
    assert enforcer.processes(share) == (shell.pid, child)
    assert answer(shell, "simulated-cuda alloc=3000 sleep=1000 &").startswith("init: ok")
    assert answer(shell, "") == "alloc=3000: ok"
    assert answer(shell, "simulated-cuda alloc=72 alloc=1").startswith("init: ok")
    assert [answer(shell, "") for _ in range(2)] == ["alloc=72: ok", "alloc=1: CUDA_ERROR_OUT_OF_MEMORY (2)"]
    enforcer.end(share.gpu, SHARE)


def test_the_end_kills_what_is_inside_and_leaves_nothing_reserved(
    enforcer: CgroupEnforcer, share: Share, shell: subprocess.Popen[str], simulator: Simulator
) -> None:
    enforcer.begin(share)
    child = int(answer(shell, "sleep 1000 & echo $!"))
    assert enforcer.existing() == ((share.gpu, SHARE),)
    enforcer.end(share.gpu, SHARE)
    assert shell.wait(timeout=5) == -signal.SIGKILL
    assert processes.started(child) is None
    assert not folder(simulator).exists()
    assert not simulator.leaked_guarantees()
    assert enforcer.existing() == ()
    assert enforcer.processes(share) == ()
    enforcer.end(share.gpu, SHARE)
    refused(DriverErrorKind.NOT_FOUND, "there is no", lambda: enforcer.check(share))


def test_what_was_started_may_end_by_itself(
    share: Share, shell: subprocess.Popen[str], driver: Driver, simulator: Simulator, tmp_path: Path
) -> None:
    patient = CgroupEnforcer(driver, Host(simulator.host_root, simulated=True), "a", grace_seconds=20)
    patient.begin(share)
    saved = tmp_path / "saved"
    answer(shell, f"sh -c 'sleep 0.2; echo saved >{saved}' & echo")
    patient.end(share.gpu, SHARE)
    assert saved.read_text() == "saved\n"
    assert shell.wait(timeout=5) == -signal.SIGKILL, "it waited, for nothing that is in the share"


def test_it_may_begin_again(enforcer: CgroupEnforcer, share: Share, shell: subprocess.Popen[str]) -> None:
    enforcer.begin(share)
    enforcer.begin(share)
    assert enforcer.processes(share) == (shell.pid,)


def test_a_process_that_has_ended_is_not_moved(
    enforcer: CgroupEnforcer, share: Share, shell: subprocess.Popen[str]
) -> None:
    assert share.process is not None
    other = replace(share, process=replace(share.process, started=share.process.started - 1))
    words = f"process {shell.pid} has ended; start it again"
    assert refused(DriverErrorKind.NOT_FOUND, words, lambda: enforcer.begin(other)).left_behind
    shell.kill()
    shell.wait()
    assert refused(DriverErrorKind.NOT_FOUND, words, lambda: enforcer.begin(share)).left_behind
    assert enforcer.processes(share) == ()
    enforcer.end(share.gpu, SHARE)
    assert enforcer.existing() == ()


def test_what_a_cgroup_cannot_do(enforcer: CgroupEnforcer, share: Share) -> None:
    words = "start it by migctl run"
    without = replace(share, process=None)
    assert not refused(DriverErrorKind.INVALID_ARGUMENT, words, lambda: enforcer.begin(without)).left_behind
    with_threads = replace(share, thread_percentage=25)
    refused(DriverErrorKind.NOT_SUPPORTED, "not multiprocessors", lambda: enforcer.begin(with_threads))
    too_much = replace(share, limit_mib=1 << 20)
    assert refused(DriverErrorKind.INVALID_ARGUMENT, "", lambda: enforcer.begin(too_much)).left_behind
    assert enforcer.processes(share) == (), "never inside without a limit"
    assert enforcer.existing() == ((None, SHARE),)
    enforcer.end(share.gpu, SHARE)
    assert enforcer.existing() == ()


def test_a_cgroup_of_other_processes_is_left_alone(
    enforcer: CgroupEnforcer, share: Share, shell: subprocess.Popen[str]
) -> None:
    enforcer.begin(share)
    with subprocess.Popen(["sleep", "1000"]) as other:
        again = replace(share, process=holder(other.pid))
        words = f"mig-agent-a/7 has other processes; end them; held by pid {shell.pid}"
        assert not refused(DriverErrorKind.IN_USE, words, lambda: enforcer.begin(again)).left_behind
        other.kill()
    assert enforcer.processes(share) == (shell.pid,)


def test_only_names_that_are_generations_are_shares(
    enforcer: CgroupEnforcer, share: Share, simulator: Simulator
) -> None:
    enforcer.begin(replace(share, generation=Generation(10)))
    for name in ("notes", "07", "7.scope", "0"):
        folder(simulator).with_name(name).mkdir()
    folder(simulator, 2).mkdir()
    assert enforcer.existing() == ((None, Generation(2)), (share.gpu, Generation(10)))


def test_a_limit_that_was_changed_is_noticed(
    enforcer: CgroupEnforcer, share: Share, driver: Driver, simulator: Simulator
) -> None:
    enforcer.begin(share)
    driver.set_memory_limit(share.gpu, folder(simulator), 5000)
    words = "is 5000 MiB, 5000 MiB guaranteed, not 4096 MiB, 4096 MiB guaranteed"
    refused(DriverErrorKind.READ_BACK, words, lambda: enforcer.check(share))
    driver.set_memory_limit(share.gpu, folder(simulator), None)
    refused(DriverErrorKind.READ_BACK, "is none, not 4096 MiB", lambda: enforcer.check(share))


def test_a_driver_that_lies_about_the_limit_lets_nothing_in(
    enforcer: CgroupEnforcer, share: Share, simulator: Simulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pynvml, "nvmlDeviceSetMemoryLimits_v1", lambda *_: None)
    assert refused(DriverErrorKind.READ_BACK, "is none", lambda: enforcer.begin(share)).left_behind
    assert enforcer.processes(share) == ()
    monkeypatch.undo()
    simulator.fail("nvmlDeviceSetMemoryLimits_v1", 4)
    assert refused(DriverErrorKind.NO_PERMISSION, "", lambda: enforcer.begin(share)).left_behind
    assert enforcer.processes(share) == ()


@pytest.mark.parametrize(
    ("simulator", "words"),
    [
        ("l40s,driver=580.95.05", "driver 580.95.05 has no memory limits of cgroups, 615 has"),
        (f"h100-80gb,driver={R615}", "as in MIG mode; switch MIG mode off"),
    ],
    indirect=["simulator"],
)
def test_a_gpu_that_cannot_is_told(enforcer: CgroupEnforcer, gpu: GpuUuid, words: str) -> None:
    assert words in enforcer.why_not(gpu)


def test_a_compute_mode_for_one_process_is_told(enforcer: CgroupEnforcer, gpu: GpuUuid) -> None:
    pynvml.nvmlDeviceSetComputeMode(pynvml.nvmlDeviceGetHandleByIndex(0), pynvml.NVML_COMPUTEMODE_EXCLUSIVE_PROCESS)
    assert f"is EXCLUSIVE_PROCESS; `nvidia-smi -i {gpu} -c DEFAULT`" in enforcer.why_not(gpu)


@pytest.mark.parametrize("simulator", [f"l40s,driver={R615},kernel=6.12"], indirect=True)
def test_a_kernel_without_the_controller(
    enforcer: CgroupEnforcer, share: Share, shell: subprocess.Popen[str], simulator: Simulator
) -> None:
    assert enforcer.why_not(share.gpu) == ""
    enforcer.begin(share)
    assert "dmem" not in (folder(simulator).parent / "cgroup.subtree_control").read_text()
    assert said(shell, "simulated-cuda alloc=3G alloc=1G")[2] == "alloc=1G: CUDA_ERROR_OUT_OF_MEMORY (2)"
    enforcer.end(share.gpu, SHARE)


def test_a_machine_without_cgroup_v2(tmp_path: Path) -> None:
    mount = tmp_path / "cgroup"
    cgroups = Cgroups(mount, "mig-agent")
    assert cgroups.why_not() == f"no cgroup v2 is mounted at {mount}; mount it there"
    write(mount / "memory/cgroup.procs", "")
    hint = "boot with systemd.unified_cgroup_hierarchy=1"
    assert cgroups.why_not() == f"{mount} has cgroup v1; {hint}"
    write(mount / "unified/cgroup.controllers", "")
    assert cgroups.why_not() == f"{mount} has cgroup v1 beside v2; {hint}"
    write(mount / "cgroup.controllers", "cpu dmem\n")
    assert cgroups.why_not() == ""
    with mock.patch.object(os, "access", return_value=False):
        assert cgroups.why_not().startswith(f"{mount} cannot be written to; run the agent as root")


def test_what_the_kernel_refuses_is_told_with_its_file(
    enforcer: CgroupEnforcer, share: Share, simulator: Simulator
) -> None:
    write(folder(simulator), "not a folder")
    assert refused(DriverErrorKind.UNKNOWN, f"{folder(simulator)}: ", lambda: enforcer.begin(share)).left_behind
    with mock.patch.object(
        Cgroups, "make", side_effect=OSError(errno.EROFS, "Read-only file system", "/sys/fs/cgroup")
    ):
        refused(DriverErrorKind.UNKNOWN, "/sys/fs/cgroup: Read-only file system", lambda: enforcer.begin(share))


def test_a_process_that_cannot_be_killed_is_named(
    enforcer: CgroupEnforcer, share: Share, shell: subprocess.Popen[str], driver: Driver, simulator: Simulator
) -> None:
    """It hangs in a driver, for instance. The limit then stays, since the memory is in use."""
    enforcer.begin(share)
    quick = CgroupEnforcer(driver, Host(simulator.host_root, simulated=True), "a", deadline_seconds=0.1)
    with mock.patch.object(Cgroups, "kill"):
        words = f"processes do not end; held by pid {shell.pid}"
        refused(DriverErrorKind.TIMEOUT, words, lambda: quick.end(share.gpu, SHARE))
    enforcer.check(share)


def test_a_lost_gpu_keeps_its_cgroup_until_it_answers(
    enforcer: CgroupEnforcer, share: Share, simulator: Simulator
) -> None:
    """Removed with its limit set, it would leave its memory reserved for ever."""
    enforcer.begin(share)
    simulator.lose_gpu(0)
    refused(DriverErrorKind.GPU_LOST, "", lambda: enforcer.end(share.gpu, SHARE))
    refused(DriverErrorKind.GPU_LOST, "", lambda: enforcer.end(GpuUuid(""), SHARE))
    assert enforcer.existing() == ((None, SHARE),)


def test_a_share_is_ended_without_knowing_its_gpu(enforcer: CgroupEnforcer, share: Share, simulator: Simulator) -> None:
    enforcer.begin(share)
    enforcer.end(GpuUuid(""), SHARE)
    assert not folder(simulator).exists()
    assert not simulator.leaked_guarantees()


def test_a_process_is_in_one_share_and_its_users_own(
    enforcer: CgroupEnforcer, share: Share, shell: subprocess.Popen[str]
) -> None:
    enforcer.begin(replace(share, uid=os.getuid()))
    second = replace(share, generation=Generation(8))
    words = f"process {shell.pid} is in share 7, and a process can be in one only"
    assert not refused(DriverErrorKind.IN_USE, words, lambda: enforcer.begin(second)).left_behind
    theirs = replace(share, uid=os.getuid() + 1)
    words = f"process {shell.pid} belongs to another user"
    assert not refused(DriverErrorKind.NO_PERMISSION, words, lambda: enforcer.begin(theirs)).left_behind


def test_cgroups_inside_a_share_go_with_it(
    enforcer: CgroupEnforcer, share: Share, shell: subprocess.Popen[str], simulator: Simulator
) -> None:
    enforcer.begin(share)
    inner = folder(simulator) / "a/b"
    inner.mkdir(parents=True)
    write(folder(simulator) / "cgroup.procs", "")
    write(inner / "cgroup.procs", f"{shell.pid}\n")
    assert enforcer.processes(share) == (shell.pid,)
    enforcer.end(share.gpu, SHARE)
    assert shell.wait(timeout=5) == -signal.SIGKILL
    assert not folder(simulator).exists()


def test_a_kernel_that_kills_whole_cgroups_is_asked_to(tmp_path: Path) -> None:
    """`cgroup.kill` spares no process that is forked meanwhile."""
    cgroups = Cgroups(tmp_path, "mig-agent")
    cgroups.make("7")
    write(cgroups.path("7") / "cgroup.kill", "")
    write(cgroups.path("7") / "cgroup.procs", f"{os.getpid()}\n")
    cgroups.kill("7")
    assert (cgroups.path("7") / "cgroup.kill").read_text() == "1"


def test_a_cgroup_that_stays_busy_is_an_error_after_the_deadline(tmp_path: Path) -> None:
    cgroups = Cgroups(tmp_path, "mig-agent")
    cgroups.make("7")
    busy = OSError(errno.EBUSY, "Device or resource busy")
    with mock.patch.object(Path, "rmdir", side_effect=busy), pytest.raises(TimeoutError, match="still in use"):
        cgroups.remove("7", 0.05)
    cgroups.remove("7", 0.05)
    assert cgroups.names() == ()

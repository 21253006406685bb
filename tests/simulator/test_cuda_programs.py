"""Programs that use CUDA on a simulated GPU: through MPS, past it, and in cgroups with limits."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pynvml
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mig_agent.simulator import Simulator
from mig_agent.simulator.cuda import CudaProcess
from mig_agent.simulator.cuda_codes import CudaError
from mig_agent.simulator.mps.wire import connect
from support.mps import OTHER_UID, StandIn, stand_in
from support.simulated import machine, put_under_pynvml

MIB, GIB = 1 << 20, 1 << 30
TOTAL = 46068
"""MiB of the simulated GPU, of which 512 are the driver's and 512 of each context."""


@pytest.fixture
def folder() -> Iterator[Path]:
    made = Path(tempfile.mkdtemp(prefix="mps-"))
    yield made
    shutil.rmtree(made)


@pytest.fixture
def start(folder: Path) -> Iterator[Callable[..., StandIn]]:
    """Makes a machine with one L40S, and a daemon with a limit unless it is None."""
    made: list[StandIn] = []

    def run(*arguments: str, driver: str = "580.95.05", limit: str | None = "4096M") -> StandIn:
        simulator = machine(folder, f"l40s,driver={driver}")
        put_under_pynvml(simulator)
        made.append(stand_in(simulator, folder))
        assert made[0].start("-d", *arguments).returncode == 0
        if limit is not None:
            made[0].say(f"set_default_device_pinned_mem_limit 0 {limit}\n")
        return made[0]

    yield run
    for each in made:
        for pid in each.pids():
            os.kill(pid, signal.SIGCONT)
            os.kill(pid, signal.SIGKILL)


class Program:
    """A program that holds what it has, until it is released or killed."""

    def __init__(self, mps: StandIn, *steps: str, **more: str) -> None:
        self._process = mps.start_cuda(*steps, **more)
        self._steps = len(steps[: steps.index("hold")]) if "hold" in steps else 0
        self.lines: list[str] = []

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait_ready(self) -> Program:
        assert self._process.stdout is not None
        while len(self.lines) <= self._steps:
            line = self._process.stdout.readline()
            assert line, self.lines
            self.lines.append(line.rstrip())
        return self

    def end(self) -> list[str]:
        out, _ = self._process.communicate(timeout=20)
        return self.lines + out.splitlines()

    def kill(self) -> None:
        self._process.kill()
        self._process.communicate()


def ready(mps: StandIn, *steps: str, **more: str) -> Program:
    return Program(mps, *steps, **more).wait_ready()


def listed(name: str) -> dict[int, int]:
    """MiB by process, as NVML lists them."""
    function = getattr(pynvml, f"nvmlDeviceGet{name}RunningProcesses")
    return {each.pid: each.usedGpuMemory // MIB for each in function(pynvml.nvmlDeviceGetHandleByIndex(0))}


def test_a_client_gets_out_of_memory_at_its_limit_with_the_context_inside_it(start: Callable[..., StandIn]) -> None:
    mps = start()
    assert [line.partition(" pid")[0] for line in mps.cuda("info", "alloc=3G", "info", "managed=30G", "alloc=513")] == [
        "init: ok,",
        f"info: free 3584 MiB, total {TOTAL} MiB",
        "alloc=3G: ok",
        f"info: free 512 MiB, total {TOTAL} MiB",
        "managed=30G: ok",
        "alloc=513: CUDA_ERROR_OUT_OF_MEMORY (2)",
    ]


def test_nvml_lists_the_server_and_the_clients(start: Callable[..., StandIn]) -> None:
    mps = start()
    program = ready(mps, "alloc=1G", "hold")
    server = int(mps.say("get_server_list\n")[1])
    assert listed("Compute") == {server: 60, program.pid: 1024 + 512}
    assert listed("MPSCompute") == {program.pid: 1024 + 512}
    assert mps.say(f"get_client_list {server}\nget_server_status {server}\n")[1] == f"{program.pid}\nACTIVE\n"
    header, row = mps.say("ps\n")[1].splitlines()
    assert header.split() == ["PID", "ID", "SERVER", "DEVICE", "NAMESPACE", "COMMAND"]
    assert row.split()[:3] == [str(program.pid), "0", str(server)]
    program.end()
    assert listed("Compute") == {server: 60}  # it stays
    assert mps.say("quit -t 5\n") == (0, "", "")
    assert listed("Compute") == {}


def test_the_lower_limit_holds_and_a_bad_entry_drops_all_of_them(start: Callable[..., StandIn]) -> None:
    mps = start()
    variable = "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"
    left = {}
    for entry in ("0=2048M", "0=8G", "0=2G,1=2G", "GPU-unknown=1G"):
        found = re.search(r"free (\d+) MiB", mps.cuda("info", **{variable: entry})[1])
        assert found is not None
        left[entry] = int(found[1])
    unlimited = TOTAL - 512 - 512 - 60
    assert left == {"0=2048M": 1536, "0=8G": 3584, "0=2G,1=2G": unlimited, "GPU-unknown=1G": unlimited}


def test_the_limit_is_each_processs_own(start: Callable[..., StandIn]) -> None:
    mps = start()
    first = ready(mps, "alloc=3G", "hold")
    assert mps.cuda("alloc=3G")[1] == "alloc=3G: ok"
    first.end()


def test_a_limit_reaches_servers_that_start_later(start: Callable[..., StandIn]) -> None:
    mps = start(limit=None)
    assert mps.cuda("alloc=6G")[1] == "alloc=6G: ok"
    mps.say("set_default_device_pinned_mem_limit 0 4G\n")
    assert mps.cuda("alloc=6G")[1] == "alloc=6G: ok"
    mps.say(f"shutdown_server {mps.say('get_server_list' + chr(10))[1].strip()}\n")
    assert mps.cuda("alloc=6G")[1] == "alloc=6G: CUDA_ERROR_OUT_OF_MEMORY (2)"


@pytest.mark.parametrize("way", ["no folder", "stale socket"])
def test_without_a_daemon_there_is_no_limit_and_no_word_of_it(start: Callable[..., StandIn], way: str) -> None:
    mps = start()
    if way == "stale socket":
        for pid in mps.pids():
            os.kill(pid, signal.SIGKILL)
    more = {"CUDA_MPS_PIPE_DIRECTORY": "/none"} if way == "no folder" else {}
    lines = mps.cuda("alloc=6G", **more)
    assert lines[0].endswith("no MPS")
    assert lines[1] == "alloc=6G: ok"


def test_exclusive_process_lets_nothing_past_the_server(start: Callable[..., StandIn]) -> None:
    mps = start()
    pynvml.nvmlDeviceSetComputeMode(pynvml.nvmlDeviceGetHandleByIndex(0), pynvml.NVML_COMPUTEMODE_EXCLUSIVE_PROCESS)
    first = ready(mps, "hold")
    assert mps.cuda("alloc=1G")[1] == "alloc=1G: ok"
    assert mps.cuda(CUDA_MPS_PIPE_DIRECTORY="/none") == ["init: CUDA_ERROR_DEVICE_UNAVAILABLE (46)"]
    first.end()


def test_a_server_that_cannot_start_is_tried_six_times(start: Callable[..., StandIn]) -> None:
    mps = start()
    (Path(mps.path.split(":")[0]) / "nvidia-cuda-mps-server").write_text("#!/bin/sh\nexit 1\n")
    assert mps.cuda() == ["init: CUDA_ERROR_MPS_CONNECTION_FAILED (805)"]
    assert mps.log().count("exited with status 1") == 6


def test_a_terminated_client_loses_its_memory_and_is_told(start: Callable[..., StandIn]) -> None:
    mps = start()
    program = ready(mps, "alloc=1G", "hold", "info")
    server = mps.say("get_server_list\n")[1].strip()
    assert mps.say(f"terminate_client {server} {program.pid}\n") == (0, "0\n", "")
    assert program.pid not in listed("Compute")
    assert program.end()[-1] == "info: CUDA_ERROR_MPS_CLIENT_TERMINATED (810)"


def test_a_fatal_fault_reaches_every_client_and_new_ones_wait_for_the_last_to_go(start: Callable[..., StandIn]) -> None:
    mps = start()
    other = ready(mps, "hold", "info")
    assert mps.cuda("fault")[1] == "fault: CUDA_ERROR_ILLEGAL_ADDRESS (700)"
    assert mps.say(f"get_server_status {mps.say('get_server_list' + chr(10))[1].strip()}\n")[1] == "FAULT\n"
    assert mps.cuda() == ["init: CUDA_ERROR_MPS_SERVER_NOT_READY (807)"]
    assert other.end()[-1] == "info: CUDA_ERROR_ILLEGAL_ADDRESS (700)"
    assert mps.cuda("info")[0].endswith("MPS")


def test_a_client_killed_at_work_takes_the_others_with_it_and_later_ones_hang(start: Callable[..., StandIn]) -> None:
    mps = start()
    busy, other = ready(mps, "busy", "hold"), ready(mps, "hold", "info")
    busy.kill()
    late = Program(mps, "hold")
    deadline = time.monotonic() + 5
    while mps.log().count("NEW CLIENT") < 3:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert other.end()[-1] == "info: CUDA_ERROR_ILLEGAL_ADDRESS (700)"
    with pytest.raises(subprocess.TimeoutExpired):
        late._process.wait(0.3)
    late.kill()


def test_a_stopped_daemon_hangs_every_cuinit(start: Callable[..., StandIn]) -> None:
    mps = start()
    daemon = mps.pids()[0]
    os.kill(daemon, signal.SIGSTOP)
    waiting = Program(mps, "info")
    with pytest.raises(subprocess.TimeoutExpired):
        waiting._process.wait(0.5)
    os.kill(daemon, signal.SIGCONT)
    assert waiting.end()[-1].startswith("info: free")


def test_quit_waits_for_clients_as_long_as_it_is_told(start: Callable[..., StandIn]) -> None:
    mps = start()
    program = ready(mps, "hold", "info")
    before = time.monotonic()
    assert mps.say("quit -t 1\n") == (0, "", "")
    assert time.monotonic() - before > 0.9
    assert "CUDA_ERROR_MPS" in program.end()[-1]


@pytest.mark.skipif(os.geteuid() != 0, reason="other users take root")
def test_another_users_client_waits_for_those_of_the_first(start: Callable[..., StandIn], folder: Path) -> None:
    mps = start()
    first = ready(mps, "hold")
    folder.chmod(0o755)
    os.seteuid(OTHER_UID)
    try:
        second = connect(mps.pipe)
    finally:
        os.seteuid(0)
    second.send({"kind": "client"})
    deadline = time.monotonic() + 5
    while mps.log().count("NEW CLIENT") < 2:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    time.sleep(0.2)
    assert not second.has_news()
    assert len(mps.say("get_server_list\n")[1].split()) == 1
    first.end()
    assert second.receive() is not None  # let in, or not if that user may not start our Python
    second.close()
    assert re.search(rf"Starting new server \d+ for user {OTHER_UID}", mps.log())


def test_a_daemon_of_a_mig_device_serves_it_as_device_0(folder: Path) -> None:
    simulator = machine(folder, "h100-80gb")
    put_under_pynvml(simulator)
    simulator.create_foreign(0, "1g.10gb")
    uuid = pynvml.nvmlDeviceGetUUID(pynvml.nvmlDeviceGetMigDeviceHandleByIndex(pynvml.nvmlDeviceGetHandleByIndex(0), 0))
    mps = stand_in(simulator, folder)
    mps.env["CUDA_VISIBLE_DEVICES"] = uuid
    assert mps.start().returncode == 0
    mps.say("set_default_device_pinned_mem_limit 0 2G\n")
    assert mps.cuda("info")[1] == "info: free 1536 MiB, total 9984 MiB"
    assert mps.say("quit\n")[0] == 0


# Memory limits of cgroups.


@pytest.fixture
def limited(folder: Path) -> Callable[..., tuple[Simulator, CudaProcess]]:
    """This process in a cgroup with limits in GiB, and as CUDA sees it: `limited("a/b", {"a/b": 4})`."""

    def make(own: str, limits: dict[str, int], *, kernel: str = "6.14") -> tuple[Simulator, CudaProcess]:
        simulator = machine(folder, f"l40s,driver=615.71,kernel={kernel}")
        put_under_pynvml(simulator)
        root = simulator.host_root / "sys/fs/cgroup"
        (root / own).mkdir(parents=True)
        for parent in Path(own).parents:
            (root / parent / "cgroup.subtree_control").write_text("+dmem")
        (root / own / "cgroup.procs").write_text(str(os.getpid()))
        for path, gib in limits.items():
            asked = pynvml.c_nvmlSetMemoryLimits_v1_t(nameSpace=bytes(root / path), softLimit=0, hardLimit=gib * GIB)
            pynvml.nvmlDeviceSetMemoryLimits_v1(pynvml.nvmlDeviceGetHandleByIndex(0), asked)
        process = CudaProcess(simulator.state_file, {})
        process.init()
        process.create_context()
        return simulator, process

    return make


def test_a_cgroups_limit_is_shown_as_the_total_and_holds(limited: Callable[..., tuple[Simulator, CudaProcess]]) -> None:
    simulator, process = limited("mig-agent/7", {"mig-agent/7": 4})
    assert process.memory_info() == (3584 * MIB, 4 * GIB)
    process.allocate(3 * GIB)
    with pytest.raises(CudaError, match="OUT_OF_MEMORY"):
        process.allocate(513 * MIB)
    process.free(GIB)
    process.allocate(GIB)
    cgroup = (simulator.host_root / f"proc/{os.getpid()}/cgroup").read_text()
    assert cgroup == "0::/mig-agent/7\n"
    leaf = simulator.host_root / "sys/fs/cgroup/mig-agent/7"
    answer = pynvml.c_nvmlGetMemoryLimits_v1_t(nameSpace=bytes(leaf))
    pynvml.nvmlDeviceGetMemoryLimits_v1(pynvml.nvmlDeviceGetHandleByIndex(0), answer)
    assert answer.currentUsed == 3584 * MIB
    process.close()


def test_an_ancestors_limit_holds_but_is_not_shown(limited: Callable[..., tuple[Simulator, CudaProcess]]) -> None:
    _, process = limited("mig-agent/7", {"mig-agent": 4})
    assert process.memory_info() == (3584 * MIB, TOTAL * MIB)
    with pytest.raises(CudaError, match="OUT_OF_MEMORY"):
        process.allocate(4 * GIB)


def test_without_the_controller_an_ancestors_limit_holds_for_nothing_below_it(
    limited: Callable[..., tuple[Simulator, CudaProcess]],
) -> None:
    _, process = limited("mig-agent/7", {"mig-agent": 4}, kernel="6.12")
    process.allocate(8 * GIB)


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.tuples(st.booleans(), st.integers(1, 30_000)), max_size=10))
def test_a_card_never_gives_more_than_it_has(steps: list[tuple[bool, int]]) -> None:
    """Steps: allocate or free so many MiB, in a process without limits beside a workload of 10,000 MiB."""
    with tempfile.TemporaryDirectory() as path:
        simulator = machine(Path(path), "l40s")
        simulator.occupy("0", used_mib=10_000)
        process = CudaProcess(simulator.state_file, {"CUDA_MPS_PIPE_DIRECTORY": "/none"})
        process.init()
        process.create_context()
        held = 0
        for is_allocation, mib in steps:
            if not is_allocation:
                process.free(mib * MIB)
                held = max(held - mib, 0)
                continue
            free = process.memory_info()[0]
            try:
                process.allocate(mib * MIB)
            except CudaError:
                assert mib * MIB > free
            else:
                held += mib
                assert mib * MIB <= free
            used = sum(each["used_mib"] or 0 for each in simulator.machine()["gpus"][0]["processes"])
            assert used == 10_000 + 512 + held <= TOTAL - 512

"""One machine in several threads and processes, and what outlives whom."""

from __future__ import annotations

import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pynvml
import pytest

from mig_agent.simulator import STATE_FILE, Simulator, SimulatorError, open_library, open_or_create_machine

Simulate = Callable[..., Simulator]

CHURN = """
import sys, pathlib, pynvml
from mig_agent.simulator import open_library
pynvml.nvmlLib = open_library(pathlib.Path(sys.argv[1]))
pynvml.nvmlInit()
gpu = pynvml.nvmlDeviceGetHandleByIndex(0)
made = 0
while made < int(sys.argv[2]):
    try:
        instance = pynvml.nvmlDeviceCreateGpuInstance(gpu, 19)
    except pynvml.NVMLError_InsufficientResources:
        continue
    made += 1
    pynvml.nvmlGpuInstanceDestroy(instance)
"""


def overlaps(simulator: Simulator) -> bool:
    taken: set[int] = set()
    for instance in simulator.machine()["gpus"][0]["instances"]:
        window = set(range(instance["start"], instance["start"] + instance["size"]))
        if taken & window:
            return True
        taken |= window
    return False


def test_processes_share_one_machine(simulate: Simulate) -> None:
    """Each change is whole: nothing overlaps, no call is lost, all agree at the end."""
    simulator = simulate("a100-40gb")
    program = [sys.executable, "-c", CHURN, str(simulator.state_file), "25"]
    with subprocess.Popen(program) as first, subprocess.Popen(program) as second:
        gpu = pynvml.nvmlDeviceGetHandleByIndex(0)
        for _ in range(25):
            instance = pynvml.nvmlDeviceCreateGpuInstance(gpu, 19)
            assert not overlaps(simulator)
            pynvml.nvmlGpuInstanceDestroy(instance)
        assert [first.wait(120), second.wait(120)] == [0, 0]
    assert simulator.machine()["gpus"][0]["instances"] == []
    assert simulator.calls("nvmlGpuInstanceDestroy") == 75


def test_threads_share_one_machine(simulate: Simulate) -> None:
    simulator = simulate("a100-40gb")
    gpu = pynvml.nvmlDeviceGetHandleByIndex(0)

    def one(_: int) -> bool:
        try:
            pynvml.nvmlDeviceCreateGpuInstance(gpu, 19)
        except pynvml.NVMLError_InsufficientResources:
            return False
        return True

    with ThreadPoolExecutor(8) as threads:
        assert sum(threads.map(one, range(20))) == 7
    assert not overlaps(simulator)


def test_what_another_process_changed_is_seen_at_once(simulate: Simulate) -> None:
    """Also where two changes come so fast that no clock tells them apart."""
    simulator = simulate("a100-40gb")
    other = Simulator(simulator.state_file)
    gpu = pynvml.nvmlDeviceGetHandleByIndex(0)
    for _ in range(50):
        id_, _ = other.create_foreign(0, "1g.5gb")
        pynvml.nvmlDeviceGetGpuInstanceById(gpu, id_)
        other.destroy_foreign(f"0/{id_}")
        with pytest.raises(pynvml.NVMLError_NotFound):
            pynvml.nvmlDeviceGetGpuInstanceById(gpu, id_)


def test_readers_do_not_wait_for_a_creation(simulate: Simulate) -> None:
    simulator = simulate("a100-40gb")
    simulator.set_latency(create_seconds=3600, destroy_seconds=0)
    gpu = pynvml.nvmlDeviceGetHandleByIndex(0)
    creating = threading.Thread(target=pynvml.nvmlDeviceCreateGpuInstance, args=(gpu, 19), daemon=True)
    creating.start()
    # Neither readers nor writers: the hour passes outside all locks.
    assert pynvml.nvmlDeviceGetMigMode(gpu) == [1, 1]
    simulator.create_foreign(0, "1g.5gb")
    assert creating.is_alive()


def test_a_process_that_ends_with_a_hanging_call_ends(simulate: Simulate) -> None:
    simulator = simulate("a100-40gb")
    simulator.hang("nvmlDeviceGetMigMode")
    program = (
        "import sys, pathlib, threading, pynvml\n"
        "from mig_agent.simulator import open_library\n"
        "pynvml.nvmlLib = open_library(pathlib.Path(sys.argv[1])); pynvml.nvmlInit()\n"
        "gpu = pynvml.nvmlDeviceGetHandleByIndex(0)\n"
        "threading.Thread(target=pynvml.nvmlDeviceGetMigMode, args=(gpu,), daemon=True).start()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(simulator.state_file)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_the_machine_outlives_its_users(tmp_path: Path) -> None:
    first = open_or_create_machine(tmp_path / STATE_FILE, "a100-40gb:1,t4", create_seconds=0, destroy_seconds=0)
    first.create_foreign(0, "2g.10gb")
    again = open_or_create_machine(tmp_path / STATE_FILE, "a100-40gb:1,t4")
    assert again.machine() == first.machine()
    with pytest.raises(SimulatorError, match="it holds a100-40gb, t4"):
        open_or_create_machine(tmp_path / STATE_FILE, "h100-80gb:1")


def test_without_a_machine_there_is_no_library(tmp_path: Path) -> None:
    with pytest.raises(SimulatorError, match="cannot find simulated GPUs"):
        open_library(tmp_path / "none" / STATE_FILE)


def test_files_of_the_host_are_mended(simulate: Simulate) -> None:
    """A process may be killed between writing the state and writing what /proc shows of it."""
    simulator = simulate("a100-40gb")
    simulator.create_foreign(0, "1g.5gb")
    pid = simulator.occupy("0/13")
    shutil.rmtree(simulator.host_root / f"proc/{pid}")
    capability = simulator.host_root / "proc/driver/nvidia/capabilities/gpu0/mig/gi13"
    shutil.rmtree(capability)
    (capability.parent / "gi1/ci0").mkdir(parents=True)
    open_library(simulator.state_file)
    assert (simulator.host_root / f"proc/{pid}/fd").is_dir()
    assert {folder.name for folder in capability.parent.iterdir()} == {"gi13"}
    assert (capability / "ci0/access").read_text().startswith("DeviceFileMinor: 121\n")


def test_a_workload_tied_to_a_real_process_ends_with_it(simulate: Simulate) -> None:
    simulator = simulate("a100-40gb")
    simulator.create_foreign(0, "1g.5gb")
    gpu = pynvml.nvmlDeviceGetHandleByIndex(0)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as workload:
        assert simulator.occupy("0/13", pid=workload.pid) == workload.pid
        assert [each.pid for each in pynvml.nvmlDeviceGetComputeRunningProcesses(gpu)] == [workload.pid]
        with pytest.raises(SimulatorError, match="19"):
            simulator.destroy_foreign("0/13")
        workload.communicate(b"\n", timeout=120)
    assert pynvml.nvmlDeviceGetComputeRunningProcesses(gpu) == []
    assert not (simulator.host_root / f"proc/{workload.pid}").exists()
    simulator.destroy_foreign("0/13")


def test_the_file_is_never_half_written(simulate: Simulate) -> None:
    """A reader that comes at any moment finds a whole state."""
    simulator = simulate("a100-40gb")
    stop = threading.Event()
    failures: list[Exception] = []

    def read() -> None:
        while not stop.is_set():
            try:
                Simulator(simulator.state_file).machine()
            except Exception as error:  # noqa: BLE001 -- whatever it is, it is the finding
                failures.append(error)
                return

    reader = threading.Thread(target=read)
    reader.start()
    deadline = time.monotonic() + 30
    while simulator.machine()["revision"] < 100 and time.monotonic() < deadline:
        simulator.set_latency(create_seconds=0, destroy_seconds=0)
    stop.set()
    reader.join(30)
    assert failures == []

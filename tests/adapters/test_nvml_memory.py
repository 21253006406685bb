"""What the driver tells of the memory of GPUs without MIG, through the real pynvml over simulated ones."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from mig_agent.adapters.nvml import ComputeMode, Driver, MemoryLimit
from mig_agent.core.errors import DriverError, DriverErrorKind
from mig_agent.core.model import GpuUuid
from mig_agent.simulator import Simulator, open_library
from support.agent import short_folder
from support.mps import stand_in
from support.simulated import machine

GIB = 1 << 30


@pytest.fixture
def simulator(request: pytest.FixtureRequest) -> Iterator[Simulator]:
    with short_folder() as folder:
        yield machine(folder, getattr(request, "param", "l40s,driver=615.71"))


@pytest.fixture
def driver(simulator: Simulator) -> Iterator[Driver]:
    opened = Driver.open(open_library(simulator.state_file))
    yield opened
    opened.close()


@pytest.fixture
def gpu(simulator: Simulator) -> GpuUuid:
    return GpuUuid(simulator.machine()["gpus"][0]["uuid"])


def test_memory_that_the_driver_keeps_and_the_compute_mode(driver: Driver, gpu: GpuUuid) -> None:
    assert driver.reserved_mib(gpu) == 512
    assert driver.compute_mode(gpu) is ComputeMode.DEFAULT


def test_the_limit_of_a_cgroup(driver: Driver, gpu: GpuUuid, simulator: Simulator) -> None:
    cgroup = simulator.host_root / "sys/fs/cgroup/a"
    cgroup.mkdir()
    (cgroup.parent / "cgroup.subtree_control").write_text("+dmem")
    assert driver.memory_limit(gpu, cgroup) is None
    driver.set_memory_limit(gpu, cgroup, 1024)
    assert driver.memory_limit(gpu, cgroup) == MemoryLimit(soft_bytes=GIB, hard_bytes=GIB)
    assert str(driver.memory_limit(gpu, cgroup)) == "1024 MiB, 1024 MiB guaranteed"
    driver.set_memory_limit(gpu, cgroup, None)
    assert driver.memory_limit(gpu, cgroup) is None


@pytest.mark.parametrize("simulator", ["l40s,driver=580.95.05"], indirect=True)
def test_an_older_driver_does_not_have_it(driver: Driver, gpu: GpuUuid) -> None:
    with pytest.raises(DriverError) as caught:
        driver.memory_limit(gpu, Path("/sys/fs/cgroup/a"))
    assert caught.value.kind is DriverErrorKind.NOT_SUPPORTED


@pytest.mark.parametrize("simulator", ["l40s,driver=550.163.01"], indirect=True)
def test_a_client_of_mps_is_one_process(driver: Driver, gpu: GpuUuid, simulator: Simulator) -> None:
    """NVML may name it in two of its lists."""
    programs = stand_in(simulator, simulator.state_file.parent / "mps")
    programs.folder.mkdir()
    programs.start(CUDA_VISIBLE_DEVICES=gpu)
    with programs.start_cuda("alloc=100", "hold") as client:
        assert client.stdout is not None
        while not client.stdout.readline().startswith("alloc"):
            assert client.poll() is None
        found = driver.processes(gpu)
        assert [each.pid for each in found] == sorted({each.pid for each in found})
        assert [each.used_mib for each in found if each.pid == client.pid] == [612]
        client.communicate()
    programs.say("quit -t 5\n")

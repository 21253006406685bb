"""The NVML adapter on a real GPU, read-only: `pytest -m gpu`."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mig_agent.adapters.host import Host
from mig_agent.adapters.nvml import Driver
from mig_agent.core.errors import DriverError, DriverErrorKind
from mig_agent.core.observation import SM_PERCENT_OF

pytestmark = pytest.mark.gpu
TESTS = Path(__file__).resolve().parents[1]


@pytest.fixture
def driver() -> Driver:
    return Driver.open()


def test_every_gpu_is_described(driver: Driver) -> None:
    seen = driver.observe()
    assert seen.gpus
    assert dict(seen.failed) == {}
    assert [gpu.index for gpu in seen.gpus] == list(range(len(seen.gpus)))
    for gpu in seen.gpus:
        assert gpu.uuid.startswith("GPU-")
        assert gpu.model
        assert gpu.memory_mib > 0
        assert driver.observe_gpu(gpu.uuid).uuid == gpu.uuid
    assert driver.version


def test_what_the_driver_lists_of_profiles_makes_sense(driver: Driver) -> None:
    for gpu in driver.observe().gpus:
        if gpu.layout is None:
            assert not gpu.mode.current
            continue
        assert gpu.mode.capable
        for profile in gpu.layout.profiles:
            assert profile.name.startswith(f"{profile.compute_slices}g.")
            assert 0 < profile.memory_mib <= gpu.memory_mib
            assert {place.size for place in profile.placements} == {profile.memory_slices}


def test_usage_of_a_gpu_without_mig_mode(driver: Driver) -> None:
    for gpu in driver.observe().gpus:
        if gpu.mode.current:
            continue
        usage = driver.usage(gpu.uuid)
        assert usage.memory_total_mib == gpu.memory_mib
        assert usage.memory_used_mib is None or 0 <= usage.memory_used_mib <= gpu.memory_mib
        assert all(process.pid > 0 for process in driver.processes(gpu.uuid))


def test_compute_use_of_instances_that_are_there(driver: Driver) -> None:
    """It is a percentage at the second reading from Hopper on, and unknown before."""
    for gpu in driver.observe().gpus:
        for instance in gpu.instances:
            assert driver.usage(gpu.uuid, instance.gpu_instance_id, tenure="1/").compute is None
            time.sleep(1.0)
            compute = driver.usage(gpu.uuid, instance.gpu_instance_id, tenure="1/").compute
            assert compute is None or 0.0 <= compute.sm_percent <= 100.0
            if not {"H100", "H200", "GH200"}.isdisjoint(gpu.model.split()) and instance.compute_instances:
                assert compute is not None


def test_a_busy_instance_reads_near_all_of_its_own_multiprocessors(driver: Driver) -> None:
    """What `core.observation.SM_PERCENT_OF` assumes: on an instance with a part of the GPU it is either way clear."""
    assert SM_PERCENT_OF == "the instance"
    for gpu in driver.observe().gpus:
        if gpu.layout is None or not gpu.mode.current:
            continue
        for instance in gpu.instances:
            idle = instance.compute_instances and not driver.processes(gpu.uuid, instance.gpu_instance_id)
            if not idle or instance.placement.size > gpu.layout.memory_slices // 2:
                continue
            command = [sys.executable, "-m", "support.busy_gpu", "6"]
            variables = os.environ | {"CUDA_VISIBLE_DEVICES": instance.uuid, "PYTHONPATH": str(TESTS)}
            with subprocess.Popen(command, env=variables, stdout=subprocess.PIPE, text=True) as busy:
                assert busy.stdout is not None
                assert busy.stdout.readline() == "busy\n"
                driver.usage(gpu.uuid, instance.gpu_instance_id, tenure="2/")
                time.sleep(3.0)
                compute = driver.usage(gpu.uuid, instance.gpu_instance_id, tenure="2/").compute
            if compute is None:
                continue  # before Hopper
            assert compute.sm_percent > 80.0, f"SM_UTIL is {compute.sm_percent} % under full load: not of the instance"
            return
    pytest.skip("no idle instance with at most half of a GPU that has performance counters (Hopper or later)")


def test_looking_for_an_instance_where_mig_mode_is_off(driver: Driver) -> None:
    for gpu in driver.observe().gpus:
        if not gpu.mode.current:
            with pytest.raises(DriverError) as refused:
                driver.verify(gpu.uuid, 1, 0, f"MIG-{gpu.uuid}")
            kinds = {DriverErrorKind.NOT_SUPPORTED, DriverErrorKind.NOT_FOUND, DriverErrorKind.INVALID_ARGUMENT}
            assert refused.value.kind in kinds


def test_the_machine_around_it() -> None:
    host = Host()
    assert host.boot_id()
    assert host.process(os.getpid()) is not None

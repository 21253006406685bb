"""Compute mode, and memory limits of cgroups: NVML of driver r615 over a folder that plays cgroupfs."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import pynvml
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mig_agent.simulator import Simulator
from support.simulated import machine, put_under_pynvml

GIB = 1 << 30
R615 = "615.71.03"


@pytest.fixture
def gpu(simulate: Callable[..., Simulator]) -> Simulator:
    return simulate("l40s", driver_version=R615)


def cgroup(simulator: Simulator, path: str, *, dmem: bool = True) -> Path:
    """Makes a cgroup as an agent does: its folder, and the controller in all ancestors."""
    root = simulator.host_root / "sys/fs/cgroup"
    folder = root / path
    folder.mkdir(parents=True, exist_ok=True)
    if dmem:
        for parent in folder.relative_to(root).parents:
            (root / parent / "cgroup.subtree_control").write_text("+dmem")
    return folder


def limit(folder: Path, soft: int, hard: int) -> None:
    limits = pynvml.c_nvmlSetMemoryLimits_v1_t(nameSpace=bytes(folder), softLimit=soft, hardLimit=hard)
    pynvml.nvmlDeviceSetMemoryLimits_v1(pynvml.nvmlDeviceGetHandleByIndex(0), limits)


def limits(folder: Path) -> tuple[int, int, int]:
    answer = pynvml.c_nvmlGetMemoryLimits_v1_t(nameSpace=bytes(folder))
    pynvml.nvmlDeviceGetMemoryLimits_v1(pynvml.nvmlDeviceGetHandleByIndex(0), answer)
    return answer.softLimit, answer.hardLimit, answer.currentUsed


def guaranteed(folder: Path) -> int:
    return int((folder / "dmem.min").read_text().split()[1])


def refused(code: int, folder: Path, soft: int, hard: int) -> None:
    with pytest.raises(pynvml.NVMLError) as caught:
        limit(folder, soft, hard)
    assert caught.value.value == code


def test_limits_are_read_back(gpu: Simulator) -> None:
    leaf = cgroup(gpu, "mig-agent/7")
    limit(leaf, 4 * GIB, 4 * GIB)
    assert limits(leaf) == (4 * GIB, 4 * GIB, 0)
    limit(leaf, 0, pynvml.NVML_DEVICE_MEMORY_LIMIT_MAX)
    with pytest.raises(pynvml.NVMLError_NotFound):
        limits(leaf)


def test_what_is_refused(gpu: Simulator) -> None:
    leaf = cgroup(gpu, "mig-agent/7")
    refused(pynvml.NVML_ERROR_INVALID_ARGUMENT, leaf, 2 * GIB, GIB)
    refused(pynvml.NVML_ERROR_INVALID_ARGUMENT, leaf, 0, 100 * GIB)
    refused(pynvml.NVML_ERROR_OPERATING_SYSTEM, leaf.parent / "none", 0, GIB)
    refused(pynvml.NVML_ERROR_OPERATING_SYSTEM, cgroup(gpu, "other/a", dmem=False), 0, GIB)
    gpu.fail("nvmlDeviceSetMemoryLimits_v1", 4)
    refused(pynvml.NVML_ERROR_NO_PERMISSION, leaf, GIB, GIB)


def test_in_mig_mode_they_are_not_supported(simulate: Callable[..., Simulator]) -> None:
    leaf = cgroup(simulate("h100-80gb", driver_version=R615), "a/b")
    refused(pynvml.NVML_ERROR_NOT_SUPPORTED, leaf, GIB, GIB)


def test_drivers_before_r615_do_not_have_the_functions(simulate: Callable[..., Simulator]) -> None:
    leaf = cgroup(simulate("l40s"), "a/b")
    refused(pynvml.NVML_ERROR_FUNCTION_NOT_FOUND, leaf, GIB, GIB)


def test_a_cgroup_removed_with_its_soft_limit_leaves_the_sum_of_its_ancestors(gpu: Simulator) -> None:
    good, bad = cgroup(gpu, "mig-agent/good"), cgroup(gpu, "mig-agent/bad")
    limit(good, GIB, GIB)
    limit(bad, 2 * GIB, 2 * GIB)
    assert guaranteed(good.parent) == 3 * GIB
    limit(good, 0, pynvml.NVML_DEVICE_MEMORY_LIMIT_MAX)
    shutil.rmtree(good)
    assert not gpu.leaked_guarantees()
    shutil.rmtree(bad)
    uuid = gpu.machine()["gpus"][0]["uuid"]
    assert gpu.leaked_guarantees() == {uuid: {"/mig-agent": 2 * GIB}}
    limit(cgroup(gpu, "mig-agent/bad"), GIB, GIB)  # one of the same name is another one
    assert guaranteed(bad.parent) == 3 * GIB
    gpu.reboot()
    assert not gpu.leaked_guarantees()


def test_without_the_controller_any_cgroup_takes_limits_and_none_adds_up(tmp_path: Path) -> None:
    simulator = machine(tmp_path, "l40s,driver=615.71,kernel=6.12")
    put_under_pynvml(simulator)
    leaf = cgroup(simulator, "mig-agent/7", dmem=False)
    limit(leaf, GIB, GIB)
    shutil.rmtree(leaf)
    assert not simulator.leaked_guarantees()
    assert not (leaf.parent / "dmem.min").exists()


def test_compute_mode(simulate: Callable[..., Simulator]) -> None:
    simulator = simulate("a100-40gb+nomig,h100-80gb")
    shared, partitioned = (pynvml.nvmlDeviceGetHandleByIndex(index) for index in (0, 1))
    assert pynvml.nvmlDeviceGetComputeMode(shared) == pynvml.NVML_COMPUTEMODE_DEFAULT
    pynvml.nvmlDeviceSetComputeMode(shared, pynvml.NVML_COMPUTEMODE_EXCLUSIVE_PROCESS)
    assert pynvml.nvmlDeviceGetComputeMode(shared) == pynvml.NVML_COMPUTEMODE_EXCLUSIVE_PROCESS
    with pytest.raises(pynvml.NVMLError_NotSupported):
        pynvml.nvmlDeviceSetMigMode(shared, 1)
    with pytest.raises(pynvml.NVMLError_NotSupported):
        pynvml.nvmlDeviceSetComputeMode(partitioned, pynvml.NVML_COMPUTEMODE_EXCLUSIVE_PROCESS)
    with pytest.raises(pynvml.NVMLError_InvalidArgument):
        pynvml.nvmlDeviceSetComputeMode(shared, 1)
    simulator.reboot()
    assert pynvml.nvmlDeviceGetComputeMode(shared) == pynvml.NVML_COMPUTEMODE_DEFAULT


LEAVES = ("a/1", "a/2", "a/b/3", "c/4")


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.tuples(st.sampled_from(LEAVES), st.integers(-2, 3)), max_size=8))
def test_the_sum_of_each_ancestor_is_that_of_its_leaves_and_of_what_was_forgotten(
    steps: list[tuple[str, int]],
) -> None:
    """Steps: a leaf, and its limit in GiB; -1 removes it as one should, -2 without taking its soft limit back."""
    with tempfile.TemporaryDirectory() as folder:
        simulator = machine(Path(folder), f"l40s,driver={R615}")
        put_under_pynvml(simulator)
        living: dict[str, int] = {}
        forgotten: dict[str, int] = {}
        for leaf, gib in steps:
            path = cgroup(simulator, leaf)
            if gib == -2:
                forgotten[leaf] = forgotten.get(leaf, 0) + living.pop(leaf, 0)
            else:
                limit(path, max(gib, 0) * GIB, max(gib, 0) * GIB if gib > 0 else pynvml.NVML_DEVICE_MEMORY_LIMIT_MAX)
                living[leaf] = max(gib, 0)
            if gib < 0:
                shutil.rmtree(path)
                living.pop(leaf, None)
            leaked = next(iter(simulator.leaked_guarantees().values()), {})
            state = simulator.machine()["gpus"][0].get("guaranteed", {})
            for ancestor in ("a", "a/b", "c"):
                lost = sum(number for each, number in forgotten.items() if each.startswith(f"{ancestor}/"))
                held = sum(number for each, number in living.items() if each.startswith(f"{ancestor}/"))
                assert leaked.get(f"/{ancestor}", 0) == lost * GIB
                assert state.get(f"/{ancestor}", 0) == (lost + held) * GIB

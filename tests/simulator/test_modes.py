"""MIG mode: which GPUs need a reset, who blocks a change, and what survives a reboot."""

from __future__ import annotations

from collections.abc import Callable

import pynvml
import pytest

from mig_agent.simulator import Simulator

Simulate = Callable[..., Simulator]
OFF, ON = pynvml.NVML_DEVICE_MIG_DISABLE, pynvml.NVML_DEVICE_MIG_ENABLE
AMPERE, HOPPER = "a100-40gb", "h100-80gb"


def mode() -> list[int]:
    return list(pynvml.nvmlDeviceGetMigMode(pynvml.nvmlDeviceGetHandleByIndex(0)))


def set_mode(wanted: int) -> int:
    return int(pynvml.nvmlDeviceSetMigMode(pynvml.nvmlDeviceGetHandleByIndex(0), wanted))


def test_ampere_waits_for_a_reset(simulate: Simulate) -> None:
    simulator = simulate(AMPERE, mig_mode=False)
    assert set_mode(ON) == pynvml.NVML_ERROR_RESET_REQUIRED
    assert mode() == [OFF, ON]
    simulator.reset_gpu(0)
    assert mode() == [ON, ON]


def test_hopper_switches_at_once(simulate: Simulate) -> None:
    simulate(HOPPER, mig_mode=False)
    assert set_mode(ON) == pynvml.NVML_SUCCESS
    assert mode() == [ON, ON]
    assert set_mode(OFF) == pynvml.NVML_SUCCESS
    assert mode() == [OFF, OFF]


@pytest.mark.parametrize("key", [AMPERE, HOPPER])
def test_a_process_on_the_gpu_blocks_the_change(simulate: Simulate, key: str) -> None:
    """The answer is the activation status, not an error, so a caller that does not look believes it worked."""
    simulator = simulate(key, mig_mode=False)
    pid = simulator.occupy("0")
    assert set_mode(ON) == pynvml.NVML_ERROR_IN_USE
    assert mode() == [OFF, ON]
    simulator.vacate(pid)
    assert set_mode(OFF) == pynvml.NVML_SUCCESS
    assert mode() == [OFF, OFF]


@pytest.mark.parametrize("key", [AMPERE, HOPPER])
def test_instances_block_switching_off(simulate: Simulate, key: str) -> None:
    simulator = simulate(key)
    simulator.create_foreign(0, "1g.5gb" if key == AMPERE else "1g.10gb")
    assert set_mode(OFF) == pynvml.NVML_ERROR_IN_USE
    assert mode()[0] == ON


@pytest.mark.parametrize(
    ("key", "keep", "after"),
    [(AMPERE, False, [ON, ON]), (HOPPER, False, [OFF, OFF]), (HOPPER, True, [ON, ON])],
)
def test_what_a_reboot_leaves(simulate: Simulate, key: str, keep: bool, after: list[int]) -> None:
    simulator = simulate(key)
    simulator.create_foreign(0, "7g.40gb" if key == AMPERE else "7g.80gb")
    before = simulator.machine()["boot_id"]
    boot_id = simulator.host_root / "proc/sys/kernel/random/boot_id"
    assert boot_id.read_text().strip() == before
    simulator.reboot(keep_mig_mode=keep)
    assert mode() == after
    assert simulator.machine()["gpus"][0]["instances"] == []
    assert boot_id.read_text().strip() == simulator.machine()["boot_id"] != before


def test_ampere_takes_a_pending_mode_at_a_reboot(simulate: Simulate) -> None:
    simulator = simulate(AMPERE, mig_mode=False)
    set_mode(ON)
    simulator.reboot()
    assert mode() == [ON, ON]


@pytest.mark.parametrize("model", ["t4", "v100", "a10", "l4", "l40s"])
def test_a_gpu_that_has_no_mig(simulate: Simulate, model: str) -> None:
    simulate(model)
    gpu = pynvml.nvmlDeviceGetHandleByIndex(0)
    calls: list[Callable[[], object]] = [
        lambda: pynvml.nvmlDeviceGetMigMode(gpu),
        lambda: pynvml.nvmlDeviceSetMigMode(gpu, ON),
        lambda: pynvml.nvmlDeviceGetGpuInstanceProfileInfo(gpu, 0),
        lambda: pynvml.nvmlDeviceCreateGpuInstance(gpu, 19),
    ]
    for call in calls:
        with pytest.raises(pynvml.NVMLError_NotSupported):
            call()
    assert pynvml.nvmlDeviceGetMaxMigDeviceCount(gpu) == 0
    assert pynvml.nvmlDeviceGetUtilizationRates(gpu).gpu == 0


def test_with_mig_off_nothing_is_made(simulate: Simulate) -> None:
    simulate(AMPERE, mig_mode=False)
    gpu = pynvml.nvmlDeviceGetHandleByIndex(0)
    assert pynvml.nvmlDeviceGetGpuInstanceProfileInfo(gpu, 0).id == 19
    assert pynvml.nvmlDeviceGetMaxMigDeviceCount(gpu) == 0
    calls: list[Callable[[], object]] = [
        lambda: pynvml.nvmlDeviceCreateGpuInstance(gpu, 19),
        lambda: pynvml.nvmlDeviceGetGpuInstanceById(gpu, 1),
        lambda: pynvml.nvmlDeviceGetGpuInstanceRemainingCapacity(gpu, 19),
        lambda: pynvml.nvmlDeviceGetMigDeviceHandleByIndex(gpu, 0),
    ]
    for call in calls:
        with pytest.raises(pynvml.NVMLError_NotSupported):
            call()


def test_an_old_driver_lists_profiles_only_in_mig_mode(simulate: Simulate) -> None:
    simulator = simulate(AMPERE, mig_mode=False, driver_version="535.183.01")
    gpu = pynvml.nvmlDeviceGetHandleByIndex(0)
    with pytest.raises(pynvml.NVMLError_NotSupported):
        pynvml.nvmlDeviceGetGpuInstanceProfileInfo(gpu, 0)
    simulator.set_mig_mode(0, on=True)
    simulator.reset_gpu(0)
    assert pynvml.nvmlDeviceGetGpuInstanceProfileInfo(gpu, 0).id == 19


@pytest.mark.parametrize(
    ("gpus", "driver_version", "resetless", "mode_independent"),
    [
        (AMPERE, "580.95.05", 0, 1),
        (HOPPER, "580.95.05", 1, 1),
        (HOPPER, "535.183.01", None, None),
        ("t4", "580.95.05", None, None),
    ],
)
def test_field_values(
    simulate: Simulate, gpus: str, driver_version: str, resetless: int | None, mode_independent: int | None
) -> None:
    simulate(gpus, driver_version=driver_version)
    fields = [
        pynvml.NVML_FI_DEV_IS_RESETLESS_MIG_SUPPORTED,
        pynvml.NVML_FI_DEV_IS_MIG_MODE_INDEPENDENT_MIG_QUERY_CAPABLE,
    ]
    values = pynvml.nvmlDeviceGetFieldValues(pynvml.nvmlDeviceGetHandleByIndex(0), fields)
    found = [value.value.uiVal if value.nvmlReturn == pynvml.NVML_SUCCESS else None for value in values]
    assert found == [resetless, mode_independent]

"""Performance counters (GPM) of simulated GPUs, through the real pynvml."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pynvml
import pytest

from mig_agent.simulator import Simulator
from support.simulated import machine, put_under_pynvml

SM, GRAPHICS, NVLINK = pynvml.NVML_GPM_METRIC_SM_UTIL, pynvml.NVML_GPM_METRIC_GRAPHICS_UTIL, 60


class Clock:
    """A clock that the counters go by."""

    now = 50.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def simulator(tmp_path: Path) -> Simulator:
    return machine(tmp_path, "h100-80gb,a100-80gb,h100-80gb:1:off")


@pytest.fixture
def clock(simulator: Simulator) -> Iterator[Clock]:
    put_under_pynvml(simulator)
    made = pynvml.nvmlLib.monotonic = Clock()
    yield made
    pynvml.nvmlShutdown()


def metrics(first: Any, second: Any, *ids: int) -> list[Any]:
    query = pynvml.c_nvmlGpmMetricsGet_t()
    query.version, query.numMetrics = pynvml.NVML_GPM_METRICS_GET_VERSION, len(ids)
    query.sample1, query.sample2 = first, second
    for number, each in enumerate(ids):
        query.metrics[number].metricId = each
    pynvml.nvmlGpmMetricsGet(query)
    return list(query.metrics[: len(ids)])


def test_a_metric_is_a_mean_between_two_samples(simulator: Simulator, clock: Clock) -> None:
    gpu = pynvml.nvmlDeviceGetHandleByIndex(0)
    gi, _ = simulator.create_foreign(0, "1g.10gb")
    first, second = (pynvml.nvmlGpmSampleAlloc() for _ in range(2))
    pynvml.nvmlGpmMigSampleGet(gpu, gi, first)
    simulator.occupy(f"0/{gi}", sm_percent=80)
    clock.now += 0.05
    pynvml.nvmlGpmMigSampleGet(gpu, gi, second)
    assert math.isnan(metrics(first, second, SM)[0].value), "counters are refreshed each 100 ms"
    clock.now += 1
    pynvml.nvmlGpmMigSampleGet(gpu, gi, second)
    sm, nvlink = metrics(first, second, SM, NVLINK)
    assert (sm.nvmlReturn, nvlink.nvmlReturn) == (pynvml.NVML_SUCCESS, pynvml.NVML_ERROR_NOT_SUPPORTED)
    assert sm.value == pytest.approx(80)
    for each in (first, second):
        pynvml.nvmlGpmSampleFree(each)
    with pytest.raises(pynvml.NVMLError_InvalidArgument):
        pynvml.nvmlGpmSampleFree(first)
    assert not pynvml.nvmlLib.gpm_samples


def test_which_gpus_have_counters(simulator: Simulator, clock: Clock) -> None:
    hopper, ampere, whole = map(pynvml.nvmlDeviceGetHandleByIndex, range(3))
    supported = [pynvml.nvmlGpmQueryDeviceSupport(each).isSupportedDevice for each in (hopper, ampere, whole)]
    assert supported == [1, 0, 1]
    gi, _ = simulator.create_foreign(1, "1g.10gb")
    sample, other = (pynvml.nvmlGpmSampleAlloc() for _ in range(2))
    with pytest.raises(pynvml.NVMLError_NotSupported):
        pynvml.nvmlGpmMigSampleGet(ampere, gi, sample)
    with pytest.raises(pynvml.NVMLError_NotSupported):
        pynvml.nvmlGpmSampleGet(hopper, sample)
    with pytest.raises(pynvml.NVMLError_NotSupported):
        pynvml.nvmlGpmMigSampleGet(whole, gi, sample)
    pynvml.nvmlGpmSampleGet(whole, sample)
    clock.now += 1
    pynvml.nvmlGpmSampleGet(whole, other)
    assert metrics(sample, other, GRAPHICS)[0].value == 0.0


def test_what_is_not_there_has_no_sample(simulator: Simulator, clock: Clock) -> None:
    del clock
    gpu = pynvml.nvmlDeviceGetHandleByIndex(0)
    sample, empty = (pynvml.nvmlGpmSampleAlloc() for _ in range(2))
    gi, _ = simulator.create_foreign(0, "1g.10gb", with_compute=False)
    for each in (gi, 6):
        with pytest.raises(pynvml.NVMLError_InvalidArgument):
            pynvml.nvmlGpmMigSampleGet(gpu, each, sample)
    with pytest.raises(pynvml.NVMLError_InvalidArgument):
        metrics(sample, empty, SM)
    simulator.lose_gpu(0)
    with pytest.raises(pynvml.NVMLError_GpuIsLost):
        pynvml.nvmlGpmMigSampleGet(gpu, gi, sample)
    pynvml.nvmlGpmSampleFree(sample)


def test_structures_of_another_version_are_refused(clock: Clock) -> None:
    del clock
    query = pynvml.c_nvmlGpmMetricsGet_t()
    with pytest.raises(pynvml.NVMLError_ArgumentVersionMismatch):
        pynvml.nvmlGpmMetricsGet(query)

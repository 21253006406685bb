"""Compute use of instances, measured through the real pynvml over simulated GPUs."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from mig_agent.adapters.nvml import Driver, compute_meter
from mig_agent.adapters.nvml.calls import SM_UTIL, Nvml
from mig_agent.adapters.nvml.compute_meter import LONGEST_SECONDS, RETRY_SECONDS, ComputeMeter
from mig_agent.adapters.nvml.inventory import Inventory, KnownGpu
from mig_agent.core.errors import DriverError, DriverErrorKind
from mig_agent.core.observation import ComputeUsage
from mig_agent.simulator import Code, Simulator, open_library
from support.nvmlfaults import ANY, COUNTERS
from support.simulated import machine


class Bench:
    """A meter over a simulated machine, with a clock that moves when it is told to."""

    def __init__(self, folder: Path, gpus: str = "h100-80gb", **options: Any) -> None:
        self.simulator: Simulator = machine(folder, gpus, **options)
        library: Any = open_library(self.simulator.state_file)
        self.library = library
        self.nvml = Nvml(library)
        self.nvml.open()
        self.now = 1000.0
        library.monotonic = lambda: self.now
        self.meter = ComputeMeter(self.nvml, lambda: self.now)
        self.meter.begin(self.nvml.driver_version())
        self.gi, _ = self.simulator.create_foreign(0, "1g.10gb" if "80" in gpus else "1g.5gb")
        self.known: KnownGpu = Inventory(self.nvml).at(0)

    def measure(self, tenure: str = "1/lease", gi: int | None = None, *, after: float = 1.0) -> ComputeUsage | None:
        self.now += after
        return self.meter.measure(self.known, self.gi if gi is None else gi, tenure)

    @property
    def unfreed(self) -> int:
        return len(self.library.gpm_samples)


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def test_the_first_reading_is_unknown_and_the_second_is_the_load_since(bench: Bench) -> None:
    assert bench.measure() is None
    idle = bench.measure()
    assert idle == ComputeUsage(seconds=1.0, sm_percent=0.0, tensor_percent=0.0, memory_bandwidth_percent=0.0)
    bench.simulator.occupy(f"0/{bench.gi}", sm_percent=60)
    busy = bench.measure(after=2.0)
    assert busy is not None
    assert busy.seconds == 2.0
    assert busy.sm_percent == pytest.approx(60)
    assert busy.tensor_percent == pytest.approx(30)
    assert busy.memory_bandwidth_percent == pytest.approx(48)
    assert bench.unfreed == 1


def test_each_instance_has_its_own(bench: Bench) -> None:
    other, _ = bench.simulator.create_foreign(0, "2g.20gb")
    bench.simulator.occupy(f"0/{other}", sm_percent=90)
    bench.measure()
    bench.measure("2/", other)
    first, second = bench.measure(), bench.measure("2/", other)
    assert first is not None
    assert second is not None
    assert first.sm_percent == 0.0
    assert second.sm_percent == pytest.approx(90)


@pytest.mark.parametrize("gpus", ["a100-40gb", "a30"])
def test_before_hopper_it_is_unknown_and_asked_once(tmp_path: Path, gpus: str) -> None:
    asked: list[str] = []
    simulator = machine(tmp_path, gpus)
    gi, _ = simulator.create_foreign(0, "1g.5gb" if gpus != "a30" else "1g.6gb")
    nvml = Nvml(open_library(simulator.state_file), on_call=lambda name, _seconds, _error: asked.append(name))
    nvml.open()
    meter = ComputeMeter(nvml)
    meter.begin("580.95.05")
    known = Inventory(nvml).at(0)
    asked.clear()
    for _ in range(3):
        assert meter.measure(known, gi, "") is None
    assert asked == ["nvmlGpmQueryDeviceSupport"]


@pytest.mark.parametrize("symbol", ["nvmlGpmQueryDeviceSupport", "nvmlGpmMigSampleGet", "nvmlGpmMetricsGet"])
def test_a_library_without_it_is_unknown(tmp_path: Path, symbol: str) -> None:
    simulator = machine(tmp_path, "h100-80gb")
    gi, _ = simulator.create_foreign(0, "1g.10gb")
    library: Any = open_library(simulator.state_file, without=[symbol])
    nvml = Nvml(library)
    nvml.open()
    meter = ComputeMeter(nvml, iter(range(100)).__next__)
    meter.begin("580.95.05")
    known = Inventory(nvml).at(0)
    assert [meter.measure(known, gi, "") for _ in range(3)] == [None] * 3
    assert not library.gpm_samples


def test_a_driver_that_is_too_old_is_not_asked(tmp_path: Path) -> None:
    bench = Bench(tmp_path, driver_version="535.129.03")
    assert [bench.measure() for _ in range(3)] == [None] * 3
    assert not bench.library.gpm_counters


def test_readings_close_to_each_other_give_the_figure_before(bench: Bench) -> None:
    bench.simulator.occupy(f"0/{bench.gi}", sm_percent=60)
    bench.measure()
    assert bench.measure(after=0.1) is None, "not apart enough"
    busy = bench.measure()
    assert busy is not None
    assert bench.measure(after=0.1) is busy


def test_a_sample_of_long_ago_is_not_compared(bench: Bench) -> None:
    bench.measure()
    assert bench.measure(after=LONGEST_SECONDS + 1) is None
    assert bench.measure() is not None
    assert bench.unfreed == 1


def test_another_lease_of_the_same_instance_starts_anew(bench: Bench) -> None:
    bench.simulator.occupy(f"0/{bench.gi}", sm_percent=60)
    bench.measure()
    assert bench.measure() is not None
    assert bench.measure("1/next") is None
    assert bench.measure("1/next") is not None
    assert bench.unfreed == 1


def test_an_instance_made_again_under_the_same_id_starts_anew(bench: Bench) -> None:
    pid = bench.simulator.occupy(f"0/{bench.gi}", sm_percent=60)
    bench.measure()
    assert bench.measure() is not None
    bench.simulator.vacate(pid)
    bench.simulator.destroy_foreign(f"0/{bench.gi}")
    again, _ = bench.simulator.create_foreign(0, "1g.10gb")
    assert again == bench.gi, "ids recur"
    assert bench.measure("2/") is None
    assert bench.measure("2/") == ComputeUsage(
        seconds=1.0, sm_percent=0.0, tensor_percent=0.0, memory_bandwidth_percent=0.0
    )


def test_an_instance_that_is_gone_is_unknown_and_its_sample_freed(bench: Bench) -> None:
    bench.measure()
    bench.simulator.destroy_foreign(f"0/{bench.gi}")
    assert bench.measure() is None
    assert bench.unfreed == 0


def test_a_figure_that_cannot_be_true_is_unknown(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen of drivers: not a number, and above 100 % (DCGM issue 152)."""
    bench.measure()
    for values in [(float("nan"), 1.0, 1.0), (-1.0, 1.0, 1.0), (140.0, 1.0, 1.0), (None, 1.0, 1.0)]:
        monkeypatch.setattr(bench.nvml, "counter_metrics", lambda *_, values=values: values)
        assert bench.measure() is None
    monkeypatch.setattr(bench.nvml, "counter_metrics", lambda *_: (100.4, float("nan"), 250.0))
    assert bench.measure() == ComputeUsage(seconds=1.0, sm_percent=100.0)


@pytest.mark.parametrize("call", sorted(COUNTERS - {"nvmlGpmSampleFree"}))
@pytest.mark.parametrize("code", [*ANY, Code.NO_PERMISSION, Code.INVALID_ARGUMENT])
def test_an_error_is_unknown_leaks_nothing_and_is_not_repeated_for_long(bench: Bench, call: str, code: Code) -> None:
    bench.measure()
    fault = bench.simulator.fail(call, code, times=None)
    assert bench.measure() is None
    assert bench.unfreed == 0
    bench.simulator.clear(fault)
    assert bench.measure() is None, "it is not tried at every reading"
    assert bench.measure("2/next") is None
    assert bench.measure("2/next") is not None, "of another lease it is"
    bench.measure(after=RETRY_SECONDS)
    assert bench.measure() is not None
    assert bench.unfreed == 1


def test_a_query_that_fails_is_asked_again_later(bench: Bench) -> None:
    bench.simulator.fail("nvmlGpmQueryDeviceSupport", Code.UNKNOWN)
    assert [bench.measure() for _ in range(3)] == [None] * 3
    bench.measure(after=RETRY_SECONDS)
    assert bench.measure() is not None


def test_a_sample_that_cannot_be_freed_stops_nothing(bench: Bench) -> None:
    bench.measure()
    bench.simulator.fail("nvmlGpmSampleFree", Code.UNKNOWN, times=None)
    assert bench.measure() is not None


def test_the_end_of_a_session_frees_all_and_none_reaches_the_next(bench: Bench) -> None:
    bench.measure()
    first = bench.nvml.sample_counters(bench.known.handle, bench.gi, 0)
    bench.nvml.shutdown()
    assert bench.unfreed == 0
    assert bench.measure() is None, "no session is open"
    bench.nvml.open()
    second = bench.nvml.sample_counters(bench.known.handle, bench.gi, 0)
    with pytest.raises(DriverError) as raised:
        bench.nvml.counter_metrics(first, second, (SM_UTIL,), 0)
    assert raised.value.kind is DriverErrorKind.LIBRARY
    bench.nvml.free_sample(first)
    bench.nvml.free_sample(second)
    bench.nvml.free_sample(second)
    assert bench.unfreed == 0
    bench.meter.begin("580.95.05")
    assert bench.measure() is None
    assert bench.measure() is not None


def test_the_driver_measures_instances_and_forgets_those_that_it_destroys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compute_meter, "SHORTEST_SECONDS", 0.1)
    simulator = machine(tmp_path, "h100-80gb,h100-80gb:1:off")
    library: Any = open_library(simulator.state_file)
    driver = Driver.open(library)
    gi, _ = simulator.create_foreign(0, "1g.10gb")
    gpu, whole = driver.observe().gpus
    simulator.occupy(f"0/{gi}", sm_percent=20)
    assert driver.usage(gpu.uuid, gi).compute is None
    time.sleep(0.11)
    compute = driver.usage(gpu.uuid, gi).compute
    assert compute is not None
    assert compute.sm_percent == pytest.approx(20)
    assert driver.usage(whole.uuid).compute is None
    simulator.lose_gpu(0)
    with pytest.raises(DriverError):
        driver.usage(gpu.uuid, gi)
    driver.close()
    assert not library.gpm_samples

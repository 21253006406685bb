"""Measures how busy the multiprocessors of instances are, from two samples of the driver's performance counters (GPM).

A figure is the mean between two readings of one instance under one lease. Where that is not known there is none:
on GPUs before Hopper, at the first reading, and after an error.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from mig_agent.adapters.nvml.calls import MEMORY_BANDWIDTH_UTIL, SM_UTIL, TENSOR_UTIL, CounterSample, Nvml
from mig_agent.adapters.nvml.inventory import KnownGpu
from mig_agent.core.errors import DriverError, DriverErrorKind
from mig_agent.core.model import GpuUuid
from mig_agent.core.observation import ComputeUsage

SHORTEST_SECONDS = 0.5
"""Two samples closer than this are not compared, and the figure before is given; the driver refreshes at 0.1 s."""
LONGEST_SECONDS = 300.0
"""A sample older than this is not compared: the mean of so long a time says little of now."""
RETRY_SECONDS = 600.0
"""The pause after an error of the driver before the same counters are read again."""
FIRST_DRIVER = 550
"""The first major version of the driver whose counters are read.

On 535 with an H100 it was reported that reading them made later readings of an instance's memory fail.
"""
_METRICS = (SM_UTIL, TENSOR_UTIL, MEMORY_BANDWIDTH_UTIL)
_WHOLE_GPU = -1
"""Stands in place of the id of a GPU instance."""
_MOST_PERCENT = 101.0
"""A figure above this is not rounded down to 100 but wrong."""


@dataclass(frozen=True, slots=True)
class _Last:
    """The last sample of an instance, and what was measured up to it."""

    tenure: str
    sample: CounterSample
    at: float
    usage: ComputeUsage | None


class ComputeMeter:
    """Keeps the last sample of each instance. Thread-safe if each GPU is read by one thread at a time."""

    def __init__(self, nvml: Nvml, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._nvml = nvml
        self._monotonic = monotonic
        self._mutex = threading.Lock()
        self._last: dict[tuple[GpuUuid, int], _Last] = {}
        self._usable: dict[GpuUuid, bool] = {}
        """True for GPUs that have counters, as far as known in this session."""
        self._failed: dict[tuple[GpuUuid, int], tuple[str, float]] = {}
        """Failures of the driver: the tenure, and the time of the next try."""
        self._is_new_driver = False

    def begin(self, driver_version: str) -> None:
        """Begin a session with a driver of this version: nothing is known of it yet."""
        major = driver_version.partition(".")[0]
        with self._mutex:
            self._last.clear()  # the end of their session has freed the samples
            self._usable.clear()
            self._failed.clear()
            self._is_new_driver = major.isdecimal() and int(major) >= FIRST_DRIVER

    def measure(self, known: KnownGpu, gpu_instance_id: int, tenure: str) -> ComputeUsage | None:
        """Return how busy an instance was since the last reading under this tenure; None if that is not known.

        `tenure` names the instance and its lease: another one starts anew. Raises nothing.
        """
        if not self._is_usable(known) or self._is_put_off((known.uuid, gpu_instance_id), tenure):
            return None
        try:
            return self._measure(known, gpu_instance_id, tenure)
        except DriverError as error:
            self.forget(known.uuid, gpu_instance_id)
            self._put_off((known.uuid, gpu_instance_id), tenure, error)
            return None

    def forget(self, gpu: GpuUuid, gpu_instance_id: int | None = None) -> None:
        """Drop the sample of an instance that is gone, or all of a GPU whose MIG mode has changed."""
        if gpu_instance_id is None:
            self._usable.pop(gpu, None)
        with self._mutex:
            places = [each for each in self._last if each[0] == gpu and gpu_instance_id in {None, each[1]}]
            dropped = [self._last.pop(each).sample for each in places]
        for sample in dropped:
            self._nvml.free_sample(sample)

    def _is_usable(self, known: KnownGpu) -> bool:
        place = (known.uuid, _WHOLE_GPU)
        if not self._is_new_driver or self._is_put_off(place, ""):
            return False
        if known.uuid not in self._usable:
            try:
                self._usable[known.uuid] = self._nvml.has_counters(known.handle, known.index)
            except DriverError as error:
                self._put_off(place, "", error)
        return self._usable.get(known.uuid, False)

    def _is_put_off(self, place: tuple[GpuUuid, int], tenure: str) -> bool:
        failed, retry_at = self._failed.get(place, ("", 0.0))
        return failed == tenure and self._monotonic() < retry_at

    def _put_off(self, place: tuple[GpuUuid, int], tenure: str, error: DriverError) -> None:
        if error.kind is DriverErrorKind.NOT_SUPPORTED:
            self._usable[place[0]] = False
        else:
            self._failed[place] = (tenure, self._monotonic() + RETRY_SECONDS)

    def _measure(self, known: KnownGpu, gpu_instance_id: int, tenure: str) -> ComputeUsage | None:
        place, now = (known.uuid, gpu_instance_id), self._monotonic()
        with self._mutex:
            last = self._last.get(place)
        if last is not None and (last.tenure != tenure or now - last.at > LONGEST_SECONDS):
            self.forget(*place)
            last = None
        if last is not None and now - last.at < SHORTEST_SECONDS:
            return last.usage
        sample = self._nvml.sample_counters(known.handle, gpu_instance_id, known.index)
        usage = None
        try:
            if last is not None:
                values = self._nvml.counter_metrics(last.sample, sample, _METRICS, known.index)
                usage = _usage(values, now - last.at)
        except DriverError:
            self._nvml.free_sample(sample)
            raise
        with self._mutex:
            self._last[place] = _Last(tenure, sample, now, usage)
        if last is not None:
            self._nvml.free_sample(last.sample)
        return usage


def _usage(values: tuple[float | None, ...], seconds: float) -> ComputeUsage | None:
    sm, tensor, bandwidth = map(_percent, values)
    if sm is None:
        return None
    return ComputeUsage(seconds=seconds, sm_percent=sm, tensor_percent=tensor, memory_bandwidth_percent=bandwidth)


def _percent(value: float | None) -> float | None:
    """Return a figure that can be true; the driver reports NaN for what it has not counted."""
    if value is None or math.isnan(value) or not 0.0 <= value <= _MOST_PERCENT:
        return None
    return min(value, 100.0)

"""The library's functions of GPU performance monitoring (GPM): how busy multiprocessors were between two samples.

A sample is a copy of counters that only rise; a metric is what they rose by between two samples, over the time between
them. The load that is found at a sample counts for all the time since the sample before.
"""

from __future__ import annotations

import ctypes
import math
from ctypes import c_uint, c_void_p
from types import MappingProxyType

from mig_agent.simulator import handles, operations, structs
from mig_agent.simulator.codes import Code, Failure
from mig_agent.simulator.handles import Kind
from mig_agent.simulator.library import GpmCounters, GpmSample, Library, symbol
from mig_agent.simulator.pointers import Address, at, write_handle
from mig_agent.simulator.state import DEFAULT_SM_PERCENT, Gpu, Process, model_of

REFRESH_SECONDS = 0.1
"""The driver reads the counters this often: two samples within it hold the same."""
_SHARES = MappingProxyType({1: 1.0, 2: 1.0, 5: 0.5, 10: 0.8})
"""Each metric that is simulated, by its id, and its share of the busy multiprocessors: graphics, SM, tensor, DRAM."""
_METRICS = 333
"""The number of metrics from which on an id is invalid, as in drivers of the simulated version."""


def _supported(gpu: Gpu) -> Gpu:
    if not model_of(gpu).has_gpm:
        raise Failure(Code.NOT_SUPPORTED)
    return gpu


@symbol("nvmlGpmQueryDeviceSupport", c_void_p, c_void_p)
def device_support(library: Library, device: Address, out: Address) -> None:
    gpu = handles.gpu(library.read(), device)
    support = at(structs.GpmSupport, out)
    if support.version != structs.GPM_SUPPORT_VERSION:
        raise Failure(Code.ARGUMENT_VERSION_MISMATCH)
    support.isSupportedDevice = model_of(gpu).has_gpm


@symbol("nvmlGpmSampleAlloc", c_void_p)
def sample_alloc(library: Library, out: Address) -> None:
    write_handle(out, handles.encode(Kind.GPM_SAMPLE, 0, library.add_gpm_sample()))


def _number(library: Library, sample: Address) -> int:
    _, number = handles.decode(sample, Kind.GPM_SAMPLE)
    if number not in library.gpm_samples:
        raise Failure(Code.INVALID_ARGUMENT)
    return number


@symbol("nvmlGpmSampleFree", c_void_p)
def sample_free(library: Library, sample: Address) -> None:
    del library.gpm_samples[_number(library, sample)]


@symbol("nvmlGpmSampleGet", c_void_p, c_void_p)
def sample_get(library: Library, device: Address, sample: Address) -> None:
    number = _number(library, sample)
    gpu = _supported(handles.gpu(library.forget_ended_processes(), device))
    if gpu["mig_current"]:
        raise Failure(Code.NOT_SUPPORTED)
    library.gpm_samples[number] = _count(library, (gpu["minor"], 0), gpu["processes"])


@symbol("nvmlGpmMigSampleGet", c_void_p, c_uint, c_void_p)
def mig_sample_get(library: Library, device: Address, gpu_instance: int, sample: Address) -> None:
    number = _number(library, sample)
    gpu = _supported(handles.gpu(library.forget_ended_processes(), device))
    operations.require_mig(gpu)
    for instance in gpu["instances"]:
        if instance["id"] == gpu_instance and instance["compute"]:
            processes = [process for compute in instance["compute"] for process in compute["processes"]]
            library.gpm_samples[number] = _count(library, (gpu["minor"], instance["serial"]), processes)
            return
    raise Failure(Code.INVALID_ARGUMENT)


def _count(library: Library, place: tuple[int, int], processes: list[Process]) -> GpmSample:
    now = library.monotonic()
    counters = library.gpm_counters.setdefault(place, GpmCounters(now))
    if now - counters.at >= REFRESH_SECONDS:
        load = min(100.0, sum(process.get("sm_percent", DEFAULT_SM_PERCENT) for process in processes))
        counters.busy += load * (now - counters.at)
        counters.at = now
    return GpmSample(counters.at, counters.busy)


@symbol("nvmlGpmMetricsGet", c_void_p)
def metrics_get(library: Library, out: Address) -> None:
    head = at(structs.GpmMetricsHead, out)
    if head.version != structs.GPM_METRICS_VERSION:
        raise Failure(Code.ARGUMENT_VERSION_MISMATCH)
    first, second = (library.gpm_samples[_number(library, each)] for each in (head.sample1, head.sample2))
    if first is None or second is None or not out:
        raise Failure(Code.INVALID_ARGUMENT)
    metrics = (structs.GpmMetric * head.numMetrics).from_address(out + ctypes.sizeof(structs.GpmMetricsHead))
    seconds = second.at - first.at
    for metric in metrics:
        share = _SHARES.get(metric.metricId)
        if share is None:
            metric.nvmlReturn = Code.NOT_SUPPORTED if 0 < metric.metricId < _METRICS else Code.INVALID_ARGUMENT
            continue
        metric.nvmlReturn = Code.SUCCESS
        # The driver does not notice that two samples are of different instances, nor that they are one moment's.
        metric.value = share * (second.busy - first.busy) / seconds if seconds else math.nan

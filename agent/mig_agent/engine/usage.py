"""Reads what is used on devices, in the GPUs' reader threads, and keeps how busy each was at the last reading."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import replace

from mig_agent.adapters.host import Host
from mig_agent.core.errors import DriverError
from mig_agent.core.model import Generation, Instance, InstanceState
from mig_agent.core.observation import ComputeReading, InstanceUsage, ProcessUsage
from mig_agent.engine.context import Context

_UNKNOWN = InstanceUsage(memory_used_mib=None, memory_total_mib=None)
_THERE = frozenset(InstanceState) - {InstanceState.CREATING, InstanceState.DESTROYING}
_LONGEST_COMMAND = 200
"""The most characters of a process's command line that are passed on."""
_FRESH_SECONDS = 60.0
"""The least time for which metrics show the last reading of how busy an instance is."""


async def read_usage(context: Context, states: frozenset[InstanceState] = _THERE) -> Mapping[Generation, InstanceUsage]:
    """Return the usage of every instance in these states; what the driver does not report now is unknown."""
    records = context.state.gpus.values()
    instances = [each for record in records for each in record.instances.values() if each.state in states]
    if context.driver_use.paused:
        return dict.fromkeys((each.generation for each in instances), _UNKNOWN)
    with context.driver_use.inside():
        found = await asyncio.gather(*(_of(context, each) for each in instances))
    _keep_compute(context, zip(instances, found, strict=True))
    return dict(zip((each.generation for each in instances), found, strict=True))


async def _of(context: Context, instance: Instance) -> InstanceUsage:
    backend, host = context.backends[instance.kind], context.host

    def read() -> InstanceUsage:
        usage = backend.usage(instance)
        if usage.processes is None:
            return usage
        return replace(usage, processes=tuple(_described(each, host) for each in usage.processes))

    try:
        return await context.gpu_workers[instance.slot.gpu].read("read the usage", read)
    except DriverError:
        return _UNKNOWN


def _described(process: ProcessUsage, host: Host) -> ProcessUsage:
    found = host.process(process.pid)
    if found is None:
        return process
    return replace(process, uid=found.uid, command=found.command[:_LONGEST_COMMAND])


def _keep_compute(context: Context, found: Iterable[tuple[Instance, InstanceUsage]]) -> None:
    """Keep how busy the instances were, for metrics; forget what is not known now, and instances that are gone."""
    fresh = max(_FRESH_SECONDS, 2 * (context.settings.sample_usage_seconds or 0.0))
    fresh_until = context.clock.now() + fresh
    there = {generation for record in context.state.gpus.values() for generation in record.instances}
    kept = {generation: each for generation, each in context.compute_readings.items() if generation in there}
    for instance, usage in found:
        kept.pop(instance.generation, None)
        if usage.compute is not None and instance.generation in there:
            kept[instance.generation] = ComputeReading(
                lease=instance.lease, fresh_until=fresh_until, usage=usage.compute
            )
    if kept or context.compute_readings:
        context.compute_readings = kept
        context.state.status_changed.emit()

"""What is used on each instance, read from the driver beside everything else."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from mig_agent.core.errors import DriverError
from mig_agent.core.model import Generation, Instance, InstanceState
from mig_agent.core.observation import InstanceUsage
from mig_agent.engine.context import Context

_UNKNOWN = InstanceUsage(memory_used_mib=None, memory_total_mib=None)
_NOT_THERE = frozenset({InstanceState.CREATING, InstanceState.DESTROYING})


async def read_usage(context: Context) -> Mapping[Generation, InstanceUsage]:
    """Of every instance that is there; what the driver does not tell now is unknown."""
    records = context.state.gpus.values()
    instances = [each for record in records for each in record.instances.values() if each.state not in _NOT_THERE]
    if context.gate.paused:
        return dict.fromkeys((each.generation for each in instances), _UNKNOWN)
    with context.gate.inside():
        found = await asyncio.gather(*(_of(context, each) for each in instances))
    return dict(zip((each.generation for each in instances), found, strict=True))


async def _of(context: Context, instance: Instance) -> InstanceUsage:
    gpu, gi = instance.slot.gpu, instance.gpu_instance_id
    try:
        return await context.lanes[gpu].read("read the usage", lambda: context.driver.usage(gpu, gi))
    except DriverError:
        return _UNKNOWN

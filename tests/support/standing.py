"""The GPUs of several agents as they stand at a moment, as one node of the placement benchmark."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from collections.abc import Set as AbstractSet

from placement_bench.agent import node_of
from placement_bench.mixed import model

from mig_agent.client.types import Gpu as GpuInfo
from mig_agent.client.types import Instance as InstanceInfo
from mig_agent.client.types import Status
from mig_agent.core.model import Generation, Gpu, Instance, InstanceState, LeaseId, NodeView, Placement, Slot


def as_they_stand(
    statuses: Sequence[Status], models: Sequence[str], leases: AbstractSet[str] | None = None
) -> NodeView:
    """One node with all of their GPUs and the instances on them; `models` are theirs, as `profiles/` names them.

    With `leases`, by their ids, only the instances of these are there.
    """
    there = [gpu for status in statuses for gpu in status.gpus]
    empty = node_of([model(name) for name in models])
    assert [gpu.model for gpu in there] == [gpu.layout.model for gpu in empty.gpus], "not these models"
    numbers = map(Generation, itertools.count(1))
    gpus = tuple(
        dataclasses.replace(
            gpu, instances=tuple(_instance(gpu, next(numbers), each) for each in _by_place(seen, leases))
        )
        for gpu, seen in zip(empty.gpus, there, strict=True)
    )
    return dataclasses.replace(empty, gpus=gpus)


def _by_place(gpu: GpuInfo, leases: AbstractSet[str] | None) -> list[InstanceInfo]:
    there = [each for each in gpu.instances if leases is None or each.lease in leases]
    return sorted(there, key=lambda each: each.placement.start if each.placement else 0)


def _instance(gpu: Gpu, number: Generation, seen: InstanceInfo) -> Instance:
    assert seen.placement is not None
    place = Placement(seen.placement.start, seen.placement.size)
    return Instance(
        slot=Slot(gpu.uuid, gpu.layout.by_name[seen.profile], place),
        generation=number,
        state=InstanceState(seen.state),
        uuid=seen.uuid,
        lease=LeaseId(seen.lease) if seen.lease else None,
        since=seen.since,
    )

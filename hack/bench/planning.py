"""The planner alone, on nodes of any size at half load: how long one call of `plan` takes."""

from __future__ import annotations

import random
import statistics
import time
from pathlib import Path

from mig_agent.adapters import catalog_files
from mig_agent.core.model import (
    Generation,
    Gpu,
    GpuState,
    GpuUuid,
    Instance,
    InstanceState,
    Layout,
    MigMode,
    NodeView,
    Placement,
    Request,
    Slot,
    Want,
)
from mig_agent.core.planning.plan import Policy
from mig_agent.core.planning.planner import plan

_SEED = 7
_NODES = 40
_CALLS = 25


def _gpu(index: int, layout: Layout, chance: random.Random) -> Gpu:
    """Return a GPU with about half of its slices taken, leased and idle instances mixed."""
    uuid = GpuUuid(f"GPU-{index}")
    instances: list[Instance] = []
    mask = 0
    for _ in range(4):
        profile = chance.choice([each for each in layout.profiles if each.name.startswith(("1g.", "2g.", "3g."))])
        free: list[Placement] = [place for place in profile.placements if not place.mask & mask]
        if not free:
            continue
        place = chance.choice(free)
        mask |= place.mask
        state = chance.choice((InstanceState.LEASED, InstanceState.IDLE))
        number = Generation(index * 8 + len(instances) + 1)
        instances.append(Instance(slot=Slot(uuid, profile, place), generation=number, state=state))
    return Gpu(
        index=index,
        uuid=uuid,
        layout=layout,
        mode=MigMode(capable=True, current=True, pending=True),
        state=GpuState.READY,
        instances=tuple(sorted(instances, key=lambda each: each.slot.placement)),
    )


def microseconds_of_plan(gpus: int) -> float:
    """Return the median over single calls for 4 to 20 GB on many nodes of this many H100-80GB.

    Tables are warm, nodes are new.
    """
    layout = catalog_files.load(None).layout("NVIDIA H100 80GB HBM3", 81559)
    if layout is None:
        message = f"cannot find the H100's profiles in {Path.cwd()}"
        raise RuntimeError(message)
    chance = random.Random(_SEED)  # noqa: S311 -- a benchmark's workload, not a secret
    policy = Policy()
    took: list[float] = []
    for node in range(_NODES):
        view = NodeView(node="bench", revision=node, gpus=tuple(_gpu(index, layout, chance) for index in range(gpus)))
        for call in range(_CALLS):
            want = Want(memory_bytes=chance.choice((4, 9, 15, 20)) * 10**9)
            request = Request(wants=(want,))
            began = time.perf_counter()
            plan(view, request, policy, now=0.0)
            if node and call:
                took.append(time.perf_counter() - began)
    return statistics.median(took) * 1e6

"""A GPU's last known facts as text in the ledger: what an agent shows that starts without the driver."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from mig_agent.core.model import Engines, GpuUuid, Layout, MigMode, Placement, Profile
from mig_agent.core.observation import ObservedGpu


def text_of(gpu: ObservedGpu) -> str:
    """Return all facts except instances, which have records of their own. Equal GPUs give equal texts."""
    mode = gpu.mode
    return json.dumps(
        {
            "index": gpu.index,
            "minor": gpu.minor,
            "model": gpu.model,
            "memory_mib": gpu.memory_mib,
            "mode": [mode.capable, mode.current, mode.pending],
            "layout": None if gpu.layout is None else _layout(gpu.layout),
        }
    )


def gpu_of(uuid: str, text: str) -> ObservedGpu:
    """Return the GPU without instances. Raises ValueError, KeyError or TypeError for any other text."""
    known = json.loads(text)
    capable, current, pending = known["mode"]
    return ObservedGpu(
        index=known["index"],
        uuid=GpuUuid(uuid),
        minor=known["minor"],
        model=known["model"],
        memory_mib=known["memory_mib"],
        mode=MigMode(capable=capable, current=current, pending=pending),
        layout=None if known["layout"] is None else _layout_of(known["layout"]),
        instances=(),
    )


def _layout(layout: Layout) -> dict[str, object]:
    return {
        "model": layout.model,
        "memory_slices": layout.memory_slices,
        "memory_mib": layout.memory_mib,
        "engines": layout.engines.as_tuple(),
        "profiles": [
            [
                each.id,
                each.name,
                each.compute_slices,
                each.memory_slices,
                each.memory_mib,
                [(place.start, place.size) for place in each.placements],
                each.engines.as_tuple(),
                sorted(each.attributes),
            ]
            for each in layout.profiles
        ],
    }


def _layout_of(known: dict[str, Any]) -> Layout:
    return Layout(
        model=known["model"],
        memory_slices=known["memory_slices"],
        memory_mib=known["memory_mib"],
        engines=_engines(known["engines"]),
        profiles=tuple(
            Profile(
                id=id_,
                name=name,
                compute_slices=compute,
                memory_slices=slices,
                memory_mib=mib,
                placements=tuple(Placement(start, size) for start, size in placements),
                engines=_engines(engines),
                attributes=frozenset(attributes),
            )
            for id_, name, compute, slices, mib, placements, engines, attributes in known["profiles"]
        ),
    )


def _engines(counts: Sequence[int]) -> Engines:
    multiprocessors, copy, decoders, encoders, jpeg, ofa = counts
    return Engines(multiprocessors=multiprocessors, copy=copy, decoders=decoders, encoders=encoders, jpeg=jpeg, ofa=ofa)

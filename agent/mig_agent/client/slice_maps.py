"""The slice map of a status: what its GPUs look like on the map, and the map as a picture."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from mig_agent.core.holder_names import user_of
from mig_agent.core.quantities import counted
from mig_agent.core.slicemap import SliceMapBlock, SliceMapGpu
from mig_agent.core.slicemap_svg import render_svg

if TYPE_CHECKING:
    from mig_agent.client.types import Gpu, Status


def slice_maps(node: Status) -> tuple[SliceMapGpu, ...]:
    """Return the GPUs of a node as the input of the map."""
    pods = {each.id: each.pod.name for each in node.leases if each.pod is not None and each.pod.name}
    return tuple(_slice_map(each, pods) for each in node.gpus)


def status_svg(node: Status) -> str:
    """Return the map of a node as an SVG document."""
    waiting = f", {len(node.queue)} waiting" if node.queue else ""
    summary = f"{counted(len(node.gpus), 'GPU')}, {counted(len(node.leases), 'lease')}{waiting}"
    return render_svg(slice_maps(node), caption=f"{node.node}: {summary}")


def _slice_map(gpu: Gpu, pods: Mapping[str, str]) -> SliceMapGpu:
    """Return one GPU. `pods` are pod names by lease, without namespaces to fit the cells."""
    state = "" if gpu.state == "ready" else gpu.state
    blocks = tuple(
        SliceMapBlock(
            start=each.placement.start if each.placement else 0,
            size=each.placement.size if each.placement else gpu.memory_slices,
            label=each.profile,
            state=each.state,
            holder=pods.get(each.lease) or user_of(each.holder),
        )
        for each in gpu.instances
    )
    return SliceMapGpu(
        title=f"GPU {gpu.index}: {', '.join(filter(None, (gpu.model, state)))}",
        name=f"GPU {gpu.index} {', '.join(filter(None, (state, gpu.model.removeprefix('NVIDIA '))))}",
        memory_slices=gpu.memory_slices,
        blocks=blocks,
        unusable=frozenset(gpu.unusable_slices),
    )

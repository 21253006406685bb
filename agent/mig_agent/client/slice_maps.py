"""The map of a status: what its GPUs look like on the map, and the map as a picture."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from mig_agent.core.holder_names import user_of
from mig_agent.core.quantities import counted, format_mib
from mig_agent.core.slicemap import SliceMapBlock, SliceMapGpu
from mig_agent.core.slicemap_svg import render_svg

if TYPE_CHECKING:
    from mig_agent.client.types import Gpu, Instance, SharedMemory, Status


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
    state, memory = mode_words(gpu), gpu.shared_memory
    shared = gpu.is_shared and memory is not None and gpu.state != "lost"
    taken = f"{format_mib(memory.taken_mib)} of {format_mib(memory.usable_mib)} taken" if shared and memory else ""
    return SliceMapGpu(
        title=f"GPU {gpu.index}: {', '.join(filter(None, (gpu.model, state, taken)))}",
        name=f"GPU {gpu.index} {', '.join(filter(None, (state, gpu.model.removeprefix('NVIDIA '))))}",
        memory_slices=gpu.memory_slices,
        blocks=_shares(gpu, memory, pods) if shared and memory else _instances(gpu, pods),
        unusable=frozenset(gpu.unusable_slices),
        # After a change of the settings more may be taken than could be shared now.
        shared_mib=max(memory.usable_mib, memory.taken_mib + memory.others_mib) if shared and memory else 0,
    )


def mode_words(gpu: Gpu) -> str:
    """Return how a GPU is used, for people: `whole`, `shared`, `cordoned, shared`; empty in MIG mode."""
    state = "" if gpu.state in {"ready", "whole"} else gpu.state
    use = "shared" if gpu.is_shared else "whole" if gpu.state == "whole" else ""
    return ", ".join(filter(None, (state, use)))


def _instances(gpu: Gpu, pods: Mapping[str, str]) -> tuple[SliceMapBlock, ...]:
    return tuple(
        SliceMapBlock(
            start=each.placement.start if each.placement else 0,
            size=each.placement.size if each.placement else gpu.memory_slices,
            label=each.profile,
            state=each.state,
            holder=_holder(each, pods),
        )
        for each in gpu.instances
    )


def _shares(gpu: Gpu, memory: SharedMemory, pods: Mapping[str, str]) -> tuple[SliceMapBlock, ...]:
    """Return the shares one behind the other, in the order in which they came; nothing has a place of its own."""
    blocks: list[SliceMapBlock] = []
    start = 0
    for each in sorted((one for one in gpu.instances if one.is_share), key=lambda one: one.generation):
        size = each.memory_mib + memory.overhead_mib
        blocks.append(
            SliceMapBlock(
                start=start,
                size=size,
                label=format_mib(each.memory_mib),
                state=each.state,
                holder=_holder(each, pods),
            )
        )
        start += size
    if memory.others_mib:
        label = format_mib(memory.others_mib)
        blocks.append(SliceMapBlock(start=start, size=memory.others_mib, label=label, state="foreign"))
    return tuple(blocks)


def _holder(instance: Instance, pods: Mapping[str, str]) -> str:
    return pods.get(instance.lease) or user_of(instance.holder)

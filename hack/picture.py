"""The picture in the README: where the agent's own planner places a morning's requests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from mig_agent.adapters import catalog_files
from mig_agent.core.model import (
    Generation,
    Gpu,
    GpuState,
    GpuUuid,
    Instance,
    InstanceState,
    LeaseId,
    MigMode,
    NodeView,
    Request,
    Want,
    slices_in,
)
from mig_agent.core.planning.feasibility import unusable_mask
from mig_agent.core.planning.plan import CreateInstance, Plan
from mig_agent.core.planning.planner import plan
from mig_agent.core.quantities import parse_memory
from mig_agent.core.slicemap import SliceMapBlock, SliceMapGpu
from mig_agent.core.slicemap_svg import render_svg

GPUS = (("NVIDIA A100-SXM4-40GB", 40960), ("NVIDIA H100 80GB HBM3", 81559), ("NVIDIA H100 80GB HBM3", 81559))
"""Product names, and MiB as the driver reports them."""
REQUESTS: Mapping[str, tuple[str, str]] = {
    "alice": ("4G", "leased"),
    "bob": ("18G", "leased"),
    "carol": ("4G", "idle"),
    "dave": ("39G", "leased"),
    "erin": ("9.7Gi", "leased"),
    "frank": ("9.7Gi", "idle"),
    "grace": ("20G", "leased"),
    "heidi": ("75G", "leased"),
}
"""By user: how much memory, and the state of the instance."""


def slice_map() -> str:
    """Return the picture as SVG; the same every time."""
    gpus = tuple(_gpu(index, *gpu) for index, gpu in enumerate(GPUS))
    names: dict[Generation, str] = {}
    for number, (name, (memory, state)) in enumerate(REQUESTS.items(), start=1):
        view = NodeView(node="picture", revision=number, gpus=gpus)
        outcome = plan(view, Request(wants=(Want(memory_bytes=parse_memory(memory)),)))
        if not isinstance(outcome, Plan) or not isinstance(outcome.devices[0].serve, CreateInstance):
            continue  # the node is full: the picture shows who came before
        made = Instance(
            slot=outcome.devices[0].slot,
            generation=Generation(number),
            state=InstanceState(state),
            lease=LeaseId(name) if state == "leased" else None,
        )
        names[made.generation] = name if state == "leased" else ""
        gpus = tuple(_with(gpu, made, outcome) if gpu.uuid == made.slot.gpu else gpu for gpu in gpus)
    return render_svg([_mapped(gpu, names) for gpu in gpus])


def _gpu(index: int, model: str, memory_mib: int) -> Gpu:
    layout = catalog_files.load(None).layout(model, memory_mib)
    if layout is None:
        message = f"cannot draw {model}: it has no file in profiles/"
        raise LookupError(message)
    mode = MigMode(capable=True, current=True, pending=True)
    return Gpu(index=index, uuid=GpuUuid(f"GPU-{index}"), layout=layout, mode=mode, state=GpuState.READY)


def _with(gpu: Gpu, made: Instance, served: Plan) -> Gpu:
    gone = {victim.instance.generation for victim in served.devices[0].victims}
    kept = (each for each in gpu.instances if each.generation not in gone)
    return replace(gpu, instances=tuple(sorted((*kept, made), key=lambda each: each.slot.placement)))


def _mapped(gpu: Gpu, names: Mapping[Generation, str]) -> SliceMapGpu:
    return SliceMapGpu(
        title=f"GPU {gpu.index}: {gpu.layout.model}",
        memory_slices=gpu.layout.memory_slices,
        blocks=tuple(
            SliceMapBlock(
                start=each.slot.placement.start,
                size=each.slot.placement.size,
                label=each.slot.profile.name,
                state=each.state.value,
                holder=names[each.generation],
            )
            for each in gpu.instances
        ),
        unusable=frozenset(slices_in(unusable_mask(gpu))),
    )

"""Partitionable devices: every slot that may exist on a GPU, with what a claim can ask of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType

from mig_agent.core.dra.counters import consumption
from mig_agent.core.dra.names import counter_set_name, device_name
from mig_agent.core.model import Engines, GpuUuid, Layout, Placement, Slot

_LONGEST_TEXT = 64
"""Bytes that the API server takes in an attribute."""
MIG_DEVICE = "mig"
WHOLE_DEVICE = "gpu"

SizeClass = tuple[int, int, int, bool, str]
"""The sort key of devices that are alike to a claim: memory, compute slices, memory slices, attributes, profile."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionableDevice:
    """A slot as published: devices of one GPU take from one counter set."""

    name: str
    gpu: GpuUuid
    product_name: str
    type: str
    """`mig` for an instance, `gpu` for a whole GPU, as NVIDIA's driver calls them."""
    profile: str
    compute_slices: int
    memory_mib: int
    placement: Placement
    engines: Engines
    counter_set: str
    consumes: tuple[tuple[str, int], ...]
    """(name, amount) of each counter that the device takes, by name."""

    @property
    def size(self) -> SizeClass:
        """The size class: the smallest comes first, and with an attribute after a plain one of the same size."""
        has_attributes = "+" in self.profile or "-" in self.profile
        return (self.memory_mib, self.compute_slices, self.placement.size, has_attributes, self.profile)


@lru_cache(maxsize=256)
def slots_by_name(gpu: GpuUuid, layout: Layout) -> Mapping[str, Slot]:
    """Return every slot that may exist on a GPU, by the name of its device.

    Shares are not among them: counters cannot say that a GPU is either whole or shared by any amounts of memory.
    """
    slots = (Slot(gpu, profile, placement) for profile in layout.profiles for placement in profile.placements)
    return MappingProxyType({device_name(slot): slot for slot in slots})


@lru_cache(maxsize=256)
def devices_of(gpu: GpuUuid, layout: Layout) -> tuple[PartitionableDevice, ...]:
    """Return a GPU's devices, the smallest first and then by the start of their placement."""
    found = (_device(name, slot, layout) for name, slot in slots_by_name(gpu, layout).items())
    return tuple(sorted(found, key=lambda each: (each.size, each.placement)))


def consumed(devices: Iterable[PartitionableDevice]) -> dict[tuple[str, str], int]:
    """Return what devices take together, by counter set and counter."""
    counts: dict[tuple[str, str], int] = {}
    for device in devices:
        for counter, amount in device.consumes:
            key = (device.counter_set, counter)
            counts[key] = counts.get(key, 0) + amount
    return counts


def _device(name: str, slot: Slot, layout: Layout) -> PartitionableDevice:
    profile = slot.profile
    return PartitionableDevice(
        name=name,
        gpu=slot.gpu,
        product_name=layout.model.encode()[:_LONGEST_TEXT].decode(errors="ignore"),
        type=WHOLE_DEVICE if profile.kind.takes_whole_gpu else MIG_DEVICE,
        profile=profile.name,
        compute_slices=profile.compute_slices,
        memory_mib=profile.memory_mib,
        placement=slot.placement,
        engines=profile.engines,
        counter_set=counter_set_name(slot.gpu),
        consumes=tuple(sorted(consumption(layout, profile, slot.placement).items())),
    )

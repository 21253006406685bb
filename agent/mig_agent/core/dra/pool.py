"""A node's pool of devices: which slice holds which device, in which order, and the counters that are left.

Which devices a slice holds depends only on the devices that there are, so a change of order or counters is a change
within slices, and never needs a new generation of the pool. That is what makes relisting cheap and unnoticed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from mig_agent.core.dra.counters import CounterSet, consumption, counters_of
from mig_agent.core.dra.devices import PartitionableDevice, consumed, devices_of
from mig_agent.core.dra.names import counter_set_name, counter_slice_name, device_name, slice_name
from mig_agent.core.dra.order import Rank, open_gpus, ranking
from mig_agent.core.model import Gpu, GpuUuid, NodeView
from mig_agent.core.planning.plan import DEFAULT_POLICY, Policy
from mig_agent.core.planning.search import NOTHING_RESERVED

MOST_DEVICES = 64
"""Devices that the API server takes in a slice if any of them takes from counters."""
MOST_COUNTER_SETS = 8
"""Counter sets that the API server takes in a slice."""
_NOT_FREE: Rank = (float("inf"), 0.0, 0, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class ResourceSlice:
    """The content of one slice: devices, or counter sets, since the API server refuses both in one."""

    name: str
    devices: tuple[PartitionableDevice, ...] = ()
    counter_sets: tuple[CounterSet, ...] = ()

    @property
    def members(self) -> frozenset[str]:
        """The names of what the slice holds."""
        return frozenset((*(each.name for each in self.devices), *(each.name for each in self.counter_sets)))


def slices_of(
    view: NodeView,
    allocated: frozenset[str],
    published: Sequence[ResourceSlice] = (),
    policy: Policy = DEFAULT_POLICY,
    *,
    reserved: frozenset[GpuUuid] = NOTHING_RESERVED,
) -> tuple[ResourceSlice, ...]:
    """Return the slices to publish for a node.

    `allocated` are the names of the devices that claims have, whether or not their instances exist yet. Those of them
    in `published`, the newest generation last, stay as they are there, even if no GPU offers them now: the scheduler
    forgets what an unpublished device takes and gives it out again. Nothing new may be placed on `reserved` GPUs.
    """
    devices = {each.name: each for gpu in view.gpus for each in devices_of(gpu.uuid, gpu.layout)}
    kept = {each.name: each for part in published for each in part.devices if each.name in allocated}
    devices |= kept
    open_now = open_gpus(view, reserved)
    ranks = ranking(open_now, allocated, policy)
    parts = _divide(devices.values())
    names = (slice_name(view.node, number) for number in range(len(parts)))
    of_devices = tuple(
        ResourceSlice(name=name, devices=_listed(part, ranks)) for name, part in zip(names, parts, strict=True)
    )
    sets = _counter_sets(view, [devices[name] for name in allocated if name in devices], open_now)
    of_counters = tuple(
        ResourceSlice(
            name=counter_slice_name(view.node, start // MOST_COUNTER_SETS),
            counter_sets=tuple(sets[start : start + MOST_COUNTER_SETS]),
        )
        for start in range(0, len(sets), MOST_COUNTER_SETS)
    )
    return of_counters + of_devices


def _divide(devices: Iterable[PartitionableDevice]) -> list[list[PartitionableDevice]]:
    """Return the devices by slice: whole size classes as far as they fit, the smallest first.

    A class that is too large for one slice is divided between GPUs, not within one.
    """
    by_size = sorted(devices, key=lambda each: (each.size, each.gpu, each.placement))
    parts: list[list[PartitionableDevice]] = []
    for _, size_class in groupby(by_size, key=lambda each: each.size):
        for piece in _pieces(size_class):
            if parts and len(parts[-1]) + len(piece) <= MOST_DEVICES:
                parts[-1] += piece
            else:
                parts.append(piece)
    return parts


def _pieces(size_class: Iterable[PartitionableDevice]) -> list[list[PartitionableDevice]]:
    pieces: list[list[PartitionableDevice]] = [[]]
    for _, of_gpu in groupby(size_class, key=lambda each: each.gpu):
        group = list(of_gpu)
        if len(pieces[-1]) + len(group) > MOST_DEVICES:
            pieces.append([])
        pieces[-1] += group
    return pieces


def _listed(part: Iterable[PartitionableDevice], ranks: Mapping[str, Rank]) -> tuple[PartitionableDevice, ...]:
    """Return a slice's devices in the order of listing; those that are not free come last of their size."""
    return tuple(sorted(part, key=lambda each: (each.size, ranks.get(each.name, _NOT_FREE), each.gpu, each.placement)))


def _counter_sets(
    view: NodeView, allocated: Sequence[PartitionableDevice], open_now: Sequence[Gpu]
) -> list[CounterSet]:
    """Return the counter set of every GPU, and of GPUs that are gone while claims have devices of theirs.

    No counter is below what allocated devices take of it: one negative counter stops every device of the pool.
    """
    names = frozenset(each.name for each in allocated)
    open_uuids = frozenset(gpu.uuid for gpu in open_now)
    found = {counter_set_name(gpu.uuid): _left(gpu, names, is_open=gpu.uuid in open_uuids) for gpu in view.gpus}
    for (name, counter), amount in consumed(allocated).items():
        left = found.setdefault(name, {})
        left[counter] = max(amount, left.get(counter, 0))
    return [CounterSet(name, tuple(sorted(left.items()))) for name, left in sorted(found.items())]


def _left(gpu: Gpu, allocated: frozenset[str], *, is_open: bool) -> dict[str, int]:
    """Return what instances outside DRA leave of a GPU's counters; nothing if the GPU is not open.

    Idle instances take nothing, since they are reused or destroyed. Those in allocated slots take nothing either: the
    scheduler subtracts what their devices take.
    """
    counts = dict(counters_of(gpu.layout))
    if not is_open or not (gpu.layout.can_create or gpu.instances):
        return dict.fromkeys(counts, 0)
    for instance in gpu.instances:
        slot = instance.slot
        if instance.is_available or device_name(slot) in allocated:
            continue
        for counter, amount in consumption(gpu.layout, slot.profile, slot.placement).items():
            if counter in counts:
                counts[counter] = max(0, counts[counter] - amount)
    return counts

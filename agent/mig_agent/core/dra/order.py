"""The order in which devices of one size are listed: the planner's own preference among the slots that are free.

The scheduler takes the first device that fits, so the order of listing is the only way to choose for it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import lru_cache
from types import MappingProxyType

from mig_agent.core.dra.devices import slots_by_name
from mig_agent.core.model import Gpu, GpuUuid, Layout, NodeView, Profile, Request, Slot
from mig_agent.core.planning.occupancy import Candidate, Occupancy
from mig_agent.core.planning.pinning import window_of
from mig_agent.core.planning.plan import DEFAULT_POLICY, Policy
from mig_agent.core.planning.search import NOTHING_RESERVED, usable_gpus

Rank = tuple[float, float, int, int]
"""Cost and age of the GPU's best slot, index of the GPU, position among its slots; lower is listed first."""
_ANYTHING = Request(wants=())


def open_gpus(view: NodeView, reserved: frozenset[GpuUuid] = NOTHING_RESERVED) -> tuple[Gpu, ...]:
    """Return the GPUs on which something new may be placed: not cordoned, lost or reserved for those that wait."""
    return tuple(usable_gpus(view, _ANYTHING, reserved))


def ranking(gpus: Iterable[Gpu], allocated: Collection[str], policy: Policy = DEFAULT_POLICY) -> Mapping[str, Rank]:
    """Return the rank of every device that could be given now on these GPUs, by name; what does not fit is left out.

    Of each profile the first is what the planner would choose now. The other slots of its GPU follow, in the order in
    which the planner would fill that GPU with the profile, and then those of the next GPU: so the order is good for
    several allocations before the next listing, too. `allocated` are names of devices that belong to claims: their
    slots are held, with or without an instance in them.
    """
    ranks: dict[str, Rank] = {}
    for gpu in gpus:
        here = tuple(sorted(slots_by_name(gpu.uuid, gpu.layout).keys() & allocated))
        key = f"DRA ranks beside {here} by {policy}"
        known = gpu.scratch.get(key)
        if not isinstance(known, dict):
            known = gpu.scratch[key] = _ranks_on(gpu, here, policy)
        ranks |= known
    return ranks


def _ranks_on(gpu: Gpu, allocated: Collection[str], policy: Policy) -> dict[str, Rank]:
    start = _with_allocated(gpu, allocated, policy)
    names = _names(gpu.uuid, gpu.layout)
    ranks: dict[str, Rank] = {}
    for profile in gpu.layout.profiles:
        free = start.candidates(profile, policy.creation_cost)
        if not free:
            continue
        order = [each.window for each in _filled_with(profile, start, policy)]
        order += [each.window for each in free if each.window not in order]
        for position, window in enumerate(order):
            ranks[names[profile.id, window.placement.start]] = (free[0].cost, free[0].age, gpu.index, position)
    return ranks


def _filled_with(profile: Profile, occupancy: Occupancy, policy: Policy) -> Iterator[Candidate]:
    """Yield the slots in which the planner would place one instance of the profile after another."""
    while (found := occupancy.best(profile, policy.creation_cost)) is not None:
        yield found
        occupancy = occupancy.place(found)


def _with_allocated(gpu: Gpu, allocated: Collection[str], policy: Policy) -> Occupancy:
    """Return the occupancy of a GPU with the allocated slots that have no leased instance yet."""
    occupancy = Occupancy.of(gpu, policy)
    slots = slots_by_name(gpu.uuid, gpu.layout)
    for slot in (slots[name] for name in allocated if name in slots):
        window = window_of(occupancy, slot)
        candidate = None if window is None else occupancy.candidate_at(window, policy.creation_cost)
        if candidate is not None:
            occupancy = occupancy.place(candidate)
    return occupancy


@lru_cache(maxsize=256)
def _names(gpu: GpuUuid, layout: Layout) -> Mapping[tuple[int, int], str]:
    """Return the names of a GPU's devices by profile id and start."""

    def key(slot: Slot) -> tuple[int, int]:
        return slot.profile.id, slot.placement.start

    return MappingProxyType({key(slot): name for name, slot in slots_by_name(gpu, layout).items()})

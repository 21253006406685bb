"""Feasibility: whether requests can be served once leases end, which GPUs to reserve, and which slices are unusable."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import combinations, islice

from mig_agent.core.model import Gpu, GpuUuid, InstanceState, Layout, Want
from mig_agent.core.planning.alike_gpus import alike
from mig_agent.core.planning.exact_packing import pack
from mig_agent.core.planning.occupancy import Occupancy
from mig_agent.core.planning.placement import tables_for
from mig_agent.core.planning.profiles import served_by, share_of_gpus
from mig_agent.core.planning.shares import devices_in_the_way, share_window

_TOLERANCE = 1e-9
"""Rounding error allowed in sums of fractions."""
_MOST_COMBINATIONS = 200
"""The most sets of GPUs of one size that are tried; beyond that GPUs are only left out one by one."""
_MOST_SETS = 8
"""The most unlike sets that are tried; beyond that, too, GPUs are only left out one by one."""
_STEPS = 200
"""Steps of the search whether some of the GPUs suffice; if it is undecided by then, they count as not sufficient."""


def empty_occupancy(gpu: Gpu, *, keep_foreign: bool) -> Occupancy:
    """Return the GPU without its instances; with its foreign ones if they cannot be counted on to go."""
    kept = [each for each in gpu.instances if keep_foreign and each.state is InstanceState.FOREIGN]
    tables = tables_for(gpu.layout)
    held = engines = 0
    for instance in kept:
        held |= instance.slot.placement.mask
        engines += tables.engines_of(instance.slot.profile)
    return Occupancy(gpu, tables, held, engines, ())


def unusable_mask(gpu: Gpu) -> int:
    """Return the free slices that no profile can use beside what is held on the GPU now, as a bit mask.

    Idle instances are not in the way, since a plan destroys them. Cached on the frozen GPU.
    """
    key = "unusable slices"
    known = gpu.scratch.get(key)
    if isinstance(known, int):
        return known
    free = (1 << gpu.layout.memory_slices) - 1
    for instance in gpu.instances:
        free &= ~instance.slot.placement.mask
    tables, engines = tables_for(gpu.layout), _held_engines(gpu)
    usable = 0
    for profile in gpu.layout.profiles:
        if profile.kind.is_created and tables.engines_fit(engines + tables.engines_of(profile)):
            for ranked in tables.ranked(profile.id, gpu.held_mask):
                usable |= ranked.window.mask
    found = gpu.scratch[key] = free & ~usable
    return found


def _held_engines(gpu: Gpu) -> int:
    tables = tables_for(gpu.layout)
    return sum(tables.engines_of(each.slot.profile) for each in gpu.instances if each.state is not InstanceState.IDLE)


def fits_when_empty(gpus: Iterable[Gpu], wants: Sequence[Want], *, keep_foreign: bool = False) -> bool:
    """Return True if the wants would fit together on these GPUs with nothing on them."""
    occupancies = (empty_occupancy(gpu, keep_foreign=keep_foreign) for gpu in gpus)
    if len(wants) == 1:
        return any(_windows(occupancy, wants[0]) for occupancy in occupancies)
    return pack(list(occupancies), wants) is not None


def fewest_gpus(
    gpus: Sequence[Gpu], wants: Sequence[Want], cache: FeasibilityCache | None = None
) -> frozenset[GpuUuid]:
    """Return the fewest GPUs that could serve the wants once their leases ended, those with the least to end first.

    Foreign instances are not counted on to go. Empty when even all GPUs could not serve the wants. `cache` must be for
    these wants; it keeps results between calls. Of several models (`alike_gpus`) it is the one with the least to end.
    """
    if len(wants) == 1:
        nearest = _nearest(gpus, wants[0])
        return frozenset() if nearest is None else frozenset({nearest.uuid})
    cache = FeasibilityCache(wants) if cache is None else cache
    sets = alike(gpus, wants)
    if sets is None:
        return _fewest(gpus, wants, cache)
    held = {gpu.uuid: gpu.held_mask.bit_count() / gpu.layout.memory_slices for gpu in gpus}
    found = [_fewest(each, wants, cache) for each in sets.of_one_model]
    return min(filter(None, found), key=lambda each: sum(held[uuid] for uuid in each), default=frozenset())


def _fewest(gpus: Sequence[Gpu], wants: Sequence[Want], cache: FeasibilityCache) -> frozenset[GpuUuid]:
    ordered = sorted(gpus, key=lambda gpu: (gpu.held_mask.bit_count(), gpu.index))
    if not cache.suffice(ordered):
        return frozenset()
    unlike: set[tuple[object, ...]] = set()
    least = max(math.ceil(share_of_gpus(gpus, wants) - _TOLERANCE), 1)
    for size in range(least, len(ordered)):
        for chosen in islice(combinations(ordered, size), _MOST_COMBINATIONS):
            if cache.suffice(chosen, most_steps=_STEPS):
                return _without_unneeded(chosen, cache)
            unlike.add(cache.key_of(chosen))
        if len(unlike) > _MOST_SETS:
            break
    return _without_unneeded(ordered, cache)


def _without_unneeded(gpus: Sequence[Gpu], cache: FeasibilityCache) -> frozenset[GpuUuid]:
    kept = list(gpus)
    for gpu in reversed(gpus):
        others = [each for each in kept if each is not gpu]
        if cache.suffice(others, most_steps=_STEPS):
            kept = others
    return frozenset(gpu.uuid for gpu in kept)


class FeasibilityCache:
    """Caches which sets of emptied GPUs some wants would fit on; sets with equal GPUs share one result."""

    def __init__(self, wants: Sequence[Want]) -> None:
        self.wants = wants
        self._named = frozenset(want.slot.gpu for want in wants if want.slot is not None)
        """The GPUs of slots that the wants name; no other looks like one of these."""
        self._layouts: dict[int, Layout] = {}
        """By identity, which is quicker than by content; kept here so that no other layout gets the same id."""
        self._known: dict[tuple[bool, tuple[object, ...]], bool] = {}
        """By whether the search was unlimited, and by the state of the set."""

    def suffice(self, gpus: Sequence[Gpu], *, most_steps: int | None = None) -> bool:
        """Return True if the wants fit once leases end; `most_steps` is that of `pack`.

        Foreign instances are not counted on to go.
        """
        key = (most_steps is None, self.key_of(gpus))
        if key not in self._known:
            occupancies = [empty_occupancy(gpu, keep_foreign=True) for gpu in gpus]
            self._known[key] = pack(occupancies, self.wants, most_steps=most_steps) is not None
        return self._known[key]

    def key_of(self, gpus: Sequence[Gpu]) -> tuple[object, ...]:
        """Return a key that is equal for sets whose GPUs, emptied, are alike."""
        self._layouts.update((id(gpu.layout), gpu.layout) for gpu in gpus)
        occupancies = [empty_occupancy(gpu, keep_foreign=True) for gpu in gpus]
        return tuple(
            sorted(
                (
                    id(occupancy.gpu.layout),
                    occupancy.held,
                    occupancy.engines,
                    occupancy.gpu.uuid if occupancy.gpu.uuid in self._named else "",
                )
                for occupancy in occupancies
            )
        )


def _nearest(gpus: Sequence[Gpu], want: Want) -> Gpu | None:
    """Return the GPU on which least has to end before the want fits; the first of equals."""
    best: tuple[tuple[int, int, int], int] | None = None
    nearest: Gpu | None = None
    for gpu in gpus:
        to_end = _least_to_end(gpu, want)
        if to_end is not None:
            key = (to_end, gpu.index)
            if best is None or key < best:
                best, nearest = key, gpu
    return nearest


def _least_to_end(gpu: Gpu, want: Want) -> tuple[int, int, int] | None:
    """Return what has to end on one GPU before the want fits, less first; None if foreign instances prevent it.

    The wait is for the last of the leases to end, so few leases count before few slices. Of as many leases (unless it
    is one) a GPU with a large one among them is better to reserve: less of it is idle meanwhile. `docs/placement.md`
    has what that is worth. Cached on the frozen GPU.
    """
    profile = served_by(want, gpu)
    if profile is None:
        return None
    if profile.kind.shares_memory:
        count = len(devices_in_the_way(gpu, profile))
        return (count, 0, min(count, 1))
    key = f"to end {profile.id} {'' if want.slot is None else want.slot.placement}"
    if key not in gpu.scratch:
        held = [each.slot.placement for each in gpu.instances if each.state is not InstanceState.IDLE]
        found: list[tuple[int, int, int]] = []
        for mask in _windows(empty_occupancy(gpu, keep_foreign=True), want):
            sizes = [place.size for place in held if place.mask & mask]
            largest = max(sizes) if len(sizes) > 1 else 0
            found.append((len(sizes), -largest, (mask & gpu.held_mask).bit_count()))
        gpu.scratch[key] = min(found, default=None)
    known = gpu.scratch[key]
    return known if isinstance(known, tuple) else None


def _windows(occupancy: Occupancy, want: Want) -> list[int]:
    """Return the masks of the windows that would serve the want."""
    profile = served_by(want, occupancy.gpu)
    if profile is not None and profile.kind.shares_memory:
        return [share_window(profile).mask] if occupancy.most_shares(profile) else []
    if profile is None or not occupancy.tables.engines_fit(occupancy.engines + occupancy.tables.engines_of(profile)):
        return []
    windows = (ranked.window for ranked in occupancy.tables.ranked(profile.id, occupancy.held))
    return [each.mask for each in windows if want.slot is None or each.placement == want.slot.placement]

"""Profile selection: the smallest profile of a GPU model that serves a want, and hints for near misses."""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import lru_cache

from mig_agent.core.model import Gpu, Layout, Profile, Want
from mig_agent.core.planning.shares import share_for
from mig_agent.core.quantities import format_memory

_ROUNDING = 1e-9
"""Rounding error: a fraction such as 0.1 + 0.2 in a float must not cost a slice."""


def order_of_size(profile: Profile) -> tuple[int, int, int, int]:
    """Return the sort key by size: least memory, then fewest compute slices, then fewest memory slices."""
    return (profile.memory_mib, profile.compute_slices, profile.memory_slices, profile.id)


def candidates(want: Want, layout: Layout) -> tuple[Profile, ...]:
    """Return all profiles of the layout that would serve the want, the smallest first; only the first is ever used."""
    return tuple(sorted((each for each in layout.profiles if serves(each, want, layout)), key=order_of_size))


@lru_cache(maxsize=1024)
def smallest_profile(want: Want, layout: Layout) -> Profile | None:
    """Return the smallest profile of the layout, or the share of its GPUs, that serves the want; None if there is none.

    Memory is compared with what the profile really has. A profile with attributes serves only wants for its attributes
    or its name. Cached, since the planner calls it for every GPU of a node.
    """
    if layout.shares is not None and (share := share_for(want, layout)) is not None:
        return share
    best: Profile | None = None
    for profile in layout.profiles:
        if serves(profile, want, layout) and (best is None or order_of_size(profile) < order_of_size(best)):
            best = profile
    return best


def served_by(want: Want, gpu: Gpu) -> Profile | None:
    """Return the smallest profile of a GPU that serves the want; None if none does, or the want names another GPU."""
    if want.slot is not None and want.slot.gpu != gpu.uuid:
        return None
    return smallest_profile(want, gpu.layout)


def serves(profile: Profile, want: Want, layout: Layout) -> bool:
    """Return True if an instance of this profile satisfies the want."""
    if want.slot is not None:
        return (profile.id, profile.name) == (want.slot.profile.id, want.slot.profile.name)
    if want.compute_percent is not None:
        return False  # only a share has it
    if profile.kind.takes_whole_gpu:
        return want.whole_gpu
    if want.profile is not None:
        named = profile.name == want.profile and want.attributes <= profile.attributes
        return named and profile.compute_slices >= want.min_compute_slices
    if profile.compute_slices < want.min_compute_slices or profile.attributes != want.attributes:
        return False
    return _is_large_enough(profile, want, layout)


def _is_large_enough(profile: Profile, want: Want, layout: Layout) -> bool:
    if want.whole_gpu:
        return profile.memory_slices == layout.memory_slices
    if want.memory_bytes is not None:
        return profile.memory_bytes >= want.memory_bytes
    if want.fraction is not None:
        return profile.memory_slices >= slices_of_fraction(want.fraction, layout.memory_slices)
    return False


def slices_of_fraction(fraction: float, slices: int) -> int:
    """Return how many of a GPU's memory slices a fraction of it is, rounded up."""
    return max(1, math.ceil(fraction * slices - _ROUNDING))


def wasted_mib(profile: Profile, want: Want, layout: Layout) -> float:
    """Return the memory in MiB that the profile has beyond what is wanted; 0 if no amount was named."""
    if profile.kind.shares_memory:
        return 0.0  # a limit in MiB, above what is wanted only where it would be below the least one
    if want.memory_bytes is not None:
        return profile.memory_mib - want.memory_bytes / (1 << 20)
    if want.fraction is not None:
        share = profile.memory_slices / layout.memory_slices - want.fraction
        return max(0.0, share) * layout.memory_mib
    return 0.0


def share_of_gpus(gpus: Iterable[Gpu], wants: Iterable[Want]) -> float:
    """Return how many GPUs the wants need at least, by slices.

    Each counts on the model where it takes least, as a whole GPU if no profile serves it.
    """
    layouts = {id(gpu.layout): gpu.layout for gpu in gpus}.values()
    return sum(min((_share(want, layout) for layout in layouts), default=1.0) for want in wants)


def _share(want: Want, layout: Layout) -> float:
    profile = smallest_profile(want, layout)
    if profile is None:
        return 1.0
    if profile.kind.shares_memory and layout.shares is not None:
        return layout.shares.taken(profile.memory_mib) / layout.shares.usable_mib
    return profile.memory_slices / layout.memory_slices


_NEAR = 1.125
"""A want is near a smaller profile up to an eighth above its memory: 10Gi and 9728 MiB, 18Gi and 16384 MiB."""
_STEP_MIB = 256
"""Suggested amounts are multiples of a quarter of a Gi."""


def near_miss(want: Want, layout: Layout) -> Profile | None:
    """Return the smaller profile that a want for memory just misses, with fewer memory slices than the one it gets.

    None if there is none. Profiles with enough memory but other attributes or too little compute do not count.
    """
    if want.memory_bytes is None:
        return None
    able = [
        profile
        for profile in layout.profiles
        if profile.attributes == want.attributes and profile.compute_slices >= want.min_compute_slices
    ]
    wanted = want.memory_bytes
    served = min((each for each in able if each.memory_bytes >= wanted), key=order_of_size, default=None)
    near = (each for each in able if each.memory_bytes < wanted <= each.memory_bytes * _NEAR)
    missed = min(near, key=lambda each: (each.memory_slices, -each.memory_mib), default=None)
    if missed is None or (served is not None and missed.memory_slices >= served.memory_slices):
        return None
    return missed


def round_amount(profile: Profile) -> str:
    """Return a round amount of memory that the profile has: `9.5Gi`."""
    mib = profile.memory_mib // _STEP_MIB * _STEP_MIB or profile.memory_mib
    return format_memory(mib << 20)


def near_miss_notes(want: Want, given: Profile, gpu: Gpu) -> tuple[str, ...]:
    """Return `10Gi takes 2 memory slices of GPU 1 (1g.20gb), 9.75Gi would take 1 (1g.10gb)`, or nothing."""
    if want.memory_bytes is None or given.memory_slices == 1:
        return ()  # no profile has fewer memory slices
    missed = near_miss(want, gpu.layout)
    if missed is None:
        return ()
    asked = want.text or format_memory(want.memory_bytes)
    words = (
        f"{asked} takes {given.memory_slices} memory slices of GPU {gpu.index} ({given.name}), "
        f"{round_amount(missed)} would take {missed.memory_slices} ({missed.name})"
    )
    return (words,)

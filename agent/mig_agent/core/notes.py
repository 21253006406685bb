"""What a person should know of a plan: how a slightly smaller wish would cost half."""

from __future__ import annotations

from mig_agent.core.choosing import order_of_size
from mig_agent.core.model import Gpu, Layout, Profile, Want
from mig_agent.core.quantities import format_memory

_NEAR = 1.125
"""A want is near a smaller profile up to an eighth above its memory: 10Gi and 9728 MiB, 18Gi and 16384 MiB."""
_STEP_MIB = 256
"""Suggested amounts are multiples of a quarter of a Gi."""


def near_miss(want: Want, layout: Layout) -> Profile | None:
    """The smaller profile that a want for memory only just misses, with fewer memory slices than the one it gets.

    None when there is none. A profile with enough memory but other attributes or compute is not meant here.
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
    """A round quantity that the profile has: `9.5Gi`."""
    mib = profile.memory_mib // _STEP_MIB * _STEP_MIB or profile.memory_mib
    return format_memory(mib << 20)


def near_miss_notes(want: Want, given: Profile, gpu: Gpu) -> tuple[str, ...]:
    """`10Gi takes 2 memory slices of GPU 1 (1g.20gb), 9.75Gi would take 1 (1g.10gb)`, or nothing."""
    if want.memory_bytes is None:
        return ()
    missed = near_miss(want, gpu.layout)
    if missed is None:
        return ()
    asked = want.text or format_memory(want.memory_bytes)
    words = (
        f"{asked} takes {given.memory_slices} memory slices of GPU {gpu.index} ({given.name}), "
        f"{round_amount(missed)} would take {missed.memory_slices} ({missed.name})"
    )
    return (words,)

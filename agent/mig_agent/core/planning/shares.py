"""Shares of GPUs without MIG mode in planning: their profiles, and an account of MiB in place of slices.

A GPU is whole or shared, never both: its whole device is idle while it is shared, and no share is there while the
whole device is not idle. That is derived from the devices that exist, so no state of its own can contradict them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache

from mig_agent.core.model import (
    SHARE,
    SHARE_PROFILE_ID,
    Gpu,
    Instance,
    InstanceState,
    Isolation,
    Layout,
    Placement,
    Profile,
    Want,
)
from mig_agent.core.planning.placement import Window

WHOLE_GPU_COST = 8.0
"""The cost of the first share of a GPU, in slices: whole GPUs stay whole while a shared one has enough memory."""
_PLACEMENT = Placement(0, 1)
"""The one slice of a GPU without MIG mode: a share is in the way of the whole device, but not of other shares."""


@lru_cache(maxsize=4096)
def share_profile(limit_mib: int, compute_percent: int | None = None) -> Profile:
    """Return the profile of a share with this memory limit, and at most this part of the multiprocessors."""
    return Profile(
        id=SHARE_PROFILE_ID,
        name=f"share.{limit_mib}m",
        compute_slices=1,
        memory_slices=1,
        memory_mib=limit_mib,
        placements=(_PLACEMENT,),
        kind=SHARE,
        compute_percent=compute_percent,
    )


@lru_cache(maxsize=4096)
def share_window(profile: Profile) -> Window:
    """Return the window of a share, the same for all shares of a GPU."""
    return Window(profile, _PLACEMENT, _PLACEMENT.mask, 0)


def share_for(want: Want, layout: Layout) -> Profile | None:
    """Return the share that serves a want on GPUs of this layout; None if it takes MIG, a whole GPU or more memory."""
    terms = layout.shares
    if terms is None or want.isolation is Isolation.MIG or want.attributes or want.min_compute_slices > 1:
        return None
    if terms.way(has_process=want.has_process, limits_compute=want.compute_percent is not None) is None:
        return None
    limit = None
    if want.memory_bytes is not None:
        limit = terms.limit_of_memory(want.memory_bytes)
    elif want.fraction is not None:
        limit = terms.limit_of_fraction(want.fraction)
    return None if limit is None else share_profile(limit, want.compute_percent)


def without_shares(wants: Iterable[Want]) -> tuple[Want, ...]:
    """Return the wants of a request for several devices, none of which a share may serve.

    One process cannot use the MPS daemons of two shares.
    """
    return tuple(each if each.isolation is Isolation.MIG else replace(each, isolation=Isolation.MIG) for each in wants)


def shared_mib(gpu: Gpu) -> int:
    """Return how much of the usable memory the shares of a GPU take, with what others use of it, in MiB."""
    terms = gpu.layout.shares
    if terms is None:
        return 0
    return terms.others_mib + sum(terms.taken(each.slot.profile.memory_mib) for each in shares_of(gpu.instances))


def shares_of(instances: Iterable[Instance]) -> tuple[Instance, ...]:
    """Return the shares among devices."""
    return tuple(each for each in instances if each.kind.shares_memory)


def most_shares(layout: Layout, taken_mib: int, limit_mib: int) -> int:
    """Return how many shares with a limit fit beside `taken_mib` of the usable memory."""
    terms = layout.shares
    return 0 if terms is None else max(0, terms.usable_mib - taken_mib) // terms.taken(limit_mib)


def largest_share(gpu: Gpu) -> Profile | None:
    """Return the largest share that fits on a GPU now; None if there is none."""
    terms = gpu.layout.shares
    if terms is None or any(
        not each.kind.shares_memory and each.state is not InstanceState.IDLE for each in gpu.instances
    ):
        return None
    limit = terms.usable_mib - shared_mib(gpu) - terms.overhead_mib
    return share_profile(limit) if limit >= terms.least_mib else None


def share_cost(layout: Layout, taken_mib: int, limit_mib: int) -> float:
    """Return the cost of a share beside `taken_mib`: lower on a GPU that is fuller, and on one that is shared."""
    terms = layout.shares
    if terms is None:
        raise AssertionError(f"{layout.model} offers no shares")
    left = terms.usable_mib - taken_mib - terms.taken(limit_mib)
    return left / terms.usable_mib + (0.0 if taken_mib else WHOLE_GPU_COST)


def devices_in_the_way(gpu: Gpu, profile: Profile) -> tuple[Instance, ...]:
    """Return the fewest devices that would have to end on a GPU before a share fits."""
    terms = gpu.layout.shares
    if terms is None:
        raise AssertionError(f"{gpu.layout.model} offers no shares")
    if whole := _whole_in_use(gpu):
        return whole
    missing = shared_mib(gpu) + terms.taken(profile.memory_mib) - terms.usable_mib
    found: list[Instance] = []
    for each in sorted(shares_of(gpu.instances), key=lambda each: (-each.slot.profile.memory_mib, each.generation)):
        if missing <= 0:
            break
        found.append(each)
        missing -= terms.taken(each.slot.profile.memory_mib)
    return tuple(found)


def _whole_in_use(gpu: Gpu) -> tuple[Instance, ...]:
    """Return the device that is the whole GPU unless it is idle."""
    return tuple(each for each in gpu.instances if each.kind.takes_whole_gpu and each.state is not InstanceState.IDLE)

"""The driver's choice of a placement and an id for an instance. Pure functions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from mig_agent.simulator.models import ComputeProfile, GpuModel, GpuProfile, Window

# First GPU-instance id by the share of the memory slices that the instance has: the driver's swizz ids
# (open-gpu-kernel-modules, kmigmgrMemSizeFlagToSwizzIdRange_GA100). Full 0, half 1-2, quarter 3-6, eighth 7-14.
_FIRST_ID = {1: 0, 2: 1, 4: 3, 8: 7}


def occupied(windows: Iterable[Window]) -> int:
    """Return the bit mask of all windows."""
    mask = 0
    for window in windows:
        mask |= window.mask
    return mask


def engines_left(model: GpuModel, held: Sequence[GpuProfile]) -> tuple[int, ...]:
    """Return the GPU's engine totals less what the held profiles take."""
    left = list(model.engine_totals)
    for profile in held:
        left = [have - take for have, take in zip(left, profile.engines, strict=True)]
    return tuple(left)


def has_engines(profile: GpuProfile, left: Sequence[int]) -> bool:
    """Return True if the remaining engines suffice for one more instance of this profile."""
    return all(take <= have for take, have in zip(profile.engines, left, strict=True))


def free_windows(profile: GpuProfile, mask: int, left: Sequence[int]) -> tuple[Window, ...]:
    """Return the placements at which an instance of this profile could be created now."""
    if not has_engines(profile, left):
        return ()
    return tuple(window for window in profile.windows if not window.mask & mask)


def choose(model: GpuModel, profile: GpuProfile, mask: int, held: Sequence[GpuProfile]) -> Window | None:
    """Return the driver's own choice: what leaves the most placements of all profiles; the lowest start on a tie.

    This one rule gives every layout of the MIG User Guide and every capture, also those where it leads into a dead end
    (1g, 1g, 2g and then no space for a 3g).
    """
    left = engines_left(model, held)
    after_left = engines_left(model, (*held, profile))

    def remaining(window: Window) -> int:
        after = mask | window.mask
        return sum(len(free_windows(other, after, after_left)) for other in model.profiles)

    return max(free_windows(profile, mask, left), key=lambda window: (remaining(window), -window.start), default=None)


def choose_compute(profiles: Sequence[ComputeProfile], profile: ComputeProfile, mask: int) -> Window | None:
    """Return the driver's choice inside a GPU instance, by the same rule as `choose`."""

    def remaining(window: Window) -> int:
        after = mask | window.mask
        return sum(not other.mask & after for each in profiles for other in each.windows)

    free = (window for window in profile.windows if not window.mask & mask)
    return max(free, key=lambda window: (remaining(window), -window.start), default=None)


def gpu_instance_id(model: GpuModel, window: Window, *, halves_swapped: bool = False) -> int:
    """Return the id that the driver gives an instance at this window.

    Captures show two maps: ids rising with the start, and ids rising from the middle of the GPU. Code must not derive
    one from the other, so a simulated GPU can be told to use either.
    """
    start = window.start
    if halves_swapped and window.size < model.memory_slices:
        start = (start + model.memory_slices // 2) % model.memory_slices
    return _FIRST_ID[model.memory_slices // window.size] + start // window.size

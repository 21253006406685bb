"""What the driver does to a machine's state, and with which code it refuses. No files and no pointers here."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from enum import IntEnum

from mig_agent.simulator import faults, placing
from mig_agent.simulator.codes import Code, Failure
from mig_agent.simulator.models import ComputeProfile, GpuProfile, Window
from mig_agent.simulator.state import (
    ComputeInstance,
    FaultKind,
    Ghost,
    Gpu,
    GpuInstance,
    Machine,
    mig_uuid,
    model_of,
    profile_of,
    window_of,
)

REV1_COMPUTE_PROFILE = 7


class ComputeMode(IntEnum):
    """Compute modes, which limit how many processes use a GPU, as nvml.h numbers them; 1 was EXCLUSIVE_THREAD."""

    DEFAULT = 0
    PROHIBITED = 2
    EXCLUSIVE_PROCESS = 3


def require_mig(gpu: Gpu) -> None:
    """Raise Failure (NOT_SUPPORTED) unless MIG mode is on."""
    if not gpu["mig_current"]:
        raise Failure(Code.NOT_SUPPORTED)


def gpu_profile(gpu: Gpu, profile_id: int) -> GpuProfile:
    """Return the profile with this id (not enum). Raises Failure (INVALID_ARGUMENT) if there is none."""
    profile = model_of(gpu).by_id.get(profile_id)
    if profile is None:
        raise Failure(Code.INVALID_ARGUMENT)
    return profile


def compute_profile(gpu: Gpu, instance: GpuInstance, profile_id: int) -> ComputeProfile:
    """Return the compute-instance profile with this id (which is its enum) inside an instance. Raises Failure."""
    for profile in profile_of(gpu, instance).compute_profiles:
        if profile.id == profile_id:
            return profile
    known = 0 <= profile_id <= 8  # noqa: PLR2004 -- NVML_COMPUTE_INSTANCE_PROFILE_7_SLICE_NVL, the last
    raise Failure(Code.NOT_SUPPORTED if known else Code.INVALID_ARGUMENT)


def free_windows(gpu: Gpu, profile: GpuProfile) -> tuple[Window, ...]:
    """Return where an instance of this profile could be created now."""
    held = [profile_of(gpu, each) for each in gpu["instances"]]
    mask = placing.occupied(map(window_of, gpu["instances"]))
    return placing.free_windows(profile, mask, placing.engines_left(model_of(gpu), held))


def remaining_capacity(gpu: Gpu, profile: GpuProfile) -> int:
    """Return how many more instances of this profile fit, by the driver's own choice one after the other."""
    model = model_of(gpu)
    held = [profile_of(gpu, each) for each in gpu["instances"]]
    mask = placing.occupied(map(window_of, gpu["instances"]))
    count = 0
    while (window := placing.choose(model, profile, mask, held)) is not None:
        mask |= window.mask
        held.append(profile)
        count += 1
    return count


def create_gpu_instance(machine: Machine, gpu: Gpu, profile_id: int, window: Window | None) -> GpuInstance:
    """Create a GPU instance at the window, or where the driver chooses. Raises Failure."""
    require_mig(gpu)
    profile = gpu_profile(gpu, profile_id)
    model = model_of(gpu)
    if window is None:
        held = [profile_of(gpu, each) for each in gpu["instances"]]
        window = placing.choose(model, profile, placing.occupied(map(window_of, gpu["instances"])), held)
    elif window not in profile.windows:
        raise Failure(Code.INVALID_ARGUMENT)
    elif window not in free_windows(gpu, profile):
        window = None
    if window is None:
        raise Failure(Code.INSUFFICIENT_RESOURCES)
    instance = GpuInstance(
        serial=_next_serial(machine),
        id=placing.gpu_instance_id(model, window, halves_swapped=gpu["halves_swapped"]),
        profile=profile_id,
        start=window.start,
        size=window.size,
        compute=[],
        holders=[],
    )
    gpu["instances"].append(instance)
    gpu["changes"] += 1
    return instance


def destroy_gpu_instance(machine: Machine, gpu: Gpu, instance: GpuInstance) -> None:
    """Remove a GPU instance. Raises Failure (IN_USE) while compute instances or holders remain."""
    if instance["compute"] or instance["holders"]:
        raise Failure(Code.IN_USE)
    if _strikes(machine, gpu, "remnant"):
        return
    gpu["instances"].remove(instance)
    gpu["changes"] += 1


def create_compute_instance(
    machine: Machine, gpu: Gpu, instance: GpuInstance, profile_id: int, window: Window | None
) -> ComputeInstance:
    """Create a compute instance inside a GPU instance. Raises Failure."""
    profile = compute_profile(gpu, instance, profile_id)
    if profile_id == REV1_COMPUTE_PROFILE:
        raise Failure(Code.NOT_SUPPORTED)
    mask = placing.occupied(map(window_of, instance["compute"]))
    if window is None:
        window = placing.choose_compute(profile_of(gpu, instance).compute_profiles, profile, mask)
        if window is None:
            raise Failure(Code.INSUFFICIENT_RESOURCES)
    elif window not in profile.windows:
        raise Failure(Code.INVALID_ARGUMENT)
    elif window.mask & mask:
        raise Failure(Code.IN_USE)
    compute = ComputeInstance(
        serial=_next_serial(machine),
        id=_lowest_free(each["id"] for each in instance["compute"]),
        profile=profile_id,
        start=window.start,
        size=window.size,
        mig_index=_lowest_free(each["mig_index"] for other in gpu["instances"] for each in other["compute"]),
        processes=[],
        holders=[],
    )
    gpu["ghosts"] = [ghost for ghost in gpu["ghosts"] if ghost["mig_index"] != compute["mig_index"]]
    instance["compute"].append(compute)
    gpu["changes"] += 1
    return compute


def destroy_compute_instance(machine: Machine, gpu: Gpu, instance: GpuInstance, compute: ComputeInstance) -> None:
    """Remove a compute instance. Raises Failure (IN_USE) while a process or a holder has it open."""
    if compute["processes"] or compute["holders"]:
        raise Failure(Code.IN_USE)
    if _strikes(machine, gpu, "stale"):
        uuid = mig_uuid(gpu, instance["id"], compute["id"])
        ghost = Ghost(
            mig_index=compute["mig_index"],
            uuid=uuid,
            gpu_instance=instance["id"],
            compute_instance=compute["id"],
            since=machine["revision"] + 1,
        )
        gpu["ghosts"].append(ghost)
    instance["compute"].remove(compute)
    gpu["changes"] += 1


def remaining_compute_capacity(gpu: Gpu, instance: GpuInstance, profile_id: int) -> int:
    """Return how many more compute instances of this profile fit."""
    profile = compute_profile(gpu, instance, profile_id)
    mask = placing.occupied(map(window_of, instance["compute"]))
    count = 0
    while (window := placing.choose_compute(profile_of(gpu, instance).compute_profiles, profile, mask)) is not None:
        mask |= window.mask
        count += 1
    return count


def set_mig_mode(gpu: Gpu, *, on: bool) -> Code:
    """Request MIG mode on or off; return the activation status, which is not an error of the call."""
    model = model_of(gpu)
    if not model.can_mig or (on and gpu.get("compute_mode")):
        raise Failure(Code.NOT_SUPPORTED)
    if gpu["mig_pending"] != on:
        gpu["mig_pending"] = on
        gpu["changes"] += 1
    if gpu["mig_current"] == on:
        return Code.SUCCESS
    if gpu["processes"] or gpu["instances"]:
        return Code.IN_USE
    if model.mode_needs_reset:
        return Code.RESET_REQUIRED
    gpu["mig_current"] = on
    gpu["changes"] += 1
    return Code.SUCCESS


def set_compute_mode(gpu: Gpu, mode: int) -> None:
    """Set the compute mode. Raises Failure: in MIG mode only DEFAULT is taken."""
    if mode not in set(ComputeMode):
        raise Failure(Code.INVALID_ARGUMENT)
    if gpu["mig_current"] and mode != ComputeMode.DEFAULT:
        raise Failure(Code.NOT_SUPPORTED)
    gpu["compute_mode"] = mode


def reset_gpu(gpu: Gpu) -> None:
    """Apply the pending mode; remove instances and processes; bring back a lost GPU."""
    gpu["mig_current"] = gpu["mig_pending"]
    gpu["instances"], gpu["processes"], gpu["ghosts"] = [], [], []
    gpu["lost"] = False
    gpu["changes"] += 1


def reboot(machine: Machine, boot_id: str, *, keep_mig_mode: bool = False) -> None:
    """Reboot the machine: Ampere comes up in its pending mode, later GPUs without MIG mode.

    `keep_mig_mode` turns it on again where it was on, as a service at boot does.
    """
    machine["boot_id"] = boot_id
    machine["faults"] = []
    for gpu in machine["gpus"]:
        if not (model_of(gpu).mode_needs_reset or keep_mig_mode):
            gpu["mig_pending"] = False
        reset_gpu(gpu)
        gpu["compute_mode"] = ComputeMode.DEFAULT
        gpu["memory_limits"], gpu["guaranteed"] = [], {}


def _strikes(machine: Machine, gpu: Gpu, kind: FaultKind) -> bool:
    index = machine["gpus"].index(gpu)
    fitting = [each for each in machine["faults"] if each["kind"] == kind and each["gpu"] in {None, index}]
    return any(faults.is_due(machine, each) for each in fitting)


def _next_serial(machine: Machine) -> int:
    serial = machine["next_serial"]
    machine["next_serial"] += 1
    return serial


def _lowest_free(taken: Iterable[int]) -> int:
    used = set(taken)
    return next(number for number in itertools.count() if number not in used)

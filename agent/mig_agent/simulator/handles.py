"""The opaque handles that the library gives out: numbers that point to no memory."""

from __future__ import annotations

from enum import IntEnum

from mig_agent.simulator.codes import Code, Failure
from mig_agent.simulator.state import ComputeInstance, Ghost, Gpu, GpuInstance, Machine, mig_uuid

_TAG = 0x4D49 << 48


class Kind(IntEnum):
    """The object that a handle refers to."""

    GPU = 1
    MIG = 2
    """An index on its GPU, so that it may refer to another MIG device later, as the driver's do."""
    GPU_INSTANCE = 3
    """A serial number: once destroyed, never valid again."""
    COMPUTE_INSTANCE = 4
    EVENT_SET = 5
    GPM_SAMPLE = 6


def encode(kind: Kind, gpu: int, value: int = 0) -> int:
    """Return a handle; never 0."""
    return _TAG | kind << 40 | gpu << 32 | value


def gpu_of(handle: int | None) -> int | None:
    """Return the GPU's index in a handle; None if it is no handle of a GPU or of something on one."""
    if not handle or handle >> 48 != _TAG >> 48 or handle >> 40 & 0xFF in {Kind.EVENT_SET, Kind.GPM_SAMPLE}:
        return None
    return handle >> 32 & 0xFF


def decode(handle: int | None, kind: Kind) -> tuple[int, int]:
    """Return GPU index and value of a handle. Raises Failure (INVALID_ARGUMENT) for any other kind."""
    if not handle or handle >> 48 != _TAG >> 48 or handle >> 40 & 0xFF != kind:
        raise Failure(Code.INVALID_ARGUMENT)
    return handle >> 32 & 0xFF, handle & 0xFFFFFFFF


def is_kind(handle: int | None, kind: Kind) -> bool:
    """Return True if `handle` is of this kind."""
    return bool(handle) and handle is not None and handle >> 48 == _TAG >> 48 and handle >> 40 & 0xFF == kind


def gpu(machine: Machine, handle: int | None) -> Gpu:
    """Return the GPU of a GPU's handle. Raises Failure (INVALID_ARGUMENT) for any other handle."""
    index, _ = decode(handle, Kind.GPU)
    if index >= len(machine["gpus"]):
        raise Failure(Code.INVALID_ARGUMENT)
    return machine["gpus"][index]


def gpu_instance(machine: Machine, handle: int | None) -> tuple[Gpu, GpuInstance]:
    """Return a GPU instance by its handle, after its GPU. Raises Failure (INVALID_ARGUMENT) if it is gone."""
    index, serial = decode(handle, Kind.GPU_INSTANCE)
    gpu = machine["gpus"][index]
    for instance in gpu["instances"]:
        if instance["serial"] == serial:
            return gpu, instance
    raise Failure(Code.INVALID_ARGUMENT)


def compute_instance(machine: Machine, handle: int | None) -> tuple[Gpu, GpuInstance, ComputeInstance]:
    """Return a compute instance by its handle, after its GPU and its GPU instance. Raises Failure if it is gone."""
    index, serial = decode(handle, Kind.COMPUTE_INSTANCE)
    gpu = machine["gpus"][index]
    for instance in gpu["instances"]:
        for compute in instance["compute"]:
            if compute["serial"] == serial:
                return gpu, instance, compute
    raise Failure(Code.INVALID_ARGUMENT)


def mig_device(machine: Machine, handle: int | None) -> tuple[Gpu, GpuInstance, ComputeInstance] | Ghost:
    """Return what is at a MIG handle's index now; a ghost if the driver still lists a deleted device there."""
    index, mig_index = decode(handle, Kind.MIG)
    gpu = machine["gpus"][index]
    for instance in gpu["instances"]:
        for compute in instance["compute"]:
            if compute["mig_index"] == mig_index:
                return gpu, instance, compute
    for ghost in gpu["ghosts"]:
        if ghost["mig_index"] == mig_index:
            return ghost
    raise Failure(Code.INVALID_ARGUMENT)


def by_uuid(machine: Machine) -> dict[str, int]:
    """Return the handles by UUID; of MIG devices also by their names from before R470, made of ids."""
    found = {}
    for index, gpu in enumerate(machine["gpus"]):
        found[gpu["uuid"]] = encode(Kind.GPU, index)
        for instance in gpu["instances"]:
            for compute in instance["compute"]:
                handle = encode(Kind.MIG, index, compute["mig_index"])
                found[mig_uuid(gpu, instance["id"], compute["id"])] = handle
                found[f"MIG-{gpu['uuid']}/{instance['id']}/{compute['id']}"] = handle
    return found


def live_mig_device(machine: Machine, handle: int | None) -> tuple[Gpu, GpuInstance, ComputeInstance]:
    """Return the MIG device of a handle. Raises Failure for a ghost, of which only the name is known."""
    found = mig_device(machine, handle)
    if isinstance(found, tuple):
        return found
    raise Failure(Code.INVALID_ARGUMENT)

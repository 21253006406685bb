"""The recorded tables, as pynvml reads them back, and the C structures they travel in."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import pynvml
import pytest

from mig_agent.simulator import MODELS, Simulator, structs
from support.simulated import put_under_pynvml

Simulate = Callable[..., Simulator]
WITH_MIG = [key for key, model in MODELS.items() if model.can_mig]


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (structs.PlacementStruct, pynvml.c_nvmlGpuInstancePlacement_t),
        (structs.PlacementStruct, pynvml.c_nvmlComputeInstancePlacement_t),
        (structs.ProfileInfo, pynvml.c_nvmlGpuInstanceProfileInfo_t),
        (structs.ProfileInfoV2, pynvml.c_nvmlGpuInstanceProfileInfo_v2_t),
        (structs.GpuInstanceInfo, pynvml.c_nvmlGpuInstanceInfo_t),
        (structs.ComputeProfileInfo, pynvml.c_nvmlComputeInstanceProfileInfo_t),
        (structs.ComputeProfileInfoV2, pynvml.c_nvmlComputeInstanceProfileInfo_v2_t),
        (structs.ComputeInstanceInfo, pynvml.c_nvmlComputeInstanceInfo_t),
        (structs.DeviceAttributes, pynvml.c_nvmlDeviceAttributes),
        (structs.Memory, pynvml.c_nvmlMemory_t),
        (structs.MemoryV2, pynvml.c_nvmlMemory_v2_t),
        (structs.PciInfo, pynvml.nvmlPciInfo_t),
        (structs.ProcessInfo, pynvml.c_nvmlProcessInfo_t),
        (structs.FieldValue, pynvml.c_nvmlFieldValue_t),
        (structs.EventData, pynvml.c_nvmlEventData_t),
        (structs.Utilization, pynvml.c_nvmlUtilization_t),
    ],
)
def test_structures_are_laid_out_as_pynvml_lays_them_out(
    ours: type[ctypes.Structure], theirs: type[ctypes.Structure]
) -> None:
    def layout(struct: type[ctypes.Structure]) -> list[tuple[int, int]]:
        return [(getattr(struct, field[0]).offset, getattr(struct, field[0]).size) for field in struct._fields_]

    assert ctypes.sizeof(ours) == ctypes.sizeof(theirs)
    assert layout(ours) == layout(theirs)


@pytest.mark.parametrize("key", WITH_MIG)
def test_every_profile_is_reported_by_enum_and_by_id(simulate: Simulate, key: str) -> None:
    simulate(key)
    gpu = pynvml.nvmlDeviceGetHandleByIndex(0)
    found = {}
    for enum in range(pynvml.NVML_GPU_INSTANCE_PROFILE_COUNT):
        try:
            info = pynvml.nvmlDeviceGetGpuInstanceProfileInfo(gpu, enum)
        except pynvml.NVMLError_NotSupported:
            continue
        old = pynvml.nvmlDeviceGetGpuInstanceProfileInfo(gpu, enum, version=1)
        by_id = pynvml.nvmlDeviceGetGpuInstanceProfileInfoById(gpu, info.id)
        assert (old.id, old.memorySizeMB) == (info.id, info.memorySizeMB) == (by_id.id, by_id.memorySizeMB)
        found[info.name.removeprefix("MIG ")] = info
    assert set(found) == {profile.name for profile in MODELS[key].profiles}
    with pytest.raises(pynvml.NVMLError_InvalidArgument):
        pynvml.nvmlDeviceGetGpuInstanceProfileInfo(gpu, pynvml.NVML_GPU_INSTANCE_PROFILE_COUNT)


def test_a_profiles_figures_are_those_of_nvidia_smi(simulate: Simulate) -> None:
    """The row `MIG 2g.20gb 14 3/3 19.62 No 32 2 0 / 2 2 0` of an H100 80GB HBM3."""
    simulate("h100-80gb")
    info = pynvml.nvmlDeviceGetGpuInstanceProfileInfo(pynvml.nvmlDeviceGetHandleByIndex(0), 1)
    assert info.name == "MIG 2g.20gb"
    assert (info.id, info.sliceCount, info.instanceCount, info.multiprocessorCount) == (14, 2, 3, 32)
    assert info.memorySizeMB == 20096
    assert (info.copyEngineCount, info.decoderCount, info.encoderCount) == (2, 2, 0)
    assert (info.jpegCount, info.ofaCount, info.isP2pSupported) == (2, 0, 0)


@pytest.mark.parametrize(
    ("key", "profile_id", "expected"),
    [
        ("a100-40gb", 19, [(start, 1) for start in range(7)]),
        ("a100-40gb", 15, [(0, 2), (2, 2), (4, 2), (6, 2)]),
        ("h100-80gb", 14, [(0, 2), (2, 2), (4, 2)]),
        ("h100-94gb", 9, [(0, 4), (4, 4)]),
        ("h200-141gb", 0, [(0, 8)]),
        ("a30", 14, [(0, 1), (1, 1), (2, 1), (3, 1)]),
        ("a30", 5, [(0, 2), (2, 2)]),
        ("rtx-pro-6000", 14, [(0, 3), (3, 3), (6, 3), (9, 3)]),
        ("rtx-pro-6000", 5, [(0, 6), (6, 6)]),
        ("rtx-pro-6000", 0, [(0, 12)]),
    ],
)
def test_placements(simulate: Simulate, key: str, profile_id: int, expected: list[tuple[int, int]]) -> None:
    simulate(key)
    gpu = pynvml.nvmlDeviceGetHandleByIndex(0)
    count = ctypes.c_uint()
    pynvml.nvmlDeviceGetGpuInstancePossiblePlacements(gpu, profile_id, None, ctypes.byref(count))
    room = (pynvml.c_nvmlGpuInstancePlacement_t * count.value)()
    pynvml.nvmlDeviceGetGpuInstancePossiblePlacements(gpu, profile_id, room, ctypes.byref(count))
    assert [(place.start, place.size) for place in room] == expected


def test_instance_count_of_an_a30_is_wrong(simulate: Simulate) -> None:
    simulate("a30")
    info = pynvml.nvmlDeviceGetGpuInstanceProfileInfo(pynvml.nvmlDeviceGetHandleByIndex(0), 0)
    assert info.instanceCount < 4


def test_a_structure_of_another_version_is_refused(simulate: Simulate) -> None:
    simulate("a100-40gb")
    gpu = pynvml.nvmlDeviceGetHandleByIndex(0)
    info = pynvml.c_nvmlGpuInstanceProfileInfo_v2_t()
    info.version = 0x03000098
    call = pynvml._nvmlGetFunctionPointer("nvmlDeviceGetGpuInstanceProfileInfoV")
    assert call(gpu, 0, ctypes.byref(info)) == pynvml.NVML_ERROR_INVALID_ARGUMENT
    with pytest.raises(pynvml.NVMLError_ArgumentVersionMismatch):
        pynvml.nvmlDeviceGetMemoryInfo(gpu, version=0x03000028)


def test_an_old_drivers_missing_function_is_not_found(simulate: Simulate) -> None:
    simulator = simulate("a100-40gb")
    put_under_pynvml(simulator, without=["nvmlDeviceGetGpuInstanceProfileInfoV"])
    gpu = pynvml.nvmlDeviceGetHandleByIndex(0)
    with pytest.raises(pynvml.NVMLError_FunctionNotFound):
        pynvml.nvmlDeviceGetGpuInstanceProfileInfo(gpu, 0)
    assert pynvml.nvmlDeviceGetGpuInstanceProfileInfo(gpu, 0, version=1).id == 19

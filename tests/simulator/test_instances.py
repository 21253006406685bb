"""Making, listing and removing instances, and every code that a mistake is answered with."""

from __future__ import annotations

import ctypes
import itertools
import uuid
from collections.abc import Callable

import pynvml
import pytest

from mig_agent.simulator import Simulator

Simulate = Callable[..., Simulator]


def create_at(gpu: object, profile_id: int, start: int, size: int) -> object:
    place = pynvml.c_nvmlGpuInstancePlacement_t(start, size)
    return pynvml.nvmlDeviceCreateGpuInstanceWithPlacement(gpu, profile_id, ctypes.byref(place))


def mig_devices(gpu: object) -> dict[int, object]:
    """MIG device handles by index."""
    found = {}
    for index in range(pynvml.nvmlDeviceGetMaxMigDeviceCount(gpu)):
        try:
            found[index] = pynvml.nvmlDeviceGetMigDeviceHandleByIndex(gpu, index)
        except pynvml.NVMLError_NotFound:
            continue
    return found


def listed(gpu: object, profile_id: int) -> list[int]:
    """Ids of the GPU instances of a profile."""
    room, count = (pynvml.c_nvmlGpuInstance_t * 16)(), ctypes.c_uint()
    pynvml.nvmlDeviceGetGpuInstances(gpu, profile_id, room, ctypes.byref(count))
    return [pynvml.nvmlGpuInstanceGetInfo(each).id for each in room[: count.value]]


def test_instance_is_created_at_the_requested_placement(simulate: Simulate) -> None:
    simulate("a100-40gb")
    gpu = pynvml.nvmlDeviceGetHandleByIndex(0)
    instance = create_at(gpu, 14, 2, 2)
    info = pynvml.nvmlGpuInstanceGetInfo(instance)
    assert (info.profileId, info.placement.start, info.placement.size, info.id) == (14, 2, 2, 4)
    assert pynvml.nvmlDeviceGetUUID(info.device) == pynvml.nvmlDeviceGetUUID(gpu)
    assert listed(gpu, 14) == [4]
    assert listed(gpu, 19) == []
    again = pynvml.nvmlDeviceGetGpuInstanceById(gpu, 4)
    assert pynvml.nvmlGpuInstanceGetInfo(again).placement.start == 2


@pytest.mark.parametrize(
    ("profile_id", "start", "size", "error"),
    [
        (14, 2, 2, pynvml.NVMLError_InsufficientResources),  # occupied: the same window
        (19, 3, 1, pynvml.NVMLError_InsufficientResources),  # occupied: inside it
        (0, 0, 8, pynvml.NVMLError_InsufficientResources),  # occupied: around it
        (14, 1, 2, pynvml.NVMLError_InvalidArgument),  # no 2g starts at an odd slice
        (19, 7, 1, pynvml.NVMLError_InvalidArgument),  # the eighth slice has no compute
        (9, 0, 3, pynvml.NVMLError_InvalidArgument),  # a 3g has four memory slices
        (99, 0, 1, pynvml.NVMLError_InvalidArgument),
    ],
)
def test_where_no_instance_can_be(
    simulate: Simulate, profile_id: int, start: int, size: int, error: type[Exception]
) -> None:
    simulator = simulate("a100-40gb")
    gpu = pynvml.nvmlDeviceGetHandleByIndex(0)
    create_at(gpu, 14, 2, 2)
    with pytest.raises(error):
        create_at(gpu, profile_id, start, size)
    assert len(simulator.machine()["gpus"][0]["instances"]) == 1
    assert simulator.calls("nvmlDeviceCreateGpuInstanceWithPlacement") == 2


def test_a_placement_passed_by_value_is_refused(simulate: Simulate) -> None:
    """Without argument types pynvml would hand it to a real driver, which then reads its bytes as an address."""
    simulate("a100-40gb")
    gpu = pynvml.nvmlDeviceGetHandleByIndex(0)
    with pytest.raises(ctypes.ArgumentError):
        pynvml.nvmlDeviceCreateGpuInstanceWithPlacement(gpu, 19, pynvml.c_nvmlGpuInstancePlacement_t(0, 1))


def test_a_mig_device_appears_with_its_compute_instance(simulate: Simulate) -> None:
    simulate("a100-40gb")
    gpu = pynvml.nvmlDeviceGetHandleByIndex(0)
    instance = create_at(gpu, 14, 0, 2)
    assert mig_devices(gpu) == {}
    compute = pynvml.nvmlGpuInstanceCreateComputeInstance(instance, pynvml.NVML_COMPUTE_INSTANCE_PROFILE_2_SLICE)
    (device,) = mig_devices(gpu).values()
    assert pynvml.nvmlDeviceIsMigDeviceHandle(device).value == 1
    assert pynvml.nvmlDeviceGetGpuInstanceId(device) == pynvml.nvmlGpuInstanceGetInfo(instance).id
    assert pynvml.nvmlDeviceGetComputeInstanceId(device) == 0
    assert pynvml.nvmlDeviceGetName(device) == "NVIDIA A100-SXM4-40GB MIG 2g.10gb"
    assert pynvml.nvmlDeviceGetUUID(pynvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(device)).startswith("GPU-")
    attributes = pynvml.nvmlDeviceGetAttributes(device)
    assert (attributes.memorySizeMB, attributes.multiprocessorCount, attributes.gpuInstanceSliceCount) == (9856, 28, 2)
    assert pynvml.nvmlDeviceGetMemoryInfo(device).total == 9856 << 20
    # The device of a compute instance is its parent, not the MIG device.
    assert pynvml.nvmlDeviceGetUUID(pynvml.nvmlComputeInstanceGetInfo(compute).device).startswith("GPU-")
    with pytest.raises(pynvml.NVMLError_NotSupported):
        pynvml.nvmlDeviceGetAttributes(gpu)
    with pytest.raises(pynvml.NVMLError_NotSupported):
        pynvml.nvmlDeviceGetUtilizationRates(device)


def test_mig_uuids_are_of_version_5_and_come_again(simulate: Simulate) -> None:
    simulate("a100-40gb")
    gpu = pynvml.nvmlDeviceGetHandleByIndex(0)

    def make() -> str:
        instance = create_at(gpu, 19, 3, 1)
        compute = pynvml.nvmlGpuInstanceCreateComputeInstance(instance, 0)
        found = str(pynvml.nvmlDeviceGetUUID(mig_devices(gpu)[0]))
        ids = pynvml.nvmlGpuInstanceGetInfo(instance).id
        by_path = pynvml.nvmlDeviceGetHandleByUUID(f"MIG-{pynvml.nvmlDeviceGetUUID(gpu)}/{ids}/0")
        assert pynvml.nvmlDeviceGetUUID(by_path) == found
        assert pynvml.nvmlDeviceGetUUID(pynvml.nvmlDeviceGetHandleByUUID(found)) == found
        pynvml.nvmlComputeInstanceDestroy(compute)
        pynvml.nvmlGpuInstanceDestroy(instance)
        with pytest.raises(pynvml.NVMLError_NotFound):
            pynvml.nvmlDeviceGetHandleByUUID(found)
        return found

    first, second = make(), make()
    assert first == second
    assert uuid.UUID(first.removeprefix("MIG-")).version == 5


def test_mig_indices_have_gaps_and_a_handle_becomes_the_next_instance(simulate: Simulate) -> None:
    simulate("a100-40gb")
    gpu = pynvml.nvmlDeviceGetHandleByIndex(0)
    made = []
    for start in range(3):
        instance = create_at(gpu, 19, start, 1)
        made.append((instance, pynvml.nvmlGpuInstanceCreateComputeInstance(instance, 0)))
    handles = mig_devices(gpu)
    before = pynvml.nvmlDeviceGetUUID(handles[1])
    pynvml.nvmlComputeInstanceDestroy(made[1][1])
    pynvml.nvmlGpuInstanceDestroy(made[1][0])
    assert list(mig_devices(gpu)) == [0, 2]
    with pytest.raises(pynvml.NVMLError_InvalidArgument):
        pynvml.nvmlDeviceGetUUID(handles[1])
    pynvml.nvmlGpuInstanceCreateComputeInstance(create_at(gpu, 19, 5, 1), 0)
    assert pynvml.nvmlDeviceGetUUID(handles[1]) != before
    with pytest.raises(pynvml.NVMLError_InvalidArgument):
        pynvml.nvmlDeviceGetMigDeviceHandleByIndex(gpu, 7)


def test_an_instance_goes_only_from_the_inside_out(simulate: Simulate) -> None:
    simulate("a100-40gb")
    gpu = pynvml.nvmlDeviceGetHandleByIndex(0)
    instance = create_at(gpu, 9, 4, 4)
    compute = pynvml.nvmlGpuInstanceCreateComputeInstance(instance, 2)
    with pytest.raises(pynvml.NVMLError_InUse):
        pynvml.nvmlGpuInstanceDestroy(instance)
    pynvml.nvmlComputeInstanceDestroy(compute)
    pynvml.nvmlGpuInstanceDestroy(instance)
    for call, handle in ((pynvml.nvmlGpuInstanceGetInfo, instance), (pynvml.nvmlComputeInstanceGetInfo, compute)):
        with pytest.raises(pynvml.NVMLError_InvalidArgument):
            call(handle)
    with pytest.raises(pynvml.NVMLError_NotFound):
        pynvml.nvmlDeviceGetGpuInstanceById(gpu, 2)


def test_a_process_keeps_its_instance_in_use(simulate: Simulate) -> None:
    simulator = simulate("a100-40gb")
    gpu = pynvml.nvmlDeviceGetHandleByIndex(0)
    instance = create_at(gpu, 19, 0, 1)
    compute = pynvml.nvmlGpuInstanceCreateComputeInstance(instance, 0)
    pid = simulator.occupy("0/7", used_mib=512, name="python train.py")
    (device,) = mig_devices(gpu).values()
    (process,) = pynvml.nvmlDeviceGetComputeRunningProcesses(device)
    assert (process.pid, process.usedGpuMemory) == (pid, 512 << 20)
    (seen_from_gpu,) = pynvml.nvmlDeviceGetComputeRunningProcesses(gpu)
    assert (seen_from_gpu.gpuInstanceId, seen_from_gpu.computeInstanceId) == (7, 0)
    assert pynvml.nvmlDeviceGetMemoryInfo(device).used >= 512 << 20
    assert pynvml.nvmlSystemGetProcessName(pid) == "python train.py"
    with pytest.raises(pynvml.NVMLError_InUse):
        pynvml.nvmlComputeInstanceDestroy(compute)
    simulator.vacate(pid)
    assert pynvml.nvmlDeviceGetComputeRunningProcesses(device) == []
    pynvml.nvmlComputeInstanceDestroy(compute)


def test_more_processes_than_the_first_guess(simulate: Simulate) -> None:
    simulator = simulate("a100-40gb")
    simulator.create_foreign(0, "7g.40gb")
    pids = [simulator.occupy("0/0", used_mib=None) for _ in range(20)]
    found = pynvml.nvmlDeviceGetComputeRunningProcesses(mig_devices(pynvml.nvmlDeviceGetHandleByIndex(0))[0])
    assert [process.pid for process in found] == pids
    assert {process.usedGpuMemory for process in found} == {None}


def test_a_gpu_without_mig_mode_has_processes_of_its_own(simulate: Simulate) -> None:
    simulator = simulate("t4")
    pid = simulator.occupy("0", used_mib=100)
    (process,) = pynvml.nvmlDeviceGetComputeRunningProcesses(pynvml.nvmlDeviceGetHandleByIndex(0))
    assert (process.pid, process.gpuInstanceId) == (pid, 0xFFFFFFFF)


def test_compute_instances_share_a_gpu_instance(simulate: Simulate) -> None:
    simulate("a100-40gb")
    gpu = pynvml.nvmlDeviceGetHandleByIndex(0)
    instance = create_at(gpu, 9, 0, 4)
    made = [pynvml.nvmlGpuInstanceCreateComputeInstance(instance, 0) for _ in range(2)]
    devices = mig_devices(gpu)
    assert [pynvml.nvmlDeviceGetComputeInstanceId(device) for device in devices.values()] == [0, 1]
    assert [pynvml.nvmlDeviceGetAttributes(device).multiprocessorCount for device in devices.values()] == [14, 14]
    with pytest.raises(pynvml.NVMLError_InsufficientResources):
        pynvml.nvmlGpuInstanceCreateComputeInstance(instance, 2)
    taken = pynvml.nvmlComputeInstanceGetInfo(made[0]).placement
    with pytest.raises(pynvml.NVMLError_InUse):
        pynvml.nvmlGpuInstanceCreateComputeInstanceWithPlacement(instance, 0, ctypes.byref(taken))
    pynvml.nvmlComputeInstanceDestroy(made[0])
    assert pynvml.nvmlComputeInstanceGetInfo(pynvml.nvmlGpuInstanceCreateComputeInstance(instance, 0)).id == 0


def test_the_second_profile_of_one_slice_cannot_be_created(simulate: Simulate) -> None:
    """The last profile with as many slices as the instance is the wrong one."""
    simulate("h100-80gb")
    instance = create_at(pynvml.nvmlDeviceGetHandleByIndex(0), 19, 0, 1)
    info = pynvml.nvmlGpuInstanceGetComputeInstanceProfileInfo(instance, 7, 0)
    assert (info.sliceCount, info.id) == (1, 7)
    with pytest.raises(pynvml.NVMLError_NotSupported):
        pynvml.nvmlGpuInstanceCreateComputeInstance(instance, 7)
    for enum, error in ((4, pynvml.NVMLError_NotSupported), (9, pynvml.NVMLError_InvalidArgument)):
        with pytest.raises(error):
            pynvml.nvmlGpuInstanceGetComputeInstanceProfileInfo(instance, enum, 0)


def test_names_of_compute_profiles(simulate: Simulate) -> None:
    simulate("a100-40gb")
    instance = create_at(pynvml.nvmlDeviceGetHandleByIndex(0), 14, 0, 2)
    names = [pynvml.nvmlGpuInstanceGetComputeInstanceProfileInfo(instance, enum, 0).name for enum in (0, 1)]
    assert names == ["MIG 1c.2g.10gb", "MIG 2g.10gb"]


def test_listing_needs_a_buffer(simulate: Simulate) -> None:
    simulate("a100-40gb")
    with pytest.raises(pynvml.NVMLError_InvalidArgument):
        pynvml.nvmlDeviceGetGpuInstances(pynvml.nvmlDeviceGetHandleByIndex(0), 19, None, ctypes.byref(ctypes.c_uint()))


def test_before_initialisation_nothing_answers(simulate: Simulate) -> None:
    simulate("a100-40gb")
    pynvml.nvmlShutdown()
    with pytest.raises(pynvml.NVMLError_Uninitialized):
        pynvml.nvmlDeviceGetCount()
    assert pynvml.nvmlErrorString(19) == "In Use"


def test_handles_of_another_kind_are_refused(simulate: Simulate) -> None:
    simulator = simulate("a100-40gb")
    simulator.create_foreign(0, "1g.5gb")
    gpu = pynvml.nvmlDeviceGetHandleByIndex(0)
    device = mig_devices(gpu)[0]
    instance = pynvml.nvmlDeviceGetGpuInstanceById(gpu, 13)
    wrong = itertools.product(
        (pynvml.nvmlDeviceGetMigMode, pynvml.nvmlDeviceGetMinorNumber, pynvml.nvmlDeviceGetMaxMigDeviceCount),
        (device, instance),
    )
    for call, handle in wrong:
        with pytest.raises(pynvml.NVMLError_InvalidArgument):
            call(handle)
    with pytest.raises(pynvml.NVMLError_InvalidArgument):
        pynvml.nvmlGpuInstanceGetInfo(gpu)
    with pytest.raises(pynvml.NVMLError_NotSupported):
        pynvml.nvmlDeviceGetGpuInstanceId(gpu)


def test_what_a_gpu_says_of_itself(simulate: Simulate) -> None:
    simulate("a100-40gb:1,h200-141gb:1")
    assert pynvml.nvmlDeviceGetCount() == 2
    gpu = pynvml.nvmlDeviceGetHandleByIndex(1)
    uuid = pynvml.nvmlDeviceGetUUID(gpu)
    assert pynvml.nvmlDeviceGetName(gpu) == "NVIDIA H200"
    assert pynvml.nvmlDeviceGetIndex(pynvml.nvmlDeviceGetHandleByUUID(uuid)) == 1
    assert pynvml.nvmlDeviceGetMinorNumber(gpu) == 1
    assert pynvml.nvmlDeviceGetCudaComputeCapability(gpu) == (9, 0)
    pci = pynvml.nvmlDeviceGetPciInfo(gpu)
    assert pci.pciDeviceId == 0x233510DE
    assert pynvml.nvmlDeviceGetIndex(pynvml.nvmlDeviceGetHandleByPciBusId(pci.busId)) == 1
    assert pynvml.nvmlDeviceGetMemoryInfo(gpu).total == 143771 << 20
    assert pynvml.nvmlDeviceGetMemoryInfo(gpu, version=pynvml.nvmlMemory_v2).reserved > 0
    assert pynvml.nvmlSystemGetDriverVersion() == "580.95.05"
    with pytest.raises(pynvml.NVMLError_InvalidArgument):
        pynvml.nvmlDeviceGetHandleByIndex(2)

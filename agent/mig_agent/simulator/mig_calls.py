"""The library's functions about MIG: mode, profiles, GPU instances, compute instances and MIG devices."""

from __future__ import annotations

import ctypes
from ctypes import c_uint, c_void_p

from mig_agent.simulator import handles, operations, structs
from mig_agent.simulator.codes import Code, Failure
from mig_agent.simulator.device_calls import queries_need_mig_mode
from mig_agent.simulator.handles import Kind
from mig_agent.simulator.library import Library, symbol
from mig_agent.simulator.models import ComputeProfile, GpuProfile, Window
from mig_agent.simulator.pointers import Address, at, write_handle, write_uint
from mig_agent.simulator.state import Gpu, GpuInstance, Machine, model_of, profile_of

_GPU_PROFILE_COUNT = 0x12
_COMPUTE_PROFILE_COUNT = 0x9
_ENGINE_PROFILE_COUNT = 0x1


@symbol("nvmlDeviceGetMigMode", c_void_p, c_void_p, c_void_p)
def mig_mode(library: Library, device: Address, current: Address, pending: Address) -> None:
    gpu = handles.gpu(library.read(), device)
    if not model_of(gpu).can_mig:
        raise Failure(Code.NOT_SUPPORTED)
    write_uint(current, gpu["mig_current"])
    write_uint(pending, gpu["mig_pending"])


@symbol("nvmlDeviceSetMigMode", c_void_p, c_uint, c_void_p)
def set_mig_mode(library: Library, device: Address, mode: int, status: Address) -> None:
    with library.change("nvmlDeviceSetMigMode") as machine:
        if mode not in {0, 1}:
            raise Failure(Code.INVALID_ARGUMENT)
        write_uint(status, operations.set_mig_mode(handles.gpu(machine, device), on=bool(mode)))


def _queryable(machine: Machine, device: Address) -> Gpu:
    gpu = handles.gpu(machine, device)
    if not model_of(gpu).can_mig or (queries_need_mig_mode(machine) and not gpu["mig_current"]):
        raise Failure(Code.NOT_SUPPORTED)
    return gpu


def _profile_by_enum(library: Library, device: Address, enum: int) -> GpuProfile:
    if enum >= _GPU_PROFILE_COUNT:
        raise Failure(Code.INVALID_ARGUMENT)
    profile = model_of(_queryable(library.read(), device)).by_enum.get(enum)
    if profile is None:
        raise Failure(Code.NOT_SUPPORTED)
    return profile


def _fill_profile(info: structs.ProfileInfo | structs.ProfileInfoV2, profile: GpuProfile) -> None:
    info.id = profile.id
    info.isP2pSupported = 0
    info.sliceCount = profile.slices
    info.instanceCount = profile.instance_count
    info.multiprocessorCount = profile.multiprocessors
    info.copyEngineCount = profile.copy_engines
    info.decoderCount = profile.decoders
    info.encoderCount = profile.encoders
    info.jpegCount = profile.jpeg
    info.ofaCount = profile.ofa
    info.memorySizeMB = profile.memory_mib
    if isinstance(info, structs.ProfileInfoV2):
        info.name = f"MIG {profile.name}".encode()


def _versioned_profile(out: Address) -> structs.ProfileInfoV2:
    info = at(structs.ProfileInfoV2, out)
    if info.version != structs.PROFILE_INFO_V2:
        raise Failure(Code.INVALID_ARGUMENT)
    return info


@symbol("nvmlDeviceGetGpuInstanceProfileInfo", c_void_p, c_uint, c_void_p)
def profile_info(library: Library, device: Address, enum: int, out: Address) -> None:
    _fill_profile(at(structs.ProfileInfo, out), _profile_by_enum(library, device, enum))


@symbol("nvmlDeviceGetGpuInstanceProfileInfoV", c_void_p, c_uint, c_void_p)
def profile_info_v(library: Library, device: Address, enum: int, out: Address) -> None:
    info = _versioned_profile(out)
    _fill_profile(info, _profile_by_enum(library, device, enum))


@symbol("nvmlDeviceGetGpuInstanceProfileInfoByIdV", c_void_p, c_uint, c_void_p)
def profile_info_by_id(library: Library, device: Address, profile_id: int, out: Address) -> None:
    info = _versioned_profile(out)
    _fill_profile(info, operations.gpu_profile(_queryable(library.read(), device), profile_id))


def _fill_windows(windows: tuple[Window, ...], out: Address, number: Address) -> None:
    # As in the driver: the size of the buffer is not asked, so a short buffer is overrun.
    write_uint(number, len(windows))
    if out:
        for place, window in zip((structs.PlacementStruct * len(windows)).from_address(out), windows, strict=True):
            place.start, place.size = window.start, window.size


@symbol("nvmlDeviceGetGpuInstancePossiblePlacements_v2", c_void_p, c_uint, c_void_p, c_void_p)
def possible_placements(library: Library, device: Address, profile_id: int, out: Address, number: Address) -> None:
    profile = operations.gpu_profile(_queryable(library.read(), device), profile_id)
    _fill_windows(profile.windows, out, number)


@symbol("nvmlDeviceGetGpuInstanceRemainingCapacity", c_void_p, c_uint, c_void_p)
def remaining_capacity(library: Library, device: Address, profile_id: int, number: Address) -> None:
    gpu = handles.gpu(library.read(), device)
    operations.require_mig(gpu)
    write_uint(number, operations.remaining_capacity(gpu, operations.gpu_profile(gpu, profile_id)))


def _create(library: Library, function: str, device: Address, profile_id: int, place: Address, out: Address) -> None:
    if not out or (place is None and function.endswith("WithPlacement")):
        raise Failure(Code.INVALID_ARGUMENT)
    window = _window(place)
    with library.change(function, seconds=library.read()["create_seconds"]) as machine:
        gpu = handles.gpu(machine, device)
        instance = operations.create_gpu_instance(machine, gpu, profile_id, window)
        write_handle(out, handles.encode(Kind.GPU_INSTANCE, gpu["minor"], instance["serial"]))


def _window(place: Address) -> Window | None:
    if place is None:
        return None
    asked = at(structs.PlacementStruct, place)
    return Window(asked.start, asked.size)


@symbol("nvmlDeviceCreateGpuInstance", c_void_p, c_uint, c_void_p)
def create_gpu_instance(library: Library, device: Address, profile_id: int, out: Address) -> None:
    _create(library, "nvmlDeviceCreateGpuInstance", device, profile_id, None, out)


@symbol("nvmlDeviceCreateGpuInstanceWithPlacement", c_void_p, c_uint, c_void_p, c_void_p)
def create_with_placement(library: Library, device: Address, profile_id: int, place: Address, out: Address) -> None:
    _create(library, "nvmlDeviceCreateGpuInstanceWithPlacement", device, profile_id, place, out)


@symbol("nvmlGpuInstanceDestroy", c_void_p)
def destroy_gpu_instance(library: Library, gpu_instance: Address) -> None:
    with library.change("nvmlGpuInstanceDestroy", seconds=library.read()["destroy_seconds"]) as machine:
        gpu, instance = handles.gpu_instance(machine, gpu_instance)
        operations.destroy_gpu_instance(machine, gpu, instance)


@symbol("nvmlDeviceGetGpuInstances", c_void_p, c_uint, c_void_p, c_void_p)
def gpu_instances(library: Library, device: Address, profile_id: int, out: Address, number: Address) -> None:
    gpu = handles.gpu(library.read(), device)
    operations.require_mig(gpu)
    operations.gpu_profile(gpu, profile_id)
    serials = [each["serial"] for each in gpu["instances"] if each["profile"] == profile_id]
    _fill_handles([handles.encode(Kind.GPU_INSTANCE, gpu["minor"], serial) for serial in serials], out, number)


def _fill_handles(found: list[int], out: Address, number: Address) -> None:
    if not out:
        raise Failure(Code.INVALID_ARGUMENT)
    write_uint(number, len(found))
    for position, handle in enumerate(found):
        write_handle(out + position * ctypes.sizeof(c_void_p), handle)


@symbol("nvmlDeviceGetGpuInstanceById", c_void_p, c_uint, c_void_p)
def gpu_instance_by_id(library: Library, device: Address, id_: int, out: Address) -> None:
    gpu = handles.gpu(library.read(), device)
    operations.require_mig(gpu)
    for instance in gpu["instances"]:
        if instance["id"] == id_:
            write_handle(out, handles.encode(Kind.GPU_INSTANCE, gpu["minor"], instance["serial"]))
            return
    raise Failure(Code.NOT_FOUND)


@symbol("nvmlGpuInstanceGetInfo", c_void_p, c_void_p)
def gpu_instance_info(library: Library, gpu_instance: Address, out: Address) -> None:
    gpu, instance = handles.gpu_instance(library.read(), gpu_instance)
    info = at(structs.GpuInstanceInfo, out)
    info.device = handles.encode(Kind.GPU, gpu["minor"])
    info.id, info.profileId = instance["id"], instance["profile"]
    info.placement.start, info.placement.size = instance["start"], instance["size"]


def _compute_profile_by_enum(gpu: Gpu, instance: GpuInstance, enum: int, engine: int) -> ComputeProfile:
    if enum >= _COMPUTE_PROFILE_COUNT or engine >= _ENGINE_PROFILE_COUNT:
        raise Failure(Code.INVALID_ARGUMENT)
    return operations.compute_profile(gpu, instance, enum)


def _compute_multiprocessors(gpu: Gpu, instance: GpuInstance, slices: int) -> int:
    whole = profile_of(gpu, instance)
    if slices == whole.slices:
        return whole.multiprocessors
    return model_of(gpu).by_enum[0].multiprocessors * slices


def _fill_compute_profile(
    info: structs.ComputeProfileInfo | structs.ComputeProfileInfoV2,
    gpu: Gpu,
    instance: GpuInstance,
    profile: ComputeProfile,
) -> None:
    whole = profile_of(gpu, instance)
    info.id = profile.id
    info.sliceCount = profile.slices
    info.instanceCount = profile.instance_count
    info.multiprocessorCount = _compute_multiprocessors(gpu, instance, profile.slices)
    info.sharedCopyEngineCount = whole.copy_engines
    info.sharedDecoderCount = whole.decoders
    info.sharedEncoderCount = whole.encoders
    info.sharedJpegCount = whole.jpeg
    info.sharedOfaCount = whole.ofa
    if isinstance(info, structs.ComputeProfileInfoV2):
        part = "" if profile.slices == whole.slices else f"{profile.slices}c."
        info.name = f"MIG {part}{whole.name}".encode()


@symbol("nvmlGpuInstanceGetComputeInstanceProfileInfo", c_void_p, c_uint, c_uint, c_void_p)
def compute_profile_info(library: Library, gpu_instance: Address, enum: int, engine: int, out: Address) -> None:
    gpu, instance = handles.gpu_instance(library.read(), gpu_instance)
    info = at(structs.ComputeProfileInfo, out)
    _fill_compute_profile(info, gpu, instance, _compute_profile_by_enum(gpu, instance, enum, engine))


@symbol("nvmlGpuInstanceGetComputeInstanceProfileInfoV", c_void_p, c_uint, c_uint, c_void_p)
def compute_profile_info_v(library: Library, gpu_instance: Address, enum: int, engine: int, out: Address) -> None:
    gpu, instance = handles.gpu_instance(library.read(), gpu_instance)
    info = at(structs.ComputeProfileInfoV2, out)
    if info.version != structs.COMPUTE_PROFILE_INFO_V2:
        raise Failure(Code.INVALID_ARGUMENT)
    _fill_compute_profile(info, gpu, instance, _compute_profile_by_enum(gpu, instance, enum, engine))


@symbol("nvmlGpuInstanceGetComputeInstanceRemainingCapacity", c_void_p, c_uint, c_void_p)
def compute_remaining_capacity(library: Library, gpu_instance: Address, profile_id: int, number: Address) -> None:
    gpu, instance = handles.gpu_instance(library.read(), gpu_instance)
    write_uint(number, operations.remaining_compute_capacity(gpu, instance, profile_id))


@symbol("nvmlGpuInstanceGetComputeInstancePossiblePlacements", c_void_p, c_uint, c_void_p, c_void_p)
def compute_placements(library: Library, gpu_instance: Address, profile_id: int, out: Address, number: Address) -> None:
    gpu, instance = handles.gpu_instance(library.read(), gpu_instance)
    _fill_windows(operations.compute_profile(gpu, instance, profile_id).windows, out, number)


def _create_compute(
    library: Library, function: str, gpu_instance: Address, profile_id: int, place: Address, out: Address
) -> None:
    if not out or (place is None and function.endswith("WithPlacement")):
        raise Failure(Code.INVALID_ARGUMENT)
    window = _window(place)
    with library.change(function) as machine:
        gpu, instance = handles.gpu_instance(machine, gpu_instance)
        compute = operations.create_compute_instance(machine, gpu, instance, profile_id, window)
        write_handle(out, handles.encode(Kind.COMPUTE_INSTANCE, gpu["minor"], compute["serial"]))


@symbol("nvmlGpuInstanceCreateComputeInstance", c_void_p, c_uint, c_void_p)
def create_compute_instance(library: Library, gpu_instance: Address, profile_id: int, out: Address) -> None:
    _create_compute(library, "nvmlGpuInstanceCreateComputeInstance", gpu_instance, profile_id, None, out)


@symbol("nvmlGpuInstanceCreateComputeInstanceWithPlacement", c_void_p, c_uint, c_void_p, c_void_p)
def create_compute_with_placement(
    library: Library, gpu_instance: Address, profile_id: int, place: Address, out: Address
) -> None:
    function = "nvmlGpuInstanceCreateComputeInstanceWithPlacement"
    _create_compute(library, function, gpu_instance, profile_id, place, out)


@symbol("nvmlComputeInstanceDestroy", c_void_p)
def destroy_compute_instance(library: Library, compute_instance: Address) -> None:
    with library.change("nvmlComputeInstanceDestroy") as machine:
        operations.destroy_compute_instance(machine, *handles.compute_instance(machine, compute_instance))


@symbol("nvmlGpuInstanceGetComputeInstances", c_void_p, c_uint, c_void_p, c_void_p)
def compute_instances(library: Library, gpu_instance: Address, profile_id: int, out: Address, number: Address) -> None:
    gpu, instance = handles.gpu_instance(library.read(), gpu_instance)
    operations.compute_profile(gpu, instance, profile_id)
    serials = [each["serial"] for each in instance["compute"] if each["profile"] == profile_id]
    _fill_handles([handles.encode(Kind.COMPUTE_INSTANCE, gpu["minor"], serial) for serial in serials], out, number)


@symbol("nvmlGpuInstanceGetComputeInstanceById", c_void_p, c_uint, c_void_p)
def compute_instance_by_id(library: Library, gpu_instance: Address, id_: int, out: Address) -> None:
    gpu, instance = handles.gpu_instance(library.read(), gpu_instance)
    for compute in instance["compute"]:
        if compute["id"] == id_:
            write_handle(out, handles.encode(Kind.COMPUTE_INSTANCE, gpu["minor"], compute["serial"]))
            return
    raise Failure(Code.NOT_FOUND)


@symbol("nvmlComputeInstanceGetInfo_v2", c_void_p, c_void_p)
def compute_instance_info(library: Library, compute_instance: Address, out: Address) -> None:
    gpu, instance, compute = handles.compute_instance(library.read(), compute_instance)
    info = at(structs.ComputeInstanceInfo, out)
    info.device = handles.encode(Kind.GPU, gpu["minor"])  # the parent's, as the header says: not the MIG device's
    info.gpuInstance = handles.encode(Kind.GPU_INSTANCE, gpu["minor"], instance["serial"])
    info.id, info.profileId = compute["id"], compute["profile"]
    info.placement.start, info.placement.size = compute["start"], compute["size"]


@symbol("nvmlDeviceIsMigDeviceHandle", c_void_p, c_void_p)
def is_mig_device_handle(library: Library, device: Address, answer: Address) -> None:
    library.read()
    write_uint(answer, handles.is_kind(device, Kind.MIG))


@symbol("nvmlDeviceGetMaxMigDeviceCount", c_void_p, c_void_p)
def max_mig_device_count(library: Library, device: Address, number: Address) -> None:
    gpu = handles.gpu(library.read(), device)
    write_uint(number, model_of(gpu).slices if gpu["mig_current"] else 0)


@symbol("nvmlDeviceGetMigDeviceHandleByIndex", c_void_p, c_uint, c_void_p)
def mig_device_by_index(library: Library, device: Address, index: int, out: Address) -> None:
    gpu = handles.gpu(library.read(), device)
    operations.require_mig(gpu)
    if index >= model_of(gpu).slices:
        raise Failure(Code.INVALID_ARGUMENT)
    listed = {compute["mig_index"] for instance in gpu["instances"] for compute in instance["compute"]}
    listed |= {ghost["mig_index"] for ghost in gpu["ghosts"] if ghost["since"] > library.initialised_at}
    if index not in listed:
        raise Failure(Code.NOT_FOUND)
    write_handle(out, handles.encode(Kind.MIG, gpu["minor"], index))


@symbol("nvmlDeviceGetDeviceHandleFromMigDeviceHandle", c_void_p, c_void_p)
def parent_of_mig_device(library: Library, device: Address, out: Address) -> None:
    handles.mig_device(library.read(), device)
    gpu, _ = handles.decode(device, Kind.MIG)
    write_handle(out, handles.encode(Kind.GPU, gpu))


def _mig_ids(library: Library, device: Address) -> tuple[int, int]:
    if handles.is_kind(device, Kind.GPU):
        raise Failure(Code.NOT_SUPPORTED)
    found = handles.mig_device(library.read(), device)
    if isinstance(found, tuple):
        return found[1]["id"], found[2]["id"]
    return found["gpu_instance"], found["compute_instance"]


@symbol("nvmlDeviceGetGpuInstanceId", c_void_p, c_void_p)
def gpu_instance_id(library: Library, device: Address, out: Address) -> None:
    write_uint(out, _mig_ids(library, device)[0])


@symbol("nvmlDeviceGetComputeInstanceId", c_void_p, c_void_p)
def compute_instance_id(library: Library, device: Address, out: Address) -> None:
    write_uint(out, _mig_ids(library, device)[1])


@symbol("nvmlDeviceGetAttributes_v2", c_void_p, c_void_p)
def attributes(library: Library, device: Address, out: Address) -> None:
    if handles.is_kind(device, Kind.GPU):
        raise Failure(Code.NOT_SUPPORTED)
    gpu, instance, compute = handles.live_mig_device(library.read(), device)
    whole = profile_of(gpu, instance)
    info = at(structs.DeviceAttributes, out)
    info.multiprocessorCount = _compute_multiprocessors(gpu, instance, compute["size"])
    info.sharedCopyEngineCount = whole.copy_engines
    info.sharedDecoderCount = whole.decoders
    info.sharedEncoderCount = whole.encoders
    info.sharedJpegCount = whole.jpeg
    info.sharedOfaCount = whole.ofa
    info.gpuInstanceSliceCount = whole.slices
    info.computeInstanceSliceCount = compute["size"]
    info.memorySizeMB = whole.memory_mib

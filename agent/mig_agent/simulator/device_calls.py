"""The library's functions about itself and about whole GPUs (and those that take either kind of device handle)."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import c_char_p, c_int, c_uint, c_void_p
from types import MappingProxyType

from mig_agent.simulator import faults, handles, memory, operations, structs
from mig_agent.simulator.codes import Code, Failure
from mig_agent.simulator.handles import Kind
from mig_agent.simulator.library import Library, symbol
from mig_agent.simulator.pointers import Address, at, write_handle, write_text, write_uint
from mig_agent.simulator.state import Gpu, Machine, Process, driver_branch, mig_uuid, model_of, profile_of

_MIB = 1 << 20
_IDLE_MIG_MIB = 12
"""Memory used on a MIG device on which nothing runs; nvidia-smi shows 12 or 13 MiB."""
_FIRST_WITH_MODE_INDEPENDENT_QUERIES = 550
_FIELD_RESETLESS_MIG = 184
_FIELD_MODE_INDEPENDENT_QUERIES = 199
_VALUE_UNSIGNED_INT = 1

_ERRORS = MappingProxyType(
    {code.value: ctypes.create_string_buffer(code.name.replace("_", " ").title().encode()) for code in Code}
)


def queries_need_mig_mode(machine: Machine) -> bool:
    """Return True for drivers before 550 (such as 535), which list profiles only while MIG mode is on."""
    return driver_branch(machine) < _FIRST_WITH_MODE_INDEPENDENT_QUERIES


@symbol("nvmlInitWithFlags", c_uint, before_init=True)
def init_with_flags(library: Library, _flags: int) -> None:
    library.init()


@symbol("nvmlInit_v2", before_init=True)
def init(library: Library) -> None:
    library.init()


@symbol("nvmlShutdown")
def shutdown(library: Library) -> None:
    library.shutdown()


@symbol("nvmlErrorString", c_int, answer=c_void_p, before_init=True)
def error_string(_library: Library, code: int) -> int:
    return ctypes.addressof(_ERRORS.get(code, _ERRORS[Code.UNKNOWN]))


@symbol("nvmlSystemGetDriverVersion", c_void_p, c_uint)
def driver_version(library: Library, text: Address, length: int) -> None:
    write_text(text, length, library.read()["driver_version"])


@symbol("nvmlSystemGetNVMLVersion", c_void_p, c_uint)
def nvml_version(library: Library, text: Address, length: int) -> None:
    write_text(text, length, f"13.{library.read()['driver_version']}")


@symbol("nvmlSystemGetCudaDriverVersion_v2", c_void_p)
def cuda_driver_version(_library: Library, version: Address) -> None:
    write_uint(version, 13000)


@symbol("nvmlSystemGetProcessName", c_uint, c_void_p, c_uint)
def process_name(library: Library, pid: int, text: Address, length: int) -> None:
    for processes in faults.process_lists(library.read()):
        for process in processes:
            if process["pid"] == pid:
                write_text(text, length, process["name"])
                return
    raise Failure(Code.NOT_FOUND)


@symbol("nvmlDeviceGetCount_v2", c_void_p)
def count(library: Library, number: Address) -> None:
    write_uint(number, len(library.read()["gpus"]))


@symbol("nvmlDeviceGetHandleByIndex_v2", c_uint, c_void_p)
def handle_by_index(library: Library, index: int, device: Address) -> None:
    gpus = library.read()["gpus"]
    if index >= len(gpus):
        raise Failure(Code.INVALID_ARGUMENT)
    if gpus[index]["lost"]:
        raise Failure(Code.GPU_IS_LOST)
    write_handle(device, handles.encode(Kind.GPU, index))


@symbol("nvmlDeviceGetHandleByPciBusId_v2", c_char_p, c_void_p)
def handle_by_bus_id(library: Library, bus_id: bytes | None, device: Address) -> None:
    for index, gpu in enumerate(library.read()["gpus"]):
        if bus_id and bus_id.decode().lower() in {_bus_id(gpu).lower(), _bus_id(gpu)[4:].lower()}:
            write_handle(device, handles.encode(Kind.GPU, index))
            return
    raise Failure(Code.NOT_FOUND)


@symbol("nvmlDeviceGetHandleByUUID", c_char_p, c_void_p)
def handle_by_uuid(library: Library, uuid: bytes | None, device: Address) -> None:
    handle = library.handles_by_uuid().get((uuid or b"").decode())
    if handle is None:
        raise Failure(Code.NOT_FOUND)
    write_handle(device, handle)


@symbol("nvmlDeviceGetName", c_void_p, c_void_p, c_uint)
def name(library: Library, device: Address, text: Address, length: int) -> None:
    if handles.is_kind(device, Kind.MIG):
        gpu, instance, _ = handles.live_mig_device(library.read(), device)
        write_text(text, length, f"{model_of(gpu).name} MIG {profile_of(gpu, instance).name}")
    else:
        write_text(text, length, model_of(handles.gpu(library.read(), device)).name)


@symbol("nvmlDeviceGetUUID", c_void_p, c_void_p, c_uint)
def uuid(library: Library, device: Address, text: Address, length: int) -> None:
    if not handles.is_kind(device, Kind.MIG):
        write_text(text, length, handles.gpu(library.read(), device)["uuid"])
        return
    found = handles.mig_device(library.read(), device)
    if isinstance(found, tuple):
        gpu, instance, compute = found
        write_text(text, length, mig_uuid(gpu, instance["id"], compute["id"]))
    else:
        write_text(text, length, found["uuid"])


@symbol("nvmlDeviceGetIndex", c_void_p, c_void_p)
def index(library: Library, device: Address, number: Address) -> None:
    kind = Kind.MIG if handles.is_kind(device, Kind.MIG) else Kind.GPU
    gpu_index, mig_index = handles.decode(device, kind)
    library.read()
    write_uint(number, mig_index if kind is Kind.MIG else gpu_index)


@symbol("nvmlDeviceGetMinorNumber", c_void_p, c_void_p)
def minor_number(library: Library, device: Address, number: Address) -> None:
    write_uint(number, handles.gpu(library.read(), device)["minor"])


def _bus_id(gpu: Gpu) -> str:
    return f"00000000:{0x10 + gpu['minor']:02X}:00.0"


@symbol("nvmlDeviceGetPciInfo_v3", c_void_p, c_void_p)
def pci_info(library: Library, device: Address, out: Address) -> None:
    gpu = handles.gpu(library.read(), device)
    info = at(structs.PciInfo, out)
    info.busIdLegacy = _bus_id(gpu)[4:].encode()
    info.busId = _bus_id(gpu).encode()
    info.domain, info.bus, info.device = 0, 0x10 + gpu["minor"], 0
    info.pciDeviceId, info.pciSubSystemId = model_of(gpu).pci_device_id, 0


@symbol("nvmlDeviceGetCudaComputeCapability", c_void_p, c_void_p, c_void_p)
def compute_capability(library: Library, device: Address, major: Address, minor: Address) -> None:
    capability = model_of(handles.gpu(library.read(), device)).compute_capability
    write_uint(major, capability[0])
    write_uint(minor, capability[1])


@symbol("nvmlDeviceGetPersistenceMode", c_void_p, c_void_p)
def persistence_mode(library: Library, device: Address, mode: Address) -> None:
    handles.gpu(library.read(), device)
    write_uint(mode, 0)


@symbol("nvmlDeviceGetComputeMode", c_void_p, c_void_p)
def compute_mode(library: Library, device: Address, mode: Address) -> None:
    write_uint(mode, handles.gpu(library.read(), device).get("compute_mode", operations.ComputeMode.DEFAULT))


@symbol("nvmlDeviceSetComputeMode", c_void_p, c_uint)
def set_compute_mode(library: Library, device: Address, mode: int) -> None:
    with library.change("nvmlDeviceSetComputeMode") as machine:
        operations.set_compute_mode(handles.gpu(machine, device), mode)


def _memory_mib(library: Library, device: Address) -> tuple[int, int]:
    machine = library.forget_ended_processes()
    if handles.is_kind(device, Kind.MIG):
        gpu, instance, _ = handles.live_mig_device(machine, device)
        lists = [compute["processes"] for compute in instance["compute"]]
        total = profile_of(gpu, instance).memory_mib
        used = _IDLE_MIG_MIB
    else:
        gpu = handles.gpu(machine, device)
        lists = [gpu["processes"]]
        lists += [compute["processes"] for each in gpu["instances"] for compute in each["compute"]]
        total, used = model_of(gpu).memory_mib, 0
    used += sum(process["used_mib"] or 0 for processes in lists for process in processes)
    return total, min(used, total)


@symbol("nvmlDeviceGetMemoryInfo", c_void_p, c_void_p)
def memory_info(library: Library, device: Address, out: Address) -> None:
    total, used = _memory_mib(library, device)
    info = at(structs.Memory, out)
    info.total, info.used, info.free = total * _MIB, used * _MIB, (total - used) * _MIB


@symbol("nvmlDeviceGetMemoryInfo_v2", c_void_p, c_void_p)
def memory_info_v2(library: Library, device: Address, out: Address) -> None:
    info = at(structs.MemoryV2, out)
    if info.version != structs.MEMORY_V2:
        raise Failure(Code.ARGUMENT_VERSION_MISMATCH)
    total, used = _memory_mib(library, device)
    reserved = 0 if handles.is_kind(device, Kind.MIG) else memory.RESERVED_MIB
    info.total, info.used, info.reserved = total * _MIB, used * _MIB, reserved * _MIB
    info.free = max(total - used - reserved, 0) * _MIB


@symbol("nvmlDeviceGetUtilizationRates", c_void_p, c_void_p)
def utilization_rates(library: Library, device: Address, out: Address) -> None:
    gpu = handles.gpu(library.read(), device) if not handles.is_kind(device, Kind.MIG) else None
    if gpu is None or gpu["mig_current"]:
        raise Failure(Code.NOT_SUPPORTED)
    rates = at(structs.Utilization, out)
    rates.gpu = rates.memory = 35 if gpu["processes"] else 0


_Row = tuple[Process, int, int]


def _processes(library: Library, device: Address) -> list[_Row]:
    machine = library.forget_ended_processes()
    if handles.is_kind(device, Kind.MIG):
        _, instance, compute = handles.live_mig_device(machine, device)
        return [(process, instance["id"], compute["id"]) for process in compute["processes"]]
    gpu = handles.gpu(machine, device)
    rows: list[_Row] = [(process, structs.NO_INSTANCE, structs.NO_INSTANCE) for process in gpu["processes"]]
    for instance in gpu["instances"]:
        for compute in instance["compute"]:
            rows += [(process, instance["id"], compute["id"]) for process in compute["processes"]]
    return rows


def _list_processes(rows: list[_Row], number: Address, out: Address) -> None:
    if not number:
        raise Failure(Code.INVALID_ARGUMENT)
    room = c_uint.from_address(number)
    has_room = room.value >= len(rows)
    room.value = len(rows)
    if not has_room:
        raise Failure(Code.INSUFFICIENT_SIZE)
    if not rows:
        return
    if not out:
        raise Failure(Code.INVALID_ARGUMENT)
    for info, (process, gpu_instance, compute_instance) in zip(
        (structs.ProcessInfo * len(rows)).from_address(out), rows, strict=True
    ):
        used = process["used_mib"]
        info.pid = process["pid"]
        info.usedGpuMemory = structs.NOT_AVAILABLE if used is None else used * _MIB
        info.gpuInstanceId, info.computeInstanceId = gpu_instance, compute_instance


def _compute_processes(library: Library, device: Address, number: Address, out: Address) -> None:
    _list_processes(_processes(library, device), number, out)


def _mps_processes(library: Library, device: Address, number: Address, out: Address) -> None:
    _list_processes([row for row in _processes(library, device) if row[0].get("mps") == "client"], number, out)


def _no_processes(library: Library, device: Address, number: Address, out: Address) -> None:
    _processes(library, device)
    _list_processes([], number, out)


_LISTS: dict[str, Callable[..., None]] = {
    "nvmlDeviceGetComputeRunningProcesses_v3": _compute_processes,
    "nvmlDeviceGetGraphicsRunningProcesses_v3": _no_processes,
    "nvmlDeviceGetMPSComputeRunningProcesses_v3": _mps_processes,
}
for _name, _function in _LISTS.items():
    symbol(_name, c_void_p, c_void_p, c_void_p)(_function)


@symbol("nvmlDeviceGetFieldValues", c_void_p, c_int, c_void_p)
def field_values(library: Library, device: Address, number: int, out: Address) -> None:
    machine = library.read()
    model = model_of(handles.gpu(machine, device))
    if not out or number < 1:
        raise Failure(Code.INVALID_ARGUMENT)
    answers = {_FIELD_RESETLESS_MIG: not model.mode_needs_reset, _FIELD_MODE_INDEPENDENT_QUERIES: True}
    known = model.can_mig and not queries_need_mig_mode(machine)
    for value in (structs.FieldValue * number).from_address(out):
        if known and value.fieldId in answers:
            value.nvmlReturn, value.valueType = Code.SUCCESS, _VALUE_UNSIGNED_INT
            value.value.ullVal = answers[value.fieldId]
        else:
            value.nvmlReturn = Code.NOT_SUPPORTED

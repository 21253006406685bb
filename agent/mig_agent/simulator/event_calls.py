"""The library's event sets, for changes of the MIG configuration only."""

from __future__ import annotations

import time
from ctypes import c_uint, c_ulonglong, c_void_p

from mig_agent.simulator import handles, structs
from mig_agent.simulator.codes import Code, Failure
from mig_agent.simulator.handles import Kind
from mig_agent.simulator.library import EventSet, Library, symbol
from mig_agent.simulator.pointers import Address, at, write_handle
from mig_agent.simulator.state import model_of

MIG_CONFIGURATION_CHANGE = 0x100
_POLL_SECONDS = 0.05


def _supported(library: Library, device: Address) -> int:
    return MIG_CONFIGURATION_CHANGE if model_of(handles.gpu(library.read(), device)).can_mig else 0


@symbol("nvmlDeviceGetSupportedEventTypes", c_void_p, c_void_p)
def supported_event_types(library: Library, device: Address, types: Address) -> None:
    if not types:
        raise Failure(Code.INVALID_ARGUMENT)
    c_ulonglong.from_address(types).value = _supported(library, device)


@symbol("nvmlEventSetCreate", c_void_p)
def create(library: Library, out: Address) -> None:
    number = library.add_event_set()
    write_handle(out, handles.encode(Kind.EVENT_SET, 0, number))


def _event_set(library: Library, handle: Address) -> EventSet:
    _, number = handles.decode(handle, Kind.EVENT_SET)
    found = library.event_sets.get(number)
    if found is None:
        raise Failure(Code.INVALID_ARGUMENT)
    return found


@symbol("nvmlDeviceRegisterEvents", c_void_p, c_ulonglong, c_void_p)
def register(library: Library, device: Address, types: int, event_set: Address) -> None:
    if types & ~_supported(library, device):
        raise Failure(Code.NOT_SUPPORTED)
    index, _ = handles.decode(device, Kind.GPU)
    _event_set(library, event_set).seen[index] = library.read()["gpus"][index]["changes"]


@symbol("nvmlEventSetWait_v2", c_void_p, c_void_p, c_uint)
def wait(library: Library, event_set: Address, out: Address, milliseconds: int) -> None:
    found = _event_set(library, event_set)
    deadline = time.monotonic() + milliseconds / 1000
    while True:
        gpus = library.read()["gpus"]
        for index, seen in found.seen.items():
            # Changes between two calls make one event: the listener is only told to read again.
            if index < len(gpus) and gpus[index]["changes"] != seen:
                found.seen[index] = gpus[index]["changes"]
                data = at(structs.EventData, out)
                data.device = handles.encode(Kind.GPU, index)
                data.eventType, data.eventData = MIG_CONFIGURATION_CHANGE, 0
                data.gpuInstanceId = data.computeInstanceId = structs.NO_INSTANCE
                return
        if time.monotonic() >= deadline:
            raise Failure(Code.TIMEOUT)
        time.sleep(_POLL_SECONDS)


@symbol("nvmlEventSetFree", c_void_p)
def free(library: Library, event_set: Address) -> None:
    _event_set(library, event_set)
    library.remove_event_set(handles.decode(event_set, Kind.EVENT_SET)[1])

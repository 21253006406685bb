"""Faults of each call of the adapter: the codes that nvml.h lists for it, and those that any call may answer.

docs/reference/reliability.md shows this table; `tests/faults/test_nvml_faults.py` goes through all of it.
"""

from __future__ import annotations

from collections.abc import Iterable

from mig_agent.simulator import Code

ANY = (Code.UNINITIALIZED, Code.GPU_IS_LOST, Code.UNKNOWN)
"""nvml.h lets any call answer the first; a GPU that falls off the bus, and a driver in trouble, the others."""
_I, _S, _P, _F = Code.INVALID_ARGUMENT, Code.NOT_SUPPORTED, Code.NO_PERMISSION, Code.NOT_FOUND
_DEVICE = (_I, _S)

LISTED: dict[str, tuple[Code, ...]] = {
    # The session, and what it says of the machine.
    "nvmlInitWithFlags": (_P,),
    "nvmlShutdown": (),
    "nvmlSystemGetDriverVersion": (_I,),
    "nvmlSystemGetNVMLVersion": (_I,),
    "nvmlDeviceGetCount": (_I,),
    "nvmlEventSetCreate": (_I, _S),
    "nvmlDeviceRegisterEvents": (_I, _S),
    "nvmlEventSetWait_v2": (_I, Code.TIMEOUT),
    "nvmlEventSetFree": (_I,),
    # GPUs.
    "nvmlDeviceGetHandleByIndex": (_I, _P),
    "nvmlDeviceGetName": _DEVICE,
    "nvmlDeviceGetUUID": (_I, _S, Code.INSUFFICIENT_SIZE),
    "nvmlDeviceGetMinorNumber": _DEVICE,
    "nvmlDeviceGetMemoryInfo": (*_DEVICE, _P),
    "nvmlDeviceGetUtilizationRates": _DEVICE,
    "nvmlDeviceGetComputeMode": _DEVICE,
    "nvmlDeviceGetComputeRunningProcesses": (_I, _S, _P, Code.INSUFFICIENT_SIZE),
    "nvmlDeviceGetGraphicsRunningProcesses": (_I, _S, _P, Code.INSUFFICIENT_SIZE),
    "nvmlDeviceGetMPSComputeRunningProcesses": (_I, _S, _P, Code.INSUFFICIENT_SIZE),
    # MIG mode and profiles.
    "nvmlDeviceGetMigMode": _DEVICE,
    "nvmlDeviceSetMigMode": (*_DEVICE, _P, Code.IN_USE, Code.RESET_REQUIRED),
    "nvmlDeviceGetGpuInstanceProfileInfo": (*_DEVICE, _P),
    "nvmlDeviceGetGpuInstancePossiblePlacements": (*_DEVICE, _P),
    "nvmlGpuInstanceGetComputeInstanceProfileInfo": (*_DEVICE, _P),
    # Instances.
    "nvmlDeviceCreateGpuInstanceWithPlacement": (*_DEVICE, _P, Code.IN_USE, Code.INSUFFICIENT_RESOURCES),
    "nvmlGpuInstanceDestroy": (*_DEVICE, _P, Code.IN_USE),
    "nvmlDeviceGetGpuInstances": (*_DEVICE, _P),
    "nvmlDeviceGetGpuInstanceById": (*_DEVICE, _P, _F),
    "nvmlGpuInstanceGetInfo": (_I, _P),
    "nvmlGpuInstanceCreateComputeInstance": (*_DEVICE, _P, Code.INSUFFICIENT_RESOURCES),
    "nvmlComputeInstanceDestroy": (*_DEVICE, _P, Code.IN_USE),
    "nvmlGpuInstanceGetComputeInstances": (*_DEVICE, _P),
    "nvmlComputeInstanceGetInfo": (_I, _P),
    # MIG devices.
    "nvmlDeviceGetMaxMigDeviceCount": (_I,),
    "nvmlDeviceGetMigDeviceHandleByIndex": (*_DEVICE, _F),
    "nvmlDeviceGetHandleByUUID": (_I, _F),
    "nvmlDeviceGetGpuInstanceId": _DEVICE,
    "nvmlDeviceGetComputeInstanceId": _DEVICE,
    # Memory limits of cgroups.
    "nvmlDeviceSetMemoryLimits_v1": (*_DEVICE, _P, Code.OPERATING_SYSTEM),
    "nvmlDeviceGetMemoryLimits_v1": (*_DEVICE, _F, Code.OPERATING_SYSTEM),
    # Performance counters, for which nvml.h lists none.
    "nvmlGpmQueryDeviceSupport": (),
    "nvmlGpmSampleAlloc": (),
    "nvmlGpmMigSampleGet": (),
    "nvmlGpmMetricsGet": (),
    "nvmlGpmSampleFree": (),
}

OF_NO_GPU = frozenset(
    {
        "nvmlInitWithFlags",
        "nvmlShutdown",
        "nvmlSystemGetDriverVersion",
        "nvmlSystemGetNVMLVersion",
        "nvmlDeviceGetCount",
        "nvmlDeviceGetHandleByIndex",
        "nvmlDeviceGetHandleByUUID",
        "nvmlEventSetCreate",
        "nvmlEventSetWait_v2",
        "nvmlEventSetFree",
    }
)
"""Calls that get no handle of a GPU: a fault in them cannot be kept to one."""


# Where each call is made

ON_ITS_FACE = frozenset({"nvmlEventSetFree", "nvmlShutdown", "nvmlSystemGetNVMLVersion"})
"""The adapter offers them, and the engine does not make them, or only at the very end."""
COUNTERS = frozenset({"nvmlGpmSampleAlloc", "nvmlGpmMigSampleGet", "nvmlGpmMetricsGet", "nvmlGpmSampleFree"})
"""Calls of performance counters: where they fail, a figure is unknown (`tests/adapters/test_compute_meter.py`)."""
LIMITS = frozenset({"nvmlDeviceSetMemoryLimits_v1", "nvmlDeviceGetMemoryLimits_v1"})
"""Calls that limit shares: where they fail, none is granted (`tests/engine/test_cgroup_shares.py`)."""
SHARES = LIMITS | {"nvmlDeviceGetComputeMode"}
"""Calls of GPUs that may be shared: where they fail, there are no new shares (`tests/engine/test_shares.py`)."""
_ONCE = frozenset({"nvmlInitWithFlags", "nvmlSystemGetDriverVersion", "nvmlDeviceGetName"})
_PROFILES = frozenset({"nvmlDeviceGetGpuInstanceProfileInfo", "nvmlDeviceGetGpuInstancePossiblePlacements"})
_EVENTS = frozenset({"nvmlEventSetCreate", "nvmlDeviceRegisterEvents", "nvmlEventSetWait_v2"})
_FOR_REQUESTS = frozenset(
    {
        "nvmlComputeInstanceDestroy",
        "nvmlDeviceCreateGpuInstanceWithPlacement",
        "nvmlDeviceGetGpuInstanceById",
        "nvmlDeviceGetHandleByUUID",
        "nvmlDeviceGetUtilizationRates",
        "nvmlDeviceSetMigMode",
        "nvmlGpuInstanceCreateComputeInstance",
        "nvmlGpuInstanceDestroy",
        "nvmlGpmQueryDeviceSupport",
    }
)
SERVING = LISTED.keys() - ON_ITS_FACE - COUNTERS - SHARES - _ONCE - _PROFILES - _EVENTS
"""Calls that an agent makes while it serves."""
STARTING = LISTED.keys() - ON_ITS_FACE - COUNTERS - SHARES - _FOR_REQUESTS
"""Calls that it makes when it starts, those of the thread that listens for events among them."""
HANGING = SERVING
"""Those that can keep somebody waiting."""
NOTHING_WITHOUT = frozenset({"nvmlInitWithFlags", "nvmlSystemGetDriverVersion", "nvmlDeviceGetCount"})
"""Where these fail there is nothing to serve with, and the start is refused in words."""


def codes_of(call: str) -> tuple[Code, ...]:
    """Each code that the call is made to answer."""
    return tuple(dict.fromkeys((*LISTED[call], *ANY)))


def pairs(calls: Iterable[str]) -> int:
    """How many calls x codes these are."""
    return sum(len(codes_of(call)) for call in calls)

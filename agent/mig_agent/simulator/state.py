"""The state of a simulated machine, as in its JSON file, and how a new one is made."""

from __future__ import annotations

import re
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, NotRequired, TypedDict

from mig_agent.simulator.codes import SimulatorError
from mig_agent.simulator.models import MODELS, GpuModel, GpuProfile, Window

FORMAT = 1
"""The format of the state file; any other number is refused."""

DRIVER_VERSION = "580.95.05"
KERNEL_VERSION = "6.14"
"""The first kernel that has the cgroup controller dmem."""
DEFAULT_SM_PERCENT = 35.0
"""Percentage of its multiprocessors that a workload keeps busy unless said otherwise."""


class Process(TypedDict):
    """A simulated workload, or a real process that is tied to a simulated one."""

    pid: int
    name: str
    """The command line."""
    used_mib: int | None
    """None if the driver does not report it."""
    container: str
    """Id of the container that it runs in, or empty."""
    sm_percent: NotRequired[float]
    """Percentage of its GPU instance's multiprocessors that it keeps busy; DEFAULT_SM_PERCENT where it is missing."""
    started: int | None
    """For a real process its start time (ticks since boot): when that process ends, this entry is removed."""
    cgroup: NotRequired[str]
    """The cgroup that its GPU memory is charged to, such as `/mig-agent/7`; absent: none that limits it."""
    mps: NotRequired[Literal["client", "server"]]
    """Absent: it uses the GPU without MPS."""


class MemoryLimit(TypedDict):
    """Limits that nvmlDeviceSetMemoryLimits has set for a cgroup on one GPU, in bytes."""

    cgroup: str
    soft: int
    hard: int


class ComputeInstance(TypedDict):
    """A compute instance, which makes its GPU instance a MIG device."""

    serial: int
    """Never used twice; handles refer to it."""
    id: int
    profile: int
    start: int
    size: int
    mig_index: int
    processes: list[Process]
    holders: list[Process]
    """Processes that keep it in use without being listed."""


class GpuInstance(TypedDict):
    """A GPU instance."""

    serial: int
    id: int
    profile: int
    start: int
    size: int
    compute: list[ComputeInstance]
    holders: list[Process]


class Ghost(TypedDict):
    """A deleted MIG device that the driver still lists to libraries that were initialised before the deletion."""

    mig_index: int
    uuid: str
    gpu_instance: int
    compute_instance: int
    since: int
    """Revision of the machine when it was deleted."""


class Gpu(TypedDict):
    """One GPU."""

    model: str
    uuid: str
    minor: int
    mig_current: bool
    mig_pending: bool
    lost: bool
    halves_swapped: bool
    """True if ids of GPU instances rise from the middle of the GPU, as on some boards."""
    changes: int
    """Counts changes of the MIG configuration."""
    instances: list[GpuInstance]
    processes: list[Process]
    """Workloads while MIG mode is off."""
    ghosts: list[Ghost]
    compute_mode: NotRequired[int]
    """Compute mode as NVML numbers it; absent: DEFAULT."""
    memory_limits: NotRequired[list[MemoryLimit]]
    guaranteed: NotRequired[dict[str, int]]
    """dmem.min, in bytes, by cgroup: of each cgroup with a soft limit, and of its ancestors."""


FaultKind = Literal["fail", "hang", "remnant", "stale"]


class Fault(TypedDict):
    """An injected fault."""

    id: int
    kind: FaultKind
    function: str
    gpu: int | None
    """None: on any GPU."""
    code: int
    skip: int
    """How many calls succeed before it occurs."""
    times: int | None
    """How often it occurs; None: until it is cleared."""


class Machine(TypedDict):
    """The whole machine."""

    format: int
    revision: int
    boot_id: str
    driver_version: str
    kernel_version: NotRequired[str]
    """Absent: `KERNEL_VERSION`."""
    create_seconds: float
    destroy_seconds: float
    next_serial: int
    calls: dict[str, int]
    """How often each function that changes something was called."""
    gpus: list[Gpu]
    faults: list[Fault]


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuSpec:
    """One GPU of a machine to be made."""

    model: str
    mig_mode: bool = True
    halves_swapped: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineSpec:
    """A machine to be made."""

    gpus: tuple[GpuSpec, ...]
    driver_version: str | None = None
    """Value that was given; None: none was."""
    kernel_version: str | None = None


def parse_gpus(text: str) -> tuple[GpuSpec, ...]:
    """Return the GPUs that `parse_machine` reads. Raises SimulatorError."""
    return parse_machine(text).gpus


def parse_machine(text: str) -> MachineSpec:
    """Return the machine that `a100-40gb:1,h100-80gb:2,a30+nomig:1,t4,driver=615.71` describes, a GPU for each.

    `+nomig` behind the model, or `:off` behind the count, leaves MIG mode off; `kernel=6.12` is one without the cgroup
    controller dmem. Raises SimulatorError.
    """
    specs: list[GpuSpec] = []
    versions: dict[str, str] = {}
    for part in (each.strip().lower() for each in text.split(",")):
        name, is_version, version = part.partition("=")
        if not is_version:
            specs += _parse_gpu(part)
        elif name not in _VERSIONS or name in versions:
            raise SimulatorError(f"cannot read {part!r}: give driver=VERSION and kernel=VERSION, each once")
        elif not _VERSION.fullmatch(version):
            raise SimulatorError(f"cannot read {part!r}: write a version such as {_VERSIONS[name]}")
        else:
            versions[name] = version
    if not specs:
        raise SimulatorError(f"cannot simulate {text!r}: name a GPU, such as h100-80gb:2")
    return MachineSpec(gpus=tuple(specs), driver_version=versions.get("driver"), kernel_version=versions.get("kernel"))


_VERSIONS = MappingProxyType({"driver": "driver=615.71.03", "kernel": "kernel=6.12"})
_VERSION = re.compile(r"[0-9]{1,4}(\.[0-9]{1,4}){1,2}")


def _parse_gpu(part: str) -> list[GpuSpec]:
    model, *options = part.split(":")
    model, has_option, option = model.partition("+")
    if model not in MODELS:
        raise SimulatorError(f"cannot simulate a GPU {model!r}: the models are {', '.join(MODELS)}")
    mig_mode = not has_option
    if options and options[-1] in {"on", "off"}:
        mig_mode = options.pop() == "on" and mig_mode
    is_number = all(each.isascii() and each.isdigit() for each in options)
    if len(options) > 1 or not is_number or (has_option and option != "nomig"):
        raise SimulatorError(f"cannot read {part!r}: write MODEL:COUNT, or MODEL+nomig:COUNT without MIG mode")
    count = int(options[0]) if options else 1
    if not 1 <= count <= 64:  # noqa: PLR2004 -- more than any machine has
        raise SimulatorError(f"cannot simulate {count} GPUs of one model: between 1 and 64 can be")
    return [GpuSpec(model=model, mig_mode=mig_mode)] * count


def new_machine(
    gpus: Sequence[GpuSpec],
    *,
    create_seconds: float,
    destroy_seconds: float,
    driver_version: str,
    kernel_version: str = KERNEL_VERSION,
) -> Machine:
    """Return a machine that has just booted, with these GPUs and no instances."""
    return Machine(
        format=FORMAT,
        revision=0,
        boot_id=str(uuid.uuid4()),
        driver_version=driver_version,
        kernel_version=kernel_version,
        create_seconds=create_seconds,
        destroy_seconds=destroy_seconds,
        next_serial=1,
        calls={},
        gpus=[_new_gpu(spec, minor) for minor, spec in enumerate(gpus)],
        faults=[],
    )


def _new_gpu(spec: GpuSpec, minor: int) -> Gpu:
    mig_mode = spec.mig_mode and MODELS[spec.model].can_mig
    return Gpu(
        model=spec.model,
        # Random, as two simulated machines on one host must not look as if they shared a GPU.
        uuid=f"GPU-{uuid.uuid4()}",
        minor=minor,
        mig_current=mig_mode,
        mig_pending=mig_mode,
        lost=False,
        halves_swapped=spec.halves_swapped,
        changes=0,
        instances=[],
        processes=[],
        ghosts=[],
    )


def driver_branch(machine: Machine) -> int:
    """Return the first number of the driver's version, such as 580."""
    return int(machine["driver_version"].split(".", 1)[0])


def has_dmem(machine: Machine) -> bool:
    """Return True if the kernel has the cgroup controller dmem."""
    return _numbers(machine.get("kernel_version", KERNEL_VERSION)) >= _numbers(KERNEL_VERSION)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")[:2]))


def model_of(gpu: Gpu) -> GpuModel:
    """Return the recorded table of a GPU."""
    return MODELS[gpu["model"]]


def profile_of(gpu: Gpu, instance: GpuInstance) -> GpuProfile:
    """Return the profile of an instance."""
    return model_of(gpu).by_id[instance["profile"]]


def window_of(instance: GpuInstance | ComputeInstance) -> Window:
    """Return where an instance is."""
    return Window(instance["start"], instance["size"])


_MIG_UUIDS = uuid.UUID("6d69672d-6167-656e-742d-73696d756c61")


def mig_uuid(gpu: Gpu, gpu_instance: int, compute_instance: int) -> str:
    """Return the UUID of a MIG device: version 5, so that the same ids on the same GPU always give the same UUID."""
    name = f"{gpu['uuid']}/{gpu_instance}/{compute_instance}"
    return f"MIG-{uuid.uuid5(_MIG_UUIDS, name)}"

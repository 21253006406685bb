"""The state of a simulated machine, as in its JSON file, and how a new one is made."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NotRequired, TypedDict

from mig_agent.simulator.codes import SimulatorError
from mig_agent.simulator.models import MODELS, GpuModel, GpuProfile, Window

FORMAT = 1
"""The format of the state file; any other number is refused."""

DRIVER_VERSION = "580.95.05"
DEFAULT_SM_PERCENT = 35.0
"""How much of its multiprocessors a workload keeps busy unless said otherwise."""


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
    """How much of the multiprocessors of its GPU instance it keeps busy; DEFAULT_SM_PERCENT where it is missing."""
    started: int | None
    """For a real process its start time (ticks since boot): when that process ends, this entry is removed."""


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


def parse_gpus(text: str) -> tuple[GpuSpec, ...]:
    """Return the GPUs that `a100-40gb:1,h100-80gb:2,a30:1:off,t4` describes, one entry each.

    `off` after the count leaves MIG mode off. Raises SimulatorError.
    """
    specs: list[GpuSpec] = []
    for part in text.split(","):
        model, *options = part.strip().lower().split(":")
        if model not in MODELS:
            raise SimulatorError(f"cannot simulate a GPU {model!r}: the models are {', '.join(MODELS)}")
        mig_mode = True
        if options and options[-1] in {"on", "off"}:
            mig_mode = options.pop() == "on"
        if len(options) > 1 or not all(option.isascii() and option.isdigit() for option in options):
            raise SimulatorError(
                f"cannot read {part.strip()!r}: write MODEL:COUNT, or MODEL:COUNT:off without MIG mode"
            )
        count = int(options[0]) if options else 1
        if not 1 <= count <= 64:  # noqa: PLR2004 -- more than any machine has
            raise SimulatorError(f"cannot simulate {count} GPUs of one model: between 1 and 64 can be")
        specs += [GpuSpec(model=model, mig_mode=mig_mode)] * count
    return tuple(specs)


def new_machine(
    gpus: Sequence[GpuSpec], *, create_seconds: float, destroy_seconds: float, driver_version: str
) -> Machine:
    """Return a machine that has just booted, with these GPUs and no instances."""
    return Machine(
        format=FORMAT,
        revision=0,
        boot_id=str(uuid.uuid4()),
        driver_version=driver_version,
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

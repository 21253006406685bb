"""A survey of the GPUs for people who look for faults: what the driver tells anybody, in a short session of its own.

Only calls that change nothing and need no privilege; the agent's own reading (`Driver.observe`) needs root.
"""

from __future__ import annotations

from dataclasses import dataclass

from mig_agent.adapters.nvml.calls import GpuHandle, Nvml
from mig_agent.adapters.nvml.driver import ComputeMode
from mig_agent.core.errors import DriverError, DriverErrorKind
from mig_agent.core.model import MigMode


@dataclass(frozen=True, slots=True, kw_only=True)
class SurveyedGpu:
    """A GPU as its driver shows it to any user."""

    index: int
    uuid: str = ""
    model: str = ""
    minor: int | None = None
    """The N of /dev/nvidiaN."""
    mode: MigMode | None = None
    """None if it could not be read."""
    processes: tuple[int, ...] | None = None
    """Pids with a context on a GPU without MIG mode; None if the driver does not tell."""
    compute_mode: str = ""
    """`DEFAULT` or `EXCLUSIVE_PROCESS`, for example; empty in MIG mode and if the driver does not tell."""
    error: DriverError | None = None
    """Reason why the GPU, or something of it, could not be read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """The driver and its GPUs."""

    driver_version: str
    nvml_version: str
    """Empty if the driver does not tell."""
    gpus: tuple[SurveyedGpu, ...]


def take_survey(library: object | None = None) -> Survey:
    """Open a session, read all GPUs and close the session. Raises DriverError if no driver answers.

    Not in a process that has a Driver: pynvml has one session a process.
    """
    nvml = Nvml(library)
    nvml.open()
    try:
        return Survey(
            driver_version=nvml.driver_version(),
            nvml_version=_nvml_version(nvml),
            gpus=tuple(_gpu(nvml, index) for index in range(nvml.gpu_count())),
        )
    finally:
        nvml.shutdown()


def _nvml_version(nvml: Nvml) -> str:
    try:
        return nvml.library_version()
    except DriverError:
        return ""


def _gpu(nvml: Nvml, index: int) -> SurveyedGpu:
    try:
        gpu = nvml.gpu(index)
        uuid, model, minor = nvml.uuid(gpu, index), nvml.name(gpu, index), nvml.minor(gpu, index)
    except DriverError as error:
        return SurveyedGpu(index=index, error=error)
    try:
        current, pending = nvml.mig_mode(gpu, index)
        mode = MigMode(capable=True, current=current, pending=pending)
    except DriverError as error:
        if error.kind is not DriverErrorKind.NOT_SUPPORTED:
            return SurveyedGpu(index=index, uuid=uuid, model=model, minor=minor, error=error)
        mode = MigMode(capable=False)
    return SurveyedGpu(
        index=index,
        uuid=uuid,
        model=model,
        minor=minor,
        mode=mode,
        processes=None if mode.current else _pids(nvml, gpu, index),
        compute_mode="" if mode.current else _compute_mode(nvml, gpu, index),
    )


def _compute_mode(nvml: Nvml, gpu: GpuHandle, index: int) -> str:
    try:
        return ComputeMode(nvml.compute_mode(gpu, index)).name
    except (DriverError, ValueError):  # ValueError: a mode that only newer drivers have
        return ""


def _pids(nvml: Nvml, gpu: GpuHandle, index: int) -> tuple[int, ...] | None:
    try:
        return tuple(each.pid for each in nvml.processes(gpu, index))
    except DriverError:
        return None

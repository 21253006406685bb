"""The hardware: the driver or a simulated one, its host, and the selection of GPUs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from mig_agent.adapters.host import Host
from mig_agent.adapters.nvml import Driver
from mig_agent.adapters.nvml.calls import OnCall
from mig_agent.config import Settings
from mig_agent.core.errors import ConfigError, DriverError, DriverErrorKind, MigAgentError
from mig_agent.core.model import GpuUuid
from mig_agent.daemon.sd_notify import is_service

NO_GPU: Final = "this node has no NVIDIA GPU"


class CannotServeError(MigAgentError):
    """The agent cannot start here; has a message for people."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """The driver, open unless the agent starts paused, and its host."""

    driver: Driver
    host: Host
    lock_folder: Path
    absent: str = ""
    """Why this node has nothing to serve and nothing to wait for; the driver is closed then."""
    no_driver: str = ""
    """Reason why the driver could not be opened; it is closed then, and opening it is to be tried again."""


def open_hardware(settings: Settings, on_call: OnCall | None, *, paused: bool = False) -> Hardware:
    """Open the driver; blocking. Raises ConfigError, or CannotServeError if there is no driver.

    With `paused` the driver is not touched, and may be missing: it is opened on resume. On a Kubernetes node without a
    GPU it may be missing: see `Hardware.absent`; and so it may in a service: see `Hardware.no_driver`.
    """
    if settings.simulate:
        return _open_simulated(settings, on_call, paused=paused)
    if paused:
        return Hardware(driver=Driver.closed(on_call=on_call), host=Host(), lock_folder=settings.lock_dir)
    try:
        driver = Driver.open(on_call=on_call)
    except DriverError as error:
        if error.kind not in {DriverErrorKind.LIBRARY, DriverErrorKind.OUTDATED}:
            raise
        if settings.kubernetes and not Host().has_nvidia_gpu():
            # A DaemonSet may run on such nodes, too: that is no error.
            return Hardware(
                driver=Driver.closed(on_call=on_call), host=Host(), lock_folder=settings.lock_dir, absent=NO_GPU
            )
        if is_service():
            # It may come with a package or a module that is built still. A restart of the process would do no better.
            return Hardware(
                driver=Driver.closed(on_call=on_call), host=Host(), lock_folder=settings.lock_dir, no_driver=str(error)
            )
        raise CannotServeError(
            f"cannot serve: there is no usable NVIDIA driver ({error.detail or error})",
            "on a machine with no GPU: mig-agent serve --simulate h100-80gb:2 --state-dir DIR",
        ) from error
    return Hardware(driver=driver, host=Host(), lock_folder=settings.lock_dir)


def simulated_file(settings: Settings) -> str:
    """Return the name of the simulated machine's file if it is in the state directory; otherwise an empty text."""
    if not settings.simulate or settings.simulated_dir != settings.state_dir:
        return ""
    from mig_agent.simulator import STATE_FILE  # noqa: PLC0415 -- an agent with real GPUs does not pay for importing it

    return STATE_FILE


def _open_simulated(settings: Settings, on_call: OnCall | None, *, paused: bool) -> Hardware:
    from mig_agent.simulator import (  # noqa: PLC0415 -- an agent with real GPUs does not import it
        STATE_FILE,
        SimulatorError,
        open_library,
        open_or_create_machine,
    )

    state_file = settings.simulated_dir / STATE_FILE
    try:
        state_file.parent.mkdir(parents=True, exist_ok=True)
        simulator = open_or_create_machine(
            state_file,
            settings.simulate,
            create_seconds=settings.simulate_create_seconds,
            destroy_seconds=settings.simulate_destroy_seconds,
        )
        library = open_library(state_file)
    except SimulatorError as error:
        raise ConfigError(str(error), "give --simulate as MODEL:COUNT, such as a100-40gb:1,h100-80gb:2") from error
    except OSError as error:
        raise ConfigError(f"cannot simulate GPUs in {state_file.parent}: {error.strerror}") from error
    return Hardware(
        driver=(Driver.closed if paused else Driver.open)(library, on_call=on_call),
        host=Host(simulator.host_root, simulated=True),
        # A lock in the simulated machine keeps its agents apart, as one in /run does on a real machine.
        lock_folder=simulator.host_root / settings.lock_dir.relative_to("/"),
    )


def selected_gpus(there: Mapping[int, GpuUuid], selection: Iterable[str], action: str = "manage") -> dict[int, GpuUuid]:
    """Return the GPUs named by index, UUID or a UUID's beginning, as CUDA takes it.

    Raises ConfigError for others: "cannot ACTION GPU 7: there is no such GPU".
    """
    chosen: dict[int, GpuUuid] = {}
    for name in selection:
        matching = {index: uuid for index, uuid in there.items() if name in {str(index), uuid}}
        matching = matching or {index: uuid for index, uuid in there.items() if _begins(uuid, name)}
        if len(matching) != 1:
            offered = ", ".join(f"{index} ({uuid})" for index, uuid in there.items()) or "none"
            why = "several GPUs begin so" if matching else "there is no such GPU"
            raise ConfigError(f"cannot {action} GPU {name}: {why}", f"the GPUs of this machine are {offered}")
        chosen |= matching
    return dict(sorted(chosen.items()))


def _begins(uuid: str, name: str) -> bool:
    return name.startswith("GPU-") and uuid.lower().startswith(name.lower())

"""What is examined: the machine, the agent's answers and settings, and the driver; gathered once, within bounds."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Generic, TypeVar

from mig_agent.adapters.host import Host
from mig_agent.client import Client, ClientError, Tls, UsageError
from mig_agent.client.addresses import Address
from mig_agent.core.errors import DriverError
from mig_agent.doctor.agent_settings import FoundSettings, find_settings
from mig_agent.doctor.probe import SUDO_HINT, Probe

if TYPE_CHECKING:
    from mig_agent.adapters.nvml.survey import Survey
    from mig_agent.client.types import Status

DRIVER_SECONDS = 20.0
"""Time limit of the driver; one without persistence needs seconds to begin, one that hangs never answers."""
AGENT_SECONDS = 15.0
"""Longest time that the agent may take to answer."""
_Answer = TypeVar("_Answer")


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered(Generic[_Answer]):
    """An answer, or the error in its place."""

    value: _Answer | None = None
    error: Exception | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """Everything that the checks look at."""

    probe: Probe
    address: Address
    status: Answered[Status]
    found: FoundSettings
    survey: Answered[Survey]
    host: Host
    """The machine of the GPUs: the simulated one if the GPUs are simulated."""
    simulated: bool = False
    now: float = field(default_factory=time.time)

    @property
    def node(self) -> Status | None:
        """The agent's answer; None if there is none."""
        return self.status.value

    @property
    def is_denied(self) -> bool:
        """True if this user may not read what would tell of the GPUs."""
        return isinstance(self.survey.error, PermissionError)

    @property
    def no_survey(self) -> str:
        """Why the GPUs were not read."""
        return words_of(self.survey.error) if self.is_denied else "NVML does not answer"

    @property
    def state_dir(self) -> Path | None:
        """The agent's folder; None if its settings are not known, or may say something else."""
        found = self.found
        if found.settings is None or (found.partly and "state_dir" not in found.given):
            return None
        return found.settings.state_dir

    @property
    def settings_hint(self) -> str:
        """Hint for where the settings do not say what a check needs."""
        error = self.found.error
        if error is not None and "installed without" in error.message:
            return error.hint
        if error is None or ("Permission denied" in error.message and not self.probe.person.is_root):
            return SUDO_HINT
        file = f" --config {self.found.where}" if self.found.where.startswith("/") else ""
        return f"sudo mig-agent check{file} tells what to mend in the settings"

    @property
    def agents_gpus(self) -> int:
        """The number of GPUs that the agent of this machine serves; 0 without one."""
        if self.node is None or self.address.path is None:
            return 0
        return sum(each.state != "lost" for each in self.node.gpus)


def within(seconds: float, function: Callable[[], _Answer]) -> Answered[_Answer]:
    """Return what a function answers in a thread of its own, or its error; a TimeoutError if it takes too long.

    The thread is daemonic: one that hangs does not keep the process from exiting.
    """
    found: list[Answered[_Answer]] = []

    def call() -> None:
        try:
            found.append(Answered(value=function()))
        except Exception as error:  # noqa: BLE001 -- it becomes a finding
            found.append(Answered(error=error))

    thread = threading.Thread(target=call, name="doctor", daemon=True)
    thread.start()
    thread.join(seconds)
    return found[0] if found else Answered(error=TimeoutError(f"no answer within {seconds:g} s"))


def gather(
    probe: Probe, address: Address, tls: Tls | None = None, config: Path | None = None, *, driver: bool = True
) -> Subject:
    """Ask the agent and the driver, and find the settings. `driver`: False leaves the driver alone."""

    def ask() -> Status:
        with Client(address, tls=tls, patience=0.0) as client:
            return client.status()

    found = find_settings(probe, address.path, config)
    status = within(AGENT_SECONDS, ask)
    settings = found.settings
    simulated = settings is not None and bool(settings.simulate)
    host, library = Host(probe.root), None
    if simulated and settings is not None:
        from mig_agent.simulator import STATE_FILE, Simulator, open_library  # noqa: PLC0415 -- only with simulated GPUs

        state_file = settings.simulated_dir / STATE_FILE
        try:
            library = open_library(state_file)
            host = Host(Simulator(state_file).host_root, simulated=True)
        except Exception as error:  # noqa: BLE001 -- no such machine, or one of another user: it becomes a finding
            unreadable: Answered[Survey] = Answered(error=error)
            return Subject(
                probe=probe, address=address, status=status, found=found, survey=unreadable, host=host, simulated=True
            )
    survey: Answered[Survey] = _survey(library) if driver else Answered(error=UsageError("it was not asked"))
    return Subject(
        probe=probe, address=address, status=status, found=found, survey=survey, host=host, simulated=simulated
    )


def _survey(library: object | None) -> Answered[Survey]:
    def ask() -> Survey:
        from mig_agent.adapters.nvml.survey import take_survey  # noqa: PLC0415 -- a light client has no pynvml

        return take_survey(library)

    return within(DRIVER_SECONDS, ask)


def words_of(error: Exception | None) -> str:
    """Return an error for people."""
    match error:
        case None:
            return "nothing is known"
        case DriverError():
            return error.detail or str(error)
        case ClientError() | UsageError():
            return error.message
        case OSError(filename=str() as path, strerror=str() as why):
            return f"{path}: {why.lower()}"
        case _:
            return str(error) or type(error).__name__

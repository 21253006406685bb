"""The list of all checks, and an examination that runs them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Final

from mig_agent.doctor.checks import (
    agent,
    caller,
    containers,
    device_nodes,
    driver,
    gpus,
    ledger,
    machine,
    other_managers,
    shares,
)
from mig_agent.doctor.findings import Finding, unknown
from mig_agent.doctor.probe import SUDO_HINT, DeniedError
from mig_agent.doctor.subject import Subject, words_of

Check = Callable[[Subject], Iterable[Finding]]

CHECKS: Final[Mapping[str, tuple[Check, ...]]] = MappingProxyType(
    {
        "Driver": (driver.kernel_module, driver.nvml, driver.version),
        "GPUs and MIG mode": (gpus.present, gpus.mig_mode, shares.sharing, gpus.agents_view),
        "Other managers of GPUs": (
            other_managers.mig_manager,
            other_managers.dcgm,
            other_managers.persistence,
            other_managers.gpu_holders,
            other_managers.foreign_instances,
        ),
        "Device nodes": (device_nodes.driver_nodes, device_nodes.capabilities),
        "Containers": (containers.toolkit, containers.cdi),
        "You and the socket": (caller.rights, caller.socket, caller.address),
        "Agent and ledger": (
            agent.serves,
            agent.unit,
            agent.versions,
            agent.state,
            agent.settings,
            ledger.state,
            ledger.file,
        ),
        "Machine": (machine.cgroups, machine.clock, machine.disk, machine.software),
    }
)
"""All checks by the heading under which their findings are shown."""


def examine(subject: Subject, checks: Mapping[str, Iterable[Check]] = CHECKS) -> Mapping[str, tuple[Finding, ...]]:
    """Return the findings by heading. A check that cannot read what it needs gives an unknown finding."""
    return {
        heading: tuple(each for check in group for each in run(check, subject)) for heading, group in checks.items()
    }


def run(check: Check, subject: Subject) -> list[Finding]:
    """Return the findings of one check, whatever happens to it."""
    found: list[Finding] = []
    name = f"{check.__module__.rpartition('.')[2]}.{check.__name__}".replace("_", "-")
    try:
        found.extend(check(subject))
    except DeniedError as error:
        found.append(unknown(name, str(error), "" if subject.probe.person.is_root else SUDO_HINT))
    except Exception as error:  # noqa: BLE001 -- a check that fails must not hide what the others find
        found.append(unknown(name, f"cannot complete this check: {words_of(error)}"))
    return found

"""Checks a configuration without starting the agent: mistakes in it, and what this machine would refuse."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import threading
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from mig_agent.adapters import catalog_files
from mig_agent.adapters.nvml import Driver
from mig_agent.adapters.private_dir import refuse_if_replaceable
from mig_agent.adapters.shares.mps import PROGRAM
from mig_agent.adapters.transport.unix_sockets import group_id_of
from mig_agent.adapters.users import Users
from mig_agent.config import Settings, UnixAddress
from mig_agent.config.load import Reading
from mig_agent.config.problems import Problem
from mig_agent.core.errors import ConfigError, DriverError
from mig_agent.core.model import GpuUuid
from mig_agent.core.shares import Fractions
from mig_agent.daemon.cert_reload import configured_certificates
from mig_agent.daemon.hardware import selected_gpus
from mig_agent.daemon.roles import configured_roles

_AS_THE_AGENT = "check as the user whom the agent runs as (sudo mig-agent check)"
_CGROUP2 = Path("/sys/fs/cgroup/cgroup.controllers")
_DRIVER_SECONDS = 5.0
"""Longest time that the driver may take to tell which GPUs there are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigFinding:
    """One result of the check."""

    problem: Problem
    is_error: bool
    """True for a mistake on any machine; False for what depends on this machine, this user or this moment."""


def findings(reading: Reading) -> tuple[ConfigFinding, ...]:
    """Return all that is wrong: the mistakes first; what this machine would refuse only if there is none. Blocks."""
    if reading.settings is None:
        return tuple(ConfigFinding(problem=each, is_error=True) for each in reading.problems)
    found = []
    for name, is_error, look in _looks(reading.settings):
        try:
            look()
        except ConfigError as error:
            found.append(ConfigFinding(problem=_placed(error, name, reading), is_error=is_error))
        except OSError as error:  # a folder that the user who checks may not enter
            words = ConfigError(f"cannot check {name}: {error.strerror}: {error.filename}", _AS_THE_AGENT)
            found.append(ConfigFinding(problem=_placed(words, name, reading), is_error=False))
    return tuple(found)


def as_json(config: Path | None, found: Iterable[ConfigFinding]) -> str:
    """Return the result as a JSON object: `config`, `valid`, `errors` and `warnings`."""
    listed: dict[bool, list[dict[str, object]]] = {True: [], False: []}
    for each in found:
        problem = each.problem
        listed[each.is_error].append(
            {
                "message": problem.message,
                "hint": problem.hint,
                "setting": problem.setting or None,
                "file": None if problem.file is None else str(problem.file),
                "line": problem.line,
            }
        )
    result = {"config": None if config is None else str(config), "valid": not listed[True]}
    return json.dumps(result | {"errors": listed[True], "warnings": listed[False]}, ensure_ascii=False)


def _placed(error: ConfigError, name: str, reading: Reading) -> Problem:
    """Return the problem with the place of the setting, if any source gives it."""
    given = reading.given.get(name)
    message = error.message if given is None else f"{error.message} ({given.where})"
    return Problem(
        message=message,
        hint=error.hint,
        setting=name,
        file=None if given is None else given.file,
        line=None if given is None else given.line,
    )


def _looks(settings: Settings) -> Iterator[tuple[str, bool, Callable[[], object]]]:
    """Yield each look at this machine: the setting, whether what is found is a mistake anywhere, and the look itself.

    Each look raises ConfigError.
    """
    yield "simulate", True, lambda: _simulated(settings.simulate)
    folder = settings.profiles_dir
    yield "profiles_dir", folder is not None and folder.is_dir(), lambda: catalog_files.load(folder)
    yield "state_dir", False, lambda: _writable(settings.state_dir, "the state directory", "--state-dir")
    folders: dict[Path, str] = {}
    for name, addresses in {"listen": settings.listen, "admin_listen": (settings.admin_address,)}.items():
        for each in addresses:
            if isinstance(each, UnixAddress):
                folders.setdefault(each.path.parent, name)
    for path, name in folders.items():
        yield name, False, partial(_writable, path, "the folder of a socket", "another address")
    if settings.socket_group:
        yield "socket_group", False, lambda: group_id_of(settings.socket_group)
    yield "socket_schedulers", False, lambda: configured_roles(settings, Users())
    yield "tls_cert", False, lambda: configured_certificates(settings)
    if settings.kubernetes and settings.kubeconfig is not None:
        yield "kubeconfig", False, lambda: _readable(settings.kubeconfig)
    if settings.gpus is not None and not settings.simulate:
        yield "gpus", False, lambda: _known(settings.gpus or (), "manage")
    if settings.fractions_by_gpu and not settings.simulate:
        yield "fractions_by_gpu", False, lambda: _known([gpu for gpu, _ in settings.fractions_by_gpu], "share")
    if not settings.simulate:
        yield (
            "fractions",
            False,
            lambda: _can_share({settings.fractions, *(way for _, way in settings.fractions_by_gpu)}),
        )


def _simulated(gpus: str) -> None:
    if not gpus:
        return
    from mig_agent.simulator import SimulatorError, parse_gpus  # noqa: PLC0415 -- only where GPUs are simulated

    try:
        parse_gpus(gpus)
    except SimulatorError as error:
        raise ConfigError(str(error), "write MODEL:COUNT, such as a100-40gb:1,h100-80gb:2") from error


def _writable(folder: Path, thing: str, instead: str) -> None:
    """Raise ConfigError where a folder cannot be written to, or not be made."""
    there = next(each for each in (folder, *folder.parents) if os.access(each, os.F_OK))
    if not there.is_dir():
        raise ConfigError(f"cannot use {thing} {folder}: {there} is no folder", f"remove it, or give {instead}")
    if not os.access(there, os.W_OK | os.X_OK):
        doing = "write to" if there == folder else "make"
        raise ConfigError(
            f"cannot {doing} {thing} {folder} as the user who checks: permission denied in {there}",
            f"{_AS_THE_AGENT}, or give {instead}",
        )
    if there == folder:
        refuse_if_replaceable(folder, thing, f"give {instead}")


def _readable(path: Path | None) -> None:
    if path is not None and not os.access(path, os.R_OK):
        why = "permission denied" if path.exists() else "there is no such file"
        raise ConfigError(f"cannot read {path}: {why}", "")


def _can_share(ways: Collection[str]) -> None:
    """Raise ConfigError for a way to enforce limits of shares that this machine lacks; `auto` takes what there is."""
    if Fractions.MPS in ways and shutil.which(PROGRAM) is None:
        raise ConfigError(
            f"cannot share GPUs by mps: {PROGRAM} is not installed", "it comes with the driver; or write auto"
        )
    if Fractions.CGROUP in ways and not _CGROUP2.exists():
        raise ConfigError("cannot share GPUs by cgroup: cgroup v2 is not mounted", "write auto, or mps")


def _known(names: Iterable[str], action: str) -> None:
    """Raise ConfigError for GPUs that this machine does not have; not where the driver cannot be asked in time."""
    there: list[dict[int, GpuUuid]] = []

    def ask() -> None:
        with contextlib.suppress(DriverError):
            driver = Driver.open()
            there.append(dict(driver.uuids()))
            driver.close_at_exit()

    thread = threading.Thread(target=ask, name="driver", daemon=True)
    thread.start()
    thread.join(_DRIVER_SECONDS)
    if there:
        selected_gpus(there[0], names, action)

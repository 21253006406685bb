"""Finds the settings of the agent of this machine: of the process that listens on its socket, or of its file."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from mig_agent.core.errors import ConfigError
from mig_agent.doctor.probe import DeniedError, Probe

if TYPE_CHECKING:
    from mig_agent.config import Settings
    from mig_agent.config.load import Reading

CONFIG_FILE: Final = Path("/etc/mig-agent/config.yaml")
"""The file that the service unit names."""
_CONFIG_VARIABLE = "MIG_AGENT_CONFIG"
_PREFIX = "MIG_AGENT_"
_CUDA = "CUDA_VISIBLE_DEVICES"
"""It limits `gpus`."""
_CONNECT_SECONDS = 1.0
_CREDENTIALS = struct.Struct("iII")
"""`struct ucred` of unix(7): pid, uid and gid."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundSettings:
    """The settings of the agent, or why they are not known."""

    settings: Settings | None = None
    given: frozenset[str] = frozenset()
    """The names of the settings that are not the defaults."""
    where: str = ""
    """Where they come from: `the agent (pid 4711)`, `/etc/mig-agent/config.yaml`, `the defaults`."""
    pid: int | None = None
    """The agent's process, if it listens on the socket and can be seen from here."""
    error: ConfigError | None = None
    """The mistake in them."""
    partly: bool = False
    """True if the agent's environment could not be read, which may set some."""


def listener_of(path: Path) -> int | None:
    """Return the pid of the process that listens on a Unix socket; None if none does or it cannot be seen."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        try:
            connection.settimeout(_CONNECT_SECONDS)
            connection.connect(str(path))
            # unix(7): the credentials of a listening socket are those of the process that called listen(2).
            raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        except OSError:
            return None
    pid, _, _ = _CREDENTIALS.unpack(raw)
    return pid or None


def find_settings(probe: Probe, socket_path: Path | None, config: Path | None = None) -> FoundSettings:
    """Return the settings of the agent that listens on the socket; without it those of `config` or the usual file."""
    pid = None if socket_path is None else listener_of(socket_path)
    try:
        return _find(probe, pid, config)
    except ImportError as error:
        package = (error.name or "").partition(".")[0]
        without = "the agent" if package == "mig_agent" else package
        missing = ConfigError(
            f"cannot read the agent's settings: this client is installed without {without}",
            "run the migctl of the agent's own installation",
        )
        return FoundSettings(where="an unknown place", pid=pid, error=missing)


def _find(probe: Probe, pid: int | None, config: Path | None) -> FoundSettings:
    from mig_agent.config.load import read  # noqa: PLC0415 -- a light client has no PyYAML

    if pid is not None and config is None:
        found = _of_process(probe, pid)
        if found is not None:
            return found
    file = config or _file_of_environment(probe.environment)
    if file is None and probe.exists(str(CONFIG_FILE)):
        file = probe.root / CONFIG_FILE.relative_to("/")
    where = "the defaults" if file is None else str(file)
    return _found(read(file, {}, environment={}), where, pid)


def _file_of_environment(environment: Mapping[str, str]) -> Path | None:
    named = environment.get(_CONFIG_VARIABLE)
    return Path(named) if named else None


def _of_process(probe: Probe, pid: int) -> FoundSettings | None:
    """Return the settings of `mig-agent serve` as it was started; None if the process is something else."""
    try:
        words = (probe.read(f"proc/{pid}/cmdline") or "").split("\0")[:-1]
    except (DeniedError, OSError):
        return None
    if "serve" not in words:
        return None
    from mig_agent.config.load import read  # noqa: PLC0415 -- a light client has no PyYAML

    arguments = words[words.index("serve") + 1 :]
    where = f"the agent (pid {pid})"
    try:
        environment, partly = _environment_of(probe, pid), False
    except (DeniedError, OSError):
        environment, partly = {}, True
    try:
        config, flags = _parse(arguments)
        named = config or _file_of_environment(environment)
        if named is not None and not named.is_absolute():
            named = Path(os.readlink(probe.root / f"proc/{pid}/cwd")) / named  # noqa: PTH115 -- the kernel's link
    except ConfigError as error:
        return FoundSettings(where=where, pid=pid, error=error, partly=partly)
    except (click.ClickException, OSError):
        return None
    return _found(read(named, flags, environment=environment), where, pid, partly=partly)


def _found(reading: Reading, where: str, pid: int | None, *, partly: bool = False) -> FoundSettings:
    return FoundSettings(
        settings=reading.settings,
        given=frozenset(reading.given),
        where=where,
        pid=pid,
        error=reading.problems[0].error() if reading.problems else None,
        partly=partly,
    )


def _environment_of(probe: Probe, pid: int) -> dict[str, str]:
    """Return the variables of the process that are settings, and no others."""
    text = probe.read(f"proc/{pid}/environ") or ""
    pairs = (each.partition("=") for each in text.split("\0"))
    return {name: value for name, _, value in pairs if name.startswith(_PREFIX) or name == _CUDA}


def _parse(arguments: Sequence[str]) -> tuple[Path | None, dict[str, str | tuple[str, ...] | None]]:
    """Return the configuration file and the flags of `mig-agent serve`. Raises ClickException."""
    from mig_agent.config.flags import settings_flags, texts_of  # noqa: PLC0415 -- as above

    config = click.Option(["--config"], type=click.Path(path_type=Path))
    command = click.Command("serve", params=[config, *settings_flags()])
    with command.make_context("serve", list(arguments)) as context:
        given = dict(context.params)
    file = given.pop("config")
    return file, texts_of(given)

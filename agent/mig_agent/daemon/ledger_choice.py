"""Finds the ledger that `mig-agent backup` and `mig-agent restore` mean: that of the running agent, if one runs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from mig_agent.adapters.ledger.inspection import ledger_in
from mig_agent.adapters.ledger.store import LEDGER_FILE
from mig_agent.config import Settings, UnixAddress
from mig_agent.config.load import load
from mig_agent.core.errors import ConfigError, UsageError


def choose_ledger(config: Path | None, state_dir: str | None, action: str) -> Path:
    """Return the path of the ledger in `state_dir`, else in the state directory of the settings.

    Without `state_dir` an agent that runs and keeps its ledger elsewhere is asked for: copying another ledger would
    look like a backup of its leases. Raises ConfigError; `action` is for its message: `back up`.
    """
    settings = load(config, {} if state_dir is None else {"state_dir": state_dir})
    ledger = ledger_in(settings.state_dir)
    if state_dir is not None:
        return ledger
    from mig_agent.doctor.agent_settings import listener_of  # noqa: PLC0415 -- imports gRPC

    for socket in _sockets(settings):
        pid = listener_of(socket)
        used = None if pid is None else _ledger_of(pid)
        if used is not None and not _is_same(ledger, used):
            raise ConfigError(
                f"cannot {action} {ledger}: the agent (pid {pid}) at unix://{socket} keeps its ledger in {used.parent}",
                f"give --state-dir {used.parent}, or --state-dir {settings.state_dir} if that one is meant",
            )
    return ledger


def check_state_directory(ledger: Path, action: str) -> None:
    """Raise ConfigError if the folder of the ledger is not there, as where its name was mistyped."""
    if not ledger.parent.is_dir():
        raise ConfigError(
            f"cannot {action} {ledger}: there is no folder {ledger.parent}",
            f"name the agent's state directory with --state-dir; for a new agent: mkdir -m 700 {ledger.parent}",
        )


def _sockets(settings: Settings) -> Iterator[Path]:
    """Yield the sockets at which the agent of these settings, and that of the clients, would listen."""
    from mig_agent.client.addresses import ADDRESS_VARIABLE, resolve  # noqa: PLC0415 -- as above

    if os.environ.get(ADDRESS_VARIABLE):
        try:
            named = resolve(None).path
        except UsageError as error:
            raise ConfigError(error.message, error.hint) from error
        if named is not None:
            yield named
    yield from (each.path for each in settings.listen if isinstance(each, UnixAddress))


def _ledger_of(pid: int) -> Path | None:
    """Return the ledger that a process has open; None if it has none, or this user may not see it."""
    try:
        for each in Path(f"/proc/{pid}/fd").iterdir():
            path = Path(os.readlink(each))  # noqa: PTH115 -- the kernel's link
            if path.name == LEDGER_FILE:
                return path
    except OSError:
        return None
    return None


def _is_same(one: Path, other: Path) -> bool:
    try:
        return one.samefile(other)
    except OSError:
        return False

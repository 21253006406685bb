"""Checks of the ledger: whether it can be written, is whole, and is nobody else's to read."""

from __future__ import annotations

import stat
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final

from mig_agent.core.errors import LedgerError
from mig_agent.core.quantities import counted
from mig_agent.doctor.findings import Finding, failed, ok, unknown, warning
from mig_agent.doctor.probe import SUDO_HINT, DeniedError
from mig_agent.doctor.subject import Answered, Subject, within, words_of

if TYPE_CHECKING:
    from mig_agent.adapters.ledger.inspection import LedgerSummary

_SECONDS: Final = 30.0
"""Longest time that the check of all rows may take."""
_OTHERS: Final = 0o077


def state(subject: Subject) -> Iterator[Finding]:
    """Check what the agent says of its ledger."""
    name, node = "ledger.state", subject.node
    if node is None:
        return
    if node.ledger_error:
        yield failed(
            name,
            f"no new lease can be written: {node.ledger_error}",
            "make room on the disk, or mount it for writing; it goes on by itself",
        )
    if node.ledger_doubt is not None:
        yield warning(name, f"the ledger {node.ledger_doubt.why}", "migctl status says how to settle it")


def file(subject: Subject) -> Iterator[Finding]:
    """Check the ledger's file, every row of it."""
    name, folder = "ledger.file", subject.state_dir
    if folder is None:
        yield unknown(name, "the ledger was not checked: the settings do not say where it is", subject.settings_hint)
        return
    from mig_agent.adapters.ledger.inspection import ledger_in, read_summary  # noqa: PLC0415 -- imports sqlite3

    path = ledger_in(folder)
    try:
        if not folder.exists():
            yield ok(name, f"there is no folder {folder} yet: the agent makes it when it first starts")
            return
        if not folder.is_dir():
            yield failed(name, f"{folder} is no folder", f"sudo mv {folder} {folder}.aside; the agent makes the folder")
            return
        mode = stat.S_IMODE(folder.stat().st_mode)
        is_there = path.exists() or path.is_symlink()
    except PermissionError as error:
        raise DeniedError(folder) from error
    if mode & _OTHERS:
        yield failed(name, f"others may use {folder} (mode {mode:04o})", f"sudo chmod 700 {folder}")
    if not is_there:
        yield ok(name, f"there is no ledger in {folder} yet")
        return
    if not path.is_file():  # a pipe would be waited for
        yield failed(name, f"{path} is no plain file: the agent cannot start with it", f"sudo mv {path} {path}.aside")
        return
    yield _verified(path, within(_SECONDS, lambda: read_summary(path)), runs=subject.node is not None)


def _verified(path: Path, answered: Answered[LedgerSummary], *, runs: bool) -> Finding:
    name, found = "ledger.file", answered.value
    if found is not None and found.damage:
        hint = (
            "sudo systemctl stop mig-agent; sudo mig-agent restore FILE; sudo systemctl start mig-agent, "
            "with FILE a backup: without one the agent keeps it aside when it starts"
        )
        return failed(name, f"{path} is damaged: {found.damage}", hint)
    if found is not None:
        has = f"{counted(found.leases, 'lease')} and {counted(found.events, 'event')}"
        return ok(name, f"{path} is whole: {has}, {found.mib:g} MiB")
    if isinstance(answered.error, LedgerError) and not runs:
        return failed(
            name, words_of(answered.error), "sudo journalctl -u mig-agent -n 50 tells whether the agent starts with it"
        )
    if isinstance(answered.error, TimeoutError):
        return unknown(
            name, f"{path} is too large to check here", "sudo mig-agent backup FILE checks every row of it, too"
        )
    return unknown(name, f"{path} could not be checked: {words_of(answered.error)}", SUDO_HINT)

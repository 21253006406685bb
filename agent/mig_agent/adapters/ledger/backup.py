"""Backups of the ledger: a consistent copy while the agent runs, and a copy put in the ledger's place."""

from __future__ import annotations

import os
import sqlite3
import time
from contextlib import closing
from pathlib import Path

from mig_agent.adapters.failpoints import FAILPOINTS
from mig_agent.adapters.ledger.commit_counter import sync_folder
from mig_agent.adapters.ledger.creation import connect, make_restored, verify
from mig_agent.adapters.ledger.damage import READING_ERRORS, DamagedError
from mig_agent.adapters.ledger.lease_evidence import recoverable_leases
from mig_agent.adapters.ledger.quarantine import REPLACED, finish_replacing, replace_ledger
from mig_agent.adapters.ledger.reader import Doubt, count_active
from mig_agent.adapters.ledger.schema import check_version, is_of_another_program
from mig_agent.adapters.tokens import KEY_FILE
from mig_agent.core.errors import ConfigError, LedgerError

_AS_WHOM = "run it as root, or as the agent's user"


def back_up(ledger: Path, target: Path, *, force: bool = False) -> int:
    """Copy a ledger that may be in use; return how many active leases the copy has.

    Every row of the copy is checked. The copy is one file, readable by its owner alone, and on the disk when this
    returns. Raises ConfigError if there is a file of that name, unless `force`, and LedgerError.
    """
    if _exists(target, f"cannot write {target}") and not force:
        raise ConfigError(f"cannot write {target}: there is such a file", "give another name, or --force")
    if _is_own(target, ledger):
        raise ConfigError(f"cannot write {target}: it is one of the agent's own files", "give the name of a new file")
    if _exists(target, f"cannot write {target}") and not target.is_file():
        raise ConfigError(f"cannot write {target}: it is no plain file", "give the name of a new file")
    if not _exists(ledger, f"cannot back up {ledger}"):
        raise LedgerError(f"cannot back up {ledger}: there is no ledger")
    if not ledger.is_file():  # a pipe would be waited for
        raise LedgerError(f"cannot back up {ledger}: it is no plain file")
    if not target.parent.is_dir():
        raise ConfigError(f"cannot write {target}: there is no folder {target.parent}")
    temporary = target.with_name(f".{target.name}.{os.getpid()}.new")
    try:
        try:
            active = _copy(ledger, temporary)
            with FAILPOINTS.around("ledger-backup"):
                if force:
                    temporary.replace(target)
                else:
                    os.link(temporary, target)  # unlike a rename, never replaces a file that was made meanwhile
        finally:
            with FAILPOINTS.around("ledger-backup"):
                temporary.unlink(missing_ok=True)
        sync_folder(target.parent)
    except FileExistsError:
        raise ConfigError(f"cannot write {target}: there is such a file", "give another name, or --force") from None
    except (DamagedError, OSError, *READING_ERRORS) as error:
        raise LedgerError(f"cannot back up {ledger} to {target}: {error}") from error
    return active


def _exists(path: Path, what: str) -> bool:
    """Return True if the file exists. Raises ConfigError if this user may not see or read it."""
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise ConfigError(f"{what}: {error.strerror}", _AS_WHOM) from error
    return True


def _is_own(target: Path, ledger: Path) -> bool:
    """Return True for a file of the state directory that an agent uses: it would go on writing to a replaced one."""
    try:
        if target.parent.samefile(ledger.parent) and (target.name == KEY_FILE or target.name.startswith(ledger.name)):
            return True
        return target.samefile(ledger)
    except OSError:
        return False


def _copy(ledger: Path, target: Path) -> int:
    with FAILPOINTS.around("ledger-backup"):
        os.close(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    with closing(connect(target, "rw")) as copy:
        with FAILPOINTS.around("ledger-backup"):
            with closing(connect(ledger, "ro")) as source:
                source.backup(copy)
            copy.execute("PRAGMA journal_mode = DELETE")  # one file, readable even on a read-only file system
        verify(copy)
        active = count_active(copy)
    descriptor = os.open(target, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return active


def restore(ledger: Path, backup: Path) -> tuple[int, Path]:
    """Replace the ledger with a backup; return its number of active leases, and where the former ledger is kept.

    No agent may be using the ledger. The backup's leases are active again. Instances that it does not account for count
    as foreign: they are neither leased nor destroyed. Raises LedgerError and ConfigError, with everything left as it
    was.
    """
    if not _exists(backup, f"cannot restore {backup}"):
        raise LedgerError(f"cannot restore {backup}: there is no such file")
    if not backup.is_file():  # as above
        raise LedgerError(f"cannot restore {backup}: it is no plain file")
    if not backup.stat().st_size:
        raise LedgerError(f"cannot restore {backup}: it is empty")
    try:
        finish_replacing(ledger)
        with closing(connect(backup, "ro")) as source:
            if is_of_another_program(source):
                raise LedgerError(f"cannot restore {backup}: it is another program's database")
            verify(source)
            check_version(source, str(backup))
            active = count_active(source)
            written = source.execute("SELECT max(at) FROM event").fetchone()[0]
        moment = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(written)) if isinstance(written, float) else ""
        why = f"was restored from {backup}" + (f", which ends at {moment}" if moment else "")
        aside = replace_ledger(
            ledger,
            REPLACED,
            lambda new, former: make_restored(
                new, backup, Doubt(at=time.time(), why=why, kept_as=str(former), restored=True)
            ),
            former=recoverable_leases(ledger),
        )
    except (DamagedError, OSError, *READING_ERRORS) as error:
        is_other = getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_NOTADB
        why = "it is no ledger of an agent" if is_other else str(error)
        raise LedgerError(f"cannot restore {backup}: {why}") from error
    return active, aside

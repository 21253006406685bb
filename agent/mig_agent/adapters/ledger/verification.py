"""Reads a ledger whole, with every part checked, and replaces a ledger that is missing or damaged by an empty one."""

from __future__ import annotations

import sqlite3
import stat
import time
from contextlib import closing
from pathlib import Path

from mig_agent.adapters.ledger.commit_counter import counter_of, read_counter
from mig_agent.adapters.ledger.creation import connect, make_empty, verify
from mig_agent.adapters.ledger.damage import READING_ERRORS, DamagedError, is_damage
from mig_agent.adapters.ledger.digest import Head, read_head
from mig_agent.adapters.ledger.lease_evidence import evidence_of, read_count, recoverable_leases
from mig_agent.adapters.ledger.quarantine import DAMAGED, FILES, any_file_exists, replace_ledger
from mig_agent.adapters.ledger.reader import Contents, Doubt, read_contents
from mig_agent.adapters.ledger.schema import (
    PATCHES,
    Patch,
    check_version,
    is_newer,
    is_of_another_program,
    is_older,
    prepare,
)
from mig_agent.adapters.tokens import KEY_FILE
from mig_agent.core.errors import LedgerError


def make_ledger(path: Path, why: str, patches: tuple[Patch, ...] = PATCHES) -> None:
    """Replace the ledger's files with an empty ledger.

    `why` completes "the ledger ..."; empty for a first one. Raises sqlite3.Error, OSError.
    """
    there = any_file_exists(path)
    at = time.time()
    replace_ledger(
        path,
        DAMAGED,
        lambda new, aside: make_empty(
            new, patches, Doubt(at=at, why=why, kept_as=str(aside) if there else "") if why else None
        ),
        former=recoverable_leases(path),
    )


def read_whole(path: Path, patches: tuple[Patch, ...], most_ended: int) -> tuple[Contents, Head]:
    """Return the contents of the ledger, every part of it checked; create the first ledger.

    Raises DamagedError if it is not what was committed last, LedgerError if a newer version or another program wrote
    it, sqlite3.Error and OSError if it cannot be read now.
    """
    if not any_file_exists(path):
        if path.with_name(KEY_FILE).exists():
            raise DamagedError("it is gone, and the key of its tokens is there")
        make_ledger(path, "", patches)
    _check_files(path)
    try:
        # Opened read-only, so that SQLite leaves a log that it cannot use where it is.
        with closing(connect(path, "ro")) as connection:
            head = _verify(connection, path, patches)
            if not is_older(connection, patches):
                return read_contents(connection, head, most_ended), head
        with closing(connect(path, "rw")) as connection:
            prepare(connection, patches)
            head = read_head(connection)
            return read_contents(connection, head, most_ended), head
    except READING_ERRORS as error:
        if is_damage(error, path):
            raise DamagedError(str(error)) from error
        raise


def _check_files(path: Path) -> None:
    if not path.exists():
        raise DamagedError("its file is gone")
    if not path.is_file() or not path.stat().st_size:
        raise DamagedError("its file is empty" if path.is_file() else "it is no file")
    for ending in FILES:
        part = path.with_name(path.name + ending)
        if ending and (part.exists() or part.is_symlink()) and not stat.S_ISREG(part.lstat().st_mode):
            raise DamagedError(f"its {part.name} is no file")


def _verify(connection: sqlite3.Connection, path: Path, patches: tuple[Patch, ...]) -> Head:
    try:
        return _compared(connection, path, patches)
    except (DamagedError, *READING_ERRORS) as error:
        if is_newer(connection, patches):  # and may keep its digest in another way
            raise LedgerError(
                f"cannot use the ledger {path}: a newer version of the agent wrote it; run that version ({error})"
            ) from error
        raise


def _compared(connection: sqlite3.Connection, path: Path, patches: tuple[Patch, ...]) -> Head:
    counter = counter_of(path)
    if is_of_another_program(connection):
        if not counter.exists() and not path.with_name(KEY_FILE).exists():
            raise LedgerError(f"cannot use {path} as ledger: it is another program's database")
        raise DamagedError("its header is not as it was written")
    head = verify(connection)
    if connection.execute("PRAGMA journal_mode").fetchone()[0] != "wal":
        raise DamagedError("its header is not as it was written")
    counted = read_counter(counter)
    if counted.ledger != head.ledger:
        raise DamagedError(f"its commit counter {counter.name} is another ledger's")
    # Both are written after the commit, so neither may be ahead: an older log that was put back together with its
    # counter is noticed, too.
    witnessed = read_count(evidence_of(path))
    last = max(each.number for each in (counted, witnessed) if each is not None and each.ledger == head.ledger)
    if head.number < last:
        raise DamagedError(f"its last {last - head.number} commits are missing")
    check_version(connection, str(path), patches)
    return head

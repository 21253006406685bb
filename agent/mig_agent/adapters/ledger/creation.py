"""Creates ledgers: an empty one, one restored from a backup, and a copy of one in use."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path

from mig_agent.adapters.failpoints import FAILPOINTS
from mig_agent.adapters.ledger.commit_counter import Count, sync_folder
from mig_agent.adapters.ledger.damage import DamagedError
from mig_agent.adapters.ledger.digest import PUT_HEAD, Head, RunningDigest, compute_digest, read_head
from mig_agent.adapters.ledger.reader import Doubt
from mig_agent.adapters.ledger.schema import Patch, prepare

_PAGE_BYTES = 1024
"""Small pages: a lease touches a few rows, and each page that they are on is written to the disk."""
_BUSY_SECONDS = 5.0
_PUT_FACT = "INSERT INTO fact (name, value) VALUES (?, ?) ON CONFLICT (name) DO UPDATE SET value = excluded.value"
_DROP_UNLEASED = (
    "DELETE FROM instance WHERE generation NOT IN"
    " (SELECT json_extract(each.value, '$[0]') FROM lease, json_each(lease.devices) AS each WHERE ended_at IS NULL)"
)


def connect(path: Path, mode: str) -> sqlite3.Connection:
    """Open a database file; `mode` is ro or rw. Raises sqlite3.Error."""
    connection = sqlite3.connect(
        f"{path.absolute().as_uri()}?mode={mode}",
        uri=True,
        timeout=_BUSY_SECONDS,
        isolation_level=None,  # transactions are begun and ended in plain sight
        check_same_thread=False,  # opened by the caller, used by the writing thread alone
        cached_statements=64,
    )
    try:
        if mode != "ro":
            connection.execute("PRAGMA synchronous = FULL")
            connection.execute("PRAGMA wal_autocheckpoint = 0")  # not inside a commit
    except BaseException:
        connection.close()
        raise
    return connection


def make_empty(path: Path, patches: tuple[Patch, ...], doubt: Doubt | None) -> Count:
    """Create an empty ledger, on the disk when this returns. Raises sqlite3.Error, OSError.

    With a doubt, generations and revisions continue from the clock, since earlier numbers must not be reused.
    """
    with FAILPOINTS.around("ledger-file"):
        path.touch(mode=0o600, exist_ok=False)
    with closing(connect(path, "rw")) as connection:
        with FAILPOINTS.around("ledger-file"):
            connection.execute(f"PRAGMA page_size = {_PAGE_BYTES}")  # counts for a new file alone
            connection.execute("PRAGMA journal_mode = WAL")
        prepare(connection, patches)
        with _changed(connection) as facts:
            if doubt is not None:
                facts["doubt"] = json.dumps(asdict(doubt))
                facts["last_generation"] = str(int(time.time()))
        count = _read_count(connection)
    _sync(path)
    return count


def make_restored(path: Path, backup: Path, doubt: Doubt) -> Count:
    """Create a ledger from a backup, on the disk when this returns. Raises sqlite3.Error, OSError.

    Its leases keep their instances. All other instances are forgotten: each may have been leased since, so they are
    discovered again as foreign. It gets a new identity, so that no other ledger's commit counter fits it.
    """
    with FAILPOINTS.around("ledger-file"):
        path.touch(mode=0o600, exist_ok=False)
    with closing(connect(path, "rw")) as connection:
        with FAILPOINTS.around("ledger-file"):
            with closing(connect(backup, "ro")) as source:
                source.backup(connection)
            connection.execute("PRAGMA journal_mode = WAL")
        with _changed(connection) as facts:
            with FAILPOINTS.around("ledger-file"):
                connection.execute(_DROP_UNLEASED)
            known = connection.execute("SELECT value FROM fact WHERE name = 'last_generation'").fetchone()
            highest = connection.execute("SELECT max(generation) FROM instance").fetchone()[0] or 0
            generation = max(int(known[0]) if known else 0, highest)
            facts["doubt"] = json.dumps(asdict(replace(doubt, generation=generation)))
            facts["last_generation"] = str(max(generation, int(time.time())))
        count = _read_count(connection)
    _sync(path)
    return count


def make_copy(path: Path, source: sqlite3.Connection) -> Count:
    """Copy an open ledger, on the disk when this returns. Raises sqlite3.Error, OSError, DamagedError."""
    with FAILPOINTS.around("ledger-file"):
        path.touch(mode=0o600, exist_ok=False)
    with closing(connect(path, "rw")) as copy:
        with FAILPOINTS.around("ledger-file"):
            source.backup(copy)
        count = verify(copy).count
    _sync(path)
    return count


@contextlib.contextmanager
def _changed(connection: sqlite3.Connection) -> Iterator[dict[str, str]]:
    """Run one transaction that stores the facts put into the dictionary and gives the ledger a new identity."""
    facts: dict[str, str] = {}
    with FAILPOINTS.around("ledger-file"):
        head = read_head(connection)
        digest = RunningDigest(connection, head.digest)
        connection.execute("BEGIN IMMEDIATE")
        yield facts
        for name, value in facts.items():
            connection.execute(_PUT_FACT, (name, value))
        revision = max(head.revision, int(time.time())) if facts else head.revision
        changed = Head(ledger=secrets.token_hex(16), number=head.number + 1, revision=revision, digest=digest.value)
        connection.execute(PUT_HEAD, changed.row())
        connection.execute("COMMIT")
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")


def _read_count(connection: sqlite3.Connection) -> Count:
    return read_head(connection).count


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    sync_folder(path.parent)


def verify(connection: sqlite3.Connection) -> Head:
    """Check every page and row of a ledger, and return its head. Raises DamagedError, sqlite3.Error."""
    answer = str(connection.execute("PRAGMA integrity_check(1)").fetchone()[0])
    if answer != "ok":
        raise DamagedError(f"SQLite finds: {answer}")
    head = read_head(connection)
    if compute_digest(connection) != head.digest:
        raise DamagedError("rows in it are not as they were written")
    return head

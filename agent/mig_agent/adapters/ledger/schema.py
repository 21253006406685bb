"""The ledger's tables, as numbered patches, and which version of the agent may open which file.

A patch that only adds (a table, or a column with a default) keeps the `least_reader` of the patch before: the version
before can then still read and write the file, so a rollback works. Any other patch raises it, and older versions refuse
the file with a message.
"""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass, replace

from mig_agent.adapters.failpoints import FAILPOINTS
from mig_agent.adapters.ledger.damage import DamagedError
from mig_agent.adapters.ledger.digest import Head, compute_digest, read_head
from mig_agent.core.errors import LedgerError

_FUTURE_VERSIONS = 1000
_NO_LEDGER = "0" * 32
"""Identity of a ledger that has not been given one."""
UNCONFIRMED = "unconfirmed/"
"""Prefix of the name of a fact about a lease that its client has not confirmed; the lease's id follows."""
DRAIN = "drain/"
"""Prefix of the name of a fact about a cordon that drains a GPU; the GPU's UUID follows. Its value is JSON: when
the cordon began, and the deadline or null, in seconds since the epoch. A version that does not know it takes the GPU
for cordoned."""
APPLICATION_ID = 0x4D494741
"""`MIGA` in the file's header, so that another program's database is not taken for a ledger."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Patch:
    """One step of the schema."""

    number: int
    least_reader: int
    """Oldest patch number whose program can still use the file afterwards."""
    statements: tuple[str, ...]


# Number 1 was the schema of development versions, without owners of leases and kinds of devices.
PATCHES = (
    Patch(
        number=2,
        least_reader=2,
        statements=(
            # Of the ledger itself, in one row; see `ledger.digest`.
            """CREATE TABLE head (
                id INTEGER PRIMARY KEY CHECK (id = 1),
                ledger TEXT NOT NULL,
                number INTEGER NOT NULL,
                revision INTEGER NOT NULL,
                digest INTEGER NOT NULL,
                mark INTEGER NOT NULL)""",
            "CREATE TABLE fact (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID",
            """CREATE TABLE instance (
                generation INTEGER PRIMARY KEY,
                gpu TEXT NOT NULL,
                kind TEXT NOT NULL,
                profile_id INTEGER NOT NULL,
                profile_name TEXT NOT NULL,
                compute_slices INTEGER NOT NULL,
                memory_slices INTEGER NOT NULL,
                memory_mib INTEGER NOT NULL,
                start INTEGER NOT NULL,
                size INTEGER NOT NULL,
                state TEXT NOT NULL CHECK (state IN ('creating', 'present', 'destroying')),
                gpu_instance_id INTEGER,
                compute_instance_id INTEGER,
                uuid TEXT NOT NULL,
                since REAL NOT NULL,
                last_tenant TEXT)""",
            # Request ids are each caller's own.
            """CREATE TABLE lease (
                id TEXT PRIMARY KEY,
                request_id TEXT NOT NULL,
                asker TEXT NOT NULL,
                digest TEXT NOT NULL,
                tenant TEXT NOT NULL,
                holder TEXT NOT NULL,
                holder_uid INTEGER,
                holder_pid INTEGER,
                created_at REAL NOT NULL,
                expires_at REAL,
                owner TEXT NOT NULL,
                devices TEXT NOT NULL,
                ended_at REAL,
                end_reason TEXT NOT NULL DEFAULT '',
                UNIQUE (request_id, asker)) WITHOUT ROWID""",
            # Finds active leases, and old ones to delete, without reading a million ended ones.
            "CREATE INDEX lease_ended ON lease (ended_at)",
            """CREATE TABLE cordon (
                gpu TEXT PRIMARY KEY,
                reason TEXT NOT NULL,
                since REAL NOT NULL) WITHOUT ROWID""",
            # As last read from the driver, for an agent that starts paused.
            "CREATE TABLE gpu (uuid TEXT PRIMARY KEY, text TEXT NOT NULL) WITHOUT ROWID",
            """CREATE TABLE event (
                number INTEGER PRIMARY KEY,
                at REAL NOT NULL,
                revision INTEGER NOT NULL,
                kind TEXT NOT NULL,
                words TEXT NOT NULL,
                gpu TEXT,
                gpu_index INTEGER,
                lease TEXT,
                generation INTEGER,
                holder TEXT NOT NULL,
                data TEXT NOT NULL)""",
        ),
    ),
    Patch(
        number=3,
        least_reader=2,
        statements=(
            # What a lease counts for, while it is active; see `ledger.accounting`.
            "ALTER TABLE lease ADD COLUMN account TEXT NOT NULL DEFAULT ''",
            "ALTER TABLE lease ADD COLUMN peaks TEXT NOT NULL DEFAULT ''",
            """CREATE TABLE accounting (
                number INTEGER PRIMARY KEY,
                merged INTEGER NOT NULL,
                lease TEXT NOT NULL,
                device INTEGER NOT NULL,
                tenant TEXT NOT NULL,
                user TEXT NOT NULL,
                uid INTEGER,
                name TEXT NOT NULL,
                profile TEXT NOT NULL,
                model TEXT NOT NULL,
                memory_mib INTEGER NOT NULL,
                slices INTEGER NOT NULL,
                asked_at REAL,
                granted_at REAL NOT NULL,
                ended_at REAL NOT NULL,
                seconds REAL NOT NULL,
                waited REAL NOT NULL,
                leases INTEGER NOT NULL,
                devices INTEGER NOT NULL,
                measured_seconds REAL NOT NULL,
                peak_mib INTEGER,
                peak_mib_seconds REAL NOT NULL,
                samples INTEGER NOT NULL,
                asked TEXT NOT NULL)""",
            "CREATE INDEX accounting_ended ON accounting (merged, ended_at)",
            # Of all leases that have ended, ever.
            """CREATE TABLE tenant_total (
                tenant TEXT PRIMARY KEY,
                mib_ms INTEGER NOT NULL,
                slice_ms INTEGER NOT NULL,
                waited_ms INTEGER NOT NULL,
                leases INTEGER NOT NULL) WITHOUT ROWID""",
        ),
    ),
    Patch(
        number=4,
        least_reader=2,  # until a share is recorded: see `FIRST_WITH_SHARES`
        statements=(
            # How the memory limit of a share is enforced.
            "ALTER TABLE instance ADD COLUMN enforced_by TEXT",
            # The most of the GPU's multiprocessors that each process of a share uses, in percent.
            "ALTER TABLE instance ADD COLUMN compute_percent INTEGER",
        ),
    ),
)
FIRST_WITH_SHARES = 4
"""The `least_reader` of a ledger in which a share was recorded: an older version cannot read that record."""


def check_version(connection: sqlite3.Connection, where: str, patches: tuple[Patch, ...] = PATCHES) -> None:
    """Check that this program can work with a whole ledger. Raises LedgerError, DamagedError, sqlite3.Error."""
    known = patches[-1].number
    version = _version(connection)
    least_reader = int(connection.execute("SELECT value FROM fact WHERE name = 'least_reader'").fetchone()[0])
    if least_reader > known:
        raise LedgerError(
            f"cannot use the ledger {where}: a newer version of the agent wrote it (schema {version}, which needs a "
            f"version that knows {least_reader}; this one knows {known}); run that version, or restore the file it kept"
        )
    first = patches[0].number
    # Both, since only the fact is in the digest: a damaged header must not keep the agent from starting.
    if 0 < version < first and least_reader < first:
        raise LedgerError(
            f"cannot use the ledger {where}: a development version wrote it (schema {version}; this version reads "
            f"{first} or newer); end its leases with that version, or move the file and those beside it away"
        )
    if not first <= version < known + _FUTURE_VERSIONS:
        raise DamagedError("its header is not as it was written")


def is_newer(connection: sqlite3.Connection, patches: tuple[Patch, ...] = PATCHES) -> bool:
    """Return whether a newer version of the agent seems to have written the file."""
    try:
        return patches[-1].number < _version(connection) < patches[-1].number + _FUTURE_VERSIONS
    except sqlite3.Error:
        return False


def is_older(connection: sqlite3.Connection, patches: tuple[Patch, ...] = PATCHES) -> bool:
    """Return whether the file lacks some of the patches. Raises sqlite3.Error."""
    return _version(connection) < patches[-1].number


def is_of_another_program(connection: sqlite3.Connection) -> bool:
    """Return whether the file is a database whose header does not name it a ledger. Raises sqlite3.Error."""
    return int(connection.execute("PRAGMA application_id").fetchone()[0]) != APPLICATION_ID


def prepare(connection: sqlite3.Connection, patches: tuple[Patch, ...] = PATCHES) -> None:
    """Bring a ledger to the newest schema that this program knows, in one transaction. Raises sqlite3.Error."""
    known = patches[-1].number
    version = _version(connection)
    if version >= known:
        return
    with FAILPOINTS.around("ledger-schema-patches"):
        connection.execute("BEGIN IMMEDIATE")
        try:
            for patch in patches:
                if patch.number > version:
                    for statement in patch.statements:
                        connection.execute(statement)
            connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
            connection.execute(f"PRAGMA user_version = {known}")
            connection.execute(
                "INSERT INTO fact VALUES ('least_reader', ?) ON CONFLICT DO UPDATE SET value = excluded.value",
                (str(patches[-1].least_reader),),
            )
            head = read_head(connection) if version else Head(ledger=_NO_LEDGER, number=0, revision=0, digest=0)
            changed = replace(head, number=head.number + 1, digest=compute_digest(connection))
            connection.execute("INSERT OR REPLACE INTO head VALUES (1, ?, ?, ?, ?, ?)", changed.row())
            connection.execute("COMMIT")
        except BaseException:
            connection.execute("ROLLBACK")
            raise


def _version(connection: sqlite3.Connection) -> int:
    return int(connection.execute("PRAGMA user_version").fetchone()[0])

"""The ledger's tables, as numbered patches, and which version of the agent may open which file.

A patch that only adds (a table, or a column with a default) keeps the `least_reader` of the patch before: the version
before can then still read and write the file, so a rollback works. Any other patch raises it, and older versions refuse
the file in words.
"""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass

from mig_agent.adapters.crashpoints import CRASH_POINTS
from mig_agent.core.errors import LedgerError

APPLICATION_ID = 0x4D494741
"""`MIGA` in the file's header, so that no other program's database is taken for a ledger."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Patch:
    """One step of the schema."""

    number: int
    least_reader: int
    """The oldest number of a patch whose program can work with the file afterwards."""
    statements: tuple[str, ...]


PATCHES = (
    Patch(
        number=1,
        least_reader=1,
        statements=(
            "CREATE TABLE fact (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID",
            """CREATE TABLE instance (
                generation INTEGER PRIMARY KEY,
                gpu TEXT NOT NULL,
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
            """CREATE TABLE lease (
                id TEXT PRIMARY KEY,
                request_id TEXT NOT NULL UNIQUE,
                digest TEXT NOT NULL,
                tenant TEXT NOT NULL,
                holder TEXT NOT NULL,
                holder_uid INTEGER,
                holder_pid INTEGER,
                created_at REAL NOT NULL,
                expires_at REAL,
                pid INTEGER,
                pid_started INTEGER,
                hold INTEGER NOT NULL,
                devices TEXT NOT NULL,
                ended_at REAL,
                end_reason TEXT NOT NULL DEFAULT '') WITHOUT ROWID""",
            """CREATE TABLE cordon (
                gpu TEXT PRIMARY KEY,
                reason TEXT NOT NULL,
                since REAL NOT NULL) WITHOUT ROWID""",
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
        number=2,
        least_reader=1,
        statements=(
            # Of a pod's lease. The version before takes it for one that has no deadline, and leaves it alone.
            "ALTER TABLE lease ADD COLUMN pod_namespace TEXT NOT NULL DEFAULT ''",
            "ALTER TABLE lease ADD COLUMN pod_name TEXT NOT NULL DEFAULT ''",
            "ALTER TABLE lease ADD COLUMN pod_uid TEXT NOT NULL DEFAULT ''",
            "ALTER TABLE lease ADD COLUMN kubelet_devices TEXT NOT NULL DEFAULT '[]'",
            # As they were last known, for an agent that starts paused.
            "CREATE TABLE gpu (uuid TEXT PRIMARY KEY, text TEXT NOT NULL) WITHOUT ROWID",
            # Those that stand are found, and old ones forgotten, without reading a million that have ended.
            "CREATE INDEX lease_ended ON lease (ended_at)",
        ),
    ),
    Patch(
        number=3,
        least_reader=1,
        statements=(
            # Of a lease that was taken for a pod: it has come, and has the lease for as long as it is there. The
            # version before takes it for one that has no deadline, and leaves it alone.
            "ALTER TABLE lease ADD COLUMN arrived INTEGER NOT NULL DEFAULT 0",
        ),
    ),
    Patch(
        number=4,
        least_reader=1,
        statements=(
            # Whose the request id is; empty of what a version before has recorded. To that version an id is unique, and
            # so the table has it: of two callers with the same id, that of the second has its caller behind it.
            "ALTER TABLE lease ADD COLUMN asker TEXT NOT NULL DEFAULT ''",
        ),
    ),
)


def check_version(connection: sqlite3.Connection, where: str, patches: tuple[Patch, ...] = PATCHES) -> None:
    """Raises LedgerError for a file of another program, or of a version whose changes this one cannot work with.

    Changes nothing. Raises sqlite3.Error, too.
    """
    known = patches[-1].number
    version, least_reader = _version(connection, where)
    if least_reader > known:
        raise LedgerError(
            f"cannot use the ledger {where}: a newer version of the agent wrote it (schema {version}, which needs a "
            f"version that knows {least_reader}; this one knows {known}); run that version, or restore the file it kept"
        )


def prepare(connection: sqlite3.Connection, where: str, patches: tuple[Patch, ...] = PATCHES) -> None:
    """Brings a ledger to the newest schema that this program knows, in one transaction. Raises sqlite3.Error."""
    known = patches[-1].number
    version, _ = _version(connection, where)
    if version >= known:
        return
    with CRASH_POINTS.around("ledger-schema-patches"):
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
            connection.execute("COMMIT")
        except BaseException:
            connection.execute("ROLLBACK")
            raise


def _version(connection: sqlite3.Connection, where: str) -> tuple[int, int]:
    """The file's schema and the least version that may work with it; zeros for a new file."""
    version = int(connection.execute("PRAGMA user_version").fetchone()[0])
    application = int(connection.execute("PRAGMA application_id").fetchone()[0])
    tables = int(connection.execute("SELECT count(*) FROM sqlite_schema").fetchone()[0])
    if application != APPLICATION_ID and (application or version or tables):
        raise LedgerError(f"cannot use {where} as ledger: it is another program's database")
    if not version:
        return 0, 0
    least_reader = connection.execute("SELECT value FROM fact WHERE name = 'least_reader'").fetchone()
    return version, int(least_reader[0])

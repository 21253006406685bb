"""The digest of the ledger: one number over all of its rows, so that a row changed by a fault is noticed.

It is the sum of a checksum of each row, so that a commit only adds what it wrote and subtracts what was there before.
Triggers of the writing connection do that. The head, a table of one row, stores it with the number of commits.
"""

from __future__ import annotations

import sqlite3
import zlib
from collections.abc import Iterator
from dataclasses import dataclass

from mig_agent.adapters.ledger.commit_counter import Count
from mig_agent.adapters.ledger.damage import DamagedError

UNCOVERED = ("event", "head")
"""Tables that the digest leaves out.

Events decide nothing: one that cannot be read is skipped. The head has a checksum of its own.
"""
_MASK = (1 << 63) - 1  # SQLite's integers have a sign
_HEAD = "SELECT ledger, number, revision, digest, mark FROM head"
_TABLES = "SELECT name FROM sqlite_schema WHERE type = 'table' AND name NOT LIKE 'sqlite\\_%' ESCAPE '\\' ORDER BY name"
_SCHEMA = "SELECT type, name, tbl_name, sql FROM sqlite_schema"
PUT_HEAD = "UPDATE head SET ledger = ?, number = ?, revision = ?, digest = ?, mark = ? WHERE id = 1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """The head row: what the ledger records about itself."""

    ledger: str
    """Identity of the ledger, 32 hexadecimal digits."""
    number: int
    """Number of its last commit."""
    revision: int
    """Highest revision of all events."""
    digest: int

    @property
    def count(self) -> Count:
        """Expected content of the commit counter beside the ledger."""
        return Count(self.ledger, self.number)

    def row(self) -> tuple[str, int, int, int, int]:
        """Return the values of its row, with their checksum."""
        values = (self.ledger, self.number, self.revision, self.digest)
        return (*values, zlib.crc32(repr(values).encode()))


def read_head(connection: sqlite3.Connection) -> Head:
    """Read the head. Raises DamagedError if it is not as it was written, sqlite3.Error."""
    rows = connection.execute(_HEAD).fetchall()
    if len(rows) == 1:
        ledger, number, revision, digest, _ = rows[0]
        head = Head(ledger=ledger, number=number, revision=revision, digest=digest)
        if head.row() == rows[0]:
            return head
    raise DamagedError("its head is not as it was written")


def compute_digest(connection: sqlite3.Connection) -> int:
    """Compute the digest of the schema and of all rows that it covers. Raises sqlite3.Error."""
    total = sum(_checksum("schema", row) for row in connection.execute(_SCHEMA))
    for table, _ in _covered(connection):
        rows = connection.execute(f"SELECT * FROM {_quoted(table)} NOT INDEXED")  # noqa: S608 -- quoted
        total += sum(_checksum(table, row) for row in rows)
    return total & _MASK


class RunningDigest:
    """Keeps the digest current while one connection writes; not usable after a rollback."""

    def __init__(self, connection: sqlite3.Connection, value: int) -> None:
        self.value = value
        connection.create_function("ledger_row", -1, self._changed)
        for table, columns in _covered(connection):
            for name, event, uses in (
                ("added", "INSERT", (("NEW", 1),)),
                ("dropped", "DELETE", (("OLD", -1),)),
                ("changed", "UPDATE", (("OLD", -1), ("NEW", 1))),
            ):
                calls = "; ".join(
                    f"SELECT ledger_row({sign}, {_literal(table)}, {', '.join(f'{row}.{each}' for each in columns)})"
                    for row, sign in uses
                )
                trigger = _quoted(f"{table}_{name}")
                connection.execute(
                    f"CREATE TEMP TRIGGER {trigger} AFTER {event} ON main.{_quoted(table)} BEGIN {calls}; END"
                )

    def _changed(self, sign: int, table: str, *values: str | float | None) -> None:
        self.value = (self.value + sign * _checksum(table, values)) & _MASK


def _covered(connection: sqlite3.Connection) -> Iterator[tuple[str, list[str]]]:
    """Yield tables with their columns, quoted, including those that a newer version of the agent has added."""
    for (table,) in connection.execute(_TABLES).fetchall():
        if table not in UNCOVERED:
            columns = connection.execute("SELECT name FROM pragma_table_info(?) ORDER BY cid", (table,))
            yield table, [_quoted(name) for (name,) in columns.fetchall()]


def _checksum(table: str, values: tuple[str | int | float | None, ...]) -> int:
    return zlib.crc32(f"{table}{values!r}".encode(errors="surrogatepass"))


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _literal(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"

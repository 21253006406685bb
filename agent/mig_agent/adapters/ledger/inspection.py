"""Looks into a ledger from outside, such as for `migctl doctor`, while the agent runs or not."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from mig_agent.adapters.ledger.creation import connect, verify
from mig_agent.adapters.ledger.damage import READING_ERRORS, DamagedError, is_damage
from mig_agent.adapters.ledger.reader import EventQuery, read_events
from mig_agent.adapters.ledger.schema import check_version
from mig_agent.adapters.ledger.store import LEDGER_FILE
from mig_agent.core.errors import LedgerError
from mig_agent.core.events import Event

_MIB = 1 << 20
_MOST_EVENTS = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerSummary:
    """Summary of a ledger, once every row of it was checked."""

    leases: int
    """Those that have not ended."""
    events: int
    mib: float
    """The size of its file, without the log, in MiB."""
    damage: str = ""
    """What is not as it was written; empty if every page and row is."""


def ledger_in(folder: Path) -> Path:
    """Return the path of the ledger in a state directory."""
    return folder / LEDGER_FILE


def read_summary(path: Path) -> LedgerSummary:
    """Check every page and row of a ledger. Raises LedgerError if it cannot be read, or is of another version."""
    try:
        with _opened(path) as connection:
            verify(connection)
            (leases,) = connection.execute("SELECT count(*) FROM lease WHERE ended_at IS NULL").fetchone()
            (events,) = connection.execute("SELECT count(*) FROM event").fetchone()
            return LedgerSummary(leases=leases, events=events, mib=round(path.stat().st_size / _MIB, 1))
    except (DamagedError, OSError, *READING_ERRORS) as error:
        if isinstance(error, DamagedError) or is_damage(error, path):
            return LedgerSummary(leases=0, events=0, mib=0.0, damage=str(error))
        raise LedgerError(f"cannot read {path}: {error}") from error


def read_all_events(path: Path) -> tuple[Event, ...]:
    """Return all events that a ledger keeps, the oldest first. Raises LedgerError."""
    try:
        with _opened(path) as connection:
            return read_events(connection, EventQuery(), _MOST_EVENTS)
    except (DamagedError, OSError, *READING_ERRORS) as error:
        raise LedgerError(f"cannot read {path}: {error}") from error


@contextmanager
def _opened(path: Path) -> Iterator[sqlite3.Connection]:
    with closing(connect(path, "ro")) as connection:
        connection.execute("BEGIN")  # one moment of it: the agent may commit meanwhile
        check_version(connection, str(path))
        yield connection

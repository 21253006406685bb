"""The ledger: what the agent has promised, in SQLite, so that no crash loses it.

One thread writes. It takes what has gathered, writes it in one transaction and waits once for the disk (WAL with
synchronous=FULL: a commit is on the disk when it returns). If the process dies before the commit returns, nothing of
the batch is there after the restart; if it dies after, all of it is.
"""

from __future__ import annotations

import contextlib
import queue
import sqlite3
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from mig_agent.adapters.crashpoints import CRASH_POINTS
from mig_agent.adapters.ledger_changes import AddEvent, Record
from mig_agent.adapters.ledger_contents import Contents, RecordedLease, find_request, read_contents, read_events
from mig_agent.adapters.ledger_schema import PATCHES, Patch, check_version, prepare
from mig_agent.core.errors import LedgerError
from mig_agent.core.event import Event
from mig_agent.core.requestkey import RequestKey

LEDGER_FILE = "ledger.sqlite3"
_PAGE_BYTES = 1024
"""A lease touches a few rows, and each page that they are on goes to the disk."""
_BUSY_SECONDS = 5.0
_MOST_IN_A_BATCH = 512
_CHECKPOINT_COMMITS = 250
"""After so many commits the write-ahead log is folded in, when nothing waits ..."""
_CHECKPOINT_AT_LATEST = 2500
"""... or even then."""
_TRIM_EVERY = 500
MOST_ENDED_IN_MEMORY = 10_000
"""Leases that ended, of which `contents` tells; `find_request` knows all of them."""

_DAMAGED = ("file is not a database", "malformed", "disk image")


class Entry(Protocol):
    """Something that carries a record; what else it carries is its maker's business."""

    @property
    def record(self) -> Record:
        """What is to be written, all or nothing."""


OnSettled = Callable[[Sequence[Entry], LedgerError | None], None]
"""Hears, in the writing thread, which entries are on the disk, or (newest first) which are not and why."""


class Ledger:
    """One open ledger. `submit` from any thread; what comes of it is told to the one listener."""

    def __init__(
        self, path: Path, connection: sqlite3.Connection, contents: Contents, set_aside: Path | None, keep_events: int
    ) -> None:
        self.path = path
        self.contents = contents
        """As found when it was opened."""
        self.set_aside = set_aside
        """Where a damaged ledger was put, which this one stands in for; None where there was none."""
        self._connection: sqlite3.Connection | None = connection
        self._keep_events = keep_events
        self._queue: queue.SimpleQueue[Entry | None] = queue.SimpleQueue()
        self._on_settled: OnSettled | None = None
        self._thread: threading.Thread | None = None
        self._commits = 0
        self._events_written = 0
        self._reader: sqlite3.Connection | None = None

    @classmethod
    def open(cls, path: Path, *, keep_events: int = 10_000, patches: tuple[Patch, ...] = PATCHES) -> Ledger:
        """Opens the ledger in this file, or makes one. A damaged one is set aside under another name and kept.

        Raises LedgerError where it cannot be read or written, or is of a newer version.
        """
        set_aside = None
        try:
            try:
                connection, contents = _open(path, patches)
            except sqlite3.DatabaseError as error:
                if not _is_damage(error):
                    raise
                set_aside = _set_aside(path)
                connection, contents = _open(path, patches)
        except (sqlite3.Error, OSError) as error:
            raise LedgerError(f"cannot open the ledger {path}: {error}") from error
        return cls(path, connection, contents, set_aside, keep_events)

    def start(self, on_settled: OnSettled) -> None:
        """Begins to write."""
        self._on_settled = on_settled
        self._thread = threading.Thread(target=self._run, name="ledger", daemon=True)
        self._thread.start()

    def submit(self, entry: Entry) -> None:
        """Has an entry written, in the order of the calls."""
        self._queue.put(entry)

    def close(self, seconds: float = 10.0) -> None:
        """Writes what was submitted and closes the file; waits for that at most so long."""
        self._close_reader()
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join(seconds)
        elif self._connection is not None:
            self._connection.close()

    def events(self, since: float, gpu: str = "", limit: int = 1000) -> tuple[Event, ...]:
        """The latest events from a moment on, oldest first. Blocking, from any thread. Raises LedgerError."""
        try:
            with contextlib.closing(_connect(self.path, "ro")) as connection:
                return read_events(connection, since, gpu, limit)
        except sqlite3.Error as error:
            raise LedgerError(f"cannot read the ledger {self.path}: {error}") from error

    def find_request(self, request: RequestKey) -> tuple[RecordedLease, ...]:
        """The lease that a request led to, standing or ended, and one of its id of which nobody recorded whose it is.

        From one thread only; takes microseconds. Raises LedgerError.
        """
        try:
            if self._reader is None:
                self._reader = _connect(self.path, "ro")
            return find_request(self._reader, request)
        except sqlite3.Error as error:
            self._close_reader()
            raise LedgerError(f"cannot read the ledger {self.path}: {error}") from error

    def _close_reader(self) -> None:
        reader, self._reader = self._reader, None
        if reader is not None:
            with contextlib.suppress(sqlite3.Error):
                reader.close()

    def _run(self) -> None:
        closing = False
        while not closing:
            batch: list[Entry] = []
            entry = self._queue.get()
            while entry is not None:
                batch.append(entry)
                if len(batch) >= _MOST_IN_A_BATCH:
                    break
                try:
                    entry = self._queue.get_nowait()
                except queue.Empty:
                    break
            closing = entry is None
            if batch:
                error = self._write(batch)
                if error is not None:
                    batch, closing = self._with_all_behind(batch, closing=closing)
                if self._on_settled is not None:
                    self._on_settled(batch, error)
            self._checkpoint(closing=closing)
        if self._connection is not None:
            with contextlib.suppress(sqlite3.Error):
                self._connection.close()

    def _write(self, batch: Sequence[Entry]) -> LedgerError | None:
        try:
            with CRASH_POINTS.around("commit"):
                self._commit(batch)
        except (sqlite3.Error, OverflowError, TypeError, ValueError) as error:  # also values that SQLite cannot hold
            self._drop_connection()
            return LedgerError(f"cannot write the ledger {self.path}: {error}")
        return None

    def _commit(self, batch: Sequence[Entry]) -> None:
        if self._connection is None:
            # Never made anew here: an empty ledger in place of a lost one would forget every lease.
            self._connection = _connect(self.path, "rw")
        execute = self._connection.execute
        execute("BEGIN IMMEDIATE")
        for entry in batch:
            for change in entry.record:
                for sql, values in change.statements():
                    execute(sql, values)
                if type(change) is AddEvent:
                    self._events_written += 1
        if self._events_written >= _TRIM_EVERY:
            self._events_written = 0
            execute("DELETE FROM event WHERE number <= (SELECT max(number) FROM event) - ?", (self._keep_events,))
        execute("COMMIT")
        self._commits += 1

    def _drop_connection(self) -> None:
        """Rolls back; the next batch starts with a fresh connection, whatever was wrong with this one."""
        connection, self._connection = self._connection, None
        if connection is not None:
            with contextlib.suppress(sqlite3.Error):
                connection.close()

    def _with_all_behind(self, batch: list[Entry], *, closing: bool) -> tuple[list[Entry], bool]:
        """What failed with what was submitted since on the strength of it, newest first."""
        with contextlib.suppress(queue.Empty):
            while True:
                entry = self._queue.get_nowait()
                if entry is None:
                    closing = True
                else:
                    batch.append(entry)
        return batch[::-1], closing

    def _checkpoint(self, *, closing: bool) -> None:
        due = self._commits >= _CHECKPOINT_AT_LATEST or (self._commits >= _CHECKPOINT_COMMITS and self._queue.empty())
        if self._connection is None or not (due or closing):
            return
        self._commits = 0
        # When it fails the log grows, and the next one folds it in.
        with contextlib.suppress(sqlite3.Error), CRASH_POINTS.around("ledger-checkpoint"):
            self._connection.execute("PRAGMA wal_checkpoint(PASSIVE)")


def _connect(path: Path, mode: str) -> sqlite3.Connection:
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
            connection.execute("PRAGMA wal_autocheckpoint = 0")  # not inside somebody's commit
    except BaseException:
        connection.close()
        raise
    return connection


def _open(path: Path, patches: tuple[Patch, ...]) -> tuple[sqlite3.Connection, Contents]:
    if not path.exists():
        # Of a damaged ledger that was being set aside when the process died: SQLite would throw it away.
        _set_aside_logs(path, _aside(path, -1))
        with CRASH_POINTS.around("ledger-file"):
            path.touch(mode=0o600)
    connection = _connect(path, "rw")
    try:
        _check(connection)
        check_version(connection, str(path), patches)
        with CRASH_POINTS.around("ledger-schema"):
            connection.execute(f"PRAGMA page_size = {_PAGE_BYTES}")  # counts for a new file alone
            connection.execute("PRAGMA journal_mode = WAL")
            prepare(connection, str(path), patches)
        return connection, read_contents(connection, MOST_ENDED_IN_MEMORY)
    except BaseException:
        connection.close()
        raise


def _check(connection: sqlite3.Connection) -> None:
    answer = str(connection.execute("PRAGMA quick_check(1)").fetchone()[0])
    if answer != "ok":
        raise sqlite3.DatabaseError(f"database disk image is malformed: {answer}")


def _is_damage(error: sqlite3.DatabaseError) -> bool:
    return any(words in str(error) for words in _DAMAGED)


def _set_aside(path: Path) -> Path:
    """Renames a damaged ledger, with its log beside it; never over an earlier one."""
    aside = _aside(path, 0)
    with CRASH_POINTS.around("ledger-aside"):
        path.rename(aside)
    _set_aside_logs(path, aside)
    return aside


def _aside(path: Path, step: int) -> Path:
    """The first free name for a damaged ledger, or with step -1 the one before it."""
    number = 1
    while path.with_name(f"{path.name}.damaged-{number}").exists():
        number += 1
    return path.with_name(f"{path.name}.damaged-{max(number + step, 1)}")


def _set_aside_logs(path: Path, aside: Path) -> None:
    for suffix in ("-wal", "-shm"):
        log = path.with_name(path.name + suffix)
        if log.exists():
            with CRASH_POINTS.around("ledger-aside"):
                log.rename(aside.with_name(aside.name + suffix))

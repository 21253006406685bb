"""The ledger: leases, instances and events in SQLite, so that no crash loses a lease.

One thread writes. It takes the queued records, writes them in one transaction and waits once for the disk (WAL with
synchronous=FULL: a commit is on the disk when it returns). If the process dies before the commit returns, nothing of
the batch is there after the restart; if it dies after, all of it is.

When the ledger is opened, all of it is checked: SQLite's structures, the digest of its rows, and that it has the
commits that the counter beside it requires. It is opened whole, or it is set aside and an empty one takes its place.
"""

from __future__ import annotations

import contextlib
import errno
import os
import queue
import sqlite3
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from mig_agent.adapters.failpoints import FAILPOINTS
from mig_agent.adapters.ledger.accounting import read_history, read_uses
from mig_agent.adapters.ledger.commit_counter import counter_of, open_counter
from mig_agent.adapters.ledger.creation import connect, make_copy
from mig_agent.adapters.ledger.damage import READING_ERRORS, DamagedError, is_damage
from mig_agent.adapters.ledger.digest import PUT_HEAD, Head, RunningDigest, read_head
from mig_agent.adapters.ledger.lease_evidence import evidence_of, read_evidence
from mig_agent.adapters.ledger.lease_evidence_writer import LeaseEvidenceWriter
from mig_agent.adapters.ledger.quarantine import REPLACED, finish_replacing, replace_ledger
from mig_agent.adapters.ledger.reader import (
    Contents,
    EventQuery,
    RecordedLease,
    count_events,
    find_lease,
    find_request,
    read_events,
)
from mig_agent.adapters.ledger.records import AddEvent, Record
from mig_agent.adapters.ledger.schema import PATCHES, Patch
from mig_agent.adapters.ledger.verification import make_ledger, read_whole
from mig_agent.core.accounting import AccountedUse, By, Period, Reader, Use
from mig_agent.core.errors import LedgerError, MigAgentError
from mig_agent.core.events import Event
from mig_agent.core.model import LeaseId, RequestKey

LEDGER_FILE = "ledger.sqlite3"
_MOST_IN_A_BATCH = 512
_CHECKPOINT_COMMITS = 250
"""After this many commits the write-ahead log is checkpointed if nothing waits ..."""
_CHECKPOINT_AT_LATEST = 2500
"""... and after this many in any case."""
_TRIM_EVERY = 500
MOST_ENDED_IN_MEMORY = 10_000
"""Limit of ended leases in `contents`; `find_request` finds all of them."""


class Entry(Protocol):
    """Something that carries a record to be written."""

    @property
    def record(self) -> Record:
        """Changes to be written, all or none."""


OnSettled = Callable[[Sequence[Entry], LedgerError | None], None]
"""Called in the writing thread with entries on the disk, or (newest first) with those that failed and the error."""


class Ledger:
    """One open ledger. `submit` from any thread; results go to the one `on_settled` callback."""

    def __init__(
        self, path: Path, contents: Contents, head: Head, keep_events: int, keep_lock: Callable[[], None]
    ) -> None:
        self.path = path
        self.contents = contents
        """Contents as read when the ledger was opened."""
        self._head = head
        """Head of the last commit that is known to be on the disk."""
        self._connection: sqlite3.Connection | None = None
        self._digest: RunningDigest | None = None
        self._counter = open_counter(counter_of(path))
        self._trail = LeaseEvidenceWriter(evidence_of(path), contents)
        self._keep_events = keep_events
        self._queue: queue.SimpleQueue[Entry | None] = queue.SimpleQueue()
        self._on_settled: OnSettled | None = None
        self._thread: threading.Thread | None = None
        self._commits = 0
        self._events_written = 0
        self._reader: sqlite3.Connection | None = None
        self._files: dict[Path, tuple[int, int]] = {}
        """Device and inode of the files being written."""
        self._keep_lock = keep_lock
        self._is_missing = False

    @classmethod
    def open(
        cls,
        path: Path,
        *,
        keep_events: int = 10_000,
        patches: tuple[Patch, ...] = PATCHES,
        keep_lock: Callable[[], None] = lambda: None,
    ) -> Ledger:
        """Open the ledger in this file, or create one. A damaged one is set aside under another name and kept.

        `keep_lock` is called before a ledger that was removed or replaced is rewritten, and raises MigAgentError if
        another agent has locked the folder meanwhile: the files there may be its ledger.

        `contents.doubt` records that this has happened, until it is settled. Raises LedgerError if the ledger cannot be
        read or written, or is of a newer version.
        """
        try:
            finish_replacing(path)
            try:
                return cls._opened(path, patches, keep_events, keep_lock)
            except DamagedError as damage:
                make_ledger(path, f"was damaged: {damage}", patches)
                return cls._opened(path, patches, keep_events, keep_lock)
        except (sqlite3.Error, OSError, DamagedError) as error:
            raise LedgerError(f"cannot open the ledger {path}: {error}") from error

    @classmethod
    def _opened(cls, path: Path, patches: tuple[Patch, ...], keep_events: int, keep_lock: Callable[[], None]) -> Ledger:
        contents, head = read_whole(path, patches, MOST_ENDED_IN_MEMORY)
        ledger = cls(path, contents, head, keep_events, keep_lock)
        try:
            ledger._connect()
            ledger._begin_trail()
        except READING_ERRORS as error:
            ledger.close()
            if is_damage(error, path):
                raise DamagedError(str(error)) from error
            raise
        return ledger

    def _begin_trail(self) -> None:
        """Rewrite the lease evidence, with what still counts of an earlier ledger. Raises sqlite3.Error."""
        contents, evidence = self.contents, read_evidence(evidence_of(self.path))
        if contents.doubt is not None and evidence is not None and evidence.fits(self._head.count):
            former = tuple(each for each in evidence.former if not self._knows(each.lease.id))
            self.contents = replace(contents, former=former)
            self._trail = LeaseEvidenceWriter(evidence_of(self.path), self.contents)
            self.contents = replace(contents, former=self._trail.former)
        self._trail.rewrite(self._head.count, keep=True)

    def _knows(self, lease: LeaseId) -> bool:
        assert self._connection is not None  # noqa: S101 -- for the types alone
        return bool(self._connection.execute("SELECT 1 FROM lease WHERE id = ?", (lease,)).fetchall())

    def start(self, on_settled: OnSettled) -> None:
        """Start the writing thread."""
        self._on_settled = on_settled
        self._thread = threading.Thread(target=self._run, name="ledger", daemon=True)
        self._thread.start()

    def submit(self, entry: Entry) -> None:
        """Queue an entry to be written, in the order of the calls."""
        self._queue.put(entry)

    def close(self, seconds: float = 10.0) -> None:
        """Write what was submitted and close the files; wait at most `seconds`."""
        self._close_reader()
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join(seconds)
        else:
            self._close_files()

    def events(
        self, since: float = 0.0, gpu: str = "", limit: int = 1000, *, lease: str = "", before: int = 0
    ) -> tuple[Event, ...]:
        """Return the latest events that match, oldest first. Blocking, from any thread. Raises LedgerError."""
        query = EventQuery(since=since, gpu=gpu, lease=lease, before=before)
        with self._reading() as connection:
            return read_events(connection, query, limit)

    def event_page(
        self, since: float = 0.0, gpu: str = "", limit: int = 1000, *, lease: str = "", before: int = 0
    ) -> tuple[tuple[Event, ...], int]:
        """Return what `events` returns, and how many older events match. Blocking as well. Raises LedgerError."""
        query = EventQuery(since=since, gpu=gpu, lease=lease, before=before)
        with self._reading() as connection:
            events = read_events(connection, query, limit)
            earlier = count_events(connection, replace(query, before=events[0].number)) if events else 0
        return events, earlier

    def lease_called(self, name: str) -> LeaseId | None:
        """Return the lease that is meant, as `find_lease`. Blocking, from any thread. Raises LedgerError."""
        with self._reading() as connection:
            return find_lease(connection, name)

    def uses(
        self, period: Period, by: By, reader: Reader, without: Sequence[LeaseId]
    ) -> tuple[list[tuple[str, Use]], float | None]:
        """Return sums over ended leases, as `read_uses`. Blocking, from any thread. Raises LedgerError."""
        with self._reading() as connection:
            return read_uses(connection, period, by, reader, without)

    def history(self, since: float, most: int, without: Sequence[LeaseId]) -> tuple[AccountedUse, ...]:
        """Return records of ended leases, as `read_history`. Blocking, from any thread. Raises LedgerError."""
        with self._reading() as connection:
            return read_history(connection, since, most, without)

    @contextlib.contextmanager
    def _reading(self) -> Iterator[sqlite3.Connection]:
        """Open a connection for reading, for the calling thread alone. Raises LedgerError, also for errors inside."""
        try:
            with closing(connect(self.path, "ro")) as connection:
                yield connection
        except READING_ERRORS as error:
            raise LedgerError(f"cannot read the ledger {self.path}: {error}") from error

    def missing(self) -> str:
        """Return, as a message, which file of the ledger was removed or replaced; empty if all are in place.

        What is committed to a removed file is lost at the next start, so the next commit first rewrites the ledger from
        the open connection. The check is cheap. Call it from one thread only.
        """
        words = ""
        for path, known in self._files.items():
            try:
                is_the_same = _identity(path) == known
            except FileNotFoundError:
                words = words or f"{path} was removed"
            except OSError as error:
                words = words or str(error)
            else:
                words = words or ("" if is_the_same else f"{path} was replaced by another file")
        if words:
            self._is_missing = True
        return words

    def find_request(self, request: RequestKey) -> RecordedLease | None:
        """Return the lease of a request, active or ended; None if there is none.

        From one thread only; takes microseconds. Raises LedgerError.
        """
        try:
            if self._reader is None:
                self._reader = connect(self.path, "ro")
            return find_request(self._reader, request)
        except READING_ERRORS as error:
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
        self._close_files()

    def _close_files(self) -> None:
        if self._connection is not None:
            with contextlib.suppress(sqlite3.Error):
                self._connection.close()
            self._connection = None
        with contextlib.suppress(OSError):
            os.fsync(self._counter)
        with contextlib.suppress(OSError):
            os.close(self._counter)
        self._counter = -1
        self._trail.close()

    def _connect(self) -> None:
        """Open the file for writing. Never creates it: an empty one would forget every lease.

        Raises sqlite3.Error, and DamagedError if it is not the ledger opened before.
        """
        connection = connect(self.path, "rw")
        try:
            connection.execute("BEGIN IMMEDIATE")
            connection.execute("UPDATE head SET id = id")  # a damaged header can forbid writing
            connection.execute("ROLLBACK")
            head = read_head(connection)
            # A commit that failed may still be on the disk.
            if head.ledger != self._head.ledger or head.number not in {self._head.number, self._head.number + 1}:
                raise DamagedError("it is not the one that was there before")  # noqa: TRY301 -- closes what it opened
            digest = RunningDigest(connection, head.digest)
        except BaseException:
            connection.close()
            raise
        self._connection, self._digest, self._head = connection, digest, head
        self._files = {each: _identity(each) for each in (self.path, _log_of(self.path), counter_of(self.path))}

    def _rewrite(self) -> None:
        """Replace removed or replaced files by a copy from the open connection; keep the present ones aside.

        Raises sqlite3.Error, OSError, and DamagedError if the connection was lost and the ledger with it.
        """
        open_one = self._connection
        if open_one is None:
            self._connect()  # if it is the ledger opened before, nothing is missing
            self._is_missing = False
            return
        try:
            self._keep_lock()
        except MigAgentError as error:
            raise OSError(str(error)) from error
        replace_ledger(
            self.path,
            REPLACED,
            lambda new, _aside: make_copy(new, open_one),
            live=self._trail.live,
            former=self._trail.former,
        )
        self._drop_connection()
        os.close(self._counter)
        self._counter = open_counter(counter_of(self.path))
        self._connect()
        self._trail.rewrite(self._head.count)
        self._is_missing = False

    def _write(self, batch: Sequence[Entry]) -> LedgerError | None:
        try:
            with FAILPOINTS.around("commit"):
                self._commit(batch)
        except (
            DamagedError,
            OSError,
            sqlite3.Error,
            OverflowError,
            TypeError,
            ValueError,
        ) as error:  # also values that SQLite cannot hold
            if self._is_missing:
                self._roll_back()  # only this connection still has the data
            else:
                self._drop_connection()
            return LedgerError(f"cannot write the ledger {self.path}: {error}")
        return None

    def _commit(self, batch: Sequence[Entry]) -> None:
        if self._is_missing:
            self._rewrite()
        if self._connection is None or self._digest is None:
            self._connect()
        assert self._connection is not None  # noqa: S101 -- for the types alone
        assert self._digest is not None  # noqa: S101 -- for the types alone
        execute, revision = self._connection.execute, self._head.revision
        execute("BEGIN IMMEDIATE")
        for entry in batch:
            for change in entry.record:
                for sql, values in change.statements():
                    execute(sql, values)
                if type(change) is AddEvent:
                    self._events_written += 1
                    revision = max(revision, change.event.revision)
        if self._events_written >= _TRIM_EVERY:
            self._events_written = 0
            execute("DELETE FROM event WHERE number <= (SELECT max(number) FROM event) - ?", (self._keep_events,))
        head = replace(self._head, number=self._head.number + 1, revision=revision, digest=self._digest.value)
        execute(PUT_HEAD, head.row())
        execute("COMMIT")
        self._head = head
        self._commits += 1
        # The ledger may have more commits than the counter, never fewer: so the counter comes after, without waiting
        # for the disk. If it cannot be written, it stays behind until the next commit.
        with contextlib.suppress(OSError):
            os.pwrite(self._counter, head.count.encode(), 0)
        self._follow(batch)

    def _follow(self, batch: Sequence[Entry]) -> None:
        """Append what was committed to the lease evidence, without waiting for the disk."""
        trail = self._trail
        pieces = trail.follow((entry.record for entry in batch), self._head.count)
        if trail.descriptor < 0:
            trail.rewrite(self._head.count)
            return
        try:
            for data, offset in pieces:
                if os.pwrite(trail.descriptor, data, offset) != len(data):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))  # noqa: TRY301 -- as the rest of it would be
        except OSError:
            trail.give_up()  # a file that lacks an end would bring back an ended lease

    def _roll_back(self) -> None:
        if self._connection is not None and self._connection.in_transaction:
            with contextlib.suppress(sqlite3.Error):
                self._connection.execute("ROLLBACK")

    def _drop_connection(self) -> None:
        """Roll back and close the connection, whatever was wrong with it; the next batch opens a new one."""
        self._files = {}  # closing removes the log
        connection, self._connection, self._digest = self._connection, None, None
        if connection is not None:
            with contextlib.suppress(sqlite3.Error):
                connection.close()

    def _with_all_behind(self, batch: list[Entry], *, closing: bool) -> tuple[list[Entry], bool]:
        """Return the failed entries and all queued behind them, which may depend on them, newest first."""
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
        # If it fails, the log grows and the next one checkpoints it.
        with contextlib.suppress(sqlite3.Error), FAILPOINTS.around("ledger-checkpoint"):
            self._connection.execute("PRAGMA wal_checkpoint(PASSIVE)")
        with contextlib.suppress(OSError):
            os.fsync(self._counter)
        if self._trail.is_due():
            self._trail.rewrite(self._head.count)


def _log_of(path: Path) -> Path:
    return path.with_name(f"{path.name}-wal")


def _identity(path: Path) -> tuple[int, int]:
    found = path.stat()
    return found.st_dev, found.st_ino

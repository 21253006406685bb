"""Commits: a record goes to the ledger, and is applied in memory and published only when it is on the disk.

Records are committed in the order in which they were submitted, several in one transaction of SQLite when several wait.
After a commit their changes in memory are applied on the event loop, with nothing in between; then the callers that
await them continue. A record whose commit failed changes nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import cast

from mig_agent.adapters.clock import Clock
from mig_agent.adapters.ledger.records import AddEvent, Change, Record
from mig_agent.adapters.ledger.store import Entry, Ledger
from mig_agent.core.errors import LedgerError, Reason, RefusedError, refuse
from mig_agent.core.events import Event, EventKind
from mig_agent.core.model import Generation, GpuUuid, Instance, LeaseId
from mig_agent.core.owner import TOKEN_OWNER, Owner
from mig_agent.engine.callers import Caller
from mig_agent.engine.event_bus import Events
from mig_agent.engine.state import State


class _Pending:
    """Holds a record that was submitted to the ledger and is not settled yet."""

    __slots__ = ("always", "apply", "done", "events", "record", "revision")

    def __init__(
        self,
        record: Record,
        revision: int,
        events: tuple[Event, ...],
        apply: Callable[[], None] | None,
        done: asyncio.Future[None],
        *,
        always: bool = False,
    ) -> None:
        self.always = always
        self.record = record
        self.revision = revision
        self.events = events
        self.apply = apply
        self.done = done


class Journal:
    """Commits and publishes every change of the node. Not thread-safe; use from the event loop."""

    def __init__(self, ledger: Ledger, state: State, events: Events, clock: Clock) -> None:
        self._ledger = ledger
        self._state = state
        self._events = events
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        self._revision = state.revision
        self.error = ""
        """Why the last commit failed; empty when it succeeded."""
        self._is_applying = False
        ledger.start(self._settled)

    def event(
        self,
        kind: EventKind,
        words: str,
        *,
        gpu: GpuUuid | None = None,
        lease: LeaseId | None = None,
        generation: Generation | None = None,
        holder: str = "",
        instance: Instance | None = None,
        caller: Caller | None = None,
        owner: Owner = TOKEN_OWNER,
        **data: str | float | bool,
    ) -> Event:
        """Return an event of this moment, with the revision of the record that is committed next.

        `instance` gives the event its GPU, generation, profile and placement; `caller` is who asked for what happened,
        and `owner` that of the lease that it is about, if any.
        """
        if instance is not None:
            gpu, generation = instance.slot.gpu, instance.generation
            placement = instance.slot.placement
            data |= {"profile": instance.slot.profile.name, "start": placement.start, "size": placement.size}
        if caller is not None:
            data |= caller.facts()
        data |= owner.event_data()
        return Event(
            kind=kind,
            at=self._clock.now(),
            revision=self._revision + 1,
            message=words,
            gpu=gpu,
            gpu_index=None if gpu is None or gpu not in self._state.gpus else self._state.gpus[gpu].index,
            lease=lease,
            generation=generation,
            holder=holder,
            data=data,
        )

    def commit(
        self, changes: Record, events: tuple[Event, ...] = (), apply: Callable[[], None] | None = None
    ) -> asyncio.Future[None]:
        """Commit changes and events as one record; after the commit run `apply`, publish the state, emit the events.

        The future fails with LedgerError; a caller that does not await it never learns of that.
        """
        self._publish_unrecorded()
        self._revision += 1
        done = self._loop.create_future()
        record = (*changes, *(AddEvent(event) for event in events))
        self._ledger.submit(_Pending(record, self._revision, events, apply, done))
        return done

    def record(self, event: Event, *changes: Change) -> None:
        """Emit an event after all earlier records, recorded if possible; `changes` concern the ledger alone."""
        self._submit_always((*changes, AddEvent(event)), (event,))

    def emit(self, event: Event) -> None:
        """Emit at once an event that changes nothing about the node: it gets no revision and is not recorded."""
        self._events.emit(replace(event, revision=self._state.revision))

    def republish(self) -> None:
        """Publish changes of the state that are never recorded, since they concern only this run of the agent."""
        self._submit_always((), ())
        self._state.status_changed.emit()

    def _submit_always(self, record: Record, events: tuple[Event, ...]) -> None:
        self._publish_unrecorded()
        self._revision += 1
        done = self._loop.create_future()
        self._ledger.submit(_Pending(record, self._revision, events, None, done, always=True))

    def _publish(self, revision: int, events: Iterable[Event]) -> None:
        self._state.publish(revision)
        for event in events:
            self._events.emit(event)

    def _publish_unrecorded(self) -> None:
        """Publish changes that were put into the state before their record, or with none, under the current revision.

        So the code that made a change sees it in the next view that it reads; the new revision follows in its turn.
        """
        if self._state.is_ahead and not self._is_applying:
            self._state.publish(self._state.revision)

    def _settled(self, entries: Sequence[Entry], error: LedgerError | None) -> None:
        """Hand the result of a batch to the event loop; called in the ledger's thread."""
        try:
            self._loop.call_soon_threadsafe(self._settle, entries, error)
        except RuntimeError:
            return  # the loop is closed, and with it all that awaited the batch

    def _settle(self, entries: Sequence[Entry], error: LedgerError | None) -> None:
        batch = cast("Sequence[_Pending]", entries)
        if error is not None:
            self._failed(batch, error)
            return
        recovered, self.error = self.error, ""
        revision = self._state.revision
        events: list[Event] = []
        self._is_applying = True
        try:
            for pending in batch:
                if pending.apply is not None:
                    pending.apply()
                revision = pending.revision
                events += pending.events
                if not pending.done.done():
                    pending.done.set_result(None)
        finally:
            self._is_applying = False
        self._publish(revision, events)
        if recovered:
            self.record(self.event(EventKind.LEDGER_RECOVERED, "the ledger can be written again"))

    def _failed(self, batch: Sequence[_Pending], error: LedgerError) -> None:
        first = not self.error
        self.error = str(error)
        self._state.status_changed.emit()
        events: list[Event] = []
        for pending in reversed(batch):  # it comes newest first
            if pending.always:
                events += pending.events
            if not pending.done.done():
                pending.done.set_exception(error)
                pending.done.exception()  # seen: not every caller awaits it
        # What is on the hardware, or concerns only this run, is so whether it can be recorded or not.
        if self._state.is_ahead or any(pending.always for pending in batch):
            self._publish(max(pending.revision for pending in batch), events)
        if first:
            self.record(self.event(EventKind.LEDGER_FAILED, f"{error}; no new leases until it is writable"))


def ledger_refusal(error: LedgerError, what: str = "give a lease") -> RefusedError:
    """Return the error that a caller gets after a failed commit; `what` completes "cannot ..."."""
    return refuse(
        Reason.LEDGER_FAILED,
        f"cannot {what}, since it cannot be recorded: {error}",
        "ask the administrator to make the ledger writable; leases that stand are not touched",
    )


@dataclass(slots=True)
class Transaction:
    """Collects changes and events, possibly of several components, that are then committed as one record."""

    journal: Journal
    changes: list[Change] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    applied: list[Callable[[], None]] = field(default_factory=list)
    ended: set[LeaseId] = field(default_factory=set)
    """The leases that end with this transaction: each is ended in it once."""

    def __bool__(self) -> bool:
        return bool(self.changes or self.events or self.applied)

    def commit(self) -> asyncio.Future[None]:
        """Commit all of it as one record. The future fails with LedgerError."""
        return self.journal.commit(tuple(self.changes), tuple(self.events), self._apply)

    def _apply(self) -> None:
        for apply in self.applied:
            apply()

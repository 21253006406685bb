"""Commits: a record goes to the ledger, and only when it is on the disk is it applied and published.

Records are committed in the order in which they are written, several at once where several wait. What a record changes
in memory is applied on the event loop when its commit has succeeded, with nothing in between; whoever waits for it then
goes on. A record that failed changes nothing.
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
from mig_agent.engine.events import Events
from mig_agent.engine.state import State


class _Pending:
    """A record on its way to the disk."""

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
    """The only way to change what everybody sees. Belongs to the event loop."""

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
        """An event of the record that is written next, now. `instance` gives its GPU, generation and slot.

        `caller` called for it, where somebody did; `owner` is that of the lease that it is about.
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
            words=words,
            gpu=gpu,
            gpu_index=None if gpu is None or gpu not in self._state.gpus else self._state.gpus[gpu].index,
            lease=lease,
            generation=generation,
            holder=holder,
            data=data,
        )

    def write(
        self, changes: Record, events: tuple[Event, ...] = (), apply: Callable[[], None] | None = None
    ) -> asyncio.Future[None]:
        """Commits changes and events as one record, applies and tells them. Fails with LedgerError.

        Whoever does not wait for the future must not mind its failure.
        """
        self._show_at_once()
        self._revision += 1
        done = self._loop.create_future()
        record = (*changes, *(AddEvent(event) for event in events))
        self._ledger.submit(_Pending(record, self._revision, events, apply, done))
        return done

    def tell(self, event: Event, *changes: Change) -> None:
        """Tells an event in its turn, recorded (with changes of the ledger alone) if that is possible."""
        self._in_turn((*changes, AddEvent(event)), (event,))

    def mention(self, event: Event) -> None:
        """Tells at once what changes nothing about the node: it gets no revision of its own and is not recorded."""
        self._events.emit(replace(event, revision=self._state.revision))

    def publish(self) -> None:
        """What was changed in the state with no record, since it concerns only this run of the agent."""
        self._in_turn((), ())
        self._state.status_changed.emit()

    def _in_turn(self, record: Record, events: tuple[Event, ...]) -> None:
        self._show_at_once()
        self._revision += 1
        done = self._loop.create_future()
        self._ledger.submit(_Pending(record, self._revision, events, None, done, always=True))

    def _publish(self, revision: int, events: Iterable[Event]) -> None:
        self._state.publish(revision)
        for event in events:
            self._events.emit(event)

    def _show_at_once(self) -> None:
        """Publish what was changed with no record, or before it: whoever changed it sees it when they look again.

        The revision follows when the record, or its turn, has come.
        """
        if self._state.is_ahead and not self._is_applying:
            self._state.publish(self._state.revision)

    def _settled(self, entries: Sequence[Entry], error: LedgerError | None) -> None:
        """In the ledger's thread."""
        try:
            self._loop.call_soon_threadsafe(self._settle, entries, error)
        except RuntimeError:
            return  # the loop is closed: nobody waits any more

    def _settle(self, entries: Sequence[Entry], error: LedgerError | None) -> None:
        batch = cast("Sequence[_Pending]", entries)
        if error is not None:
            self._failed(batch, error)
            return
        recovered, self.error = self.error, ""
        revision = self._state.revision
        told: list[Event] = []
        self._is_applying = True
        try:
            for pending in batch:
                if pending.apply is not None:
                    pending.apply()
                revision = pending.revision
                told += pending.events
                if not pending.done.done():
                    pending.done.set_result(None)
        finally:
            self._is_applying = False
        self._publish(revision, told)
        if recovered:
            self.tell(self.event(EventKind.LEDGER_RECOVERED, "the ledger can be written again"))

    def _failed(self, batch: Sequence[_Pending], error: LedgerError) -> None:
        first = not self.error
        self.error = str(error)
        self._state.status_changed.emit()
        told: list[Event] = []
        for pending in reversed(batch):  # it comes newest first
            if pending.always:
                told += pending.events
            if not pending.done.done():
                pending.done.set_exception(error)
                pending.done.exception()  # seen: not everybody waits for it
        # What is on the hardware, or concerns only this run, is so whether it can be recorded or not.
        if self._state.is_ahead or any(pending.always for pending in batch):
            self._publish(max(pending.revision for pending in batch), told)
        if first:
            self.tell(self.event(EventKind.LEDGER_FAILED, f"{error}; no new leases until it is writable"))


def ledger_refusal(error: LedgerError, what: str = "give a lease") -> RefusedError:
    """A failed commit as the answer to a request; `what` completes "cannot ..."."""
    return refuse(
        Reason.LEDGER_FAILED,
        f"cannot {what}, since it cannot be recorded: {error}",
        "ask the administrator to make the ledger writable; leases that stand are not touched",
    )


@dataclass(slots=True)
class Transaction:
    """Filled by several hands, then written once."""

    journal: Journal
    changes: list[Change] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    applied: list[Callable[[], None]] = field(default_factory=list)
    ended: set[LeaseId] = field(default_factory=set)
    """Leases whose end is in it already."""

    def __bool__(self) -> bool:
        return bool(self.changes or self.events or self.applied)

    def write(self) -> asyncio.Future[None]:
        """Commits all of it as one record. The future fails with LedgerError."""
        return self.journal.write(tuple(self.changes), tuple(self.events), self._apply)

    def _apply(self) -> None:
        for apply in self.applied:
            apply()

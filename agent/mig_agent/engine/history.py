"""Queries of the ledger's history: recorded events, accounting, and advice on what to ask for."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Generator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TypeVar

from mig_agent.adapters.ledger.store import Ledger
from mig_agent.core.accounting import Account, AccountedUse, By, Period, Reader, grouped, key_of
from mig_agent.core.advice import Advice, advise, cases
from mig_agent.core.errors import LedgerError, Reason, refuse
from mig_agent.core.events import Event
from mig_agent.core.model import CallerId, LeaseId
from mig_agent.core.quantities import shown
from mig_agent.core.replay import ReplayedNode
from mig_agent.engine.callers import Caller
from mig_agent.engine.context import Context

MOST_KEYS = 2000
"""Number of groups that one answer lists; the smallest of more are summed up."""
MOST_RUNS = 1000
"""Number of the latest leased devices that advice rests on."""
MOST_CASES = 10
"""Number of names that one call gets advice on: each takes two replays of the history."""
_ADVICE_SECONDS = 20.0
"""Time limit of one call that replays the history; names that are not reached by then get no advice."""
_MOST_QUERIES = 4
"""Number of queries that read the ledger at once; further ones wait."""

_Answer = TypeVar("_Answer")


@dataclass(slots=True)
class _Turn:
    """One user's analyses of the ledger: one at once."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    calls: int = 0
    """Number of calls that hold the lock or wait for it."""


class History:
    """Answers questions about the past from the ledger, in other threads. Use from the event loop."""

    def __init__(self, context: Context, ledger: Ledger) -> None:
        self._context = context
        self._ledger = ledger
        self._queries = asyncio.Semaphore(_MOST_QUERIES)
        self._advising = asyncio.Lock()
        self._turns: dict[CallerId, _Turn] = {}
        """The turns of the users whose calls of `account` or `advise` are in progress."""

    async def events(
        self, since: float, gpu: str | None, limit: int, *, lease: str = "", before: int = 0
    ) -> tuple[Event, ...]:
        """Return the latest `limit` recorded events since a moment, oldest first.

        Of one GPU (index or UUID), of one lease, and before the event of a number in the ledger, where these are given.
        Raises RefusedError (LEDGER_FAILED).
        """
        return await self._query(lambda: self._ledger.events(since, gpu or "", limit, lease=lease, before=before))

    async def event_page(
        self, since: float, gpu: str | None, limit: int, *, lease: str = "", before: int = 0
    ) -> tuple[tuple[Event, ...], int]:
        """Return what `events` returns, and how many older events match. Raises RefusedError (LEDGER_FAILED)."""
        return await self._query(lambda: self._ledger.event_page(since, gpu or "", limit, lease=lease, before=before))

    async def lease_called(self, name: str) -> LeaseId:
        """Return the lease that is meant by its id, the beginning of one, or a name: the latest, active or ended.

        Raises RefusedError (UNKNOWN_LEASE where no recorded event is about one, LEDGER_FAILED).
        """
        if name in self._context.state.view.leases:
            return LeaseId(name)
        found = await self._query(lambda: self._ledger.lease_called(name))
        if found is None:
            raise refuse(
                Reason.UNKNOWN_LEASE,
                f"cannot find lease {shown(name)}: none is called so, and none of which an event is remembered",
                "`migctl status --leases` lists the active ones, `migctl events` what is remembered",
            )
        return found

    async def account(self, since: float, until: float | None, by: By, caller: Caller) -> Account:
        """Return who leased what in a period, from the ledger; `until` is at most now, and None means now.

        Names of other users' leases are not shown, but counted under their users. Raises RefusedError (LEDGER_FAILED).
        """
        now = self._context.clock.now()
        period = Period(since, now if until is None else min(until, now))
        active, reader = self._context.accounting.active(now), _reader(caller)
        async with self._turn_of(caller):
            return await self._query(lambda: _read_account(self._ledger, active, period, by, reader))

    async def advise(self, since: float, name: str, caller: Caller) -> tuple[Advice, ...]:
        """Return what leases asked for against what they used, and what asking for less would have meant.

        Only of the caller's own leases, or of all for those who act for others; with `name` of leases of that name.
        The history of the node is replayed with the smaller request, in turns with other calls. Raises RefusedError.
        """
        context, reader = self._context, _reader(caller)
        # Nothing is read before it is this call's turn: a thousand calls that wait hold nothing.
        async with self._turn_of(caller), self._advising:
            active = context.accounting.active(context.clock.now())
            uses = await self._query(lambda: _read_runs(self._ledger, active, since))
            node = ReplayedNode(
                view=context.state.view,
                policy=context.policy,
                reservation_after_seconds=context.reservation_after_seconds,
                strict_fifo=context.settings.strict_fifo,
            )
            until, found = time.monotonic() + _ADVICE_SECONDS, []
            for case in cases(uses, reader, name)[:MOST_CASES]:
                advice = await self._in_turns(advise(case, uses, node), until)
                if advice is None:
                    break
                found.append(advice)
        return tuple(found)

    @asynccontextmanager
    async def _turn_of(self, caller: Caller) -> AsyncIterator[None]:
        """Wait until no other analysis of the ledger is in progress for this user, so that one cannot delay others."""
        turn = self._turns.setdefault(caller.caller_id, _Turn())
        turn.calls += 1
        try:
            async with turn.lock:
                yield
        finally:
            turn.calls -= 1
            if not turn.calls:
                self._turns.pop(caller.caller_id, None)

    async def _query(self, read: Callable[[], _Answer]) -> _Answer:
        """Read the ledger in another thread. Raises RefusedError (LEDGER_FAILED)."""
        try:
            async with self._queries:
                return await self._context.blocking_calls.run(read)
        except LedgerError as error:
            raise refuse(Reason.LEDGER_FAILED, str(error)) from error

    async def _in_turns(self, steps: Generator[None, None, _Answer], until: float) -> _Answer | None:
        """Return what a computation returns, or None at the moment `until` of `time.monotonic`.

        Other calls run between its steps.
        """
        while time.monotonic() < until:
            try:
                next(steps)
            except StopIteration as end:
                answer: _Answer = end.value
                return answer
            await self._context.fairness.yield_turn()
        steps.close()
        return None


def _reader(caller: Caller) -> Reader:
    """Return what a caller may see of accounting."""
    return Reader(uid=caller.uid, user=caller.name, everything=caller.acts_for_others)


def _read_account(ledger: Ledger, active: Sequence[AccountedUse], period: Period, by: By, reader: Reader) -> Account:
    """Return the sums over all leases in a period. Blocking, from any thread. Raises LedgerError.

    `active` are the records of the leases that are active, taken on the event loop before this call: each lease then
    counts once, whether it ends meanwhile or not.
    """
    without = sorted({LeaseId(each.lease) for each in active})
    ended, complete_since = ledger.uses(period, by, reader, without)
    now = [(key_of(each, by, reader), each.within(period)) for each in active]
    rows = grouped((each for each in (*ended, *now) if each[1].devices or each[1].waited_seconds), most=MOST_KEYS)
    return Account(rows=rows, period=period, complete_since=complete_since)


def _read_runs(ledger: Ledger, active: Sequence[AccountedUse], since: float) -> tuple[AccountedUse, ...]:
    """Return the records of the latest leases, active ones last. Blocking, from any thread. Raises LedgerError."""
    without = sorted({LeaseId(each.lease) for each in active})
    return (*ledger.history(since, MOST_RUNS, without), *active)

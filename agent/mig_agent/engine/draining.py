"""Draining: GPUs are cordoned so that they become empty; what is leased there ends by itself, or at a deadline.

A drain is a cordon with two more facts, recorded with it in one commit, so both survive a restart. The deadline is
looked at by a timer and after each reconciliation; leases are found in the state each time. The lease of a pod that is
on this node does not end by it, since its containers would go on with what others get: such a pod has to be evicted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence

from mig_agent.adapters.clock import Timer
from mig_agent.adapters.ledger.reader import Cordon
from mig_agent.adapters.ledger.records import DropCordon, PutCordon
from mig_agent.core.errors import LedgerError
from mig_agent.core.events import Event, EventKind
from mig_agent.core.model import Gpu, Lease, LeaseId
from mig_agent.core.quantities import counted, format_duration
from mig_agent.engine.callers import Caller
from mig_agent.engine.context import Context
from mig_agent.engine.journal import Transaction, ledger_refusal
from mig_agent.engine.lifecycle import EndReason, LeaseLifecycle
from mig_agent.engine.state import GpuRecord

RETRY_SECONDS = 5.0
"""The pause before committing the end of the leases of a drained GPU is tried again, in seconds."""


class Draining:
    """Drains GPUs. Not thread-safe; use from the event loop."""

    def __init__(self, context: Context, lifecycle: LeaseLifecycle) -> None:
        self._context = context
        self._lifecycle = lifecycle
        self._timer: Timer | None = None
        context.events.observers.append(self._observe)

    async def drain(
        self, names: Sequence[str], deadline_seconds: float | None, reason: str, caller: Caller
    ) -> tuple[Gpu, ...]:
        """Drain GPUs, or all if none is named, and return them. Raises RefusedError."""
        context, now = self._context, self._context.clock.now()
        records = self._named(names)
        until = None if deadline_seconds is None else now + deadline_seconds
        words = f"drained by {caller}" + (f": {reason}" if reason else "")
        cordon = Cordon(reason=words, since=now, draining=True, drain_until=until)
        transaction = Transaction(context.journal)
        for record in records:
            there = [each for each in self._leases_on(record) if not each.owner.is_bound]
            ends = "" if deadline_seconds is None else f" in {format_duration(deadline_seconds)} at the latest"
            left = f"; {counted(len(there), 'lease')} there will end{ends or ' by themselves'}" if there else ""
            transaction.changes.append(PutCordon(record.uuid, words, now, draining=True, drain_until=until))
            transaction.events.append(
                context.journal.event(
                    EventKind.GPU_CORDONED,
                    f"GPU {record.index} is being {words}{left}",
                    gpu=record.uuid,
                    caller=caller,
                    draining=True,
                )
            )
            if not self._leases_on(record):
                transaction.events.append(self._drained_event(record))
            if until is not None:
                transaction.events += [self._warning_event(record, each, words, ends) for each in there]
        transaction.applied.append(lambda: self._set(records, cordon))
        try:
            await transaction.commit()
        except LedgerError as error:
            raise ledger_refusal(error, "drain") from error
        self._arm()
        return self._gpus(records)

    async def undrain(self, names: Sequence[str], caller: Caller) -> tuple[Gpu, ...]:
        """End the draining of GPUs, or of all that are drained, and return them. Raises RefusedError.

        A GPU that is only cordoned stays so.
        """
        context = self._context
        records = [each for each in self._named(names) if each.cordon is not None and each.cordon.draining]
        transaction = Transaction(context.journal)
        for record in records:
            words = f"GPU {record.index} is not drained any more, says {caller}"
            transaction.changes.append(DropCordon(record.uuid))
            transaction.events.append(
                context.journal.event(EventKind.GPU_UNCORDONED, words, gpu=record.uuid, caller=caller)
            )
        transaction.applied.append(lambda: self._set(records, None))
        if records:
            try:
                await transaction.commit()
            except LedgerError as error:
                raise ledger_refusal(error, "undrain") from error
        self._arm()
        context.state.capacity_freed.emit()
        return self._gpus(self._named(names) if names else records)

    async def end_overdue(self) -> None:
        """End the leases on GPUs whose deadline is over; to be called at the start, too."""
        context, now = self._context, self._context.clock.now()
        failed = False
        for record in tuple(context.state.gpus.values()):
            cordon = record.cordon
            if cordon is None or cordon.drain_until is None or cordon.drain_until > now:
                continue
            for lease in self._leases_on(record):
                if lease.owner.is_bound:
                    continue
                why = f"GPU {record.index} is {cordon.reason}, and the deadline is over"
                try:
                    await self._lifecycle.end(lease.id, EndReason.DRAINED, why=why)
                except LedgerError:
                    failed = True
        self._arm(again=failed)

    @property
    def warnings(self) -> Mapping[LeaseId, str]:
        """Messages for the holders of leases on drained GPUs."""
        now, found = self._context.clock.now(), {}
        for record in self._context.state.gpus.values():
            cordon = record.cordon
            if cordon is None or not cordon.draining:
                continue
            for lease in self._leases_on(record):
                ends = ""
                if cordon.drain_until is not None and not lease.owner.is_bound:
                    ends = f"; the lease ends in {format_duration(max(cordon.drain_until - now, 1.0) // 1)}"
                found[lease.id] = f"GPU {record.index} is {cordon.reason}{ends}"
        return found

    def leases_on(self, gpus: Iterable[Gpu]) -> tuple[Lease, ...]:
        """Return the leases with a device on one of these GPUs."""
        records = (self._context.state.gpus[each.uuid] for each in gpus)
        found = {lease.id: lease for record in records for lease in self._leases_on(record)}
        return tuple(found.values())

    def close(self) -> None:
        """Cancel the timer."""
        if self._timer is not None:
            self._timer.cancel()

    def _named(self, names: Sequence[str]) -> list[GpuRecord]:
        context = self._context
        if not names:
            return list(context.state.gpus.values())
        return list({each.uuid: each for each in map(context.gpu_named, names)}.values())

    def _leases_on(self, record: GpuRecord) -> list[Lease]:
        leases = self._context.state.leases
        held = dict.fromkeys(each.lease for each in record.instances.values() if each.lease is not None)
        return [leases[each] for each in held if each in leases]

    def _set(self, records: Iterable[GpuRecord], cordon: Cordon | None) -> None:
        for record in records:
            record.cordon = cordon
            self._context.state.touch(record.uuid)

    def _gpus(self, records: Iterable[GpuRecord]) -> tuple[Gpu, ...]:
        return tuple(self._context.state.gpu(each.uuid) for each in records)

    def _warning_event(self, record: GpuRecord, lease: Lease, words: str, ends: str) -> Event:
        return self._context.journal.event(
            EventKind.LEASE_WARNED,
            f"lease {lease.id} of {lease.holder} ends{ends}: GPU {record.index} is {words}",
            gpu=record.uuid,
            lease=lease.id,
            holder=str(lease.holder),
            tenant=lease.holder.tenant,
            reason=EndReason.DRAINED.value,
        )

    def _arm(self, *, again: bool = False) -> None:
        """Set the timer to the next deadline; with `again` a failed end is tried again soon."""
        self.close()
        context, now = self._context, self._context.clock.now()
        cordons = [each.cordon for each in context.state.gpus.values() if each.cordon is not None]
        coming = [each.drain_until - now for each in cordons if each.drain_until is not None and each.drain_until > now]
        if again:
            coming.append(RETRY_SECONDS)
        self._timer = context.clock.call_later(min(coming), self._end_soon) if coming else None

    def _end_soon(self) -> None:
        if not self._context.closing:
            self._context.tasks.spawn("drain", self.end_overdue())

    def _observe(self, event: Event) -> None:
        """Report soon that a drained GPU is empty."""
        if event.kind is EventKind.LEASE_ENDED and event.gpu is not None:
            record = self._context.state.gpus.get(event.gpu)
            if record is not None and record.cordon is not None and record.cordon.draining:
                asyncio.get_running_loop().call_soon(self._report_empty, record)

    def _report_empty(self, record: GpuRecord) -> None:
        context = self._context
        if record.cordon is not None and record.cordon.draining and not self._leases_on(record) and not context.closing:
            context.journal.record(self._drained_event(record))

    def _drained_event(self, record: GpuRecord) -> Event:
        words = f"GPU {record.index} is drained: nothing is leased there"
        return self._context.journal.event(EventKind.GPU_DRAINED, words, gpu=record.uuid)

"""The end of shares: what enforces a share's memory limit is removed when its lease has ended, or when no lease has it.

A share serves one lease. Its end is not recorded before what enforced it is gone, so that a crash leaves it to the next
start.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial

from mig_agent.adapters.ledger.records import DropInstance
from mig_agent.adapters.shares.enforcer import Enforcer
from mig_agent.adapters.threads import CallThread
from mig_agent.core.errors import DriverError, LedgerError
from mig_agent.core.events import EventKind
from mig_agent.core.model import Generation, GpuUuid, Instance, InstanceState
from mig_agent.engine.context import Context
from mig_agent.engine.instances import InstanceDestroyer, StepFailedError

LONGEST_WAIT_SECONDS = 15.0
"""Time for which the release of a lease waits for the end of its shares."""
_UNKNOWN_GPU = GpuUuid("")


class Shares:
    """Ends shares that have no lease. Not thread-safe; use from the event loop."""

    def __init__(self, context: Context, destroyer: InstanceDestroyer, unloaded: dict[Generation, GpuUuid]) -> None:
        """`unloaded` are all recorded shares, with their GPUs, some of which may not answer or be managed yet."""
        self._context = context
        self._destroyer = destroyer
        self._recorded = unloaded
        self._ending: dict[Generation, asyncio.Task[None]] = {}
        self._told: dict[Generation, str] = {}
        """The error of each share that could not be ended, lest it be reported with each attempt."""
        self._thread = CallThread("shares")

    def close(self) -> None:
        """Let the thread end when its calls have returned; does not wait."""
        self._thread.close()

    def end_soon(self, share: Instance) -> None:
        """End a share that has no lease; the next reconciliation tries again if that fails."""
        context = self._context
        if context.state.instance(share.generation) is None or share.generation in self._ending:
            return
        context.state.put(replace(share, state=InstanceState.DESTROYING, lease=None))
        context.journal.republish()
        if not context.closing and not context.driver_use.paused:
            context.driver_use.enter()
            self._ending[share.generation] = context.tasks.spawn(
                f"end-share-{share.generation}", self._end(share.generation)
            )

    async def wait_until_ended(self, shares: Iterable[Generation]) -> None:
        """Wait until those of these shares that are being ended have gone, or have failed to, for a bounded time."""
        ending = [self._ending[each] for each in shares if each in self._ending]
        if ending:
            await asyncio.wait(ending, timeout=LONGEST_WAIT_SECONDS)

    async def _end(self, generation: Generation) -> None:
        context = self._context
        try:
            known = context.state.instance(generation)
            if known is None:
                return
            async with context.gpu_workers[known.slot.gpu].lock:
                await self._end_locked(generation)
        finally:
            self._ending.pop(generation, None)
            context.driver_use.leave()

    async def _end_locked(self, generation: Generation) -> None:
        context = self._context
        share = context.state.instance(generation)
        if share is None or share.state is not InstanceState.DESTROYING:
            return
        try:
            await self._destroyer.destroy(share)
        except StepFailedError as failed:
            self._tell(share, failed)
            return
        self._told.pop(generation, None)
        event = context.journal.event(
            EventKind.INSTANCE_DESTROYED, f"ended {context.place(share)}", instance=share, reason="no lease"
        )
        try:
            await context.journal.commit((DropInstance(generation),), (event,), partial(context.state.drop, generation))
        except LedgerError:
            return  # the next reconciliation ends it again, which finds nothing
        context.state.capacity_freed.emit()

    def _tell(self, share: Instance, failed: StepFailedError) -> None:
        words = f"cannot end {self._context.place(share)}: {failed.error}"
        if self._told.get(share.generation) != words:
            self._told[share.generation] = words
            self._context.journal.record(
                self._context.journal.event(
                    EventKind.STEP_FAILED,
                    words,
                    instance=share,
                    call=failed.error.call,
                    error=failed.error.kind.value,
                )
            )

    # What is on the machine and in no record

    async def sweep(self) -> None:
        """End the shares that exist on this machine and that the ledger knows nothing of.

        None while the ledger is in doubt: each may have a holder whom it does not know.
        """
        context = self._context
        for enforcer in context.share_survey.enforcers:
            try:
                existing = await self._thread.run(enforcer.existing)
            except DriverError:
                continue  # the next reconciliation tries again
            if context.state.doubt is None:
                await self._end_unknown(enforcer, [each for each in existing if not self._is_known(each[1])])

    def _is_known(self, generation: Generation) -> bool:
        state = self._context.state
        gpu = self._recorded.get(generation)
        not_loaded = gpu is not None and gpu not in state.gpus
        reserved = any(generation in record.reserved for record in state.gpus.values())
        return not_loaded or reserved or state.instance(generation) is not None

    async def _end_unknown(self, enforcer: Enforcer, unknown: Sequence[tuple[GpuUuid | None, Generation]]) -> None:
        context = self._context
        for gpu, generation in unknown:
            if context.closing:
                return
            try:
                await self._thread.run(partial(enforcer.end, gpu or _UNKNOWN_GPU, generation))
            except DriverError:
                continue  # the next reconciliation tries again
            words = f"ended what was left of share {generation}, which no lease has"
            context.journal.record(context.journal.event(EventKind.INSTANCE_DESTROYED, words, gpu=gpu))

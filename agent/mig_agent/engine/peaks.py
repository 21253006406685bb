"""Peak use of leased devices: the memory in use is read on a timer, in the GPUs' reader threads."""

from __future__ import annotations

import asyncio
import contextlib

from mig_agent.core.errors import LedgerError
from mig_agent.core.model import InstanceState
from mig_agent.engine.context import Context
from mig_agent.engine.usage import read_usage

RECORD_SECONDS = 300.0
"""Interval at which changed peaks of active leases are recorded, in seconds: a crash loses the samples since then."""


class PeakSampler:
    """Samples the memory in use on leased devices. Not thread-safe; use from the event loop."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._record_at = context.clock.now() + RECORD_SECONDS

    async def run(self, seconds: float) -> None:
        """Take a sample every so many seconds, until cancelled."""
        wake = asyncio.Event()
        while True:
            timer = self._context.clock.call_later(seconds, wake.set)
            try:
                await wake.wait()
            finally:
                timer.cancel()
            wake.clear()
            await self.sample()

    async def sample(self) -> None:
        """Read the memory in use on all leased devices now; record the peaks where that is due.

        A peak that cannot be recorded now is recorded with the end of its lease, or after a later sample.
        """
        context = self._context
        if not context.driver_use.paused:
            leases = context.accounting.leases
            context.accounting.sampled(await read_usage(context, frozenset({InstanceState.LEASED})), leases)
        now = context.clock.now()
        if now >= self._record_at and not context.journal.error:
            self._record_at = now + RECORD_SECONDS
            changes = context.accounting.peak_changes()
            if changes:
                with contextlib.suppress(LedgerError):
                    await context.journal.commit(changes)

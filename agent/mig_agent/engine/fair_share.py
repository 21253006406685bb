"""Fair share on a running node: what each tenant used lately, from active leases and the recorded ends of others."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from mig_agent.core import fairness
from mig_agent.core.backfill import WaitingRequest, in_order
from mig_agent.core.events import Event, EventKind
from mig_agent.core.model import Lease
from mig_agent.core.queue import Queue
from mig_agent.engine.context import Context

GPUS, STARTED, TENANT = "gpus", "started", "tenant"
"""The facts of the event of a lease's end from which its use is known after a restart of the agent."""


def gpus_of(context: Context, lease: Lease) -> float:
    """Return how many GPUs a lease holds, by their memory slices."""
    state = context.state
    return sum(
        each.slot.profile.memory_slices / state.gpus[each.slot.gpu].layout.memory_slices
        for each in state.instances_of(lease.id)
        if each.slot.gpu in state.gpus
    )


class FairShare:
    """Orders waiting requests by what their tenants used, if the settings ask for it.

    The use of ended leases is read again from the recorded events at the start, so that it survives a restart as far
    as the ledger keeps events. Not thread-safe; use from the event loop.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self._past = fairness.PastUse()
        self._order: tuple[tuple[object, ...], tuple[WaitingRequest, ...]] | None = None
        """The order that was computed last, with what it is for."""
        context.events.observers.append(self.observe)

    @property
    def _half_life(self) -> float | None:
        return self._context.settings.fair_share_half_life_seconds

    def observe(self, event: Event) -> None:
        """Add the use of a lease that has ended; ignore other events."""
        half_life, data = self._half_life, event.data
        if half_life is None or event.kind is not EventKind.LEASE_ENDED:
            return
        gpus, started, tenant = data.get(GPUS), data.get(STARTED), data.get(TENANT)
        if isinstance(gpus, (int, float)) and isinstance(started, (int, float)) and isinstance(tenant, str):
            self._past.add(tenant, gpus, started, event.at, half_life)

    def remember(self, events: Iterable[Event]) -> None:
        """Add the use of the leases whose ends were recorded before this start of the agent."""
        for each in events:
            self.observe(each)

    def used(self) -> Mapping[str, float]:
        """Return the weighted GPU-seconds of each tenant now; empty without fair share."""
        half_life, now = self._half_life, self._context.clock.now()
        if half_life is None:
            return {}
        used = self._past.at(now, half_life)
        for lease in self._context.state.leases.values():
            tenant = lease.holder.tenant
            mine = fairness.decayed(gpus_of(self._context, lease), lease.created_at, now, now, half_life)
            used[tenant] = used.get(tenant, 0.0) + mine
        return used

    def used_if_on(self) -> Mapping[str, float] | None:
        """Return what `used` does; None without fair share."""
        return None if self._half_life is None else self.used()

    def ordered(self, queue: Queue, newcomer: WaitingRequest | None = None) -> tuple[WaitingRequest, ...]:
        """Return the waiting requests in the order in which they are served; with a newcomer as if it waited, too.

        Computed again each second at most, unless requests come or go, or the node changes.
        """
        if newcomer is not None:
            return self._order_of((*queue.waiting, newcomer))
        if self._half_life is None or not len(queue):
            return queue.waiting
        context, now = self._context, self._context.clock.now()
        key = (int(now), context.state.revision, queue.version)
        if self._order is None or self._order[0] != key:
            self._order = (key, self._order_of(queue.waiting))
        return self._order[1]

    def _order_of(self, waiting: Iterable[WaitingRequest]) -> tuple[WaitingRequest, ...]:
        context, used = self._context, self.used_if_on()
        if used is None:
            return in_order(waiting)
        return fairness.ranked(waiting, used, context.clock.now(), context.reservation_after_seconds)

"""Idle leases: on whose devices no process was seen for a time. Holders are warned, and leases end if so configured.

The time is counted from readings of the driver. After the start of the agent, a pause, or a GPU that could not be read
it begins again, since nothing is known of the time between. Right before a lease ends its devices are looked at once
more. Leases with a bound owner (pods) are never idle.
"""

from __future__ import annotations

from collections.abc import Mapping

from mig_agent.core.errors import DriverError, LedgerError
from mig_agent.core.events import EventKind
from mig_agent.core.model import Instance, InstanceState, Lease, LeaseId
from mig_agent.core.quantities import format_duration
from mig_agent.engine.context import Context
from mig_agent.engine.lifecycle import EndReason, LeaseLifecycle
from mig_agent.engine.reconciler import Reconciler


class IdleLeases:
    """Finds, reports and ends idle leases. Not thread-safe; use from the event loop."""

    def __init__(self, context: Context, lifecycle: LeaseLifecycle, reconciler: Reconciler) -> None:
        self._context = context
        self._lifecycle = lifecycle
        self._reconciler = reconciler
        self._warned: set[LeaseId] = set()
        self.at_last_look: frozenset[LeaseId] = frozenset()
        """The leases that were idle at the last look; some may have ended since."""

    def since(self) -> Mapping[LeaseId, float]:
        """Return since when each idle lease has had no process, in seconds since the epoch."""
        before = self._context.clock.now() - self._context.settings.idle_after_seconds
        found = {each.id: self._since(each) for each in self._context.state.leases.values()}
        return {lease: since for lease, since in found.items() if since is not None and since <= before}

    @property
    def warnings(self) -> Mapping[LeaseId, str]:
        """Messages for the holders of idle leases."""
        now = self._context.clock.now()
        return {lease: f"idle for {_rounded(now - since)}{self._end(since)}" for lease, since in self.since().items()}

    async def look(self) -> None:
        """Warn the holders of leases that have become idle, and end those that were idle for too long."""
        context, now = self._context, self._context.clock.now()
        idle = self.since()
        self.at_last_look = frozenset(idle)
        self._warned &= idle.keys()
        for each, since in idle.items():
            lease = context.state.leases.get(each)
            if lease is None:
                continue
            if each not in self._warned:
                self._warned.add(each)
                self._warn(lease, since)
            limit = context.settings.end_idle_after_seconds
            if limit is not None and now - since >= limit and not await self._is_used(lease):
                why = f"no process used its devices for {_rounded(now - since)} (end_idle_after)"
                try:
                    await self._lifecycle.end(each, EndReason.IDLE, why=why)
                except LedgerError:
                    return  # the next reconciliation finds it again

    def _warn(self, lease: Lease, since: float) -> None:
        context = self._context
        words = f"lease {lease.id} of {lease.holder} is idle: no process for {_rounded(context.clock.now() - since)}"
        context.journal.record(
            context.journal.event(
                EventKind.LEASE_WARNED,
                words + self._end(since),
                lease=lease.id,
                holder=str(lease.holder),
                tenant=lease.holder.tenant,
                reason=EndReason.IDLE.value,
            )
        )

    def _end(self, since: float) -> str:
        limit = self._context.settings.end_idle_after_seconds
        if limit is None:
            return ""
        left = max(since + limit - self._context.clock.now(), 1.0)
        return f"; the lease ends in {_rounded(left)} unless a process uses it"

    def _since(self, lease: Lease) -> float | None:
        """Return when a process was last seen on any device of a lease; None if that is not known of all of them."""
        state = self._context.state
        instances = tuple(state.instances_of(lease.id))
        if lease.owner.is_supervised or not instances or len(instances) < len(lease.instances):
            return None
        if not all(map(self._is_watched, instances)):
            return None
        return max(self._reconciler.last_seen(each) for each in instances)

    def _is_watched(self, instance: Instance) -> bool:
        record = self._context.state.gpus[instance.slot.gpu]
        is_readable = not (record.trouble or record.lost or self._context.driver_use.paused)
        return is_readable and instance.state is InstanceState.LEASED and self._reconciler.is_watched(instance.slot.gpu)

    async def _is_used(self, lease: Lease) -> bool:
        """Return whether a process uses a device of a lease now, or that cannot be read."""
        for instance in tuple(self._context.state.instances_of(lease.id)):
            try:
                if await self._context.users(instance):
                    self._reconciler.saw_process(instance)
                    return True
            except DriverError:
                return True
        return False


def _rounded(seconds: float) -> str:
    """Return a duration for messages, to a minute where it is longer than one."""
    return format_duration(float(seconds // 60 * 60 if seconds >= 60 else max(seconds // 1, 1)))  # noqa: PLR2004 -- a minute

"""Idle leases: on whose devices no process was seen for a time. Holders are warned, and leases end if so configured.

A lease ends at the earliest after the whole notice between `idle_after` and `end_idle_after`, and a minute, since its
warning: one that comes late, because the driver answered late or the machine was suspended, delays the end.

The time is counted from readings of the driver. After the start of the agent, a pause, or a GPU that could not be read
it begins again, since nothing is known of the time between. Right before a lease ends its devices are looked at once
more. Leases with a bound owner (pods) are never idle.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mig_agent.core.errors import DriverError, LedgerError
from mig_agent.core.events import EventKind
from mig_agent.core.model import Instance, InstanceState, Lease, LeaseId
from mig_agent.core.quantities import format_duration
from mig_agent.engine.context import Context
from mig_agent.engine.lifecycle import EndReason, LeaseLifecycle
from mig_agent.engine.reconciler import Reconciler

_LEAST_NOTICE_SECONDS = 60.0
"""Least time between a warning and the end."""


@dataclass(frozen=True, slots=True)
class _Warning:
    since: float
    """Since when the lease was idle, in seconds since the epoch."""
    at: float
    """Time at which its holder was warned, in seconds since the epoch."""


class IdleLeases:
    """Finds, reports and ends idle leases. Not thread-safe; use from the event loop."""

    def __init__(self, context: Context, lifecycle: LeaseLifecycle, reconciler: Reconciler) -> None:
        self._context = context
        self._lifecycle = lifecycle
        self._reconciler = reconciler
        self._warned: dict[LeaseId, _Warning] = {}
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
        return {
            lease: f"idle for {_rounded(now - since)}{self._end(lease, since)}" for lease, since in self.since().items()
        }

    async def look(self) -> None:
        """Warn the holders of leases that have become idle, and end those that were idle for too long."""
        context = self._context
        idle = self.since()
        self.at_last_look = frozenset(idle)
        # One whose devices were used since its warning is warned about again.
        self._warned = {each: told for each, told in self._warned.items() if idle.get(each) == told.since}
        for each, since in idle.items():
            lease = context.state.leases.get(each)
            if lease is None:
                continue
            if each not in self._warned:
                self._warned[each] = _Warning(since, context.clock.now())
                self._warn(lease, since)
            end = self._end_at(each, since)
            if end is not None and context.clock.now() >= end and not await self._is_used(lease):
                why = f"no process used its devices for {_rounded(context.clock.now() - since)} (end_idle_after)"
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
                words + self._end(lease.id, since),
                lease=lease.id,
                holder=str(lease.holder),
                tenant=lease.holder.tenant,
                reason=EndReason.IDLE.value,
            )
        )

    def _end(self, lease: LeaseId, since: float) -> str:
        end = self._end_at(lease, since)
        if end is None:
            return ""
        left = max(end - self._context.clock.now(), 1.0)
        return f"; the lease ends in {_rounded(left)} unless a process uses it"

    def _end_at(self, lease: LeaseId, since: float) -> float | None:
        """Return when a lease ends that is idle `since`, in seconds since the epoch; None if idle leases do not end.

        For one that has not been warned about: as if its holder were warned now.
        """
        settings, told = self._context.settings, self._warned.get(lease)
        limit = settings.end_idle_after_seconds
        if limit is None:
            return None
        warned_at = told.at if told is not None and told.since == since else self._context.clock.now()
        return max(since + limit, warned_at + max(limit - settings.idle_after_seconds, _LEAST_NOTICE_SECONDS))

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

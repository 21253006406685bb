"""Publication of the engine's state: a value for any thread, the whole of a status, and notice of each change."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from mig_agent.core.model import GpuUuid, LeaseId
from mig_agent.core.planning.capacity import Available, available, largest_share_mib
from mig_agent.engine.lifecycle import leases_without_answering_devices
from mig_agent.engine.results import Published, Snapshot
from mig_agent.engine.startup import Parts


class Publication:
    """Publishes the state of one engine. Use from the event loop, except for `published`."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._context = parts.context
        self.on_view: list[Callable[[], None]] = []
        """Called soon after a new view was published or capacity was freed, on the event loop.

        Several changes within one iteration of the event loop cause one call."""
        self._notify_scheduled = False
        self._socket_problems: tuple[str, ...] = ()
        self._problems: dict[str, str] = {}
        """Problems that keep no lease from being granted, by the part of the agent that they are about."""
        self._boot_id = parts.context.host.kernel_boot_id()
        self.published = self._build_published()
        """The node as last published: a finished value, which any thread may read."""
        parts.share_watch.report_problem = self.set_problem
        state = parts.context.state
        state.view_changed.subscribe(self._update)
        state.status_changed.subscribe(self._update)
        state.view_changed.subscribe(self._schedule_notification)
        state.capacity_freed.subscribe(self._schedule_notification)

    def set_problem(self, part: str, words: str) -> None:
        """Show in status that a part of the agent does not work, or with no words that it works again."""
        self._problems[part] = words
        self._update()

    def set_missing_sockets(self, problems: tuple[str, ...]) -> None:
        """Show in status which sockets of the agent are missing."""
        self._socket_problems = problems
        self._update()

    def snapshot(self) -> Snapshot:
        """Return all that a status shows, computed at once. It takes longer the more requests wait."""
        context, parts = self._context, self._parts
        return Snapshot(
            view=context.state.view,
            at=context.clock.now(),
            queue=parts.queue.queued,
            started_at=parts.started_at,
            driver_version=context.driver.version,
            strict_fifo=context.settings.strict_fifo,
            reservation_after_seconds=context.reservation_after_seconds,
            ledger_error=context.journal.error,
            doubt=context.state.doubt,
            socket_problems=self._socket_problems,
            problems=self.published.problem_lines,
            recoverable=sum(not each.void for each in context.state.former.values()),
            unused=parts.reconciler.unused_leases(),
            idle_since=parts.idle_leases.since(),
            warnings={**parts.idle_leases.warnings, **parts.draining.warnings},
            missing=dict(context.missing),
            paused=context.driver_use.paused,
            silent=leases_without_answering_devices(context.state),
            left=self._leases_without_process(),
            boot_id=self._boot_id,
            available=self._available(),
            largest_share_mib=self._largest_share_mib(),
        )

    def _available(self) -> tuple[Available, ...]:
        """Return how many devices of each profile a new request could get now; empty while paused or stopping."""
        context = self._context
        if context.driver_use.paused or context.closing:
            return ()
        return available(context.state.working_view, context.policy, reserved=self._reserved)

    def _largest_share_mib(self) -> int:
        """Return the largest share that a new request could get now; 0 while paused or stopping."""
        context = self._context
        if context.driver_use.paused or context.closing:
            return 0
        return largest_share_mib(context.state.working_view, reserved=self._reserved)

    @property
    def _reserved(self) -> frozenset[GpuUuid]:
        """The GPUs that a new request does not get now."""
        context, queue = self._context, self._parts.queue
        # With strict_fifo a new request waits whenever another does.
        nothing = len(queue) > 0 and context.settings.strict_fifo
        return frozenset(context.state.working_view.by_uuid) if nothing else queue.reserved

    def _leases_without_process(self) -> frozenset[LeaseId]:
        host = self._context.host
        return frozenset(
            each.id
            for each in self.published.view.leases.values()
            if each.holder.pid is not None and not host.client_lives_since(each.holder.pid, each.created_at)
        )

    def _build_published(self) -> Published:
        context, parts = self._context, self._parts
        return Published(
            view=context.state.view,
            started_at=parts.started_at,
            queue_length=len(parts.queue),
            oldest_waiting_since=parts.queue.oldest_since,
            reservation_after_seconds=context.reservation_after_seconds,
            ledger_error=context.journal.error,
            # As of the last look: every commit publishes, and must not look at every lease.
            idle=frozenset() if context.driver_use.paused else parts.idle_leases.at_last_look,
            unused=parts.reconciler.unused_at_last_look,
            paused=context.driver_use.paused,
            in_doubt=context.state.doubt is not None,
            sockets_missing=len(self._socket_problems),
            tenants=context.accounting.totals,
            compute=context.compute_readings,
            problems=dict(self._problems),
        )

    def _update(self) -> None:
        self.published = self._build_published()

    def _schedule_notification(self) -> None:
        if self.on_view and not self._notify_scheduled:
            self._notify_scheduled = True
            asyncio.get_running_loop().call_soon(self._notify)

    def _notify(self) -> None:
        self._notify_scheduled = False
        for each in tuple(self.on_view):
            each()

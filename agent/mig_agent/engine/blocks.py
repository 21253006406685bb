"""Instances that are in use though nobody leases them: set aside, named with who holds them, tried again with back-off.

An instance comes back when no process is on it any more. If something holds it all the same, the next plan that would
destroy it finds that out, and the next pause is longer.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from mig_agent.adapters.clock import Timer
from mig_agent.adapters.ledger_changes import PutInstance
from mig_agent.core.backoff import Backoff
from mig_agent.core.errors import DriverError
from mig_agent.core.events import EventKind
from mig_agent.core.model import Generation, Instance, InstanceState
from mig_agent.engine.context import Context

FIRST_SECONDS = 1.0
LONGEST_SECONDS = 60.0


class Blocks:
    """Belongs to the event loop."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._times: dict[Generation, int] = {}
        """How often in a row each was blocked or found blocked still."""
        self._timers: dict[Generation, Timer] = {}

    def block(self, instance: Instance, reason: str) -> None:
        """Sets an instance aside from now on; `reason` names who holds it, where known."""
        context = self._context
        now = context.clock.now()
        # Whoever uses it without a lease is not known to be of the tenant that had it last.
        blocked = replace(instance, state=InstanceState.BLOCKED, lease=None, reason=reason, since=now, last_tenant="")
        context.state.put(blocked)
        context.journal.tell(
            context.journal.event(
                EventKind.INSTANCE_BLOCKED,
                f"{context.place(instance)} is blocked: {reason}",
                instance=instance,
                reason=reason,
            ),
            PutInstance(blocked),
        )
        self._try_later(instance.generation)

    def succeeded(self, generation: Generation) -> None:
        """It was leased or destroyed after all: its next block starts with a short pause again."""
        self._times.pop(generation, None)

    def forget(self, generation: Generation) -> None:
        """It is gone."""
        self._times.pop(generation, None)
        timer = self._timers.pop(generation, None)
        if timer is not None:
            timer.cancel()

    def close(self) -> None:
        """Nothing is tried again."""
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()

    def _try_later(self, generation: Generation) -> None:
        times = self._times[generation] = self._times.get(generation, 0) + 1
        seconds = Backoff(FIRST_SECONDS, LONGEST_SECONDS).pause(times)
        old = self._timers.pop(generation, None)
        if old is not None:
            old.cancel()
        self._timers[generation] = self._context.clock.call_later(seconds, partial(self._due, generation))

    def _due(self, generation: Generation) -> None:
        self._timers.pop(generation, None)
        if not self._context.closing:
            self._context.tasks.spawn(f"look-at-blocked-{generation}", self._look(generation))

    async def _look(self, generation: Generation) -> None:
        context = self._context
        instance = context.state.instance(generation)
        if instance is None or instance.state is not InstanceState.BLOCKED:
            return
        if context.gate.paused:
            self._try_later(generation)
            return
        try:
            with context.gate.inside():
                users = await context.processes(instance)
        except DriverError:
            self._try_later(generation)
            return
        # Another may have dealt with it meanwhile.
        if context.state.instance(generation) is not instance:
            return
        if users:
            self._still_blocked(instance, f"held by {', '.join(users)}")
            return
        free = replace(instance, state=InstanceState.IDLE, reason="", since=context.clock.now())
        context.state.put(free)
        context.journal.tell(
            context.journal.event(
                EventKind.INSTANCE_UNBLOCKED,
                f"{context.place(instance)} is blocked no more",
                gpu=instance.slot.gpu,
                generation=generation,
            )
        )
        context.freed()

    def _still_blocked(self, instance: Instance, reason: str) -> None:
        if reason != instance.reason:
            self._context.state.put(replace(instance, reason=reason))
            self._context.journal.publish()
        self._try_later(instance.generation)

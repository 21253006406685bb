"""Checks on instances before a plan touches them, their destruction, and the quarantine of those that are in use.

Nothing in use is leased, destroyed or built over: an instance that is in use without a lease is quarantined, reported
with its users, and checked again with back-off.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from mig_agent.adapters.clock import Timer
from mig_agent.adapters.ledger.records import PutInstance
from mig_agent.core.backoff import Backoff
from mig_agent.core.errors import DriverError, DriverErrorKind, MigAgentError
from mig_agent.core.events import EventKind
from mig_agent.core.model import Generation, GpuUuid, Instance, InstanceState, Slot
from mig_agent.engine.context import Context
from mig_agent.engine.gpu_worker import timed
from mig_agent.engine.state import GpuRecord

FIRST_SECONDS = 1.0
LONGEST_SECONDS = 60.0


class Quarantine:
    """Blocks instances that are in use without a lease, and checks them again until they are free.

    Not thread-safe; use from the event loop.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self._times: dict[Generation, int] = {}
        """How often in a row each instance was blocked, or found to be still in use."""
        self._timers: dict[Generation, Timer] = {}

    def block(self, instance: Instance, reason: str) -> None:
        """Block an instance, and check it again later; `reason` names the processes that hold it, where known."""
        context = self._context
        now = context.clock.now()
        # A process without a lease is not known to belong to the last tenant.
        blocked = replace(instance, state=InstanceState.BLOCKED, lease=None, reason=reason, since=now, last_tenant="")
        context.state.put(blocked)
        context.journal.record(
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
        """Reset the back-off of an instance that was leased: its next block starts with a short pause."""
        self._times.pop(generation, None)

    def forget(self, generation: Generation) -> None:
        """Cancel the checks of an instance that no longer exists."""
        self._times.pop(generation, None)
        timer = self._timers.pop(generation, None)
        if timer is not None:
            timer.cancel()

    def close(self) -> None:
        """Cancel all checks."""
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
        if context.driver_use.paused:
            self._try_later(generation)
            return
        try:
            with context.driver_use.inside():
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
        context.journal.record(
            context.journal.event(
                EventKind.INSTANCE_UNBLOCKED,
                f"{context.place(instance)} is blocked no more",
                gpu=instance.slot.gpu,
                generation=generation,
            )
        )
        context.state.capacity_freed.emit()

    def _still_blocked(self, instance: Instance, reason: str) -> None:
        if reason != instance.reason:
            self._context.state.put(replace(instance, reason=reason))
            self._context.journal.republish()
        self._try_later(instance.generation)


class Preflight:
    """Checks instances before a plan touches them.

    Not thread-safe; use from the event loop. Each check raises StepFailedError when the step must not be taken.
    """

    def __init__(self, context: Context, quarantine: Quarantine) -> None:
        self._context = context
        self._quarantine = quarantine

    async def before_reuse(self, instance: Instance) -> None:
        """Check that an instance still exists and no process is on it: one in use is never leased."""
        backend, host = self._context.backends[instance.kind], self._context.host
        what = f"look whether {instance.slot} is free"

        def look() -> tuple[str, ...]:
            return tuple(host.describe_process(process.pid) for process in backend.check_free(instance))

        try:
            users = await self._context.gpu_workers[instance.slot.gpu].read(what, look)
        except DriverError as error:
            raise StepFailedError(error, f"cannot {what}: {error}", instance.slot) from error
        self._refuse_used(instance, users, what, "reuse")

    async def before_destroying(self, victims: Sequence[Instance]) -> None:
        """Check that no process is on any of the victims: with one in use, destroying the others frees too little."""
        for victim in victims:
            what = f"look whether {victim.slot} is free"
            try:
                users = await self._context.processes(victim)
            except DriverError as error:
                raise StepFailedError(error, f"cannot {what}: {error}") from error
            self._refuse_used(victim, users, what, "destroy idle")

    async def before_creating(self, gpu: GpuUuid, intended: Sequence[Instance]) -> None:
        """Check that no foreign instance is where one is to be created, before the intention is recorded.

        After a crash the recorded intention is the only evidence that an instance there is the agent's, and may be
        destroyed.
        """
        backend, record = self._context.backends[intended[0].kind], self._context.state.gpus[gpu]
        if intended[0].kind.shares_memory:
            await self._before_first_share(record, intended)
            return
        what = "list the instances on the GPU"
        try:
            existing = await self._context.gpu_workers[gpu].read(what, lambda: backend.placements(gpu))
        except DriverError as error:
            raise StepFailedError(error, f"cannot list the instances on GPU {record.index}: {error}") from error
        ours = {each.gpu_instance_id for each in record.instances.values()}
        for instance in intended:
            for number, placement in existing.items():
                if number not in ours and placement.mask & instance.slot.placement.mask:
                    taken = DriverError(
                        DriverErrorKind.INSUFFICIENT_RESOURCES,
                        what,
                        detail=f"GPU instance {number} of another program is on slices {placement}",
                        gpu_index=record.index,
                    )
                    words = f"cannot create {self._context.place(instance)}: {taken.detail}"
                    raise StepFailedError(taken, words, instance.slot)

    async def _before_first_share(self, record: GpuRecord, intended: Sequence[Instance]) -> None:
        """Check that no process is on a GPU that is about to be shared; it has the GPU to itself until then."""
        others = {**record.instances, **record.reserved}.keys() - {each.generation for each in intended}
        there = [each for each in map(record.instances.get, others) if each is not None]
        if any(each.kind.shares_memory for each in there):
            return
        for each in there:
            await self.before_reuse(each)

    def _refuse_used(self, instance: Instance, users: tuple[str, ...], what: str, step: str) -> None:
        if users:
            held = f"held by {', '.join(users)}"
            self._quarantine.block(instance, held)
            in_use = DriverError(DriverErrorKind.IN_USE, what, holders=users)
            raise StepFailedError(in_use, f"cannot {step} {self._context.place(instance)}: it is {held}")


IN_USE_SECONDS = 1.0
"""How long destroying an instance in use is retried, in seconds: a process keeps it in use for tenths after its end."""
PAUSE_SECONDS = 0.1
"""The pause between two such tries, in seconds."""


class StepFailedError(MigAgentError):
    """A step of a plan failed; `error` says how."""

    def __init__(self, error: DriverError, words: str, exclude: Slot | None = None) -> None:
        super().__init__(words)
        self.error = error
        self.words = words
        self.exclude = exclude
        """The slot that the same request must not try again, if any."""

    @property
    def counts(self) -> bool:
        """True if it counts as a failure of the hardware, of which a request may meet only a few."""
        return self.error.kind is not DriverErrorKind.IN_USE


class InstanceDestroyer:
    """Destroys instances and records it.

    Not thread-safe; use from the event loop. Its methods are called with the lock of the GPU's worker held.
    """

    def __init__(self, context: Context, quarantine: Quarantine) -> None:
        self._context = context
        self._quarantine = quarantine

    async def destroy(self, instance: Instance) -> None:
        """Destroy an instance on the hardware; the caller records that. Raises StepFailedError.

        An instance that is in use is blocked. After any other failure the GPU has to be read again.
        """
        context = self._context
        what = f"destroy {instance.slot}"
        if instance.kind.is_listed and instance.gpu_instance_id is None:
            return  # the driver has nothing of it, and no time was taken
        worker, backend = context.gpu_workers[instance.slot.gpu], context.backends[instance.kind]
        began = context.clock.now()
        while True:
            try:
                _, seconds = await worker.change(what, lambda: timed(lambda: backend.destroy(instance)))
            except DriverError as error:
                if error.kind is not DriverErrorKind.IN_USE:
                    raise StepFailedError(error, f"cannot {what}: {error}") from error
                if context.clock.now() - began < IN_USE_SECONDS:
                    await context.clock.sleep(PAUSE_SECONDS)
                    continue
                raise await self._in_use(instance, error) from error
            if instance.kind.is_listed:
                context.step_timer.destroyed(seconds)
            self._quarantine.forget(instance.generation)
            return

    async def _in_use(self, instance: Instance, error: DriverError) -> StepFailedError:
        try:
            users = await self._context.users(instance)
        except DriverError:
            users = error.holders
        holder = f"held by {', '.join(users)}" if users else "in use, and the driver does not say by whom"
        self._quarantine.block(instance, holder)
        return StepFailedError(error, f"cannot destroy idle {self._context.place(instance)}: it is {holder}")

"""Reconciliation of the ledger with the hardware while the agent serves, and readings of what each instance uses.

The reconciler reads each GPU on a timer, after errors and on the driver's events, and has the repairs carried out
that `core.recovery` returns.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import replace

from mig_agent.adapters.ledger.records import Change, DropDoubt, ForgetLeases, PutBootId, PutDoubt
from mig_agent.core.catalog import reconcile_layout
from mig_agent.core.errors import DriverError, DriverErrorKind, LedgerError
from mig_agent.core.events import EventKind
from mig_agent.core.model import (
    Generation,
    GpuUuid,
    Instance,
    InstanceState,
    Layout,
    LeaseId,
    whole_gpu_layout,
)
from mig_agent.core.observation import ObservedGpu
from mig_agent.core.recovery import (
    NEVER_MADE,
    EndLostLease,
    FinishDestroy,
    ForgetInstance,
    Recorded,
    RecordedInstance,
    Repair,
    reconcile,
)
from mig_agent.engine.context import Context
from mig_agent.engine.idempotency import RequestLog
from mig_agent.engine.instances import Quarantine
from mig_agent.engine.lifecycle import EndReason, LeaseLifecycle, degraded_event, leases_with_devices_elsewhere
from mig_agent.engine.repairs import Repairs
from mig_agent.engine.state import GpuRecord

MOST_FAILED_READINGS = 3
"""After this many failed readings in a row nothing is placed on the GPU until it can be read again."""
_HOUR = 3600.0
_MOST_MISSED = 5
"""Number of readings of a GPU that may be missed before it counts as not watched."""
_SHORTEST_GAP = 120.0
"""The least time without a reading after which a GPU counts as not watched, in seconds."""
_GRAVE = (EndLostLease, FinishDestroy, ForgetInstance)


class Reconciler:
    """Reconciles the ledger with the hardware: on a timer, on driver events and after failures.

    Not thread-safe; use from the event loop.
    """

    def __init__(
        self,
        context: Context,
        *,
        lifecycle: LeaseLifecycle,
        quarantine: Quarantine,
        repairs: Repairs,
        request_log: RequestLog,
        boot_id: str,
    ) -> None:
        self._context = context
        self._lifecycle = lifecycle
        self._quarantine = quarantine
        self._repairs = repairs
        self._request_log = request_log
        self.boot_id = boot_id
        """The boot id of the boot that the records belong to."""
        self._failed_readings: dict[GpuUuid, int] = {}
        self._told_differences: set[str] = set()
        self._wake = asyncio.Event()
        self._followups: list[Callable[[], Awaitable[None]]] = []
        self.last_process: dict[int, float] = {}
        """When a process was last seen on an instance, by generation."""
        self._watched: dict[GpuUuid, tuple[float, float]] = {}
        """For each GPU since when its processes have been read without a gap, and when they were read last."""
        self.unused_at_last_look: frozenset[LeaseId] = frozenset()
        """What `unused_leases` returned at the last reconciliation."""

    # When to reconcile

    def hint(self) -> None:
        """Reconcile soon: something may have changed."""
        self._wake.set()

    async def run(self) -> None:
        """Reconcile on each timer and hint, until cancelled."""
        while True:
            timer = self._context.clock.call_later(self._context.settings.reread_seconds, self._wake.set)
            await self._wake.wait()
            timer.cancel()
            self._wake.clear()
            await self.look()

    async def look(self) -> None:
        """Reconcile everything once; while the agent is paused, only what needs no driver."""
        if not self._context.driver_use.paused:
            with self._context.driver_use.inside():
                await self.compare_all()
                await self.run_followups()
        self.unused_at_last_look = self.unused_leases()
        self._context.state.status_changed.emit()
        await self._forget_old_leases()

    def follow_up(self, action: Callable[[], Awaitable[None]]) -> None:
        """Run an action after each reconciliation from now on."""
        self._followups.append(action)

    async def run_followups(self) -> None:
        """Run the actions that follow a reconciliation."""
        for each in self._followups:
            await each()

    async def compare_all(self) -> None:
        """Compare every GPU with the ledger, also while the agent is paused."""
        await self._check_boot_id()
        await asyncio.gather(*(self._check(gpu) for gpu in tuple(self._context.gpu_workers)))
        for gpu in tuple(self._context.gpu_workers):
            self._take_back(gpu)

    async def check(self, gpu: GpuUuid) -> None:
        """Read a GPU and repair what does not agree, under the lock of its worker. Errors are reported, not raised."""
        with self._context.driver_use.inside():
            await self._check(gpu)

    async def _check(self, gpu: GpuUuid) -> None:
        worker = self._context.gpu_workers[gpu]
        if worker.hung:
            return
        async with worker.lock:
            await self.check_locked(gpu)

    async def check_locked(self, gpu: GpuUuid) -> None:
        """Do the same as `check`, for a caller that holds the lock of the GPU's worker."""
        if self._context.gpu_workers[gpu].hung:
            return  # the effect of the call that has not returned is not known yet
        record = self._context.state.gpus[gpu]
        try:
            await self._forget_never_made(record)
            observed = await self._read(gpu)
            self._failed_readings.pop(gpu, None)
            if record.lost or record.unreadable:
                record.lost = record.unreadable = ""
                self._tell(EventKind.GPU_RECOVERED, record, f"GPU {record.index} answers again")
            await self.compare(record, observed)
        except DriverError as error:
            await self.unread(gpu, error)
        except LedgerError:
            return  # nothing was changed; the next reconciliation finds it again

    async def _read(self, gpu: GpuUuid, *, afresh: bool = False) -> ObservedGpu:
        context = self._context
        record = context.state.gpus[gpu]
        shares = [record.instances[each] for each in sorted(self._leased_shares(record))]

        def read() -> ObservedGpu:
            return context.with_sharing(context.driver.observe_gpu(gpu, afresh=afresh), shares)

        return await context.gpu_workers[gpu].read("read the GPU", read)

    @staticmethod
    def _leased_shares(record: GpuRecord) -> set[Generation]:
        there = record.instances.values()
        return {each.generation for each in there if each.kind.shares_memory and each.state is InstanceState.LEASED}

    async def compare(self, record: GpuRecord, observed: ObservedGpu) -> None:
        """Make the records of a GPU agree with what was read. Raises LedgerError, and DriverError of a rereading."""
        if observed.sharing is not None and not self._leased_shares(record) <= observed.sharing.users.keys():
            observed = await self._read(record.uuid)  # the first reading of a start knows no shares
        repairs = self._differences(record, observed)
        if any(isinstance(each, _GRAVE) for each in repairs):
            # No lease or instance is lost over one reading, which may have been a bad one.
            observed = await self._read(record.uuid, afresh=True)
            layout = self.layout_of(observed)
            if layout != record.layout:  # only then: tables are kept by the layout's identity
                record.layout = layout
                self._show(record)
            repairs = self._differences(record, observed)
        self.take_facts(record, observed)
        await self._repairs.carry_out(record, repairs)
        await self._repairs.take_over_unused(record, observed)
        await self._repairs.have_permanent(record)
        self._check_processes(record, observed)
        self._context.state.capacity_freed.emit()

    def _differences(self, record: GpuRecord, observed: ObservedGpu) -> tuple[Repair, ...]:
        # Instances that a plan has reserved are left to that plan.
        held = {each.gpu_instance_id for each in record.reserved.values()} - {None}
        free = tuple(each for each in observed.instances if each.gpu_instance_id not in held)
        instances = tuple(each for each in record.instances.values() if each.generation not in record.reserved)
        recorded = Recorded(
            boot_id=self.boot_id,
            instances=tuple(map(_recorded, instances)),
            of_pods=frozenset(each.id for each in self._context.state.leases.values() if each.owner.is_bound),
            beside=leases_with_devices_elsewhere(self._context, record.uuid),
            doubtful_up_to=0 if self._context.state.doubt is None else self._context.state.doubt.generation,
        )
        return reconcile(recorded, (replace(observed, instances=free),), self.boot_id_now())

    async def _forget_never_made(self, record: GpuRecord) -> None:
        never_made = self._context.never_made & record.instances.keys()
        if never_made:
            await self._repairs.carry_out(record, [ForgetInstance(each, NEVER_MADE) for each in never_made])
            self._context.never_made -= never_made

    def take_facts(self, record: GpuRecord, observed: ObservedGpu) -> None:
        """Update a GPU's MIG mode, layout and device minor from what was read."""
        changed, moved = record.mode != observed.mode, record.minor != observed.minor
        record.mode, record.minor = observed.mode, observed.minor
        sharing = observed.sharing
        record.others = () if sharing is None else sharing.others
        if sharing is not None and (record.layout.shares, record.not_shared) != (sharing.terms, sharing.why_not):
            record.not_shared = sharing.why_not
            if record.layout.shares != sharing.terms:
                record.layout = self.layout_of(observed)
            moved = True
        if moved:
            self._show(record)
        if changed:
            record.layout = self.layout_of(observed)
            self.tell_differences(observed)
            mode = "on" if observed.mode.current else "off"
            pending = "" if observed.mode.current == observed.mode.pending else ", and changes at the next reset"
            words = f"MIG mode of GPU {record.index} is {mode} now{pending}"
            if not observed.mode.current and observed.mode.capable:
                words += f"; `migctl mode enable --gpu {record.index}` turns it on"
            self._tell(EventKind.GPU_MODE_CHANGED, record, words)

    def layout_of(self, observed: ObservedGpu) -> Layout:
        """Return the profiles and placements that a GPU offers now."""
        if observed.mode.current:
            from_file = self._context.catalog.layout(observed.model, observed.memory_mib)
            layout, _ = reconcile_layout(observed.layout, from_file)
            if layout is not None:
                return layout
        terms = None if observed.sharing is None else observed.sharing.terms
        return whole_gpu_layout(observed.model, observed.memory_mib, terms)

    def tell_differences(self, observed: ObservedGpu) -> None:
        """Report where driver and catalog differ: once per model, not for each of its GPUs or at each reading."""
        journal = self._context.journal
        from_file = self._context.catalog.layout(observed.model, observed.memory_mib)
        for words in reconcile_layout(observed.layout, from_file)[1]:
            if words not in self._told_differences:
                self._told_differences.add(words)
                journal.record(journal.event(EventKind.PROFILE_DIFFERS, words, gpu=observed.uuid))

    # When a GPU does not answer

    def hung(self, gpu: GpuUuid, what: str) -> None:
        """Handle a driver call that has not returned in time: nothing is placed on its GPU until it does."""
        record = self._context.state.gpus[gpu]
        if record.hung:
            return  # the other thread of the GPU hangs now, too
        record.hung = f"the driver has not come back from: {what}; nothing is placed here until it does"
        self._tell(EventKind.GPU_CORDONED, record, f"GPU {record.index} is set aside: {record.hung}")

    def answered(self, gpu: GpuUuid) -> None:
        """Handle the return of all overdue calls of a GPU: read it again, then use it again."""
        if not self._context.closing:
            self._context.tasks.spawn(f"read-again-{gpu}", self._after_answer(gpu))

    async def _after_answer(self, gpu: GpuUuid) -> None:
        if self._context.driver_use.paused:
            return  # it is read when the agent goes on
        await self.check(gpu)
        self._take_back(gpu)

    def _take_back(self, gpu: GpuUuid) -> None:
        """Use a GPU again whose overdue call has returned, and which was read since."""
        record = self._context.state.gpus[gpu]
        if record.hung and not self._context.gpu_workers[gpu].hung:
            record.hung = ""
            self._tell(EventKind.GPU_UNCORDONED, record, f"GPU {record.index} answers again and is used again")
            self._context.state.capacity_freed.emit()

    async def unread(self, gpu: GpuUuid, error: DriverError) -> None:
        """Handle a failed reading: a GPU that is lost ends leases, one that fails repeatedly gets no more instances."""
        record = self._context.state.gpus[gpu]
        if error.kind is DriverErrorKind.TIMEOUT:
            return  # the worker has reported it
        if error.kind is not DriverErrorKind.GPU_LOST:
            times = self._failed_readings[gpu] = self._failed_readings.get(gpu, 0) + 1
            if times >= MOST_FAILED_READINGS and not record.unreadable:
                record.unreadable = f"it cannot be read: {error}"
                self._tell(EventKind.GPU_CORDONED, record, f"GPU {record.index} is set aside: {record.unreadable}")
            return
        going_on = leases_with_devices_elsewhere(self._context, gpu)
        if not record.lost:
            record.lost = f"the driver reports {error.detail or error.kind}"
            self._tell(EventKind.GPU_LOST, record, f"GPU {record.index} is lost: {record.lost}")
            self._tell_who_goes_on([each for each in record.instances.values() if each.lease in going_on])
        held = (each.lease for each in record.instances.values() if each.lease is not None)
        # Another GPU of the same lease may be lost at this moment, too: it ends once.
        ends = (self._lifecycle.end(each, EndReason.GPU_LOST) for each in dict.fromkeys(held) if each not in going_on)
        with contextlib.suppress(LedgerError):  # the next reconciliation ends them
            await asyncio.gather(*ends)

    def _tell_who_goes_on(self, lost: Iterable[Instance]) -> None:
        for instance in lost:
            told = degraded_event(self._context, instance, EndReason.GPU_LOST)
            if told is not None:
                self._context.journal.record(told)

    # What else is checked

    def _check_processes(self, record: GpuRecord, observed: ObservedGpu) -> None:
        now = self._context.clock.now()
        begun = self._watched[record.uuid][0] if self.is_watched(record.uuid) else now
        self._watched[record.uuid] = (begun, now)
        pids: dict[int | None, tuple[int, ...]] = {
            each.gpu_instance_id: each.processes for each in observed.instances if each.processes
        }
        shared = {each.generation for each in record.instances.values() if each.kind.shares_memory}
        if not observed.mode.current and observed.processes and not shared:
            pids[None] = observed.processes
        users = {} if observed.sharing is None else observed.sharing.users
        for instance in tuple(record.instances.values()):
            if instance.generation in shared:
                found = tuple(each.pid for each in users.get(instance.generation, ()))
            else:
                found = pids.get(instance.gpu_instance_id, ())
            if not found:
                continue
            self.last_process[instance.generation] = now
            if instance.state is InstanceState.IDLE and instance.generation not in record.reserved:
                names = ", ".join(self._context.host.describe_process(pid) for pid in found)
                self._quarantine.block(instance, f"held by {names}")

    def unused_leases(self) -> frozenset[LeaseId]:
        """Return the leases on one of whose instances no process has been seen for `idle_after`.

        Leases with a bound owner are not among them: they end with it, whether it uses its devices or not.
        """
        state = self._context.state
        return frozenset(
            lease.id
            for lease in state.leases.values()
            if not lease.owner.is_supervised and any(map(self._is_unused, state.instances_of(lease.id)))
        )

    def _is_unused(self, instance: Instance) -> bool:
        last = max(instance.since, self.last_process.get(instance.generation, 0.0))
        limit = self._context.settings.idle_after_seconds
        return instance.state is InstanceState.LEASED and self._context.clock.now() - last >= limit

    def is_watched(self, gpu: GpuUuid) -> bool:
        """Return whether the processes of a GPU were read a short while ago."""
        gap = max(_MOST_MISSED * self._context.settings.reread_seconds, _SHORTEST_GAP)
        return gpu in self._watched and self._context.clock.now() - self._watched[gpu][1] <= gap

    def last_seen(self, instance: Instance) -> float:
        """Return when a process was last seen on an instance, as far as known, in seconds since the epoch.

        At least when it was leased, and when the readings of its GPU began that go on without a gap until now.
        """
        watched = self._watched.get(instance.slot.gpu, (self._context.clock.now(), 0.0))[0]
        return max(instance.since, self.last_process.get(instance.generation, 0.0), watched)

    def saw_process(self, instance: Instance) -> None:
        """Note that a process uses an instance now."""
        self.last_process[instance.generation] = self._context.clock.now()

    def boot_id_now(self) -> str:
        """Return the machine's boot id; where it cannot be read, the known one."""
        try:
            return self._context.host.boot_id()
        except OSError:
            return self.boot_id

    async def _check_boot_id(self) -> None:
        """Reconcile after a reboot, which no recorded instance survives. A simulated one leaves this process alive."""
        boot_id = self.boot_id_now()
        if boot_id == self.boot_id:
            return
        for gpu in tuple(self._context.gpu_workers):
            await self._check(gpu)
        await self.adopt_boot_id(boot_id)

    async def adopt_boot_id(self, boot_id: str) -> None:
        """Note that the records belong to this boot from now on; a reboot also ends a doubt about the ledger."""
        state = self._context.state
        doubt = state.doubt
        settled: tuple[Change, ...] = ()
        if doubt is not None and not doubt.boot_id:
            doubt = replace(doubt, boot_id=boot_id)
            settled = (PutDoubt(doubt),)
        elif doubt is not None and doubt.boot_id != boot_id:
            doubt, settled = None, (DropDoubt(),)  # no lease that was made before a boot outlives it
        try:
            await self._context.journal.commit((PutBootId(boot_id), *settled))
        except LedgerError:
            return  # the next reconciliation tries again
        self.boot_id, state.doubt = boot_id, doubt
        if doubt is None:
            state.settle_doubt()

    async def _forget_old_leases(self) -> None:
        now = self._context.clock.now()
        before = now - self._context.settings.request_memory_hours * _HOUR
        if self._request_log.forget_before(before) and not self._context.journal.error:
            self._context.journal.commit((ForgetLeases(before),))
        trimmed = self._context.accounting.trim_changes(now, self._context.settings.keep_accounting_seconds)
        if trimmed and not self._context.journal.error:
            self._context.journal.commit(trimmed)

    def _show(self, record: GpuRecord) -> None:
        self._context.state.touch(record.uuid)
        self._context.journal.republish()

    def _tell(self, kind: EventKind, record: GpuRecord, words: str) -> None:
        self._context.state.touch(record.uuid)
        self._context.journal.record(self._context.journal.event(kind, words, gpu=record.uuid))


def _recorded(instance: Instance) -> RecordedInstance:
    return RecordedInstance(
        generation=instance.generation,
        gpu=instance.slot.gpu,
        kind=instance.kind,
        profile_id=instance.slot.profile.id,
        placement=instance.slot.placement,
        state=instance.state,
        gpu_instance_id=instance.gpu_instance_id,
        compute_instance_id=instance.compute_instance_id,
        uuid=instance.uuid,
        lease=instance.lease,
    )

"""Execution of one plan: preflight checks, destroy, create, commit the lease; and undo if a step fails."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, field, replace

from mig_agent.adapters.device_backends import CreatedDevice, DeviceUser
from mig_agent.adapters.ledger.reader import RecordedLease
from mig_agent.adapters.ledger.records import DropInstance, PutInstance, PutLease
from mig_agent.adapters.shares.enforcer import HolderProcess
from mig_agent.core.errors import DriverError, LedgerError
from mig_agent.core.events import EventKind
from mig_agent.core.model import Generation, GpuUuid, Instance, InstanceState, Lease, LeaseId, Request, Slot
from mig_agent.core.planning.plan import CreateInstance, Plan, ReuseInstance
from mig_agent.engine.callers import Caller
from mig_agent.engine.context import Context
from mig_agent.engine.gpu_worker import timed
from mig_agent.engine.idempotency import RequestLog
from mig_agent.engine.instances import InstanceDestroyer, Preflight, Quarantine, StepFailedError
from mig_agent.engine.journal import Transaction
from mig_agent.engine.lifecycle import LeaseLifecycle
from mig_agent.engine.reconciler import Reconciler
from mig_agent.engine.shares import Shares


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseRequest:
    """A request for a lease, with its caller and its digest."""

    request: Request
    caller: Caller
    digest: str
    asked_at: float
    """Time at which the request arrived, in seconds since the epoch."""
    check_still_wanted: Callable[[], None]
    """Raises RefusedError when the lease is no longer wanted: its clients have disconnected, or the agent stops."""


@dataclass(slots=True, kw_only=True)
class Executor:
    """Begins executions, and holds the parts that they use."""

    context: Context
    request_log: RequestLog
    lifecycle: LeaseLifecycle
    quarantine: Quarantine
    preflight: Preflight
    destroyer: InstanceDestroyer
    shares: Shares
    reconciler: Reconciler
    executions: set[Execution] = field(default_factory=set)
    """The executions that have not ended."""

    @property
    def in_progress(self) -> Iterator[Execution]:
        """The executions whose lease is not committed yet."""
        return (each for each in self.executions if each.is_pending)

    def begin(self, order: LeaseRequest, plan: Plan) -> Execution:
        """Return the execution of a plan. What the plan uses is reserved at once, so that no other plan uses it."""
        return Execution(self, order, plan)


class Execution:
    """Carries out one plan. Call either `run` or `drop`; each releases the reservations."""

    def __init__(self, executor: Executor, order: LeaseRequest, plan: Plan) -> None:
        self._executor = executor
        self._context = executor.context
        self._order = order
        self.plan = plan
        now = self._context.clock.now()
        self._reused: list[Instance] = []
        self._creating: dict[GpuUuid, list[Instance]] = {}
        self._victims: dict[GpuUuid, list[Instance]] = {}
        self._tried: set[Generation] = set()
        """The instances that the driver was asked to create, successfully or not."""
        self._devices: list[Instance] = []
        """The instance of each device, in the request's order; each is replaced when it has been created."""
        for device in plan.devices:
            serve = device.serve
            if isinstance(serve, ReuseInstance):
                self._reused.append(serve.instance)
                self._devices.append(serve.instance)
            else:
                made = self._intended(serve, now)
                self._creating.setdefault(device.gpu, []).append(made)
                self._devices.append(made)
            for victim in device.victims:
                going = replace(victim.instance, state=InstanceState.DESTROYING, since=now)
                self._victims.setdefault(device.gpu, []).append(going)
        self._mine = [
            *(replace(instance, state=InstanceState.LEASED) for instance in self._reused),
            *(instance for created in self._creating.values() for instance in created),
            *(instance for victims in self._victims.values() for instance in victims),
        ]
        self._context.state.reserve(self._mine)
        executor.executions.add(self)
        self._context.driver_use.enter()
        self._inside = True

    def _intended(self, step: CreateInstance, now: float) -> Instance:
        terms = self._context.state.gpus[step.slot.gpu].layout.shares
        enforced_by = None
        if step.slot.profile.kind.shares_memory and terms is not None:
            limits_compute = step.slot.profile.compute_percent is not None
            enforced_by = terms.way(has_process=self._has_process, limits_compute=limits_compute)
        return Instance(
            slot=step.slot,
            generation=self._context.state.next_generation(),
            state=InstanceState.CREATING,
            since=now,
            last_tenant=None,
            enforced_by=enforced_by,
        )

    @property
    def request(self) -> Request:
        """The request that it serves."""
        return self._order.request

    @property
    def _has_process(self) -> bool:
        return all(each.has_process for each in self.request.wants)

    @property
    def slots(self) -> tuple[Slot, ...]:
        """The slots of its devices."""
        return tuple(each.slot for each in self.plan.devices)

    @property
    def is_pending(self) -> bool:
        """True until its lease is committed, or it has failed."""
        return bool(self._mine)

    def drop(self) -> None:
        """Release the reservations, for an execution that was never run or has ended."""
        self._executor.executions.discard(self)
        if self._inside:
            self._inside = False
            self._context.driver_use.leave()
        mine, self._mine = self._mine, []
        if mine:
            self._context.state.unreserve(mine)
            self._context.state.capacity_freed.emit()

    async def run(self) -> Lease:
        """Carry out the plan and return the committed lease. Raises StepFailedError, LedgerError and RefusedError."""
        try:
            await self._check_all_reused()
            if self._creating:
                await self._reshape()
                if self._reused:
                    await self._check_all_reused()
            self._order.check_still_wanted()
            return await self._grant()
        except BaseException:
            self._keep_created(list(self._creating))
            raise
        finally:
            self.drop()

    # Before a reuse

    async def _check_all_reused(self) -> None:
        if len(self._reused) == 1:
            await self._check_reused(self._reused[0])
        elif self._reused:
            await _all(*(self._check_reused(instance) for instance in self._reused))

    async def _check_reused(self, instance: Instance) -> None:
        try:
            await self._executor.preflight.before_reuse(instance)
        except StepFailedError as failure:
            if failure.counts:
                self._unreserve([instance])
                await self._executor.reconciler.check(instance.slot.gpu)
            raise

    # Destroying and creating

    async def _reshape(self) -> None:
        gpus = list(self._creating)
        if len(gpus) == 1:
            await self._reshape_gpu(gpus[0])
        else:
            await _all(*(self._reshape_gpu(gpu) for gpu in gpus))

    async def _reshape_gpu(self, gpu: GpuUuid) -> None:
        async with self._context.gpu_workers[gpu].lock:
            self._order.check_still_wanted()
            try:
                await self._executor.preflight.before_creating(gpu, self._creating[gpu])
                await self._executor.preflight.before_destroying(self._victims.get(gpu, []))
                await self._destroy_victims(gpu)
                for instance in self._creating[gpu]:
                    self._order.check_still_wanted()
                    await self._create(instance)
            except BaseException as failure:
                if isinstance(failure, StepFailedError):
                    self._record_failure(gpu, failure)
                self._keep_created([gpu])
                intended = self._context.state.gpus[gpu].instances.keys() & {
                    each.generation for each in self._creating[gpu]
                }
                self._context.never_made |= intended - self._tried
                # Reading the GPU shows the outcome of the steps that were begun.
                self._unreserve(
                    [each for each in self._mine if each.slot.gpu == gpu and each.state is not InstanceState.LEASED]
                )
                await self._executor.reconciler.check_locked(gpu)
                raise

    def _record_failure(self, gpu: GpuUuid, failure: StepFailedError) -> None:
        journal = self._context.journal
        for instance in self._creating[gpu]:
            if failure.exclude is None or failure.exclude == instance.slot:
                what = f"cannot create {self._context.place(instance)}: "
                words = what + failure.words.removeprefix(what)
                event = journal.event(
                    EventKind.STEP_FAILED,
                    words,
                    instance=instance,
                    call=failure.error.call,
                    error=failure.error.kind.value,
                )
                journal.record(event)

    def _unreserve(self, instances: list[Instance]) -> None:
        self._context.state.unreserve(instances)
        given = {each.generation for each in instances}
        self._mine = [each for each in self._mine if each.generation not in given]

    async def _destroy_victims(self, gpu: GpuUuid) -> None:
        victims = self._victims.get(gpu, [])
        state, journal = self._context.state, self._context.journal
        if victims:

            def going() -> None:
                for victim in victims:
                    state.put(victim)

            await journal.commit(tuple(PutInstance(victim) for victim in victims), (), going)
        gone: list[Instance] = []
        try:
            for victim in victims:
                await self._executor.destroyer.destroy(victim)
                gone.append(victim)
        finally:
            intended = self._creating[gpu] if len(gone) == len(victims) else []
            await self._commit_destroyed(gone, intended)

    async def _commit_destroyed(self, gone: list[Instance], intended: list[Instance]) -> None:
        """Commit what was destroyed, and what will be created before it is, so that a crash leaves nothing unknown."""
        if not gone and not intended:
            return
        transaction = Transaction(self._context.journal)
        state = self._context.state
        for instance in gone:
            transaction.changes.append(DropInstance(instance.generation))
            transaction.events.append(
                self._context.journal.event(
                    EventKind.INSTANCE_DESTROYED,
                    f"destroyed idle {self._context.place(instance)}: its slices were needed",
                    instance=instance,
                    reason="needed",
                )
            )
        transaction.changes += [PutInstance(instance) for instance in intended]

        def apply() -> None:
            for instance in gone:
                state.drop(instance.generation)
            for instance in intended:
                state.put(instance)

        transaction.applied.append(apply)
        try:
            await transaction.commit()
        except LedgerError:
            for instance in gone:
                state.drop(instance.generation)  # the hardware has changed, even if the ledger could not be written
            self._context.journal.republish()
            raise

    async def _create(self, instance: Instance) -> None:
        slot = instance.slot
        backend = self._context.backends[instance.kind]
        minor = self._context.state.gpus[slot.gpu].minor
        never_made = self._context.never_made
        self._tried.add(instance.generation)
        user = self._user()

        def create() -> tuple[CreatedDevice, float]:
            try:
                made, seconds = timed(lambda: backend.create(instance, user))
            except DriverError as error:
                if not error.left_behind:
                    never_made.add(instance.generation)
                raise
            if minor is not None:
                backend.make_nodes(slot, made, minor)
            return made, seconds

        try:
            made, seconds = await self._context.gpu_workers[slot.gpu].change(f"create {slot}", create)
        except DriverError as error:
            raise StepFailedError(error, f"cannot create {self._context.place(instance)}: {error}", slot) from error
        if instance.kind.is_listed:
            self._context.step_timer.created(seconds)  # of shares it would say nothing on MIG instances
        there = replace(
            instance,
            gpu_instance_id=made.gpu_instance_id,
            compute_instance_id=made.compute_instance_id,
            uuid=made.uuid,
        )
        # The state has its ids from now on, so that a reading of the GPU does not take it for a foreign one.
        self._context.state.put(there)
        self._context.state.reserve([there])
        self._devices[self._devices.index(instance)] = there

    def _user(self) -> DeviceUser:
        """Return who will use what is created, as far as the request says."""
        request, process = self._order.request, self._order.request.owner.process
        started = None if process is None else process.started or self._context.host.client_started(process.pid)
        if process is None or started is None or not self._has_process:
            return DeviceUser(uid=request.holder.uid)
        return DeviceUser(uid=request.holder.uid, process=HolderProcess(pid=process.pid, started=started))

    # The end

    async def _grant(self) -> Lease:
        context, order = self._context, self._order
        journal, state = context.journal, context.state
        now = context.clock.now()
        request = order.request
        lease = Lease(
            id=LeaseId(secrets.token_hex(8)),
            request_id=request.request_id,
            holder=request.holder,
            instances=tuple(instance.generation for instance in self._devices),
            created_at=now,
            expires_at=None if request.ttl_seconds is None else now + request.ttl_seconds,
            owner=request.owner,
            reused=tuple(instance.state is not InstanceState.CREATING for instance in self._devices),
            caller_id=request.caller_id,
        )
        leased = [
            replace(
                each,
                state=InstanceState.LEASED,
                lease=lease.id,
                since=now,
                reason="",
                last_tenant=lease.holder.tenant,
            )
            for each in self._devices
        ]
        models = (state.gpus[instance.slot.gpu].layout.model for instance in leased)
        account = context.accounting.account(request, order.caller, leased, order.asked_at, models)
        recorded = RecordedLease(lease=lease, digest=order.digest)
        transaction = Transaction(journal)
        for before, instance in zip(self._devices, leased, strict=True):
            self._add_device(transaction, before, instance, lease)
        transaction.changes.append(PutLease(lease, order.digest, account))
        places = ", ".join(context.place(instance) for instance in leased)
        transaction.events.append(
            journal.event(
                EventKind.LEASE_GRANTED,
                f"{lease.holder} got lease {lease.id}: {places}",
                gpu=leased[0].slot.gpu,
                lease=lease.id,
                holder=str(lease.holder),
                tenant=lease.holder.tenant,
                caller=order.caller,
            )
        )

        def apply() -> None:
            mine, self._mine = self._mine, []
            state.unreserve(mine)
            for instance in leased:
                state.put(instance)
                self._executor.quarantine.succeeded(instance.generation)
            state.put_lease(lease)
            context.accounting.granted(lease, account)
            self._executor.request_log.granted(recorded)
            self._executor.lifecycle.begin(lease, delivered=False)
            if self._victims:
                context.state.capacity_freed.emit()  # what was destroyed may have been larger than what was needed

        transaction.applied.append(apply)
        await transaction.commit()
        return lease

    def _add_device(self, transaction: Transaction, before: Instance, instance: Instance, lease: Lease) -> None:
        made = before.state is InstanceState.CREATING
        changed = before.last_tenant != instance.last_tenant
        if made or changed or self._context.state.is_unrecorded(instance.generation):
            transaction.changes.append(PutInstance(instance))
        transaction.events.append(
            self._context.journal.event(
                EventKind.INSTANCE_CREATED if made else EventKind.INSTANCE_REUSED,
                f"{'created' if made else 'reused'} {self._context.place(instance)}",
                instance=instance,
                lease=lease.id,
            )
        )

    def _keep_created(self, gpus: list[GpuUuid]) -> None:
        """Keep the instances that were created for a lease that failed as idle ones, or end them if they serve once."""
        context = self._context
        created = [
            each
            for each in self._devices
            if each.state is InstanceState.CREATING and each.uuid and each.slot.gpu in gpus
        ]
        for each in created:
            if not each.kind.is_reusable:
                self._devices.remove(each)
                self._unreserve([each])
                self._executor.shares.end_soon(each)
        made = [replace(each, state=InstanceState.IDLE) for each in created if each.kind.is_reusable]
        self._devices = [each for each in self._devices if each.generation not in {m.generation for m in made}]
        if not made:
            return
        for instance in made:
            context.state.put(instance)
            context.state.note_unrecorded(instance.generation)
        self._unreserve(made)
        transaction = Transaction(context.journal)
        for instance in made:
            transaction.changes.append(PutInstance(instance))
            transaction.events.append(
                context.journal.event(
                    EventKind.INSTANCE_CREATED,
                    f"created {context.place(instance)}, and nobody took it",
                    instance=instance,
                )
            )

        def apply() -> None:
            for instance in made:
                context.state.note_recorded(instance.generation)

        transaction.applied.append(apply)
        transaction.commit()


async def _all(*steps: Coroutine[None, None, None]) -> None:
    """Wait for all steps, also when some fail; raise the first failure."""
    for result in await asyncio.gather(*steps, return_exceptions=True):
        if result is not None:
            raise result

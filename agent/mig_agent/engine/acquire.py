"""Acquisition of leases: a request is served once, however often it is sent, by a granted lease or a refusal."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from mig_agent.adapters.device_backends import joined
from mig_agent.adapters.ledger.reader import RecordedLease
from mig_agent.core.backfill import WaitingRequest
from mig_agent.core.errors import LedgerError, Reason, Refusal, RefusedError, refuse
from mig_agent.core.events import EventKind
from mig_agent.core.model import Lease, Request, RequestId, RequestKey, Slot
from mig_agent.core.owner import Owner, with_start
from mig_agent.core.requests import describe
from mig_agent.engine.callers import Caller
from mig_agent.engine.context import Context
from mig_agent.engine.execution import LeaseRequest
from mig_agent.engine.idempotency import RequestLog, digest_of
from mig_agent.engine.instances import StepFailedError
from mig_agent.engine.journal import ledger_refusal
from mig_agent.engine.lifecycle import LeaseLifecycle
from mig_agent.engine.limits import LimitCheck
from mig_agent.engine.queueing import RequestQueue
from mig_agent.engine.results import Device, Granted, QueuePlace

MOST_TRIES = 4
"""How many failures of the hardware one request may meet before it is refused."""
MOST_BLOCKED = 32
"""How many instances one request may find in use before it is refused."""

MOST_SERVED = 1000
"""How many requests are served at once, beside those that may wait."""

_CANCELLED = Refusal(reason=Reason.CANCELLED, message="cannot go on: the client has gone away")


@dataclass(slots=True, eq=False)
class _Job:
    """Holds a request that is being served; several calls with the same request id share it."""

    order: LeaseRequest
    task: asyncio.Task[Lease | Refusal] | None = None
    joined: int = 0
    listeners: list[Callable[[QueuePlace], None]] = field(default_factory=list)
    place: QueuePlace | None = None
    served: bool = False
    """Whether a plan for it is being carried out: its slots are reserved in the state."""
    slots: tuple[Slot, ...] = ()
    """The slots of that plan, in the order of the wants."""
    notes: tuple[str, ...] = ()
    abandoned: bool = False

    def told(self, place: QueuePlace) -> None:
        self.place = place
        for listener in self.listeners:
            listener(place)


class Acquirer:
    """Serves requests for leases. Not thread-safe; use from the event loop."""

    def __init__(
        self,
        context: Context,
        request_log: RequestLog,
        lifecycle: LeaseLifecycle,
        queue: RequestQueue,
        limits: LimitCheck,
    ) -> None:
        self._context = context
        self._request_log = request_log
        self._lifecycle = lifecycle
        self._queue = queue
        self._limits = limits
        self._jobs: dict[RequestKey, _Job] = {}

    async def acquire(
        self, request: Request, caller: Caller, on_queued: Callable[[QueuePlace], None] | None
    ) -> Granted:
        """Return a lease for the request, as `Manager.acquire` describes. Raises RefusedError."""
        self._context.refuse_when_closing()
        began = time.perf_counter()
        digest = digest_of(request, caller)
        if not request.request_id:
            request = replace(request, request_id=RequestId(uuid.uuid4().hex))
        request = self._context.as_configured(replace(request, caller_id=caller.caller_id))
        known = self._request_log.of_request(request.key)
        if known is not None:
            # What is being recorded may be its end.
            await self._lifecycle.wait_for_pending_commit(known.lease.id)
            return self._again(self._request_log.of_request(request.key) or known, digest)
        job = self._jobs.get(request.key)
        if job is None:
            self._refuse_when_full(request)
            job = self._begin(request, caller, digest)
        elif job.order.digest != digest:
            raise _reused(request.request_id)
        outcome = await self._join(job, on_queued)
        seconds = time.perf_counter() - began
        if isinstance(outcome, Refusal):
            self._refused(request, caller, outcome, seconds)
            raise RefusedError(outcome)
        self._context.telemetry.acquired(seconds, "reused" if all(outcome.reused) else "created")
        return self.granted(outcome, job.notes)

    def granted(self, lease: Lease, notes: tuple[str, ...] = ()) -> Granted:
        """Return an active lease as its holder gets it, with devices and token."""
        state = self._context.state
        devices, environments = [], []
        for generation, reused in zip(lease.instances, lease.reused, strict=True):
            instance = state.instance(generation)
            if instance is None:
                continue  # on a GPU that is not managed any more
            slot = instance.slot
            environments.append(self._context.backends[instance.kind].environment(instance))
            devices.append(
                Device(
                    generation=generation,
                    uuid=instance.uuid,
                    gpu=slot.gpu,
                    gpu_index=state.gpus[slot.gpu].index,
                    kind=instance.kind,
                    profile=slot.profile.name,
                    memory_mib=slot.profile.memory_mib,
                    compute_percent=slot.profile.compute_percent,
                    placement=slot.placement if instance.kind.needs_mig_mode else None,
                    gpu_instance_id=instance.gpu_instance_id,
                    compute_instance_id=instance.compute_instance_id,
                    reused=reused,
                    enforced_by=instance.enforced_by,
                )
            )
        return Granted(
            lease=lease,
            token=self._context.tokens.token(lease.id),
            devices=tuple(devices),
            environment=joined(environments),
            notes=notes,
            revision=state.revision,
            confirm_by=self._lifecycle.confirm_by(lease.id),
        )

    def _refuse_when_full(self, request: Request) -> None:
        """Raise RefusedError (QUEUE_FULL) at the limit; a request whose clients are gone counts until it has ended."""
        if len(self._jobs) >= self._context.settings.max_waiting + MOST_SERVED:
            raise refuse(
                Reason.QUEUE_FULL,
                f"cannot serve {describe(request)}: {len(self._jobs)} requests are being served or wait, "
                "which is the limit",
                "try again later",
            )

    def has_slots(self, request: RequestKey) -> bool:
        """Return whether a request has an active lease, or a plan for it is being carried out."""
        job = self._jobs.get(request)
        if job is not None:
            return job.served
        known = self._request_log.of_request(request)
        return known is not None and known.ended_at is None

    def reserving(self) -> tuple[tuple[Owner, tuple[Slot, ...]], ...]:
        """Return the owners for which leases are being reserved now, and the slots of each lease."""
        standing = {lease.request_key for lease in self._context.state.leases.values()} if self._jobs else set()
        return tuple(
            (request.owner, job.slots)
            for request, job in ((each.order.request, each) for each in self._jobs.values() if each.served)
            if request.owner.is_reserved and request.key not in standing
        )

    async def wait_until_answered(self, request: RequestKey) -> None:
        """Wait until a request has been served or refused; return at once for one that is not in progress."""
        job = self._jobs.get(request)
        if job is not None and job.task is not None:
            await asyncio.wait((job.task,))

    def _again(self, known: RecordedLease, digest: str) -> Granted:
        """Return the answer of a request that was served before. Raises RefusedError if its lease has ended."""
        if known.digest != digest:
            raise _reused(known.lease.request_id)
        lease = self._context.state.leases.get(known.lease.id)
        if lease is None:
            raise refuse(
                Reason.LEASE_ENDED,
                f"cannot give lease {known.lease.id} again: it has ended ({known.end_reason or 'just now'})",
                "ask with a new request id",
                end_reason=known.end_reason,
            )
        self._lifecycle.restart_grace_period(lease.id)
        return self.granted(lease)

    def _begin(self, request: Request, caller: Caller, digest: str) -> _Job:
        owner = request.owner
        if owner.process is not None:
            started = self._context.host.client_started(owner.process.pid)
            if started is None:
                raise refuse(
                    Reason.INVALID_REQUEST,
                    f"cannot bind a lease to process {owner.process.pid}: there is no such process on this machine",
                    "give the pid of a process that runs, as the agent's machine counts them",
                )
            request = replace(request, owner=with_start(owner, started))
        # The kernel's uid counts, not the request's.
        holder = request.holder
        if caller.uid is not None and holder.uid != caller.uid:
            request = replace(request, holder=replace(holder, uid=caller.uid))
        if not holder.name and owner.label:
            request = replace(request, holder=replace(request.holder, name=owner.label))

        def check_still_wanted() -> None:
            self._context.refuse_when_closing()
            if job.abandoned:
                raise RefusedError(_CANCELLED)

        order = LeaseRequest(
            request=request,
            caller=caller,
            digest=digest,
            asked_at=self._context.clock.now(),
            check_still_wanted=check_still_wanted,
        )
        job = self._jobs[request.key] = _Job(order)
        job.task = self._context.tasks.spawn(f"acquire-{request.request_id}", self._serve(job))
        return job

    async def _join(self, job: _Job, on_queued: Callable[[QueuePlace], None] | None) -> Lease | Refusal:
        if job.task is None:
            raise RuntimeError("a job without a task")
        job.joined += 1
        if on_queued is not None:
            job.listeners.append(on_queued)
            if job.place is not None:
                on_queued(job.place)
        try:
            return await asyncio.shield(job.task)
        finally:
            job.joined -= 1
            if on_queued is not None:
                job.listeners.remove(on_queued)
            if not job.joined and not job.task.done():
                job.abandoned = True
                self._context.telemetry.acquired(0.0, _CANCELLED.reason.value)
                self._queue.dequeue(job.order.request.key, _CANCELLED)

    async def _serve(self, job: _Job) -> Lease | Refusal:
        failed: Refusal | None = None
        exclude: frozenset[Slot] = frozenset()
        waited: WaitingRequest | None = None
        tries = blocked = 0
        order = job.order
        try:
            # The digest is that of the request as it was sent: its repetition need not know the limits.
            prepared = self._limits.prepared(order.request, order.caller)
            if prepared is not order.request:
                order = job.order = replace(order, request=prepared)
            while True:
                if len(order.request.wants) > 1:
                    await self._context.fairness.yield_turn()
                order.check_still_wanted()  # a request whose client is gone by now would never leave the queue
                execution, waited = await self._queue.admit(order, job.told, failed, exclude, waited)
                job.place = None
                job.notes = execution.plan.notes
                job.served = True
                job.slots = tuple(each.slot for each in execution.plan.devices)
                try:
                    return await execution.run()
                except StepFailedError as failure:
                    job.served = False
                    failed = _failure(order.request, failure)
                    tries += failure.counts
                    blocked += not failure.counts
                    if failure.exclude is not None:
                        exclude |= {failure.exclude}
                    if tries >= MOST_TRIES or blocked >= MOST_BLOCKED:
                        return failed
        except RefusedError as error:
            return error.refusal
        except LedgerError as error:
            return ledger_refusal(error).refusal
        finally:
            del self._jobs[order.request.key]

    def _refused(self, request: Request, caller: Caller, refusal: Refusal, seconds: float) -> None:
        context = self._context
        context.telemetry.acquired(seconds, refusal.reason.value)
        holder = request.holder
        context.journal.emit(
            context.journal.event(
                EventKind.REQUEST_REFUSED,
                f"request of {holder} for {describe(request)} was refused: {refusal.message}",
                holder=str(holder),
                tenant=holder.tenant,
                reason=refusal.reason.value,
                caller=caller,
            )
        )


def _failure(request: Request, failure: StepFailedError) -> Refusal:
    in_use = not failure.counts
    return Refusal(
        reason=Reason.IN_USE if in_use else Reason.DRIVER_FAILED,
        message=f"cannot serve {describe(request)}: {failure.words}",
        hint="end that process, or try again later"
        if in_use
        else "try again; `migctl events` tells what the driver did",
    )


def _reused(request: RequestId) -> RefusedError:
    return refuse(
        Reason.REQUEST_ID_REUSED,
        f"cannot serve request {request}: the same id was used for another request",
        "make a new random id for each request",
    )

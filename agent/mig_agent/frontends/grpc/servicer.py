"""The gRPC service `migagent.v1.PartitionManager`: only translation between messages and the manager."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from typing import Final, Literal, TypeAlias

import grpc

from mig_agent import __version__
from mig_agent.adapters.transport.proxy_connection import ConnectionEnd, ConnectionEnds, Ending
from mig_agent.core.accounting import By
from mig_agent.core.errors import Reason, Refusal, RefusedError, UsageError, refuse
from mig_agent.core.events import Event, EventKind
from mig_agent.core.model import Lease, LeaseId, Request
from mig_agent.core.planning import recording
from mig_agent.core.quantities import counted
from mig_agent.core.requests import parse_gpu, parse_reason, validate_drain_deadline, validate_ttl
from mig_agent.core.texts import visible
from mig_agent.engine.callers import Caller
from mig_agent.engine.lifecycle import StreamEnd
from mig_agent.engine.manager import Manager
from mig_agent.frontends.grpc import encode, encode_plans
from mig_agent.frontends.grpc.decode import request_from
from mig_agent.frontends.grpc.handlers import Context, abort
from mig_agent.frontends.grpc.identity import Roles, caller_named, caller_of, require_admin
from mig_agent.frontends.grpc.streams import Confirmation, QueueReports, request_in
from mig_agent.pb.migagent.v1 import partition_manager_pb2 as pb

MOST_EVENTS = 1000
"""The largest number of events in one answer of Events."""
_MOST_NUMBER = 2**63 - 1
"""The largest integer of SQLite."""
MOST_ANSWER_BYTES = 3 << 20
"""The limit for answers of unbounded size: by default, gRPC's libraries reject messages above 4 MiB."""
MOST_PLANS = 256
"""The largest number of requests in one call of Plan."""

MOST_PLAN_ESTIMATES = 4
"""The largest number of estimates in one call of Plan: each takes some tenths of a second of processor time."""
MOST_DEVICES_RECORDED = 1024
"""The largest number of devices in the requests of one call of Plan that is recorded."""

_CONNECTION_END_SECONDS = 0.25
"""How long to wait for the end of the connection: gRPC may report the end of a stream a moment earlier."""

_STOPPING = Refusal(
    reason=Reason.SHUTTING_DOWN,
    message="cannot go on: the agent is shutting down",
    hint="try again when it is back; leases stay",
)

_ACCOUNTING_KEYS: Final[Mapping[int, By]] = {
    pb.ACCOUNTING_KEY_UNSPECIFIED: By.TENANT,
    pb.ACCOUNTING_KEY_USER: By.USER,
    pb.ACCOUNTING_KEY_TENANT: By.TENANT,
    pb.ACCOUNTING_KEY_NAME: By.NAME,
    pb.ACCOUNTING_KEY_PROFILE: By.PROFILE,
}

Held: TypeAlias = "dict[LeaseId, set[asyncio.Future[Event | None]]]"
"""The open streams of each held lease: each with the event that ends it, or None when the agent stops."""


class PartitionManagerServicer:
    """Implements the methods of the service. One instance serves one socket: the users' or the administrators'."""

    def __init__(
        self,
        manager: Manager,
        *,
        admin: bool,
        roles: Roles,
        held: Held | None = None,
        connection_ends: ConnectionEnds | None = None,
    ) -> None:
        """Serve `manager` with these roles; `admin`: on the administrators' socket.

        `held` is shared by all servicers of one agent, since a stream may be attached again on the other socket.
        `connection_ends` records how connections ended; without it every stream counts as closed by its client.
        """
        self._manager = manager
        self._admin = admin
        self._roles = roles
        self._stopping = False
        self._on_stop: set[Callable[[], None]] = set()
        """For each open stream the function that ends it."""
        self._unconfirmed: dict[LeaseId, set[Confirmation]] = {}
        """The open Acquire streams of each lease that a client has not confirmed yet."""
        self._held: Held = {} if held is None else held
        self._connection_ends = ConnectionEnds() if connection_ends is None else connection_ends
        manager.observers.append(self._observe)

    def use_roles(self, roles: Roles) -> None:
        """Identify callers by these roles from now on; calls in progress go on with the roles that they began with."""
        self._roles = roles

    def stop(self) -> None:
        """End all streams except those of waiting requests. Leases stay, and clients can ask for them again.

        No task is cancelled, since it may be in the middle of a write: each ends its stream when its write is done.
        """
        self._stopping = True
        for end in tuple(self._on_stop):
            end()

    async def acquire(self, message: pb.AcquireRequest | None, context: Context) -> None:
        """Acquire devices: stream the position in the queue and then the lease, and wait for its confirmation."""
        caller = self._caller(context)
        request = request_from(request_in(message), caller)
        confirmation = Confirmation(context)
        reports = QueueReports(context, lambda queued: pb.AcquireResponse(queued=queued))
        try:
            with confirmation.not_yet():
                granted = await self._manager.acquire(request, caller, reports.report)
        finally:
            await reports.finish()
        lease = granted.lease.id
        received = False
        try:
            with self._unconfirmed_by(confirmation, lease):
                await context.write(pb.AcquireResponse(granted=encode.granted(granted)))
                received = await confirmation.outcome()
            if received:
                await self._manager.confirm(lease)
        finally:
            if not received:
                self._manager.left_unconfirmed(lease)

    async def hold(self, message: pb.HoldRequest, context: Context) -> None:
        """Acquire devices, and keep them until the stream ends."""
        caller = self._caller(context)
        connection_end = self._connection_ends.of(context.peer())
        request = request_from(message.request, caller)
        reports = QueueReports(context, lambda queued: pb.HoldResponse(queued=queued))
        try:
            granted = await self._manager.hold(request, caller, reports.report)
        except BaseException:
            await reports.finish()
            raise
        lease, event = granted.lease.id, None
        try:
            with self._end_of(lease) as ended:
                await reports.finish()
                await context.write(pb.HoldResponse(granted=encode.granted(granted)))
                self._manager.delivered(lease)
                event = await ended
        except (asyncio.CancelledError, grpc.aio.InternalError):
            if not self._stopping:
                await self._release_hold(lease, await _end_by_client(connection_end), caller)
                raise asyncio.CancelledError from None
        if event is not None:
            why = str(event.data.get("reason", ""))
            raise refuse(Reason.LEASE_ENDED, f"cannot hold this lease any longer: {event.message}", end_reason=why)
        await self._release_hold(lease, StreamEnd.DROPPED, caller)
        await abort(context, _STOPPING)

    async def release(self, message: pb.ReleaseRequest, context: Context) -> pb.ReleaseResponse:
        """End a lease."""
        caller = self._caller(context)
        if message.force:
            require_admin(caller, f"release lease {message.lease} by force")
        if not message.token and caller.uid is None:
            require_admin(caller, f"release lease {message.lease} without its token")
        await self._manager.release(LeaseId(message.lease), message.token, caller, force=message.force)
        return pb.ReleaseResponse()

    async def cancel(self, message: pb.CancelRequest, context: Context) -> pb.CancelResponse:
        """Take waiting requests out of the queue."""
        caller = self._caller(context)
        if message.mine and message.request_id:
            raise UsageError("cannot cancel one request and all of yours", "give a request id, or mine")
        reason = parse_reason(message.reason)
        cancelled = self._manager.cancel(message.request_id, reason, caller, mine=message.mine, of=message.caller)
        return pb.CancelResponse(cancelled=[encode.queued_request(each) for each in cancelled])

    async def renew(self, message: pb.RenewRequest, context: Context) -> pb.RenewResponse:
        """Give a lease a new deadline, or none."""
        caller = self._caller(context)
        if not message.token and caller.uid is None:
            require_admin(caller, f"renew lease {message.lease} without its token")
        ttl = message.ttl_seconds if message.HasField("ttl_seconds") else None
        validate_ttl(ttl)
        lease = await self._manager.renew(LeaseId(message.lease), message.token, ttl, caller)
        return pb.RenewResponse(lease=encode.lease(lease, encode.leased_devices(lease, self._manager.view)))

    async def recover(self, message: pb.RecoverRequest, context: Context) -> pb.RecoverResponse:
        """Recover a lease from before the loss of the ledger, for a caller that has its token."""
        caller = self._caller(context)
        recovered = await self._manager.recover(LeaseId(message.lease), message.token, caller)
        lease = recovered.lease
        return pb.RecoverResponse(
            lease=encode.lease(lease, encode.leased_devices(lease, self._manager.view)),
            recovered=recovered.anew,
            notes=recovered.notes,
        )

    async def plan(self, message: pb.PlanRequest, context: Context) -> pb.PlanResponse:
        """Return how each request would be served now; change nothing."""
        if len(message.requests) > MOST_PLANS:
            raise UsageError(
                f"cannot plan {len(message.requests)} requests at once: at most {MOST_PLANS}", "send them in parts"
            )
        caller = self._caller(context)
        requests = [request_from(each, caller) for each in message.requests]
        view, pace, now = self._manager.view, self._manager.step_times, self._manager.now
        answer = pb.PlanResponse(revision=view.revision)
        explained = []
        estimates_left = MOST_PLAN_ESTIMATES if message.estimate else 0
        async for outcome, lines in self._manager.plan_in_turns(requests, explain=message.explain, caller=caller):
            answer.outcomes.append(encode_plans.outcome(outcome, view, pace))
            explained.append(lines)
            if estimates_left and isinstance(outcome, Refusal) and outcome.reason is Reason.NO_CAPACITY:
                estimates_left -= 1
                estimate = await self._manager.estimate(requests[len(explained) - 1], caller)
                answer.outcomes[-1].MergeFrom(pb.PlanOutcome(estimate=encode.start_estimate(estimate, now)))
        bytes_left = MOST_ANSWER_BYTES - answer.ByteSize()
        if bytes_left < 0:
            raise UsageError(
                f"cannot answer {len(requests)} plans at once: that is more than one message takes",
                "send them in parts",
            )
        encode_plans.explain(answer.outcomes, explained, bytes_left)
        if message.record:
            answer.recording = await self._record(requests)
            if answer.ByteSize() > MOST_ANSWER_BYTES:
                raise UsageError(
                    f"cannot record {counted(len(requests), 'plan')} at once: that is more than one message takes",
                    "send fewer, or none: then only the node and what waits are recorded",
                )
        return answer

    async def _record(self, requests: Sequence[Request]) -> str:
        """Return a recording of these plans, encoded in a thread: a large node's takes long."""
        devices = sum(len(each.wants) for each in requests)
        if devices > MOST_DEVICES_RECORDED:
            raise UsageError(
                f"cannot record plans for {devices} devices at once: at most {MOST_DEVICES_RECORDED}",
                "send them in parts",
            )
        made = await self._manager.record_plans(requests, __version__)
        return await asyncio.to_thread(recording.to_json, made)

    async def status(self, _message: pb.StatusRequest, context: Context) -> pb.StatusResponse:
        """Return the node as last published, as far as the caller may see it; wait only for estimates, and not long."""
        await self._manager.refresh_estimates()
        return encode.status(self._manager.snapshot, __version__, self._caller(context))

    async def watch(self, message: pb.WatchRequest, context: Context) -> None:
        """Stream events as they happen, from a revision on."""
        self._caller(context)  # a certificate without a role sees nothing
        after = message.after_revision if message.HasField("after_revision") else self._manager.view.revision
        with closing(self._manager.subscribe(after)) as events, self._ended_by_stop(events.end):
            await context.write(pb.WatchResponse(revision=after))
            async for event in events:
                if self._stopping:
                    break
                await context.write(pb.WatchResponse(revision=event.revision, event=encode.event(event)))
        await abort(context, _STOPPING)

    async def profiles(self, _message: pb.ProfilesRequest, context: Context) -> pb.ProfilesResponse:
        """Return the profiles of the node's GPUs, by GPU model."""
        self._caller(context)
        view = self._manager.view
        return pb.ProfilesResponse(models=encode.models(view), revision=view.revision)

    async def events(self, message: pb.EventsRequest, context: Context) -> pb.EventsResponse:
        """Return past events, the oldest first."""
        self._caller(context)
        since = message.since if message.HasField("since") else 0.0
        if math.isnan(since):
            raise UsageError("cannot list events since a moment that is not a number")
        gpu = parse_gpu(message.gpu) if message.gpu else None
        limit = min(message.limit or MOST_EVENTS, MOST_EVENTS)
        before = min(message.before, _MOST_NUMBER)
        lease = await self._manager.history.lease_called(message.lease) if message.lease else ""
        # Nothing is awaited after this: a user's answers are counted only once they are encoded.
        events, earlier = await self._manager.history.event_page(since, gpu, limit, lease=lease, before=before)
        latest = encode.latest([encode.event(each) for each in events], MOST_ANSWER_BYTES)
        return pb.EventsResponse(events=latest, earlier=earlier + len(events) - len(latest))

    async def usage(self, _message: pb.UsageRequest, context: Context) -> pb.UsageResponse:
        """Return the current usage of each instance."""
        caller = self._caller(context)
        readings = await self._manager.usage()
        return pb.UsageResponse(instances=encode.usage(readings, caller), at=time.time())

    async def accounting(self, message: pb.AccountingRequest, context: Context) -> pb.AccountingResponse:
        """Return who leased what in a period."""
        caller = self._caller(context)
        since, until = _moment(message, "since"), _moment(message, "until")
        if since is not None and until is not None and until < since:
            raise UsageError("cannot count from a moment to an earlier one", "give an `until` after `since`")
        by = _ACCOUNTING_KEYS.get(message.by)
        if by is None:
            raise UsageError(f"cannot group by key {message.by}: this version does not know it")
        account = await self._manager.history.account(since or 0.0, until, by, caller)
        return encode.account(account, has_since=since is not None)

    async def advise(self, message: pb.AdviseRequest, context: Context) -> pb.AdviseResponse:
        """Return what the caller's leases asked for against what they used."""
        caller = self._caller(context)
        since = _moment(message, "since")
        found = await self._manager.history.advise(since or 0.0, message.name, caller)
        return pb.AdviseResponse(advice=[encode.advice(each) for each in found])

    async def reclaim(self, message: pb.ReclaimRequest, context: Context) -> pb.ReclaimResponse:
        """Destroy the idle instances, on all GPUs or on those named."""
        caller = self._caller(context)
        require_admin(caller, "reclaim idle instances")
        gpus = tuple(parse_gpu(each) for each in message.gpus)
        destroyed = await self._manager.reclaim(gpus, caller)
        view = self._manager.view
        return pb.ReclaimResponse(
            destroyed=[encode.instance(each, view.by_uuid[each.slot.gpu].index, view.leases) for each in destroyed]
        )

    async def adopt(self, message: pb.AdoptRequest, context: Context) -> pb.AdoptResponse:
        """Adopt foreign instances."""
        caller = self._caller(context)
        require_admin(caller, "adopt instances")
        if not (message.all or message.gpus or message.uuids):
            raise UsageError("cannot adopt without being told what", "name GPUs or UUIDs, or say all")
        gpus = tuple(parse_gpu(each) for each in message.gpus)
        adopted = await self._manager.adopt(gpus, tuple(message.uuids), caller, everything=message.all)
        view = self._manager.view
        return pb.AdoptResponse(
            adopted=[encode.instance(each, view.by_uuid[each.slot.gpu].index, view.leases) for each in adopted]
        )

    async def cordon(self, message: pb.CordonRequest, context: Context) -> pb.CordonResponse:
        """Keep new leases off a GPU, or allow them again."""
        caller = self._caller(context)
        require_admin(caller, f"{'uncordon' if message.uncordon else 'cordon'} a GPU")
        reason = parse_reason(message.reason)
        gpu = await self._manager.cordon(parse_gpu(message.gpu), not message.uncordon, reason, caller)
        return pb.CordonResponse(gpu=encode.gpu(gpu, self._manager.view.leases))

    async def drain(self, message: pb.DrainRequest, context: Context) -> pb.DrainResponse:
        """Cordon GPUs so that they become empty, or end that."""
        caller = self._caller(context)
        require_admin(caller, f"{'undrain' if message.undrain else 'drain'} GPUs")
        gpus = tuple(parse_gpu(each) for each in message.gpus)
        deadline = message.deadline_seconds if message.HasField("deadline_seconds") else None
        validate_drain_deadline(deadline)
        reason = parse_reason(message.reason)
        leases: tuple[Lease, ...] = ()
        if message.undrain:
            there = await self._manager.undrain(gpus, caller)
        else:
            there, leases = await self._manager.drain(gpus, deadline, reason, caller)
        view = self._manager.view
        return pb.DrainResponse(
            gpus=[encode.gpu(each, view.leases) for each in there],
            leases=[encode.lease(each, encode.leased_devices(each, view), in_full=False) for each in leases],
        )

    async def set_mig_mode(self, message: pb.SetMigModeRequest, context: Context) -> pb.SetMigModeResponse:
        """Switch a GPU's MIG mode."""
        caller = self._caller(context)
        require_admin(caller, "switch MIG mode")
        if message.mode not in {pb.MIG_MODE_TARGET_ENABLED, pb.MIG_MODE_TARGET_DISABLED}:
            raise UsageError("cannot switch MIG mode without being told on or off")
        enable = message.mode == pb.MIG_MODE_TARGET_ENABLED
        return encode.mode_change(await self._manager.set_mig_mode(parse_gpu(message.gpu), enable, caller))

    async def pause(self, message: pb.PauseRequest, context: Context) -> pb.PauseResponse:
        """Stop granting leases, and release the driver."""
        caller = self._caller(context)
        require_admin(caller, "pause the agent")
        answer = await self._manager.pause(parse_reason(message.reason), caller, lasting=True)
        return pb.PauseResponse(
            paused=map(visible, answer.paused), driver_released=answer.driver_released, message=visible(answer.message)
        )

    async def resume(self, _message: pb.ResumeRequest, context: Context) -> pb.ResumeResponse:
        """End an administrator's pause."""
        caller = self._caller(context)
        require_admin(caller, "resume the agent")
        answer = await self._manager.resume("", caller, lasting=True)
        return pb.ResumeResponse(
            paused=map(visible, answer.paused), driver_released=answer.driver_released, message=visible(answer.message)
        )

    def refused(self, method: str, message: object, context: Context, refusal: Refusal) -> None:
        """Report a refused call to the audit log, with the lease or GPU that it names."""
        about = getattr(message, "lease", "") or getattr(message, "gpu", "")
        caller = caller_named(context, admin=self._admin, roles=self._roles)
        self._manager.report_refusal(method, caller, refusal, str(about))

    def _caller(self, context: Context) -> Caller:
        return caller_of(context, admin=self._admin, roles=self._roles)

    async def _release_hold(self, lease: LeaseId, how: StreamEnd, caller: Caller) -> None:
        """Report that a lease's stream has ended, unless another stream holds the lease."""
        # A client that was cut off may be back on another stream before the end of this one is noticed.
        if lease not in self._held:
            await asyncio.shield(self._manager.hold_ended(lease, how, caller.pid))

    @contextmanager
    def _ended_by_stop(self, end: Callable[[], None]) -> Iterator[None]:
        """Have `stop` call `end` while the block runs; call it at once if the agent is stopping already."""
        self._on_stop.add(end)
        try:
            if self._stopping:
                end()
            yield
        finally:
            self._on_stop.discard(end)

    @contextmanager
    def _unconfirmed_by(self, confirmation: Confirmation, lease: LeaseId) -> Iterator[None]:
        """While the block runs, fail the confirmation when its lease ends or the agent stops."""
        waiting = self._unconfirmed.setdefault(lease, set())
        waiting.add(confirmation)
        try:
            with self._ended_by_stop(lambda: confirmation.fail(RefusedError(_STOPPING))):
                yield
        finally:
            waiting.discard(confirmation)
            if not waiting:
                self._unconfirmed.pop(lease, None)

    @contextmanager
    def _end_of(self, lease: LeaseId) -> Iterator[asyncio.Future[Event | None]]:
        """Yield a future of the event that ends a held lease while the block runs; None if the agent stops."""
        ended: asyncio.Future[Event | None] = asyncio.get_running_loop().create_future()
        streams = self._held.setdefault(lease, set())
        streams.add(ended)
        try:
            with self._ended_by_stop(lambda: _resolve(ended, None)):
                yield ended
        finally:
            streams.discard(ended)
            if not streams:
                self._held.pop(lease, None)

    def _observe(self, event: Event) -> None:
        """End the open streams of a lease that has ended."""
        if event.kind is EventKind.LEASE_ENDED and event.lease is not None:
            for future in self._held.get(event.lease, ()):
                _resolve(future, event)
            for confirmation in self._unconfirmed.get(event.lease, ()):
                confirmation.fail(refuse(Reason.LEASE_ENDED, f"cannot keep lease {event.lease}: {event.message}"))


def _moment(message: pb.AccountingRequest | pb.AdviseRequest, name: Literal["since", "until"]) -> float | None:
    """Return a moment of a request; None if it is absent. Raises UsageError if it is not a number."""
    if not message.HasField(name):  # type: ignore[arg-type] # AdviseRequest has no `until`, and is not asked for it
        return None
    moment = float(getattr(message, name))
    if math.isnan(moment):
        raise UsageError(f"cannot count with an `{name}` that is not a number")
    return moment


def _resolve(ended: asyncio.Future[Event | None], event: Event | None) -> None:
    if not ended.done():
        ended.set_result(event)


async def _end_by_client(connection_end: ConnectionEnd | None) -> StreamEnd:
    """Return how a stream ended that this agent has not ended."""
    ending = None if connection_end is None else await connection_end.within(_CONNECTION_END_SECONDS)
    match ending:
        case None:
            return StreamEnd.CLOSED  # its connection is still open
        case Ending.HUNG_UP:
            return StreamEnd.HUNG_UP
        case Ending.BROKEN:
            return StreamEnd.DROPPED

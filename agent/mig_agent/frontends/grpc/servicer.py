"""The gRPC service `migagent.v1.PartitionManager`: only translation between messages and the manager."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import TypeAlias

import grpc

from mig_agent import __version__
from mig_agent.adapters.transport.proxy_connection import ConnectionEnd, ConnectionEnds, Ending
from mig_agent.core.errors import Reason, Refusal, RefusedError, UsageError, refuse
from mig_agent.core.events import Event, EventKind
from mig_agent.core.model import LeaseId
from mig_agent.core.requests import parse_gpu, parse_reason, validate_ttl
from mig_agent.core.texts import visible
from mig_agent.engine.callers import Caller
from mig_agent.engine.lifecycle import StreamEnd
from mig_agent.engine.manager import Manager
from mig_agent.frontends.grpc import encode
from mig_agent.frontends.grpc.decode import held_request_from, request_from
from mig_agent.frontends.grpc.handlers import Context, abort
from mig_agent.frontends.grpc.identity import Roles, caller_named, caller_of, require_admin
from mig_agent.frontends.grpc.streams import Confirmation, QueueReports, request_in
from mig_agent.pb.migagent.v1 import partition_manager_pb2 as pb

MOST_EVENTS = 1000
"""In one answer of Events."""
MOST_ANSWER_BYTES = 3 << 20
"""Of an answer that could be longer: gRPC's libraries take no messages above 4 MiB unless told to."""
MOST_PLANS = 256
"""Requests in one call of Plan."""

_TELLING_SECONDS = 0.25
"""gRPC may tell of the end of a stream a moment before its connection is seen to end."""

_STOPPING = Refusal(
    reason=Reason.SHUTTING_DOWN,
    message="cannot go on: the agent is shutting down",
    hint="try again when it is back; leases stay",
)


Held: TypeAlias = "dict[LeaseId, set[asyncio.Future[Event | None]]]"
"""The open streams of each held lease: each with the event that ends it, or None when the agent stops."""


class PartitionManagerServicer:
    """The methods of the service. One instance serves one socket: the users' or the administrators'."""

    def __init__(
        self,
        manager: Manager,
        *,
        admin: bool,
        roles: Roles,
        held: Held | None = None,
        fates: ConnectionEnds | None = None,
    ) -> None:
        """`held` is shared by those of one agent: a stream may be attached again on the other socket.

        `fates` tells what became of connections; without it whoever ends a stream has done so on purpose.
        """
        self._manager = manager
        self._admin = admin
        self._roles = roles
        self._stopping = False
        self._on_stop: set[Callable[[], None]] = set()
        """What ends each stream that is open."""
        self._unconfirmed: dict[LeaseId, set[Confirmation]] = {}
        """The open Acquire streams of each lease that a client has not confirmed yet."""
        self._held: Held = {} if held is None else held
        self._fates = ConnectionEnds() if fates is None else fates
        manager.observers.append(self._observe)

    def stop(self) -> None:
        """End all streams whose requests do not wait, as the agent's doing: leases stay, to be asked for again.

        No task is cancelled, since it may be in the middle of a write: each ends its stream when its write is done.
        """
        self._stopping = True
        for end in tuple(self._on_stop):
            end()

    async def acquire(self, message: pb.AcquireRequest | None, context: Context) -> None:
        """Take devices: stream the place in the queue and then the lease, and hear from the client that it has it."""
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
        """Takes devices and keeps them as long as the stream lives."""
        caller = self._caller(context)
        fate = self._fates.of(context.peer())
        request = held_request_from(message.request, caller)
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
                await self._let_go(lease, await _end_by_client(fate), caller)
                raise asyncio.CancelledError from None
        if event is not None:
            raise refuse(Reason.LEASE_ENDED, f"cannot hold lease {lease} any longer: {event.message}")
        await self._let_go(lease, StreamEnd.DROPPED, caller)
        await abort(context, _STOPPING)

    async def release(self, message: pb.ReleaseRequest, context: Context) -> pb.ReleaseResponse:
        """Ends a lease."""
        caller = self._caller(context)
        if message.force:
            require_admin(caller, f"release lease {message.lease} by force")
        if not message.token and caller.uid is None:
            require_admin(caller, f"release lease {message.lease} without its token")
        await self._manager.release(LeaseId(message.lease), message.token, caller, force=message.force)
        return pb.ReleaseResponse()

    async def renew(self, message: pb.RenewRequest, context: Context) -> pb.RenewResponse:
        """Gives a lease a new deadline, or none."""
        caller = self._caller(context)
        if not message.token and caller.uid is None:
            require_admin(caller, f"renew lease {message.lease} without its token")
        ttl = message.ttl_seconds if message.HasField("ttl_seconds") else None
        validate_ttl(ttl)
        lease = await self._manager.renew(LeaseId(message.lease), message.token, ttl, caller)
        return pb.RenewResponse(lease=encode.lease(lease, encode.leased_devices(lease, self._manager.view)))

    async def recover(self, message: pb.RecoverRequest, context: Context) -> pb.RecoverResponse:
        """Makes a lease of before again for who has its token."""
        caller = self._caller(context)
        recovered = await self._manager.recover(LeaseId(message.lease), message.token, caller)
        lease = recovered.lease
        return pb.RecoverResponse(
            lease=encode.lease(lease, encode.leased_devices(lease, self._manager.view)),
            recovered=recovered.anew,
            notes=recovered.notes,
        )

    async def plan(self, message: pb.PlanRequest, context: Context) -> pb.PlanResponse:
        """How each request would be served now."""
        if len(message.requests) > MOST_PLANS:
            raise UsageError(
                f"cannot plan {len(message.requests)} requests at once: at most {MOST_PLANS}", "send them in parts"
            )
        caller = self._caller(context)
        requests = [request_from(each, caller) for each in message.requests]
        view, pace = self._manager.view, self._manager.pace
        answer = pb.PlanResponse(revision=view.revision)
        explained = []
        async for outcome, lines in self._manager.plan_in_turns(requests, explain=message.explain):
            answer.outcomes.append(encode.outcome(outcome, view, pace))
            explained.append(lines)
        room = MOST_ANSWER_BYTES - answer.ByteSize()
        if room < 0:
            raise UsageError(
                f"cannot answer {len(requests)} plans at once: that is more than one message takes",
                "send them in parts",
            )
        encode.explain(answer.outcomes, explained, room)
        return answer

    async def status(self, _message: pb.StatusRequest, context: Context) -> pb.StatusResponse:
        """The node as it was last published, as far as the caller may see it; waits for nothing."""
        return encode.status(self._manager.snapshot, __version__, self._caller(context))

    async def watch(self, message: pb.WatchRequest, context: Context) -> None:
        """What happens, as it happens."""
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
        """What the GPUs can be cut into."""
        self._caller(context)
        view = self._manager.view
        return pb.ProfilesResponse(models=encode.models(view), revision=view.revision)

    async def events(self, message: pb.EventsRequest, context: Context) -> pb.EventsResponse:
        """What happened, oldest first."""
        self._caller(context)
        since = message.since if message.HasField("since") else 0.0
        if math.isnan(since):
            raise UsageError("cannot list events since a moment that is not a number")
        gpu = parse_gpu(message.gpu) if message.gpu else None
        limit = min(message.limit or MOST_EVENTS, MOST_EVENTS)
        events = await self._manager.events(since, gpu, limit)
        return pb.EventsResponse(events=encode.latest([encode.event(each) for each in events], MOST_ANSWER_BYTES))

    async def usage(self, _message: pb.UsageRequest, context: Context) -> pb.UsageResponse:
        """What is used on each instance."""
        self._caller(context)
        readings = await self._manager.usage()
        return pb.UsageResponse(instances=encode.usage(readings), at=time.time())

    async def reclaim(self, message: pb.ReclaimRequest, context: Context) -> pb.ReclaimResponse:
        """Destroys the idle instances."""
        caller = self._caller(context)
        require_admin(caller, "reclaim idle instances")
        gpus = tuple(parse_gpu(each) for each in message.gpus)
        destroyed = await self._manager.reclaim(gpus, caller)
        view = self._manager.view
        return pb.ReclaimResponse(
            destroyed=[encode.instance(each, view.by_uuid[each.slot.gpu].index, view.leases) for each in destroyed]
        )

    async def adopt(self, message: pb.AdoptRequest, context: Context) -> pb.AdoptResponse:
        """Takes over foreign instances."""
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
        """Keeps new leases off a GPU, or allows them again."""
        caller = self._caller(context)
        require_admin(caller, f"{'uncordon' if message.uncordon else 'cordon'} a GPU")
        reason = parse_reason(message.reason)
        gpu = await self._manager.cordon(parse_gpu(message.gpu), not message.uncordon, reason, caller)
        return pb.CordonResponse(gpu=encode.gpu(gpu, self._manager.view.leases))

    async def set_mig_mode(self, message: pb.SetMigModeRequest, context: Context) -> pb.SetMigModeResponse:
        """Switches a GPU's MIG mode."""
        caller = self._caller(context)
        require_admin(caller, "switch MIG mode")
        if message.mode not in {pb.MIG_MODE_TARGET_ENABLED, pb.MIG_MODE_TARGET_DISABLED}:
            raise UsageError("cannot switch MIG mode without being told on or off")
        enable = message.mode == pb.MIG_MODE_TARGET_ENABLED
        return encode.mode_change(await self._manager.set_mig_mode(parse_gpu(message.gpu), enable, caller))

    async def pause(self, message: pb.PauseRequest, context: Context) -> pb.PauseResponse:
        """Grants nothing more and lets go of the driver."""
        caller = self._caller(context)
        require_admin(caller, "pause the agent")
        answer = await self._manager.pause(parse_reason(message.reason), caller, lasting=True)
        return pb.PauseResponse(
            paused=map(visible, answer.paused), driver_released=answer.driver_released, message=visible(answer.message)
        )

    async def resume(self, _message: pb.ResumeRequest, context: Context) -> pb.ResumeResponse:
        """Takes an administrator's pause back."""
        caller = self._caller(context)
        require_admin(caller, "resume the agent")
        answer = await self._manager.resume("", caller, lasting=True)
        return pb.ResumeResponse(
            paused=map(visible, answer.paused), driver_released=answer.driver_released, message=visible(answer.message)
        )

    def refused(self, method: str, message: object, context: Context, refusal: Refusal) -> None:
        """A call was refused; the record of who did what is told."""
        about = getattr(message, "lease", "") or getattr(message, "gpu", "")
        who = caller_named(context, admin=self._admin, roles=self._roles)
        self._manager.denied(method, who, refusal, str(about))

    def _caller(self, context: Context) -> Caller:
        return caller_of(context, admin=self._admin, roles=self._roles)

    async def _let_go(self, lease: LeaseId, how: StreamEnd, caller: Caller) -> None:
        """Tell that a stream which held a lease has ended, unless another one holds it."""
        # A client that was cut off may be back on another stream before the end of this one is noticed.
        if lease not in self._held:
            await asyncio.shield(self._manager.hold_ended(lease, how, caller.pid))

    @contextmanager
    def _ended_by_stop(self, end: Callable[[], None]) -> Iterator[None]:
        """Have `stop` call this while the block lasts; at once where the agent stops already."""
        self._on_stop.add(end)
        try:
            if self._stopping:
                end()
            yield
        finally:
            self._on_stop.discard(end)

    @contextmanager
    def _unconfirmed_by(self, confirmation: Confirmation, lease: LeaseId) -> Iterator[None]:
        """End the wait for a client's confirmation with its lease, or when the agent stops."""
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
        """The event that ends a held lease while the block lasts; None when the agent stops."""
        ended: asyncio.Future[Event | None] = asyncio.get_running_loop().create_future()
        streams = self._held.setdefault(lease, set())
        streams.add(ended)
        try:
            with self._ended_by_stop(lambda: _tell(ended, None)):
                yield ended
        finally:
            streams.discard(ended)
            if not streams:
                self._held.pop(lease, None)

    def _observe(self, event: Event) -> None:
        """A lease that ends by another's doing ends the streams that are open for it."""
        if event.kind is EventKind.LEASE_ENDED and event.lease is not None:
            for future in self._held.get(event.lease, ()):
                _tell(future, event)
            for confirmation in self._unconfirmed.get(event.lease, ()):
                confirmation.fail(refuse(Reason.LEASE_ENDED, f"cannot keep lease {event.lease}: {event.message}"))


def _tell(stream: asyncio.Future[Event | None], event: Event | None) -> None:
    if not stream.done():
        stream.set_result(event)


async def _end_by_client(fate: ConnectionEnd | None) -> StreamEnd:
    """How a stream ended that this agent has not ended."""
    ending = None if fate is None else await fate.within(_TELLING_SECONDS)
    match ending:
        case None:
            return StreamEnd.CLOSED  # its connection stands
        case Ending.HUNG_UP:
            return StreamEnd.HUNG_UP
        case Ending.BROKEN:
            return StreamEnd.DROPPED

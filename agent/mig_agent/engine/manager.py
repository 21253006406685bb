"""The face of the engine: the single writer of hardware and ledger, on one event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from typing import ClassVar

from mig_agent.adapters.clock import Clock
from mig_agent.adapters.devices import DeviceAccess
from mig_agent.adapters.host import Host
from mig_agent.adapters.ledger.store import Ledger
from mig_agent.adapters.nvml import Driver
from mig_agent.core.catalog import Catalog
from mig_agent.core.errors import LedgerError, Reason, Refusal, refuse
from mig_agent.core.events import Event, EventKind
from mig_agent.core.model import (
    Generation,
    Gpu,
    Instance,
    KubeletDevice,
    Lease,
    LeaseId,
    NodeView,
    Pod,
    Request,
    RequestKey,
    Slot,
    Want,
)
from mig_agent.core.observation import InstanceUsage
from mig_agent.core.planning.capacity import RemainingCapacity
from mig_agent.core.planning.explain import MOST_LINES, explanation
from mig_agent.core.planning.plan import Outcome, StepTimes
from mig_agent.core.planning.planner import plan
from mig_agent.engine.audit import DENIED, DenialAudit
from mig_agent.engine.callers import Caller
from mig_agent.engine.context import EngineSettings, Telemetry
from mig_agent.engine.discovery import LockGpu
from mig_agent.engine.events import Subscription
from mig_agent.engine.lifecycle import StreamEnd, leases_without_answering_devices
from mig_agent.engine.reconciler import read_usage
from mig_agent.engine.results import Granted, ModeAnswer, PauseAnswer, Published, Recovered, Snapshot
from mig_agent.engine.startup import Parts, start
from mig_agent.engine.thread_check import LoopBound

CLOSING_SECONDS = 5.0
"""For the step under way when the agent stops; a driver that hangs does not get more."""
MOST_EXPLAINED_LINES = 4096
"""Of all requests of one dry run, so that the answer stays within what gRPC takes."""

_ROOM_SECONDS = 0.1
"""So long a count stands while the node stays as it is; only what is kept for somebody who waits may change then."""
_MOST_READINGS = 4
"""Of the ledger at once, for those who ask what happened; the others wait for their turn."""
_ADMINISTRATION = frozenset({"Reclaim", "Cordon", "SetMigMode", "Pause", "Resume", "Adopt"})


class Manager:
    """Every method belongs to the event loop; only `view` and `published` may be read on other threads, too.

    Refusals are raised as RefusedError.
    """

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._context = parts.context
        self.observers = parts.context.events.observers
        """Called with each event, at once, on the event loop."""
        self.on_view: list[Callable[[], None]] = []
        """Called soon after each new view, and whenever there may be room that was not there before; on the event loop.

        What changes at one moment is told once."""
        self.on_outdated = parts.pausing.on_outdated
        """Called when the driver was replaced while the agent was paused, and its library where this process looks was
        not: in a container it never will be."""
        self._telling = False
        self._room: tuple[NodeView, tuple[tuple[Want, ...], float], RemainingCapacity] | None = None
        """What was last worked out, and for what."""
        self._socket_problems: tuple[str, ...] = ()
        self._published = self._to_be_shown()
        state = parts.context.state
        state.view_changed.subscribe(self._show)
        state.status_changed.subscribe(self._show)
        state.view_changed.subscribe(self._view_changed)
        state.capacity_freed.subscribe(self._view_changed)
        self._denials = DenialAudit(parts.context.journal, parts.context.clock)
        self._readings = asyncio.Semaphore(_MOST_READINGS)
        self._usage: asyncio.Task[Mapping[Generation, InstanceUsage]] | None = None

    # Leases

    async def acquire(
        self, request: Request, caller: Caller, on_queued: Callable[[int], None] | None = None
    ) -> Granted:
        """Leases what is asked for. `on_queued` hears the request's place while it waits.

        The same request id with the same request gets the same answer. Cancelling the call takes the request out of the
        queue, or undoes what was begun; a lease that was committed by then lives on for its time of grace.
        """
        return await self._parts.acquisitions.acquire(request, caller, on_queued, hold=False)

    async def hold(self, request: Request, caller: Caller, on_queued: Callable[[int], None] | None = None) -> Granted:
        """The same for a lease that lives as long as a stream; `hold_ended` tells of the stream's end."""
        try:
            return await self._parts.acquisitions.acquire(request, caller, on_queued, hold=True)
        except asyncio.CancelledError:
            left = RequestKey(caller.asker, request.request_id)
            self._context.tasks.spawn(f"left-{left.id}", self._left(left))
            raise

    async def _left(self, request: RequestKey) -> None:
        """The client of a held lease went away before it had its answer: what was made for it does not stay long."""
        await self._parts.acquisitions.over(request)
        for lease in tuple(self._context.state.leases.values()):
            if lease.request_key == request:
                self._parts.lifetimes.left(lease.id)

    def delivered(self, lease: LeaseId) -> None:
        """Tell that the answer has arrived, for a lease whose client is this process or a stream that stays open."""
        self._parts.lifetimes.delivered(lease)

    def left_unconfirmed(self, lease: LeaseId) -> None:
        """Tell that a lease's stream has ended and its client has not confirmed it: it ends at its `confirm_by`."""
        self._parts.lifetimes.left_unconfirmed(lease)

    async def confirm(self, lease: LeaseId) -> None:
        """Keep a lease whose client says that it has the answer; without this it ends at `Granted.confirm_by`.

        Raises RefusedError (LEASE_ENDED) where it has ended.
        """
        await self._parts.leases.confirm(lease)

    async def hold_ended(self, lease: LeaseId, how: StreamEnd, client: int | None = None) -> None:
        """The stream of a held lease has ended: how, and its client's process, say how long the lease stays."""
        await self._parts.lifetimes.stream_ended(lease, how, client)

    async def release(self, lease: LeaseId, token: str, caller: Caller, *, force: bool = False) -> None:
        """Ends a lease; its instances stay, idle. Releasing one that has ended is no error for who has its token.

        With `force`, for administrators, also that of a pod that has come, where the kubelet gave it nothing for it and
        no process is on its instances.
        """
        await self._parts.leases.release(lease, token, caller, force=force)

    async def renew(self, lease: LeaseId, token: str, ttl_seconds: float | None, caller: Caller) -> Lease:
        """Another deadline from now on, or with None no deadline; the lease with it."""
        return await self._parts.leases.renew(lease, token, ttl_seconds, caller)

    async def recover(self, lease: LeaseId, token: str, caller: Caller) -> Recovered:
        """Make a lease again that was live when the ledger was lost, for who has its token, with the same id.

        Refused where it had ended, one of its devices is gone or another's, or another user asks. Doing it again
        changes nothing.
        """
        self._context.refuse_when_closing()
        return await self._parts.recovering.recover(lease, token, caller)

    async def end_for_pod(self, lease: LeaseId, words: str) -> None:
        """Ends the lease of a pod; its instances stay, idle. `words` tell why: `its pod has ended`.

        One that has ended is no error. Raises RefusedError where the end cannot be recorded, and then the lease stands.
        """
        await self._parts.leases.end_for_pod(lease, words)

    async def arrived(self, lease: LeaseId, pod: Pod) -> Lease:
        """The pod that a lease was taken for has been seen on this node: the lease is the pod's and ends with it.

        Its deadline is gone, and the pod's UID is recorded where it was not known. Nothing happens to one that has
        arrived. Raises RefusedError where the lease has ended, was not taken for this pod, or cannot be recorded.
        """
        return await self._parts.leases.arrived(lease, pod)

    async def hand_over(self, lease: LeaseId, devices: Sequence[KubeletDevice], pod: Pod) -> Lease:
        """As `arrived`, and from now on the kubelet's devices stand for the lease's instances, in their order.

        Handing over the same devices again changes nothing. Raises RefusedError as `arrived` does, and where the lease
        has other devices already or another number of instances.
        """
        return await self._parts.leases.arrived(lease, pod, devices)

    async def settled(self, lease: LeaseId) -> None:
        """Returns when nothing of a lease is on its way to the ledger: a renewal, that its pod has come, its end."""
        await self._parts.lifetimes.settled(lease)

    async def over(self, request: RequestKey) -> None:
        """Returns when nobody works on a request any more, however it came out."""
        await self._parts.acquisitions.over(request)

    def denied(self, method: str, caller: Caller, refusal: Refusal, about: str = "") -> None:
        """A call was refused: that is told where it says something of its caller, or an administrator made it.

        `about` is the lease or GPU that it named.
        """
        if refusal.reason in DENIED:
            self._denials.tell(method, caller, refusal, about)
        elif method in _ADMINISTRATION:
            words = f"{method} of {caller} was refused: {refusal.message}"
            journal, reason = self._context.journal, refusal.reason.value
            kind = EventKind.REQUEST_REFUSED
            journal.mention(journal.event(kind, words, holder=str(caller), caller=caller, method=method, reason=reason))

    def certificates(self, words: str, *, taken: bool) -> None:
        """Certificates were renewed, or what ought to replace them cannot be used; tells and records it."""
        kind = EventKind.CERTIFICATES_RENEWED if taken else EventKind.CERTIFICATES_KEPT
        self._context.journal.tell(self._context.journal.event(kind, words))

    def sockets(self, words: str, problems: tuple[str, ...], restored: bool) -> None:  # noqa: FBT001 -- as agreed
        """A socket of the agent was removed or replaced; records it, and shows those that are missing still."""
        self._socket_problems = problems
        kind = EventKind.SOCKET_RESTORED if restored else EventKind.SOCKET_LOST
        self._context.journal.tell(self._context.journal.event(kind, f"the socket {words}"))
        self._show()

    # Looking

    def plan(self, requests: Sequence[Request]) -> tuple[Outcome, ...]:
        """How each request would be served now; nothing is changed and nothing is kept for anybody."""
        view, now = self._context.state.working_view, self._context.clock.now()
        context = self._context
        return tuple(
            self._not_now() or context.with_changes(plan(view, request, context.policy, now), request)
            for request in requests
        )

    async def plan_in_turns(
        self, requests: Sequence[Request], *, explain: bool = False
    ) -> AsyncIterator[tuple[Outcome, tuple[str, ...]]]:
        """As `plan`, one by one, all for the node as it is now; other calls are answered in between.

        With each answer come, if wanted, lines for people of how it comes about; fewer of them for many requests.
        """
        context = self._context
        view, now, policy = context.state.working_view, context.clock.now(), context.policy
        most = min(max(MOST_EXPLAINED_LINES // max(len(requests), 1), 1), MOST_LINES)
        for request in requests:
            if len(requests) > 1 or len(request.wants) > 1:
                await context.turns.mine()
            paused = self._not_now()
            outcome = paused or context.with_changes(plan(view, request, policy, now), request)
            yield outcome, explanation(view, request, policy, most=most) if explain and not paused else ()

    @property
    def pace(self) -> StepTimes:
        """How long creating and destroying takes here, by what was measured."""
        return self._context.timing.pace

    def _not_now(self) -> Refusal | None:
        gate = self._context.gate
        return gate.refusal("place anything") if gate.paused else None

    def creatable(self, want: Want, before: Sequence[Want] = ()) -> int:
        """How many devices for this want could be leased now, one after the other, after those on their way.

        Nothing while the agent is paused or stops, and nothing on GPUs that are kept for somebody who waits.
        """
        context = self._context
        if context.gate.paused or context.closing:
            return 0
        view, key = context.state.working_view, (tuple(before), context.clock.now() // _ROOM_SECONDS)
        known = self._room
        if known is None or known[0] is not view or known[1] != key:
            # Asked about one resource after the other, and what is kept for whom takes looking through the queue.
            room = RemainingCapacity(view, context.policy, before, reserved=self._parts.room.reserved)
            known = self._room = (view, key, room)
        return known[2].creatable(want)

    def has_places(self, request: RequestKey) -> bool:
        """Whether a request has what it asks for, or a plan for it is being carried out.

        Then what it takes is counted as busy, and it is none of those on their way. False while it waits.
        """
        return self._parts.acquisitions.has_places(request)

    def making_for_pods(self) -> tuple[tuple[Pod, tuple[Slot, ...]], ...]:
        """What is being made, and not leased yet, for pods that have not come: for whom, and where."""
        return self._parts.acquisitions.for_pods()

    @property
    def view(self) -> NodeView:
        """Return the node as last published: a finished value, which any thread may read."""
        return self._published.view

    @property
    def published(self) -> Published:
        """Return the node as last published, with a few facts around it: a finished value, as `view` is."""
        return self._published

    @property
    def paused(self) -> tuple[str, ...]:
        """Return why nothing is granted and the driver is left alone, in words; empty while the agent serves."""
        return self._context.gate.paused

    def access(self, instance: Instance) -> DeviceAccess:
        """Return what a container needs to use an instance. Raises RefusedError where its GPU has no device node."""
        gpu = self.view.by_uuid[instance.slot.gpu]
        if gpu.minor is None:
            raise refuse(Reason.GPU_UNAVAILABLE, f"cannot give GPU {gpu.index} to a container: it has no device node")
        return self._context.backends[instance.kind].access(instance, gpu.minor)

    @property
    def driver_version(self) -> str:
        """Return the version of the driver, as it was last opened."""
        return self._context.driver.version

    @property
    def silent(self) -> frozenset[LeaseId]:
        """Return the leases with a device on a GPU that has not answered since the start, or is not managed now."""
        return leases_without_answering_devices(self._context.state)

    def position(self, request: RequestKey) -> int | None:
        """Return a request's place in the queue, 1 for the first; None when it does not wait."""
        return self._parts.room.position(request)

    @property
    def snapshot(self) -> Snapshot:
        """Work out all that a status shows: as long as requests wait, that takes long. Never waits."""
        context, parts = self._context, self._parts
        return Snapshot(
            view=context.state.view,
            queue=parts.room.queued,
            started_at=parts.started_at,
            driver_version=self.driver_version,
            strict_fifo=context.settings.strict_fifo,
            reservation_after_seconds=context.reservation_after_seconds,
            ledger_error=context.journal.error,
            doubt=context.state.doubt,
            socket_problems=self._socket_problems,
            recoverable=sum(not each.void for each in context.state.former.values()),
            unused=parts.observer.unused_leases(),
            missing=dict(context.missing),
            paused=context.gate.paused,
            silent=self.silent,
            left=self._left_by_their_process(),
        )

    def _left_by_their_process(self) -> frozenset[LeaseId]:
        host = self._context.host
        return frozenset(
            each.id
            for each in self.view.leases.values()
            if each.holder.pid is not None and not host.client_lives_since(each.holder.pid, each.created_at)
        )

    def subscribe(self, after_revision: int | None = None) -> Subscription:
        """The events after a revision, or those to come, until it is closed; a reader too far behind is refused."""
        return self._context.events.subscribe(after_revision, self._context.state.revision)

    async def events(self, since: float, gpu: str | None, limit: int) -> tuple[Event, ...]:
        """The latest recorded events from a moment on, oldest first; of one GPU (index or UUID) or all."""
        ledger = self._parts.ledger
        try:
            async with self._readings:
                return await self._context.aside.run(lambda: ledger.events(since, gpu or "", limit))
        except LedgerError as error:
            raise refuse(Reason.LEDGER_FAILED, str(error)) from error

    async def usage(self) -> Mapping[Generation, InstanceUsage]:
        """What is used on each instance. Those who ask while it is being read get the same reading."""
        if self._usage is None or self._usage.done():
            self._usage = self._context.tasks.spawn("usage", read_usage(self._context))
        return await asyncio.shield(self._usage)

    # Administration: who may call these is the transport's business

    async def reclaim(self, gpus: Sequence[str], caller: Caller) -> tuple[Instance, ...]:
        """Destroys the idle instances of these GPUs, or of all; those that were."""
        self._context.refuse_when_closing()
        return await self._parts.admin.reclaim(gpus, caller)

    async def adopt(
        self, gpus: Sequence[str], uuids: Sequence[str], caller: Caller, *, everything: bool = False
    ) -> tuple[Instance, ...]:
        """Takes over instances that are somebody else's, as idle ones; those that were.

        Of these GPUs and with these UUIDs, or all of them: then nothing of the ledger is in doubt any more.
        """
        self._context.refuse_when_closing()
        return await self._parts.admin.adopt(gpus, uuids, caller, everything=everything)

    async def cordon(self, gpu: str, on: bool, reason: str, caller: Caller) -> Gpu:  # noqa: FBT001 -- as agreed
        """Keeps new leases off a GPU, or allows them again."""
        return await self._parts.admin.cordon(gpu, reason, caller, on=on)

    async def set_mig_mode(self, gpu: str, enable: bool, caller: Caller) -> ModeAnswer:  # noqa: FBT001 -- as agreed
        """Switches MIG mode, where nothing runs and nothing is leased."""
        self._context.refuse_when_closing()
        return await self._parts.admin.set_mig_mode(gpu, caller, enable=enable)

    async def pause(self, reason: str, caller: Caller, *, lasting: bool = False) -> PauseAnswer:
        """Grants nothing more and lets go of the driver; leases stay. Returns when that is done, or cannot be.

        Paused as long as there is any reason. `lasting` is for an administrator: recorded, so that a restart stays
        paused, and at most one, whose reason may be empty. Any other reason is words, and is what `resume` names.
        """
        self._context.refuse_when_closing()
        return await self._parts.pausing.pause(reason, caller, lasting=lasting)

    async def resume(self, reason: str, caller: Caller, *, lasting: bool = False) -> PauseAnswer:
        """Takes back a reason for pausing; after the last one the driver is opened and all is read and served again.

        A reason that does not hold is no error. With `lasting` it is the administrator's, whatever its words.
        """
        self._context.refuse_when_closing()
        return await self._parts.pausing.resume(reason, caller, lasting=lasting)

    def _to_be_shown(self) -> Published:
        context, parts = self._context, self._parts
        return Published(
            view=context.state.view,
            started_at=parts.started_at,
            queue_length=len(parts.room),
            reservation_after_seconds=context.reservation_after_seconds,
            ledger_error=context.journal.error,
            unused=parts.observer.unused_at_last_look,
            paused=context.gate.paused,
            in_doubt=context.state.doubt is not None,
            sockets_missing=len(self._socket_problems),
        )

    def _show(self) -> None:
        self._published = self._to_be_shown()

    def _view_changed(self) -> None:
        self._room = None
        if self.on_view and not self._telling:
            self._telling = True
            asyncio.get_running_loop().call_soon(self._tell_of_view)

    def _tell_of_view(self) -> None:
        self._telling = False
        for each in tuple(self.on_view):
            each()

    async def close(self) -> None:
        """Ends the agent: the step under way comes to its end, who waits is refused, leases stay."""
        context, parts = self._context, self._parts
        if context.closing:
            return
        context.closing = True
        context.journal.tell(context.journal.event(EventKind.AGENT_STOPPING, "the agent stops; leases stay"))
        parts.room.close()
        parts.lifetimes.close()
        parts.blocks.close()
        await parts.stop_background()
        await context.tasks.end(CLOSING_SECONDS)
        for lane in context.lanes.values():
            lane.close()
        await context.aside.run(parts.ledger.close)
        context.aside.close()
        context.events.end()


class CheckedManager(LoopBound, Manager):
    """A Manager that fails where it is used off the event loop."""

    ON_ANY_THREAD: ClassVar[frozenset[str]] = frozenset({"view", "published", "_published"})


async def start_manager(
    *,
    driver: Driver,
    ledger: Ledger,
    host: Host,
    catalog: Catalog,
    clock: Clock,
    settings: EngineSettings,
    telemetry: Telemetry | None = None,
    claim: LockGpu = lambda _index, _uuid: None,
    paused: Iterable[str] = (),
) -> Manager:
    """A manager that has recovered and is ready to serve. `paused` are reasons, in words, for which it starts paused.

    Raises DriverError where the driver does not answer, LedgerError where the ledger cannot be written, ConfigError
    where the settings name GPUs that are not there or the tokens' key cannot be used.
    """
    kind = CheckedManager if settings.check_threads else Manager
    return kind(
        await start(
            driver=driver,
            ledger=ledger,
            host=host,
            catalog=catalog,
            clock=clock,
            settings=settings,
            telemetry=telemetry,
            claim=claim,
            paused=paused,
        )
    )

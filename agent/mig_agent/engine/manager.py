"""The face of the engine: the single writer of hardware and ledger, on one event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence

from mig_agent.adapters.clock import Clock
from mig_agent.adapters.host import Host
from mig_agent.adapters.ledger import Ledger
from mig_agent.adapters.nvml import Driver
from mig_agent.core.catalog import Catalog
from mig_agent.core.errors import LedgerError, Reason, Refusal, refuse
from mig_agent.core.event import Event, EventKind
from mig_agent.core.explain import MOST_LINES, explanation
from mig_agent.core.model import Generation, Gpu, Instance, InstanceState, Lease, LeaseId, Request, RequestId
from mig_agent.core.observed import InstanceUsage
from mig_agent.core.plan import Outcome
from mig_agent.core.planner import plan
from mig_agent.core.quantities import shown
from mig_agent.engine.answers import Granted, ModeAnswer, Snapshot
from mig_agent.engine.callers import Caller, may_change
from mig_agent.engine.context import Telemetry
from mig_agent.engine.denials import DENIED, Denials
from mig_agent.engine.events import Subscription
from mig_agent.engine.journal import ledger_refusal
from mig_agent.engine.lifetimes import EndReason
from mig_agent.engine.newcomers import Claim
from mig_agent.engine.observer import unused
from mig_agent.engine.parts import Parts
from mig_agent.engine.settings import EngineSettings
from mig_agent.engine.start import start
from mig_agent.engine.usage import read_usage

CLOSING_SECONDS = 5.0
"""For the step under way when the agent stops; a driver that hangs does not get more."""
MOST_EXPLAINED_LINES = 4096
"""Of all requests of one dry run, so that the answer stays within what gRPC takes."""

_MOST_READINGS = 4
"""Of the ledger at once, for those who ask what happened; the others wait for their turn."""
_ADMINISTRATION = frozenset({"Reclaim", "Cordon", "SetMigMode"})


class Manager:
    """Every method belongs to the event loop; refusals are raised as RefusedError."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._context = parts.context
        self.observers = parts.context.events.observers
        """Called with each event, at once, on the event loop."""
        self._denials = Denials(parts.context.journal, parts.context.clock)
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
            self._context.tasks.spawn(f"left-{request.request_id}", self._left(request.request_id))
            raise

    async def _left(self, request: RequestId) -> None:
        """The client of a held lease went away before it had its answer: what was made for it does not stay long."""
        await self._parts.acquisitions.over(request)
        for lease in tuple(self._context.state.leases.values()):
            if lease.request_id == request:
                self._parts.lifetimes.left(lease.id)

    def delivered(self, lease: LeaseId) -> None:
        """The answer was handed to the transport; without this the lease ends after its time of grace."""
        self._parts.lifetimes.delivered(lease)

    async def hold_ended(self, lease: LeaseId, *, by_client: bool) -> None:
        """The stream of a held lease has ended: if not by its client, it can be attached again for a while."""
        if by_client and not self._context.closing:
            try:
                await self._parts.lifetimes.end(lease, EndReason.STREAM_ENDED, by="its client")
            except LedgerError:
                self._parts.lifetimes.detached(lease)
        else:
            self._parts.lifetimes.detached(lease)

    async def release(self, lease: LeaseId, token: str, caller: Caller) -> None:
        """Ends a lease; its instances stay, idle. Releasing one that has ended is no error for who has its token."""
        known = self._known(lease, token, caller)
        if known is None:
            return
        try:
            # Who has the token of a lease is its holder, whatever the transport knows.
            by = str(caller) if caller.name or caller.admin else "its holder"
            await self._parts.lifetimes.end(lease, EndReason.RELEASED, by=by, caller=caller)
        except LedgerError as error:
            raise ledger_refusal(error, f"release lease {lease}") from error

    async def renew(self, lease: LeaseId, token: str, ttl_seconds: float | None, caller: Caller) -> Lease:
        """Another deadline from now on, or with None no deadline; the lease with it."""
        known = self._known(lease, token, caller)
        if known is None:
            raise refuse(Reason.LEASE_ENDED, f"cannot renew lease {lease}: it has ended", "ask for a new one")
        expires_at = None if ttl_seconds is None else self._context.clock.now() + ttl_seconds
        try:
            return await self._parts.lifetimes.renew(known, expires_at, caller)
        except LedgerError as error:
            raise ledger_refusal(error, f"renew lease {lease}") from error

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

    def _known(self, lease: LeaseId, token: str, caller: Caller) -> Lease | None:
        """The lease, if the caller may change it; None for one that has ended."""
        standing = self._context.state.leases.get(lease)
        tokens = self._context.tokens
        remembered = self._parts.memory.of_lease(lease)
        if may_change(tokens, lease, standing or (remembered.lease if remembered else None), token, caller):
            if standing is None and remembered is None and not tokens.matches(lease, token):
                raise _unknown(lease)
            return standing
        if standing is None and remembered is None:
            raise _unknown(lease)
        raise refuse(
            Reason.WRONG_TOKEN,
            f"cannot touch lease {lease}: the token is not its token"
            if token
            else f"cannot touch lease {lease}: it takes its token, since you are not who asked for it",
            "give the token that came with the lease: --token",
        )

    # Looking

    def plan(self, requests: Sequence[Request]) -> tuple[Outcome, ...]:
        """How each request would be served now; nothing is changed and nothing is kept for anybody."""
        view, now = self._context.state.working_view, self._context.clock.now()
        return tuple(plan(view, request, self._context.policy, now) for request in requests)

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
            outcome = plan(view, request, policy, now)
            yield outcome, explanation(view, request, policy, most=most) if explain else ()

    @property
    def snapshot(self) -> Snapshot:
        """The node as last published; never waits."""
        context, parts = self._context, self._parts
        view = context.state.view
        leased = (each for each in view.instances.values() if each.state is InstanceState.LEASED)
        idle_leases = unused(leased, parts.observer.last_process, context.clock.now())
        return Snapshot(
            view=view,
            queue=parts.room.queued,
            started_at=parts.started_at,
            driver_version=context.driver.version,
            strict_fifo=context.settings.strict_fifo,
            reservation_after_seconds=context.reservation_after_seconds,
            ledger_error=context.journal.error,
            unused=frozenset(each.lease for each in idle_leases if each.lease is not None),
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

    async def cordon(self, gpu: str, on: bool, reason: str, caller: Caller) -> Gpu:  # noqa: FBT001 -- as agreed
        """Keeps new leases off a GPU, or allows them again."""
        return await self._parts.admin.cordon(gpu, reason, caller, on=on)

    async def set_mig_mode(self, gpu: str, enable: bool, caller: Caller) -> ModeAnswer:  # noqa: FBT001 -- as agreed
        """Switches MIG mode, where nothing runs and nothing is leased."""
        self._context.refuse_when_closing()
        return await self._parts.admin.set_mig_mode(gpu, caller, enable=enable)

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


def _unknown(lease: LeaseId) -> Exception:
    return refuse(
        Reason.UNKNOWN_LEASE,
        f"cannot find lease {shown(lease)}: it never was, or ended long ago",
        "see `migctl status`",
    )


async def start_manager(
    *,
    driver: Driver,
    ledger: Ledger,
    host: Host,
    catalog: Catalog,
    clock: Clock,
    settings: EngineSettings,
    telemetry: Telemetry | None = None,
    claim: Claim = lambda _index, _uuid: None,
) -> Manager:
    """A manager that has recovered and is ready to serve.

    Raises DriverError where the driver does not answer, LedgerError where the ledger cannot be written, ConfigError
    where the settings name GPUs that are not there or the tokens' key cannot be used.
    """
    return Manager(
        await start(
            driver=driver,
            ledger=ledger,
            host=host,
            catalog=catalog,
            clock=clock,
            settings=settings,
            telemetry=telemetry,
            claim=claim,
        )
    )

"""Starting: what the ledger says, what the hardware shows, made to agree before anything is served."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from mig_agent.adapters.clock import Clock
from mig_agent.adapters.host import Host
from mig_agent.adapters.ledger.records import ForgetConfirmation
from mig_agent.adapters.ledger.store import Ledger
from mig_agent.adapters.nvml import Driver
from mig_agent.adapters.threads import CallThread
from mig_agent.adapters.tokens import KEY_FILE, Tokens
from mig_agent.core.backfill import MeanLeaseTime
from mig_agent.core.catalog import Catalog
from mig_agent.core.events import Event, EventKind
from mig_agent.core.planning.plan import Policy, Reuse
from mig_agent.core.quantities import counted
from mig_agent.engine.context import Context, EngineSettings, NoTelemetry, Telemetry
from mig_agent.engine.discovery import LockGpu
from mig_agent.engine.events import Events
from mig_agent.engine.journal import Journal
from mig_agent.engine.parts import Parts, wire
from mig_agent.engine.state import CheckedState, State
from mig_agent.engine.tasks import Tasks

RESTART_REVISIONS = 1000
"""Left out at a restart, so that no revision is given twice even where the last ones could not be recorded."""


LEDGER_WATCH_SECONDS = 2.0
"""Between two looks whether the ledger's files are in their place: three calls of stat(2)."""


async def start(
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
) -> Parts:
    """The parts of an engine that has recovered and is ready to serve. `claim` is called for each GPU that is taken.

    `paused` are reasons, in words, for which it starts paused; so it does where an administrator's is on record. Then
    the driver is not asked anything (nor opened, where it was not), and is read when the agent goes on.

    Raises DriverError where the driver does not answer, LedgerError where the ledger cannot be written, ConfigError
    where the settings name GPUs that are not there or the tokens' key cannot be used.
    """
    contents = ledger.contents
    state = (CheckedState if settings.check_threads else State)(
        settings.node, contents.last_revision + RESTART_REVISIONS, contents.last_generation
    )
    state.doubt = contents.doubt
    state.former = {each.lease.id: each for each in contents.former}
    events = Events()
    events.begin(state.revision)
    context = Context(
        driver=driver,
        host=host,
        catalog=catalog,
        clock=clock,
        settings=settings,
        policy=Policy(creation_cost=settings.creation_cost, reuse=Reuse(settings.reuse)),
        tokens=Tokens.load_or_make(ledger.path.with_name(KEY_FILE)),
        telemetry=telemetry or NoTelemetry(),
        state=state,
        events=events,
        journal=Journal(ledger, state, events, clock),
        tasks=Tasks(),
        patience=MeanLeaseTime.of(
            each.ended_at - each.lease.created_at for each in contents.leases if each.ended_at is not None
        ),
        aside=CallThread("aside"),
    )
    parts = wire(context, ledger, claim)
    for recorded in contents.leases:
        if recorded.ended_at is None:
            state.put_lease(recorded.lease)
    state.unmanaged = {each.generation: each.slot.gpu for each in contents.instances if each.lease is not None}
    is_paused = parts.pausing.begin(contents.paused, paused)
    if is_paused:
        await parts.inventory.without_driver()
    else:
        await parts.inventory.take_up()
    now = clock.now()
    parts.lifetimes.remember_unconfirmed(contents.unconfirmed & state.leases.keys())
    for each in contents.leases:
        lease = state.leases.get(each.lease.id)
        if lease is not None:
            # Without a word in the ledger it counts as confirmed: one that is must not be lost. No stream outlived us.
            is_confirmed = not lease.owner.ends_with_stream and not parts.lifetimes.is_unconfirmed(lease.id)
            parts.lifetimes.begin(lease, delivered=is_confirmed)
    parts.started_at = now
    leases = counted(len(state.leases), "lease")
    words = f"the agent started with {counted(len(state.gpus), 'GPU')} and {leases}"
    if is_paused:
        words = f"the agent started paused ({'; '.join(context.gate.paused)}) with {leases}"
    started = context.journal.event(EventKind.AGENT_STARTED, words)
    old = tuple(ForgetConfirmation(each) for each in contents.unconfirmed - state.leases.keys())
    await context.journal.write(old, (started, *_of_doubt(context)))
    parts.background.append(asyncio.get_running_loop().create_task(parts.observer.run(), name="observer"))
    parts.background.append(asyncio.get_running_loop().create_task(_watch_ledger(parts), name="ledger watch"))
    if settings.listen_to_driver and not is_paused:
        parts.listening.start()
    return parts


async def _watch_ledger(parts: Parts) -> None:
    """Notice when the ledger's files are removed or replaced under the agent: leases would be gone at the next start.

    The event is the commit that writes the ledger anew. Where that fails, no lease is given any more.
    """
    context, reported = parts.context, ""
    wake = asyncio.Event()
    while True:
        timer = context.clock.call_later(LEDGER_WATCH_SECONDS, wake.set)
        try:
            await wake.wait()
        finally:
            timer.cancel()
        wake.clear()
        words = parts.ledger.missing()
        if words and (words != reported or not context.journal.error):
            told = f"{words}; the ledger is written anew from what the agent has open"
            context.journal.tell(context.journal.event(EventKind.LEDGER_FAILED, told))
        reported = words


def _of_doubt(context: Context) -> tuple[Event, ...]:
    """Report at each start that the ledger does not account for everything, until that is settled."""
    doubt = context.state.doubt
    if doubt is None:
        return ()
    former = f" The former one is kept as {doubt.kept_as}." if doubt.kept_as else ""
    known = (
        "It knows nothing of the leases since then"
        if doubt.restored
        else "An empty ledger stands in for it, and no lease of before counts"
    )
    words = (
        f"the ledger {doubt.why}.{former} {known}: instances that it does not account for are left alone. "
        "`migctl recover` brings a lease of before back to who has its token, and `migctl adopt` takes over what "
        "nobody counts on any more"
    )
    return (
        context.journal.event(
            EventKind.LEDGER_QUARANTINED, words, kept_as=doubt.kept_as, since=doubt.at, restored=doubt.restored
        ),
    )

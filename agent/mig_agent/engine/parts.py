"""The parts of one running engine, wired together."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass, field

from mig_agent.adapters.ledger.store import Ledger
from mig_agent.engine.acquire import Acquirer
from mig_agent.engine.admin import Admin
from mig_agent.engine.adoption import Adopting
from mig_agent.engine.context import Context
from mig_agent.engine.discovery import Discovery, LockGpu
from mig_agent.engine.driver_events import DriverEvents
from mig_agent.engine.execution import Executor
from mig_agent.engine.idempotency import RequestLog
from mig_agent.engine.instances import InstanceDestroyer, Preflight, Quarantine
from mig_agent.engine.lease_recovery import LeaseRecovery
from mig_agent.engine.leases import Leases
from mig_agent.engine.lifecycle import LeaseLifecycle
from mig_agent.engine.maintenance import Maintenance
from mig_agent.engine.queueing import RequestQueue
from mig_agent.engine.reconciler import Reconciler
from mig_agent.engine.repairs import Repairs
from mig_agent.engine.takingup import DriverStartup


@dataclass(slots=True, kw_only=True)
class Parts:
    """Made by `wire`."""

    context: Context
    ledger: Ledger
    memory: RequestLog
    lifetimes: LeaseLifecycle
    leases: Leases
    blocks: Quarantine
    observer: Reconciler
    room: RequestQueue
    acquisitions: Acquirer
    admin: Admin
    adopting: Adopting
    recovering: LeaseRecovery
    started_at: float
    listening: DriverEvents
    inventory: DriverStartup
    pausing: Maintenance
    background: list[asyncio.Task[None]] = field(default_factory=list)

    async def stop_background(self) -> None:
        """Ends what runs as long as the engine does."""
        self.pausing.close()
        self.listening.close()
        for task in self.background:
            task.cancel()
        for task in self.background:
            with contextlib.suppress(asyncio.CancelledError):
                await task
        self.background.clear()


def wire(context: Context, ledger: Ledger, lock: LockGpu) -> Parts:
    """Construct all parts over one context and one ledger; `lock` is called for each GPU before it is managed."""
    contents = ledger.contents
    memory = RequestLog(ledger, contents.leases, more_ended=contents.more_ended)
    lifetimes = LeaseLifecycle(context, memory)
    blocks = Quarantine(context)
    remover = InstanceDestroyer(context, blocks)
    repairs = Repairs(context, lifetimes, blocks, remover)
    observer = Reconciler(
        context, lifetimes=lifetimes, blocks=blocks, repairs=repairs, memory=memory, boot_id=contents.boot_id
    )
    executor = Executor(
        context=context,
        memory=memory,
        lifetimes=lifetimes,
        blocks=blocks,
        looks=Preflight(context, blocks),
        remover=remover,
        observer=observer,
    )
    room = RequestQueue(context, executor)
    admin = Admin(context, remover, observer)
    listening = DriverEvents(context.driver, observer.hint)
    observer.follow_up(admin.destroy_overdue)
    discovery = Discovery(context, contents, observer, lock)
    recovering = LeaseRecovery(context, memory, lifetimes, observer)
    inventory = DriverStartup(
        context, contents, lifetimes=lifetimes, reconciler=observer, discovery=discovery, recovery=recovering
    )
    return Parts(
        context=context,
        ledger=ledger,
        memory=memory,
        lifetimes=lifetimes,
        leases=Leases(context, memory, lifetimes),
        blocks=blocks,
        observer=observer,
        room=room,
        acquisitions=Acquirer(context, memory, lifetimes, room),
        admin=admin,
        adopting=Adopting(context, observer),
        recovering=recovering,
        started_at=context.clock.now(),
        listening=listening,
        inventory=inventory,
        pausing=Maintenance(context, listening, inventory, observer.hint),
    )

"""The parts of one running engine, wired together."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass, field

from mig_agent.adapters.ledger import Ledger
from mig_agent.engine.acquisitions import Acquisitions
from mig_agent.engine.admin import Admin
from mig_agent.engine.adopting import Adopting
from mig_agent.engine.blocks import Blocks
from mig_agent.engine.context import Context
from mig_agent.engine.execution import Executor
from mig_agent.engine.leases import Leases
from mig_agent.engine.lifetimes import Lifetimes
from mig_agent.engine.listening import Listening
from mig_agent.engine.looks import Looks
from mig_agent.engine.memory import Memory
from mig_agent.engine.observer import Observer
from mig_agent.engine.pausing import Pausing
from mig_agent.engine.removal import Remover
from mig_agent.engine.repairs import Repairs
from mig_agent.engine.waiting import WaitingRoom


@dataclass(slots=True, kw_only=True)
class Parts:
    """Made by `wire`."""

    context: Context
    ledger: Ledger
    memory: Memory
    lifetimes: Lifetimes
    leases: Leases
    blocks: Blocks
    observer: Observer
    room: WaitingRoom
    acquisitions: Acquisitions
    admin: Admin
    adopting: Adopting
    started_at: float
    listening: Listening
    pausing: Pausing
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


def wire(context: Context, ledger: Ledger) -> Parts:
    """All parts over one context and one ledger."""
    contents = ledger.contents
    memory = Memory(ledger, contents.leases, more_ended=contents.more_ended)
    lifetimes = Lifetimes(context, memory)
    blocks = Blocks(context)
    remover = Remover(context, blocks)
    repairs = Repairs(context, lifetimes, blocks, remover)
    observer = Observer(
        context, lifetimes=lifetimes, blocks=blocks, repairs=repairs, memory=memory, boot_id=contents.boot_id
    )
    executor = Executor(
        context=context,
        memory=memory,
        lifetimes=lifetimes,
        blocks=blocks,
        looks=Looks(context, blocks),
        remover=remover,
        observer=observer,
    )
    room = WaitingRoom(context, executor)
    admin = Admin(context, remover, observer)
    listening = Listening(context.driver, observer.hint)
    observer.also.append(admin.destroy_overdue)
    return Parts(
        context=context,
        ledger=ledger,
        memory=memory,
        lifetimes=lifetimes,
        leases=Leases(context, memory, lifetimes),
        blocks=blocks,
        observer=observer,
        room=room,
        acquisitions=Acquisitions(context, memory, lifetimes, room),
        admin=admin,
        adopting=Adopting(context, observer),
        started_at=context.clock.now(),
        listening=listening,
        pausing=Pausing(context, listening, observer.hint),
    )

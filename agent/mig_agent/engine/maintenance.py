"""Maintenance: nothing is granted, and the driver is released, so that it can be replaced while leases stay active.

Several may want it at once, each for a reason of its own; the agent goes on when the last of them is done. One task
brings the driver to where it is wanted, however often that changes meanwhile. What an administrator asked for is
recorded, and outlives the agent; the other reasons are given again by their callers.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable
from typing import Protocol

from mig_agent.adapters.clock import Timer
from mig_agent.adapters.ledger.records import DropPause, PutPause
from mig_agent.adapters.threads import CallThread
from mig_agent.core.errors import DriverError, DriverErrorKind, LedgerError, MigAgentError
from mig_agent.core.events import EventKind
from mig_agent.engine.callers import Caller
from mig_agent.engine.context import Context
from mig_agent.engine.driver_events import DriverEvents
from mig_agent.engine.journal import ledger_refusal
from mig_agent.engine.results import PauseAnswer

AGAIN_SECONDS = 10.0
"""Until a driver that did not answer, or could not be let go, is tried again."""
_ADMINISTRATOR = ""
"""Stands for the one reason that is recorded; others stand for themselves."""


class GpuInventory(Protocol):
    """The GPUs as the driver shows them, and as the ledger remembers them."""

    async def take_up(self) -> None:
        """Read all GPUs of a driver that was opened again. Raises MigAgentError where that fails."""

    async def remember(self) -> None:
        """Record what is known of the GPUs."""


class Maintenance:
    """Pauses the agent, which releases the driver so that it can be replaced, and resumes it."""

    def __init__(
        self, context: Context, listening: DriverEvents, inventory: GpuInventory, look_soon: Callable[[], None]
    ) -> None:
        self._context = context
        self._listening = listening
        self._inventory = inventory
        self._look_soon = look_soon
        self._asking = asyncio.Lock()
        """Held while one who asks is recorded, so that those who ask are heard in their order."""
        self.on_outdated: list[Callable[[], None]] = []
        """Called when the driver was replaced, and its library as this process finds it was not."""
        self._reasons: dict[str, str] = {}
        self._open = True
        """Whether there is a session with the driver ..."""
        self._taken_up = True
        """... and all was read in it."""
        self._opening: asyncio.Future[None] | None = None
        """An attempt to begin one that has not come back, in time or at all."""
        self._trouble = ""
        """Why the driver is not as it is wanted, in words."""
        self._settling: asyncio.Task[None] | None = None
        self._again: Timer | None = None

    def begin(self, recorded: str, others: Iterable[str]) -> bool:
        """Whether the agent starts paused: by what is on record, or for reasons that are known already.

        The driver was not opened then.
        """
        if recorded:
            self._reasons[_ADMINISTRATOR] = recorded
        self._reasons |= {each: each for each in others}
        self._open = self._taken_up = not self._reasons
        self._show()
        return bool(self._reasons)

    async def pause(self, reason: str, caller: Caller, *, lasting: bool) -> PauseAnswer:
        """Returns when the driver was let go, or cannot be. Raises RefusedError where it cannot be recorded."""
        key = _ADMINISTRATOR if lasting else reason
        words = (f"by {caller}" + (f": {reason}" if reason else "")) if lasting else reason
        async with self._asking:
            known = self._reasons.get(key)
            if known is None or (lasting and reason and known != words):
                await self._record(PutPause(words) if lasting else None, "pause", EventKind.AGENT_PAUSED, words, caller)
                self._reasons[key] = words
                self._show()
        await self._settled()
        return self._answer()

    async def resume(self, reason: str, caller: Caller, *, lasting: bool) -> PauseAnswer:
        """Returns when the agent has taken up again, or why it has not. Raises RefusedError as `pause` does."""
        key = _ADMINISTRATOR if lasting else reason
        async with self._asking:
            if key in self._reasons:
                why = "" if lasting else reason
                await self._record(DropPause() if lasting else None, "resume", EventKind.AGENT_RESUMED, why, caller)
                del self._reasons[key]
                if self._reasons:
                    self._show()
        await self._settled()
        return self._answer()

    def close(self) -> None:
        """Nothing is tried again."""
        if self._again is not None:
            self._again.cancel()

    # Inside

    def _answer(self) -> PauseAnswer:
        return PauseAnswer(paused=self._context.gate.paused, driver_released=self._is_let_go, message=self._trouble)

    async def _record(
        self, change: PutPause | DropPause | None, verb: str, kind: EventKind, why: str, caller: Caller
    ) -> None:
        journal = self._context.journal
        if kind is EventKind.AGENT_PAUSED:
            words = f"the agent was paused ({why})" if why else "the agent was paused"
        else:
            words = f"the agent was resumed by {caller}" + (f" ({why} is over)" if why else "")
        event = journal.event(kind, words, caller=caller)
        if change is None:
            journal.tell(event)
            return
        try:
            await journal.write((change,), (event,))
        except LedgerError as error:
            raise ledger_refusal(error, verb) from error

    def _show(self) -> None:
        """What everybody sees of it."""
        paused = tuple(dict.fromkeys(self._reasons.values()))
        if not paused and not self._taken_up:
            paused = (self._trouble or "it takes up again",)
        self._context.gate.paused = paused
        self._context.journal.publish()

    async def _settled(self) -> None:
        if self._settling is None or self._settling.done():
            self._settling = self._context.tasks.spawn("pausing", self._settle())
        await asyncio.shield(self._settling)

    async def _settle(self) -> None:
        """Brings the driver to where it is wanted; tries again later what does not work now."""
        self.close()
        while not self._context.closing:
            paused = bool(self._reasons)
            if self._is_let_go if paused else self._taken_up:
                self._trouble = ""
                break
            try:
                await (self._let_go() if paused else self._go_on())
            except MigAgentError as error:
                what = "cannot let go of the driver" if paused else "cannot take up again"
                self._failed(f"{what}: {error}; it is tried every {AGAIN_SECONDS:g} s")
                if isinstance(error, DriverError) and error.kind is DriverErrorKind.OUTDATED:
                    for each in self.on_outdated:
                        each()
                break
        self._show()
        if not self._context.gate.paused:
            self._look_soon()  # what would have been looked at meanwhile, had it not been paused
            self._context.state.capacity_freed.emit()

    def _failed(self, trouble: str) -> None:
        if trouble != self._trouble:
            self._trouble = trouble
            journal = self._context.journal
            journal.tell(journal.event(EventKind.DRIVER_UNAVAILABLE, trouble))
        self._again = self._context.clock.call_later(AGAIN_SECONDS, self._try_again)

    def _try_again(self) -> None:
        if not self._context.closing:
            self._context.tasks.spawn("pausing-again", self._settled())

    async def _let_go(self) -> None:
        context = self._context
        await context.gate.empty()
        await self._inventory.remember()
        if not self._reasons:
            return  # somebody changed their mind meanwhile
        if self._opening is not None:
            with contextlib.suppress(DriverError):
                await self._opened()
            if self._opening is not None:
                raise DriverError(DriverErrorKind.TIMEOUT, "nvmlShutdown", detail="it is being opened still")
        self._listening.close()
        try:
            await _aside(self._listening.join)
            self._refuse_when_hung()
            await _aside(context.driver.close)
        except DriverError:
            self._listen()
            raise
        self._open = self._taken_up = False
        left = context.host.own_device_nodes()
        words = f", but this process still has {', '.join(left)} open" if left else ""
        context.journal.tell(context.journal.event(EventKind.DRIVER_RELEASED, f"the driver was let go{words}"))

    def _refuse_when_hung(self) -> None:
        for lane in self._context.lanes.values():
            if lane.hung:
                raise DriverError(DriverErrorKind.TIMEOUT, "nvmlShutdown", detail=f"still waiting for: {lane.hung}")

    @property
    def _is_let_go(self) -> bool:
        return not self._open and self._opening is None

    async def _go_on(self) -> None:
        context = self._context
        if not self._open and self._opening is None:
            self._opening = _aside(context.driver.reopen)
        await self._opened()
        try:
            await self._inventory.take_up()
        except MigAgentError:
            with contextlib.suppress(DriverError):  # a call that hangs holds it open
                await _aside(context.driver.close)
                self._open = False
            raise
        self._taken_up = True
        self._listen()
        words = f"the driver was opened again: version {context.driver.version}"
        context.journal.tell(context.journal.event(EventKind.DRIVER_OPENED, words))

    async def _opened(self) -> None:
        """Returns when the attempt to open the driver has come to its end. Raises DriverError."""
        opening = self._opening
        if opening is None:
            return
        deadline = self._context.settings.call_deadline_seconds
        await asyncio.wait({opening}, timeout=deadline)
        if not opening.done():
            raise DriverError(DriverErrorKind.TIMEOUT, "nvmlInitWithFlags", detail=f"no answer in {deadline:g} s")
        self._opening = None
        opening.result()
        self._open = True

    def _listen(self) -> None:
        if self._context.settings.listen_to_driver:
            self._listening.start()


def _aside(function: Callable[[], None]) -> asyncio.Future[None]:
    """Has a blocking call made in a thread of its own: one that hangs holds up nobody."""
    thread = CallThread("driver-session")
    answer = thread.run(function)
    thread.close()
    return answer

"""Maintenance: nothing is granted, and the driver is released, so that it can be replaced while leases stay active.

The agent is paused while there is at least one reason. One task releases or opens the driver until that agrees with the
reasons, however often they change meanwhile. An administrator's reason is recorded and survives a restart of the agent;
the other reasons are given again by their callers.
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

RETRY_SECONDS = 10.0
"""The pause before opening or releasing the driver is tried again, in seconds."""
_ADMINISTRATOR = ""
"""The key of the administrator's reason, the only one that is recorded; each other reason is its own key."""


class GpuInventory(Protocol):
    """Reads the GPUs from the driver, and records them in the ledger."""

    async def read_gpus(self) -> None:
        """Read all GPUs after the driver was opened again. Raises MigAgentError if that fails."""

    async def remember(self) -> None:
        """Record what is known of the GPUs."""


class Maintenance:
    """Pauses the agent, which releases the driver so that it can be replaced, and resumes it."""

    def __init__(
        self,
        context: Context,
        driver_events: DriverEvents,
        driver_startup: GpuInventory,
        reconcile_soon: Callable[[], None],
    ) -> None:
        self._context = context
        self._driver_events = driver_events
        self._driver_startup = driver_startup
        self._reconcile_soon = reconcile_soon
        self._recording = asyncio.Lock()
        """Held while a call is recorded, so that calls take effect in the order in which they came."""
        self.on_outdated: list[Callable[[], None]] = []
        """Called when the driver was replaced, but the library that this process finds was not."""
        self._reasons: dict[str, str] = {}
        self._is_open = True
        """Whether the driver is open."""
        self._is_resumed = True
        """Whether the driver is open, and all GPUs were read since."""
        self._opening: asyncio.Future[None] | None = None
        """The attempt to open the driver that has not returned; None where there is none."""
        self._problem = ""
        """Why the driver could not be released or opened, as a message; empty when it could."""
        self._cannot_open = "cannot take up again"
        """What messages call a failure to open the driver."""
        self._settling: asyncio.Task[None] | None = None
        self._retry_timer: Timer | None = None

    def begin(self, recorded: str, others: Iterable[str], no_driver: str = "") -> bool:
        """Take in the reasons to start paused: `recorded`, an administrator's, and `others`. Return True if any.

        Also if `no_driver` says why the driver could not be opened: then opening it is tried again until it works. To
        be called once, before the driver is opened.
        """
        if recorded:
            self._reasons[_ADMINISTRATOR] = recorded
        self._reasons |= {each: each for each in others}
        starts_paused = bool(self._reasons or no_driver)
        self._is_open = self._is_resumed = not starts_paused
        if no_driver and not self._reasons:
            self._cannot_open = "cannot open the driver"
            self._failed(f"{self._cannot_open}: {no_driver}; it is tried every {RETRY_SECONDS:g} s")
        self._publish()
        return starts_paused

    async def pause(self, reason: str, caller: Caller, *, lasting: bool) -> PauseAnswer:
        """Pause, and wait until the driver is released or that has failed.

        `lasting` is for the administrator's reason. Raises RefusedError where that cannot be recorded.
        """
        key = _ADMINISTRATOR if lasting else reason
        words = (f"by {caller}" + (f": {reason}" if reason else "")) if lasting else reason
        async with self._recording:
            known = self._reasons.get(key)
            if known is None or (lasting and reason and known != words):
                await self._record(PutPause(words) if lasting else None, "pause", EventKind.AGENT_PAUSED, words, caller)
                self._reasons[key] = words
                self._publish()
        await self._wait_until_settled()
        return self._answer()

    async def resume(self, reason: str, caller: Caller, *, lasting: bool) -> PauseAnswer:
        """Remove a reason; after the last one, wait until the agent serves again or that has failed.

        Raises RefusedError if the removal of the administrator's reason cannot be committed.
        """
        key = _ADMINISTRATOR if lasting else reason
        async with self._recording:
            if key in self._reasons:
                why = "" if lasting else reason
                await self._record(DropPause() if lasting else None, "resume", EventKind.AGENT_RESUMED, why, caller)
                del self._reasons[key]
                if self._reasons:
                    self._publish()
        await self._wait_until_settled()
        return self._answer()

    def close(self) -> None:
        """Cancel the retry that is scheduled, if any."""
        if self._retry_timer is not None:
            self._retry_timer.cancel()

    # Inside

    def _answer(self) -> PauseAnswer:
        return PauseAnswer(
            paused=self._context.driver_use.paused, driver_released=self._is_released, message=self._problem
        )

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
            journal.record(event)
            return
        try:
            await journal.commit((change,), (event,))
        except LedgerError as error:
            raise ledger_refusal(error, verb) from error

    def _publish(self) -> None:
        """Publish the reasons, or while the driver is not open again, why not."""
        paused = tuple(dict.fromkeys(self._reasons.values()))
        if not paused and not self._is_resumed:
            paused = (self._problem or "it takes up again",)
        self._context.driver_use.paused = paused
        self._context.journal.republish()

    async def _wait_until_settled(self) -> None:
        if self._settling is None or self._settling.done():
            self._settling = self._context.tasks.spawn("pausing", self._settle())
        await asyncio.shield(self._settling)

    async def _settle(self) -> None:
        """Release or open the driver until that agrees with the reasons; schedules a retry after a failure."""
        self.close()
        while not self._context.closing:
            paused = bool(self._reasons)
            if self._is_released if paused else self._is_resumed:
                self._problem = ""
                break
            try:
                await (self._release_driver() if paused else self._open_driver())
            except MigAgentError as error:
                what = "cannot release the driver" if paused else self._cannot_open
                self._failed(f"{what}: {error}; it is tried every {RETRY_SECONDS:g} s")
                if isinstance(error, DriverError) and error.kind is DriverErrorKind.OUTDATED:
                    for each in self.on_outdated:
                        each()
                break
        self._publish()
        if not self._context.driver_use.paused:
            self._reconcile_soon()  # no reconciliation has run during the pause
            self._context.state.capacity_freed.emit()

    def _failed(self, problem: str) -> None:
        if problem != self._problem:
            self._problem = problem
            journal = self._context.journal
            journal.record(journal.event(EventKind.DRIVER_UNAVAILABLE, problem))
        self._retry_timer = self._context.clock.call_later(RETRY_SECONDS, self._retry)

    def _retry(self) -> None:
        if not self._context.closing:
            self._context.tasks.spawn("pausing-again", self._wait_until_settled())

    async def _release_driver(self) -> None:
        context = self._context
        await context.driver_use.empty()
        await self._driver_startup.remember()
        if not self._reasons:
            return  # the last reason was removed meanwhile
        if self._opening is not None:
            with contextlib.suppress(DriverError):
                await self._wait_until_open()
            if self._opening is not None:
                raise DriverError(DriverErrorKind.TIMEOUT, "nvmlShutdown", detail="it is being opened still")
        self._driver_events.close()
        try:
            await _on_own_thread(self._driver_events.join)
            self._refuse_when_hung()
            await _on_own_thread(context.driver.close)
        except DriverError:
            self._start_driver_events()
            raise
        self._is_open = self._is_resumed = False
        context.compute_readings = {}
        left = context.host.own_device_nodes()
        words = f", but this process still has {', '.join(left)} open" if left else ""
        context.journal.record(context.journal.event(EventKind.DRIVER_RELEASED, f"the driver was released{words}"))

    def _refuse_when_hung(self) -> None:
        for worker in self._context.gpu_workers.values():
            if worker.hung:
                raise DriverError(DriverErrorKind.TIMEOUT, "nvmlShutdown", detail=f"still waiting for: {worker.hung}")

    @property
    def _is_released(self) -> bool:
        return not self._is_open and self._opening is None

    async def _open_driver(self) -> None:
        context = self._context
        if not self._is_open and self._opening is None:
            self._opening = _on_own_thread(context.driver.reopen)
        await self._wait_until_open()
        try:
            await self._driver_startup.read_gpus()
        except MigAgentError:
            with contextlib.suppress(DriverError):  # a call that hangs holds it open
                await _on_own_thread(context.driver.close)
                self._is_open = False
            raise
        self._is_resumed = True
        self._cannot_open = "cannot take up again"
        self._start_driver_events()
        words = f"the driver was opened again: version {context.driver.version}"
        context.journal.record(context.journal.event(EventKind.DRIVER_OPENED, words))

    async def _wait_until_open(self) -> None:
        """Wait until the attempt to open the driver has ended, within the deadline of a call. Raises DriverError."""
        opening = self._opening
        if opening is None:
            return
        deadline = self._context.settings.call_deadline_seconds
        await asyncio.wait({opening}, timeout=deadline)
        if not opening.done():
            raise DriverError(DriverErrorKind.TIMEOUT, "nvmlInitWithFlags", detail=f"no answer in {deadline:g} s")
        self._opening = None
        opening.result()
        self._is_open = True

    def _start_driver_events(self) -> None:
        if self._context.settings.listen_to_driver:
            self._driver_events.start()


def _on_own_thread(function: Callable[[], None]) -> asyncio.Future[None]:
    """Make a blocking call on a thread of its own, so that one that hangs blocks nothing else."""
    thread = CallThread("driver-session")
    answer = thread.run(function)
    thread.close()
    return answer

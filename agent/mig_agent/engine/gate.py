"""Who is at work with the driver, so that it can be let go: nobody begins while the agent is paused."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from mig_agent.core.errors import Reason, Refusal, RefusedError


class Gate:
    """Belongs to the event loop. Whatever uses the driver does so inside; a part of it may go inside again."""

    def __init__(self) -> None:
        self.paused: tuple[str, ...] = ()
        """Why it is closed, in words; empty while it is open."""
        self._inside = 0
        self._empty = asyncio.Event()
        self._empty.set()

    def enter(self) -> None:
        """Begins to use the driver; `leave` ends it."""
        self._inside += 1
        self._empty.clear()

    def leave(self) -> None:
        """Ends what `enter` began."""
        self._inside -= 1
        if not self._inside:
            self._empty.set()

    @contextmanager
    def inside(self) -> Iterator[None]:
        """While the driver is used."""
        self.enter()
        try:
            yield
        finally:
            self.leave()

    async def empty(self) -> None:
        """Returns when nobody is inside."""
        await self._empty.wait()

    def refusal(self, what: str) -> Refusal:
        """Why it is not done while the agent is paused; `what` completes "cannot ..."."""
        return Refusal(
            reason=Reason.PAUSED,
            message=f"cannot {what}: the agent is paused ({'; '.join(self.paused)})",
            hint="leases stay; ask again when it goes on, `migctl status` shows it",
        )

    def refuse_when_paused(self, what: str) -> None:
        """Raises RefusedError (PAUSED) while it is closed; `what` completes "cannot ..."."""
        if self.paused:
            raise RefusedError(self.refusal(what))

"""A record in the making: what is written, told and applied together."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from mig_agent.adapters.ledger_changes import Change
from mig_agent.core.events import Event
from mig_agent.core.model import LeaseId
from mig_agent.engine.journal import Journal


@dataclass(slots=True)
class Draft:
    """Filled by several hands, then written once."""

    journal: Journal
    changes: list[Change] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    applied: list[Callable[[], None]] = field(default_factory=list)
    ended: set[LeaseId] = field(default_factory=set)
    """Leases whose end is in it already."""

    def __bool__(self) -> bool:
        return bool(self.changes or self.events or self.applied)

    def write(self) -> asyncio.Future[None]:
        """Commits all of it as one record. The future fails with LedgerError."""
        return self.journal.write(tuple(self.changes), tuple(self.events), self._apply)

    def _apply(self) -> None:
        for apply in self.applied:
            apply()

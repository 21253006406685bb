"""Audit of calls that were denied to their caller, recorded at a bounded rate."""

from __future__ import annotations

import re

from mig_agent.adapters.clock import Clock
from mig_agent.core.errors import Reason, Refusal
from mig_agent.core.events import EventKind
from mig_agent.core.quantities import shown
from mig_agent.core.texts import visible
from mig_agent.engine.callers import Caller
from mig_agent.engine.journal import Journal

DENIED = frozenset({Reason.NOT_PERMITTED, Reason.WRONG_TOKEN})
"""Refusals that say something of the caller, not of the node."""
MOST_OF_ONE = 10
MOST_OF_ALL = 60
PERIOD_SECONDS = 60.0
_LONGEST = 400
_LIKE_A_TOKEN = re.compile(r"[0-9a-f]{64}", re.IGNORECASE)


class DenialAudit:
    """Records calls that were denied, at a bounded rate. Not thread-safe; use from the event loop."""

    def __init__(self, journal: Journal, clock: Clock) -> None:
        self._journal = journal
        self._clock = clock
        self._began = clock.now()
        self._told: dict[str, int] = {}
        self._left_out = 0

    def tell(self, method: str, caller: Caller, refusal: Refusal, about: str) -> None:
        """One refused call; `about` is the lease or GPU that it named, as the caller wrote it."""
        now = self._clock.now()
        if not 0 <= now - self._began < PERIOD_SECONDS:
            self._began = now
            self._told.clear()
        who = str(caller)
        mine = self._told.get(who, 0)
        if mine >= MOST_OF_ONE or sum(self._told.values()) >= MOST_OF_ALL:
            self._left_out += 1
            return
        self._told[who] = mine + 1
        left_out, self._left_out = self._left_out, 0
        more = f"; {left_out} such calls before it are not listed" if left_out else ""
        words = visible(_without_tokens(refusal.message))[:_LONGEST]
        self._journal.tell(
            self._journal.event(
                EventKind.ACCESS_DENIED,
                f"{method} of {who} was refused: {words}{more}",
                holder=who,
                caller=caller,
                method=method,
                reason=refusal.reason.value,
                about=shown(_without_tokens(about)),
                left_out=left_out,
            )
        )


def _without_tokens(text: str) -> str:
    """Somebody may have given a token where the lease belongs."""
    return _LIKE_A_TOKEN.sub("(a token)", text)

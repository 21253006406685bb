"""The audit of calls that were denied to their caller, at a bounded rate."""

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
"""The reasons of a refusal that concern the caller's rights, not the state of the node."""
MOST_OF_ONE = 10
"""The most denied calls of one caller that are recorded in a period."""
MOST_OF_ALL = 60
"""The most denied calls of all callers that are recorded in a period."""
PERIOD_SECONDS = 60.0
_LONGEST = 400
"""The most characters of a refusal's message that are recorded."""
_LIKE_A_TOKEN = re.compile(r"[0-9a-f]{64}", re.IGNORECASE)


class DenialAudit:
    """Records denied calls in the journal, at a bounded rate. Not thread-safe; use from the event loop."""

    def __init__(self, journal: Journal, clock: Clock) -> None:
        self._journal = journal
        self._clock = clock
        self._began = clock.now()
        self._recorded: dict[str, int] = {}
        self._left_out = 0

    def record(self, method: str, caller: Caller, refusal: Refusal, about: str) -> None:
        """Record a denied call; `about` is the lease or GPU that it named, as the caller wrote it.

        Beyond the limits it is only counted, and the next record reports how many were left out.
        """
        now = self._clock.now()
        if not 0 <= now - self._began < PERIOD_SECONDS:
            self._began = now
            self._recorded.clear()
        who = str(caller)
        recorded = self._recorded.get(who, 0)
        if recorded >= MOST_OF_ONE or sum(self._recorded.values()) >= MOST_OF_ALL:
            self._left_out += 1
            return
        self._recorded[who] = recorded + 1
        left_out, self._left_out = self._left_out, 0
        more = f"; {left_out} such calls before it are not listed" if left_out else ""
        words = visible(_without_tokens(refusal.message))[:_LONGEST]
        self._journal.record(
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
    """Replace tokens in a text: a caller may have given one in place of the lease."""
    return _LIKE_A_TOKEN.sub("(a token)", text)

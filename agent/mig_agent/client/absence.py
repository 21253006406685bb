"""Reports, once each, that an agent is away for longer than a restart takes, and that it is back."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from mig_agent.client.errors import ClientError

AWAY_SECONDS = 10.0
"""Seconds that an agent is away before that is reported: a restart takes less."""
OnAway: TypeAlias = Callable[[ClientError | None], None]
"""Called with why the agent cannot be reached, and with None when it is back."""


@dataclass(slots=True)
class Absence:
    """One caller's view of whether the agent is there. Not thread-safe."""

    report: OnAway | None = None
    after: float = AWAY_SECONDS
    _since: float | None = None
    _reported: bool = False

    def failed(self, error: ClientError) -> None:
        """Note that a call has failed, and report it if none has succeeded for `after` seconds."""
        now = time.monotonic()
        if self._since is None:
            self._since = now
        if not self._reported and now - self._since >= self.after:
            self._reported = True
            if self.report is not None:
                self.report(error)

    def over(self) -> None:
        """Note that the agent has answered, and report it if its absence was reported."""
        reported, self._reported, self._since = self._reported, False, None
        if reported and self.report is not None:
            self.report(None)


class WaitLimit:
    """The moment until which a request waits, however often it is sent again."""

    def __init__(self, seconds: float | None) -> None:
        """Begin to wait now; None: not at all."""
        self._until = time.monotonic() + (seconds or 0.0)

    @property
    def moment(self) -> float:
        """The end of the wait, on the clock of `time.monotonic`."""
        return self._until

    @property
    def left(self) -> float:
        """Seconds that are left; 0 at the end."""
        return max(self._until - time.monotonic(), 0.0)

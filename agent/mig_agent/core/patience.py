"""How long a request waits, by default, before GPUs are kept for it: as long as leases last on average.

`docs/placement.md` has what shorter and longer limits do, and decision 10 why it stays within bounds. After a restart
the mean is made again from the leases that the ledger remembers; where it knows none it starts from a guess.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Self

FIRST_GUESS_SECONDS = 300.0
LEAST_SECONDS = 10.0
"""Where leases last moments, so that the queue does not come down to strict first-come."""
MOST_SECONDS = 24 * 3600.0
"""Where leases last days, so that nobody is passed by for longer."""
_MEMORY = 1000
"""Leases after which the oldest begin to fade, so that the mean follows how a node is used."""


class Patience:
    """The running mean of lease lengths. The guess, in seconds, counts as much as one lease."""

    def __init__(self, first_guess: float = FIRST_GUESS_SECONDS) -> None:
        self._mean = first_guess
        self._count = 1

    @classmethod
    def of(cls, lengths: Iterable[float]) -> Self:
        """What came of leases that lasted so many seconds, the first to end first."""
        patience = cls()
        for seconds in lengths:
            patience.lease_ended(seconds)
        return patience

    def lease_ended(self, seconds: float) -> None:
        """Takes a lease into the mean; one of less than 0, from a clock that was set back, counts for nothing."""
        if seconds < 0:
            return
        self._count = min(self._count + 1, _MEMORY)
        self._mean += (seconds - self._mean) / self._count

    @property
    def limit_seconds(self) -> float:
        """What the mean says, in seconds."""
        return self._mean

    @property
    def bounded_limit_seconds(self) -> float:
        """The limit that an agent goes by, in seconds: what the mean says, from LEAST_SECONDS to MOST_SECONDS."""
        return min(max(self.limit_seconds, LEAST_SECONDS), MOST_SECONDS)

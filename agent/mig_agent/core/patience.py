"""How long a request waits, by default, before GPUs are kept for it: twice as long as leases last on average.

`docs/placement.md` has what shorter and longer limits do. The mean is not persisted: it starts from a guess.
"""

from __future__ import annotations

FIRST_GUESS_SECONDS = 150.0
_LEASES = 2
"""The limit in mean leases."""
_MEMORY = 1000
"""Leases after which the oldest begin to fade, so that the mean follows how a node is used."""


class Patience:
    """The running mean of lease lengths. The guess, in seconds, counts as much as one lease."""

    def __init__(self, first_guess: float = FIRST_GUESS_SECONDS) -> None:
        self._mean = first_guess
        self._count = 1

    def lease_ended(self, seconds: float) -> None:
        """Takes a lease into the mean; one of less than 0, from a clock that was set back, counts for nothing."""
        if seconds < 0:
            return
        self._count = min(self._count + 1, _MEMORY)
        self._mean += (seconds - self._mean) / self._count

    @property
    def limit_seconds(self) -> float:
        """The limit, in seconds."""
        return _LEASES * self._mean

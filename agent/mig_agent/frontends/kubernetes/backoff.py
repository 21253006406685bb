"""Exponential back-off for many things at once, each with its own next attempt. Pure; seconds on any clock."""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from mig_agent.core.backoff import Backoff

_Key = TypeVar("_Key", bound=Hashable)


@dataclass(slots=True, kw_only=True)
class Backoffs(Generic[_Key]):
    """Keeps, by key, when something may be attempted again."""

    first: float
    """The first pause in seconds; each further pause is twice as long as the one before."""
    longest: float
    """The longest pause in seconds."""
    _attempts: dict[_Key, tuple[float, int]] = field(default_factory=dict)
    """By key the time of the next attempt, and the number of attempts so far."""

    def is_due(self, key: _Key, now: float) -> bool:
        """Return whether an attempt may be made now; for a new key, always."""
        return now >= self.due_at(key)

    def due_at(self, key: _Key) -> float:
        """Return the time of the next attempt; minus infinity for a new key."""
        return self._attempts.get(key, (-math.inf, 0))[0]

    def attempted(self, key: _Key, now: float) -> None:
        """Record an attempt, and put the next one off by a pause."""
        times = self._attempts.get(key, (0.0, 0))[1] + 1
        self._attempts[key] = (now + Backoff(self.first, self.longest).pause(times), times)

    def retain(self, keys: Collection[_Key]) -> None:
        """Forget all keys except these."""
        self._attempts = {key: attempt for key, attempt in self._attempts.items() if key in keys}

    def next_due(self) -> float | None:
        """Return the earliest time at which a key is due; None if nothing was attempted."""
        return min((due for due, _ in self._attempts.values()), default=None)

"""When something is to be tried again: soon at first, then ever later. Pure; seconds on any clock."""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from mig_agent.core.backoff import Backoff

_What = TypeVar("_What", bound=Hashable)


@dataclass(slots=True, kw_only=True)
class Backoffs(Generic[_What]):
    """Of each thing, when its turn comes again."""

    first: float
    """The first pause; each is twice as long as the one before."""
    longest: float
    _turns: dict[_What, tuple[float, int]] = field(default_factory=dict)
    """The moment of the next turn, and how often it was tried."""

    def is_due(self, what: _What, now: float) -> bool:
        """Whether its turn has come; that of something new has."""
        return now >= self.turn(what)

    def turn(self, what: _What) -> float:
        """The moment of its turn; before all others that of something new."""
        return self._turns.get(what, (-math.inf, 0))[0]

    def tried(self, what: _What, now: float) -> None:
        """It was tried; the next turn is a pause away."""
        times = self._turns.get(what, (0.0, 0))[1] + 1
        self._turns[what] = (now + Backoff(self.first, self.longest).pause(times), times)

    def forget_all_but(self, those: Collection[_What]) -> None:
        """Nothing is known any more of what matters no more."""
        self._turns = {what: turn for what, turn in self._turns.items() if what in those}

    def next_turn(self) -> float | None:
        """The first moment at which something is due; None where nothing was tried."""
        return min((turn for turn, _ in self._turns.values()), default=None)

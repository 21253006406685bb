"""How long to pause before something that failed is tried again."""

from __future__ import annotations

from dataclasses import dataclass

_MOST_DOUBLINGS = 64
"""Many more than lie between any two pauses, and far from the 1,024 at which a float overflows."""


@dataclass(frozen=True, slots=True)
class Backoff:
    """Pauses that double with each failure in a row, up to a longest one. Durations are seconds."""

    first: float
    longest: float

    def pause(self, failures: int, chance: float = 1.0) -> float:
        """Return the pause after this many failures in a row (1 or more, without an upper limit).

        `chance` from 0 to 1 scales the pause between half and all of it. Drawn at random it keeps many agents from
        retrying at the same moments.
        """
        doublings = min(max(failures - 1, 0), _MOST_DOUBLINGS)
        return min(self.first * 2.0**doublings, self.longest) * (0.5 + 0.5 * chance)

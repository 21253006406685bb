"""Means with their 95 % confidence intervals over repetitions with seeds of their own."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

_STUDENT = (math.inf, 12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23)
"""The 97.5th percentile of Student's distribution by degrees of freedom."""
_MANY = 2.0


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean and half the width of its confidence interval (infinite for a single repetition)."""

    mean: float
    half_width: float

    @property
    def known(self) -> bool:
        """True if there is an interval."""
        return math.isfinite(self.half_width)

    def text(self, digits: int) -> str:
        """Return `80.4 ±0.2`."""
        if not self.known:
            return f"{self.mean:.{digits}f}"
        return f"{self.mean:.{digits}f} ±{self.half_width:.{digits}f}"


def estimate(values: Sequence[float]) -> Estimate:
    """Return the estimate from independent repetitions."""
    mean = statistics.fmean(values)
    freedom = len(values) - 1
    if not freedom:
        return Estimate(mean, math.inf)
    student = _STUDENT[freedom] if freedom < len(_STUDENT) else _MANY
    return Estimate(mean, student * statistics.stdev(values) / math.sqrt(len(values)))


def percentile(values: Sequence[float], share: float) -> float:
    """Return the value that this share of the values does not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, math.ceil(share * len(ordered)) - 1))]

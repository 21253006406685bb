"""Figures of a benchmark: a measured value beside its baseline, and what the budget allows."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One line of the table. `measured`, `baseline` and `budget` share `unit`; a ratio's budget is in baselines."""

    what: str
    measured: float
    unit: str
    budget: float
    baseline: float | None = None
    """The value that it is compared with, from the same run; None where the budget is absolute."""
    baseline_is: str = ""
    at_least: bool = False
    """True if more is better."""

    @property
    def judged(self) -> float:
        """The value that is compared with the budget: the ratio to the baseline, or the measured value."""
        return self.measured / self.baseline if self.baseline else self.measured

    @property
    def met(self) -> bool:
        """True if the budget is met."""
        return self.judged >= self.budget if self.at_least else self.judged <= self.budget


def number(value: float) -> str:
    """Format a number with three significant figures, without an exponent."""
    if value >= 100:  # noqa: PLR2004 -- three figures need no decimals from here on
        return f"{value:.0f}"
    return f"{value:.3g}"


def table(figures: Sequence[Figure]) -> str:
    """Return the figures as a table in Markdown, which reads well on a terminal too."""
    head = ("what", "measured", "baseline", "ratio", "budget", "met")
    rows = [head]
    for figure in figures:
        sign = ">=" if figure.at_least else "<="
        ratio = f"{figure.judged:.2f}" if figure.baseline else ""
        baseline = f"{number(figure.baseline)} {figure.unit} ({figure.baseline_is})" if figure.baseline else ""
        unit = "x" if figure.baseline else f" {figure.unit}"
        rows.append(
            (
                figure.what,
                f"{number(figure.measured)} {figure.unit}",
                baseline,
                ratio,
                f"{sign} {number(figure.budget)}{unit}",
                "yes" if figure.met else "NO",
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in rows
    ]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(lines)


def as_json(figures: Sequence[Figure]) -> str:
    """Return the figures as JSON."""
    return json.dumps(
        [{**asdict(figure), "judged": figure.judged, "met": figure.met} for figure in figures],
        indent=2,
    )


def median(values: Sequence[float]) -> float:
    """Return the median."""
    return statistics.median(values)

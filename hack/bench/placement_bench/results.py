"""The results of a part of the benchmark: tables, figures, the numbers for programs, and what they must reach."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

Json = None | bool | int | float | str | Sequence["Json"] | Mapping[str, "Json"]


@dataclass(frozen=True, slots=True)
class Table:
    """A table in Markdown, which reads well on a terminal too. The first column is text, the others right-aligned."""

    title: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def __str__(self) -> str:
        """Return the title and the rows."""
        lines = [self.head, *self.rows]
        widths = [max(len(line[column]) for line in lines) for column in range(len(self.head))]
        text = [_line(line, widths) for line in lines]
        text.insert(
            1,
            "|"
            + "|".join("-" * (width + 2) if not n else "-" * (width + 1) + ":" for n, width in enumerate(widths))
            + "|",
        )
        return "\n".join((f"**{self.title}**", "", *text))


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    padded = [
        cell.rjust(width) if number else cell.ljust(width)
        for number, (cell, width) in enumerate(zip(cells, widths, strict=True))
    ]
    return "| " + " | ".join(padded) + " |"


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """A figure that the planner is held to."""

    what: str
    measured: float
    bound: float
    at_least: bool = False
    """True if more is better; otherwise less is."""

    @property
    def met(self) -> bool:
        """True if the bound is reached, to its precision."""
        return self.measured >= self.bound if self.at_least else self.measured <= self.bound


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """All results of a part."""

    part: str
    seed: int
    tables: tuple[Table, ...]
    data: Sequence[Mapping[str, Json]]
    """The numbers of the tables and figures, one row each."""
    checks: tuple[Check, ...] = ()
    figures: Mapping[str, str] = field(default_factory=dict)
    """SVG by file name."""

    def as_json(self) -> Mapping[str, Json]:
        """Return the report as JSON."""
        return {
            "part": self.part,
            "seed": self.seed,
            "data": self.data,
            "checks": [
                {
                    "what": check.what,
                    "measured": check.measured,
                    "bound": check.bound,
                    "at_least": check.at_least,
                    "met": check.met,
                }
                for check in self.checks
            ],
        }


def checks_table(checks: Sequence[Check]) -> Table:
    """Return a table of the checks and whether each is met."""
    return Table(
        "Held to",
        ("what", "measured", "held to", "reached"),
        tuple(
            (
                check.what,
                f"{check.measured:.4g}",
                f"{'at least' if check.at_least else 'at most'} {check.bound:g}",
                "yes" if check.met else "NO",
            )
            for check in checks
        ),
    )

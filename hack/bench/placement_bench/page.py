"""Puts the tables and figures into docs/placement.md, between marks that name their part."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from placement_bench.results import Check, Report, checks_table

CHECKS = "checks"


def put_into(page: str, reports: Sequence[Report]) -> str:
    """Return the page with the text between `<!-- part: NAME -->` and `<!-- end -->` replaced for every report.

    Raises ValueError when the page has no such marks for a part.
    """
    for report in reports:
        blocks = [str(table) for table in report.tables]
        blocks += [f"![{name.removesuffix('.svg')}](figures/{name})" for name in report.figures]
        page = _replace(page, report.part, "\n\n".join(blocks))
    checks: list[Check] = [check for report in reports for check in report.checks]
    return _replace(page, CHECKS, str(checks_table(checks))) if len(reports) > 1 else page


def write(docs: Path, reports: Sequence[Report]) -> None:
    """Write the page and its figures."""
    path = docs / "placement.md"
    path.write_text(put_into(path.read_text(encoding="utf-8"), reports), encoding="utf-8")
    write_figures(docs / "figures", reports)


def write_figures(folder: Path, reports: Sequence[Report]) -> None:
    """Write only the figures."""
    folder.mkdir(parents=True, exist_ok=True)
    for report in reports:
        for name, svg in report.figures.items():
            (folder / name).write_text(svg, encoding="utf-8")


def _replace(page: str, part: str, text: str) -> str:
    marks = re.compile(rf"(<!-- part: {part} -->\n).*?(<!-- end -->)", re.DOTALL)
    if not marks.search(page):
        message = f"cannot write the figures of {part}: docs/placement.md has no marks for them"
        raise ValueError(message)
    return marks.sub(lambda found: f"{found[1]}\n{text}\n\n{found[2]}", page)

"""Findings of tests, printed at the end of the run: figures, added up (docs/reference/reliability.md), and tables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:  # pytest offers it for annotations alone
    from _pytest.terminal import TerminalReporter

Figure = Callable[[str, int], None]
Table = Callable[[str, str], None]
_PREFIX = "figure: "
_TABLE = "table: "


@pytest.fixture
def figure(record_property: Callable[[str, object], None]) -> Figure:
    """`figure("kills of the real agent", 12)`: equal names are added up over all tests."""
    return lambda name, value: record_property(f"{_PREFIX}{name}", value)


@pytest.fixture
def table(record_property: Callable[[str, object], None]) -> Table:
    """`table("how long pods take", "...")`: printed as it is."""
    return lambda title, text: record_property(f"{_TABLE}{title}", text)


def pytest_terminal_summary(terminalreporter: TerminalReporter) -> None:
    """Prints the sums and the tables."""
    sums: Counter[str] = Counter()
    tables: dict[str, str] = {}
    for reports in terminalreporter.stats.values():
        for report in reports:
            if getattr(report, "when", "") == "call":
                for name, value in report.user_properties:
                    if name.startswith(_PREFIX):
                        sums[name.removeprefix(_PREFIX)] += int(value)
                    elif name.startswith(_TABLE):
                        tables[name.removeprefix(_TABLE)] = str(value)
    if sums:
        terminalreporter.section("figures")
        for name, total in sorted(sums.items()):
            terminalreporter.write_line(f"{name}: {total}")
    for title, text in tables.items():
        terminalreporter.section(title)
        terminalreporter.write_line(text)

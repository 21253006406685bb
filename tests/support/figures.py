"""Figures that tests find out on their way, added up and printed at its end (docs/reliability.md)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:  # pytest offers it for annotations alone
    from _pytest.terminal import TerminalReporter

Figure = Callable[[str, int], None]
_PREFIX = "figure: "


@pytest.fixture
def figure(record_property: Callable[[str, object], None]) -> Figure:
    """`figure("kills of the real agent", 12)`: equal names are added up over all tests."""
    return lambda name, value: record_property(f"{_PREFIX}{name}", value)


def pytest_terminal_summary(terminalreporter: TerminalReporter) -> None:
    """Prints the sums."""
    sums: Counter[str] = Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if getattr(report, "when", "") == "call":
                for name, value in report.user_properties:
                    if name.startswith(_PREFIX):
                        sums[name.removeprefix(_PREFIX)] += int(value)
    if sums:
        terminalreporter.section("figures")
        for name, total in sorted(sums.items()):
            terminalreporter.write_line(f"{name}: {total}")

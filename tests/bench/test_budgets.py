"""The benchmark of the budgets runs; how fast anything is, is no test's business."""

from __future__ import annotations

from collections.abc import Callable

import budgets
import pytest
from figures import Figure, as_json, table


@pytest.mark.parametrize(
    ("what", "measure"),
    [
        ("acquire + release", lambda: budgets.pair(rounds=1, times=2)),
        ("clients at once", lambda: budgets.crowd(rounds=1, clients=4, times=2)),
    ],
    ids=["pair", "crowd"],
)
def test_each_is_measured_beside_its_baseline(what: str, measure: Callable[[], list[Figure]]) -> None:
    (figure,) = measure()
    assert what in figure.what
    assert figure.measured > 0
    assert figure.baseline


def test_a_figure_is_held_against_its_budget() -> None:
    slow = Figure(what="slow", measured=3.0, baseline=1.0, baseline_is="an echo", unit="ms", budget=2.5)
    many = Figure(what="many", measured=60.0, baseline=100.0, unit="pairs/s", budget=0.5, at_least=True)
    small = Figure(what="small", measured=61.0, unit="MiB", budget=70.0)
    assert [slow.met, many.met, small.met] == [False, True, True]
    page = table([slow, many, small])
    rows = [[cell.strip() for cell in line.split("|")] for line in page.splitlines()]
    assert rows[2][1:-1] == ["slow", "3 ms", "1 ms (an echo)", "3.00", "<= 2.5x", "NO"]
    assert '"met": false' in as_json([slow])

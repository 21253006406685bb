"""What docs/performance.md tells of pods can be measured; how long it takes is no test's business."""

from __future__ import annotations

import math

import pods

from support.cluster.space import Space
from support.figures import Table

ROUNDS = 2
"""The page has the figures of more, from a quiet machine: `hack/bench/pods.sh`."""


def test_the_figures_can_be_measured(space: Space, table: Table) -> None:
    with pods.Bench(space) as bench:
        timings = list(pods.measure(bench, ROUNDS))
    table(f"pods, measured in {ROUNDS} rounds beside other tests", pods.table(timings))
    assert [each.what.split()[0] for each in timings] == ["pod"] * 4 + ["node"] * 2
    for each in timings:
        assert each.rounds == ROUNDS, each
        assert 0 <= each.least <= each.median <= each.most, each
        assert math.isfinite(each.most), each

"""The mean wait of the agent's queue beside strict first-come's, on seeds that none of its rules was chosen on.

A third is what it is held to over runs of 20,000 requests (`hack/bench/placement.py queue --check`). These are short:
chance moves them by some hundredths.
"""

from __future__ import annotations

import statistics

from placement_bench.mixes import UNIFORM
from placement_bench.options import Options
from placement_bench.queueing import AGENT, SEEDS_USED, STRICT, Cell, run, run_cell

SHORT_RUNS = 0.4
SEEDS = range(SEEDS_USED + 1, SEEDS_USED + 7)


def test_the_mean_wait_is_about_a_third_of_strict_first_comes() -> None:
    ours, strict = (
        statistics.fmean(run_cell(Cell(discipline, UNIFORM, 0.7, 8, 2000, seed)).mean for seed in SEEDS)
        for discipline in (AGENT, STRICT)
    )
    assert ours <= SHORT_RUNS * strict


def test_the_figures_are_of_seeds_that_no_rule_was_chosen_on() -> None:
    rows = run(Options(requests=40, repeats=1, loads=(0.7,))).data
    (mean,) = (each["mean"] for each in rows if (each["queue"], each["mix"]) == (AGENT.name, UNIFORM.name))
    assert mean == run_cell(Cell(AGENT, UNIFORM, 0.7, 8, 40, SEEDS_USED + 1)).mean

"""How often the true wait lies inside the stated interval, in short replays on seeds that the forecast has not seen.

Over longer ones it is held to the same share by `hack/bench/placement.py waits --check`.
"""

from __future__ import annotations

from placement_bench.mixes import UNIFORM
from placement_bench.wait_estimates import HELD_TO, SEEDS_USED, Cell, Trace, coverage, run_cell

SEEDS = (SEEDS_USED + 1, SEEDS_USED + 2)


def test_three_of_four_waits_lie_inside_the_interval_of_80_percent() -> None:
    trace = Trace("uniform 0.8", UNIFORM, 0.8)
    replayed = [run_cell(Cell(trace, 4, 500, seed)) for seed in SEEDS]
    estimates = [each for one in replayed for each in one.estimates]
    assert len(estimates) > 100
    assert all(each.known for each in estimates)
    assert coverage(estimates) >= HELD_TO
    assert coverage(estimates) < 0.98, "an interval that everything lies in says nothing"


def test_a_replay_is_the_same_again() -> None:
    cell = Cell(Trace("uniform 0.8", UNIFORM, 0.8, deadlines=True), 2, 120, SEEDS_USED + 1)
    assert run_cell(cell).estimates == run_cell(cell).estimates

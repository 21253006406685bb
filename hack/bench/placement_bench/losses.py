"""Many runs of requests that are served at once or lost: policies by GPUs, loads and mixes, each over several seeds."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from placement_bench.arrivals import Arrivals, poisson
from placement_bench.contenders import RUNNERS
from placement_bench.estimates import Estimate, estimate
from placement_bench.mixes import Mix, Setting
from placement_bench.options import run_all
from placement_bench.results import Json

WARM_UP = 0.1
"""The share of the requests that only fill the GPUs and are not counted."""


@dataclass(frozen=True, slots=True)
class Cell:
    """The parameters of one run."""

    policy: str
    gpus: int
    load: float
    mix: Mix
    requests: int
    seed: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of one run: shares in percent, but `reused` between 0 and 1."""

    requests: float
    slices: float
    largest: float
    reused: float


@dataclass(frozen=True, slots=True)
class Line:
    """A policy at some number of GPUs and load: the mean over the mixes, with its interval over the seeds."""

    policy: str
    gpus: int
    load: float
    requests: Estimate
    slices: Estimate
    largest: Estimate
    reused: Estimate

    def as_json(self) -> dict[str, Json]:
        """Return the line as JSON."""
        found: dict[str, Json] = {"policy": self.policy, "gpus": self.gpus, "load": self.load}
        for name, value in (
            ("request_acceptance_percent", self.requests),
            ("slice_acceptance_percent", self.slices),
            ("acceptance_of_7g_percent", self.largest),
            ("reused_share", self.reused),
        ):
            found[name] = value.mean
            found[f"{name}_plus_minus"] = value.half_width if value.known else None
        return found


def lines(
    policies: Sequence[str],
    points: Sequence[tuple[int, float]],
    mixes: Sequence[Mix],
    *,
    requests: int,
    seeds: Sequence[int],
    jobs: int,
) -> list[Line]:
    """Return every policy at every (GPUs, load); each sees the same requests."""
    cells = [
        Cell(policy, gpus, load, mix, requests, seed)
        for gpus, load in points
        for mix in mixes
        for seed in seeds
        for policy in policies
    ]
    found = dict(zip(cells, run_all(run, cells, jobs), strict=True))

    def line(policy: str, gpus: int, load: float) -> Line:
        by_seed = [[found[Cell(policy, gpus, load, mix, requests, seed)] for mix in mixes] for seed in seeds]
        return Line(
            policy,
            gpus,
            load,
            estimate([statistics.fmean(each.requests for each in row) for row in by_seed]),
            estimate([statistics.fmean(each.slices for each in row) for row in by_seed]),
            estimate([statistics.fmean(each.largest for each in row) for row in by_seed]),
            estimate([statistics.fmean(each.reused for each in row) for row in by_seed]),
        )

    return [line(policy, gpus, load) for gpus, load in points for policy in policies]


def run(cell: Cell) -> Outcome:
    """Run one cell; the result is the same whenever it is repeated."""
    arrivals = _arrivals(cell.mix, cell.load, cell.gpus, cell.requests, cell.seed)
    served = RUNNERS[cell.policy](cell.gpus, arrivals, round(WARM_UP * cell.requests))
    return Outcome(100 * served.requests, 100 * served.slices, 100 * served.largest, served.reused)


@lru_cache(maxsize=2)
def _arrivals(mix: Mix, load: float, gpus: int, requests: int, seed: int) -> Arrivals:
    return poisson(Setting(mix, load), gpus, requests, seed)

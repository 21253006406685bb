"""Waiting instead of losing: compares the agent's queue with strict first-come and plain backfill."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from placement_bench.arrivals import plain_poisson
from placement_bench.estimates import Estimate, estimate, percentile
from placement_bench.mixes import LARGEST, NAMES, SKEW_SMALL, UNIFORM, Mix, Setting
from placement_bench.options import Options, run_all
from placement_bench.results import Check, Json, Report, Table
from placement_bench.waiting import Discipline, waits

STRICT = Discipline("strict first come", strict_fifo=True)
BACKFILL = Discipline("plain backfill", plain=True)
AGENT = Discipline("this agent (limit: the mean lease)")
DISCIPLINES = (
    STRICT,
    BACKFILL,
    AGENT,
    Discipline("limit 0.5", limit=0.5),
    Discipline("limit 2", limit=2.0),
    Discipline("no limit", limit=math.inf),
)
_MIXES = (UNIFORM, SKEW_SMALL)
_LOADS = (0.7, 0.8)
_GPUS = 8
_REQUESTS = 20_000
_REPEATS = 5
SEEDS_USED = 25
"""The rules of the queue were chosen on the seeds up to this one; what it is held to is checked on those after it."""
_SHARE_OF_STRICT = 1 / 3
_MOST_MEAN = 0.34
_MOST_99TH: Mapping[tuple[str, float], float] = {
    (UNIFORM.name, 0.7): 2.8,
    (SKEW_SMALL.name, 0.7): 3.8,
    (UNIFORM.name, 0.8): 5.1,
    (SKEW_SMALL.name, 0.8): 6.0,
}
"""The 99th percentile of the wait for a 7g that is allowed."""
_SATURATED = 0.8
"""From this load on strict first-come has no bounded wait to compare with."""


@dataclass(frozen=True, slots=True)
class Cell:
    """The parameters of one run."""

    discipline: Discipline
    mix: Mix
    load: float
    gpus: int
    requests: int
    seed: int


@dataclass(frozen=True, slots=True)
class Waits:
    """Waits of one run, in mean service times: of all requests, then by kind."""

    mean: float
    median: float
    high: float
    """The 99th percentile."""
    by_kind: tuple[tuple[float, float, float], ...]
    """(mean, median, 99th percentile) of each kind."""


def run(options: Options) -> Report:
    """Run all disciplines, mixes and loads."""
    loads = options.loads or _LOADS
    gpus = options.gpus[0] if options.gpus else _GPUS
    requests = options.requests or _REQUESTS
    seeds = [SEEDS_USED + each for each in options.seeds(_REPEATS)]
    cells = [
        Cell(discipline, mix, load, gpus, requests, seed)
        for mix in _MIXES
        for load in loads
        for seed in seeds
        for discipline in DISCIPLINES
    ]
    found = dict(zip(cells, run_all(run_cell, cells, options.jobs), strict=True))
    groups = {
        (mix.name, load, discipline): [found[Cell(discipline, mix, load, gpus, requests, seed)] for seed in seeds]
        for mix in _MIXES
        for load in loads
        for discipline in DISCIPLINES
    }
    return Report(
        part="queue",
        seed=options.seed,
        tables=(_summary(groups, loads, gpus), _by_profile(groups, loads, gpus)),
        data=[_row(*key, runs) for key, runs in groups.items()],
        checks=tuple(check for mix in _MIXES for load in loads for check in _checks(groups, mix.name, load)),
    )


def run_cell(cell: Cell) -> Waits:
    """Run one cell; the result is the same whenever it is repeated."""
    # Not evened out: waits come from the very fluctuations that this would remove.
    arrivals = plain_poisson(Setting(cell.mix, cell.load), cell.gpus, cell.requests, cell.seed)
    found = waits(cell.discipline, arrivals, cell.gpus)
    by_kind = []
    for kind in range(len(NAMES)):
        of_kind = [wait for wait, each in zip(found, arrivals.kind, strict=True) if each == kind]
        by_kind.append(_three(of_kind) if of_kind else (0.0, 0.0, 0.0))
    return Waits(*_three(found), tuple(by_kind))


Groups = Mapping[tuple[str, float, Discipline], Sequence[Waits]]


def _three(values: Sequence[float]) -> tuple[float, float, float]:
    return statistics.fmean(values), percentile(values, 0.5), percentile(values, 0.99)


def _summary(groups: Groups, loads: Sequence[float], gpus: int) -> Table:
    places = [(mix.name, load) for mix in _MIXES for load in loads]
    return Table(
        f"{gpus} GPUs: mean wait of all / 99th percentile of a 7g, in mean service times, by mix and load",
        ("queue", *(f"{mix} {load:g}" for mix, load in places)),
        tuple(
            (
                discipline.name,
                *(
                    f"{_mean(groups[*place, discipline]).text(2)} / {_largest(groups[*place, discipline]).mean:.2f}"
                    for place in places
                ),
            )
            for discipline in DISCIPLINES
        ),
    )


def _by_profile(groups: Groups, loads: Sequence[float], gpus: int) -> Table:
    rows = []
    for mix in _MIXES:
        for load in loads:
            for discipline in (STRICT, BACKFILL, AGENT):
                runs = groups[mix.name, load, discipline]
                cells = [
                    " / ".join(
                        f"{statistics.fmean(each.by_kind[kind][which] for each in runs):.2f}" for which in range(3)
                    )
                    for kind in range(len(NAMES))
                ]
                rows.append((f"{mix.name} {load:g}, {discipline.name}", *cells))
    return Table(
        f"{gpus} GPUs: wait by profile, mean / median / 99th percentile, in mean service times",
        ("queue", *NAMES),
        tuple(rows),
    )


def _mean(runs: Sequence[Waits]) -> Estimate:
    return estimate([each.mean for each in runs])


def _largest(runs: Sequence[Waits]) -> Estimate:
    return estimate([each.by_kind[LARGEST][2] for each in runs])


def _row(mix: str, load: float, discipline: Discipline, runs: Sequence[Waits]) -> dict[str, Json]:
    return {
        "mix": mix,
        "load": load,
        "queue": discipline.name,
        "mean": _mean(runs).mean,
        "mean_plus_minus": _mean(runs).half_width if _mean(runs).known else None,
        "median": statistics.fmean(each.median for each in runs),
        "percentile_99": statistics.fmean(each.high for each in runs),
        "by_profile": {
            name: {
                what: statistics.fmean(each.by_kind[kind][which] for each in runs)
                for which, what in enumerate(("mean", "median", "percentile_99"))
            }
            for kind, name in enumerate(NAMES)
        },
    }


def _checks(groups: Groups, mix: str, load: float) -> tuple[Check, ...]:
    if (mix, load) not in _MOST_99TH:
        return ()
    ours = groups[mix, load, AGENT]
    where = f"{mix} at load {load:g}"
    bound = _MOST_MEAN if load >= _SATURATED else _mean(groups[mix, load, STRICT]).mean * _SHARE_OF_STRICT
    return (
        Check(what=f"{where}: mean wait", measured=_mean(ours).mean, bound=bound),
        Check(what=f"{where}: 99th percentile of a 7g", measured=_largest(ours).mean, bound=_MOST_99TH[mix, load]),
    )

"""A long trace on many GPUs: days and nights, mixes that change with them, leases of very unlike lengths.

A user's own trace is a CSV file with the columns `at` and `lasts`, in any one unit of time, and `profile`.
"""

from __future__ import annotations

import csv
import time
from pathlib import Path

import numpy as np

from mig_agent.core.planning.plan import DEFAULT_POLICY
from placement_bench.agent import AgentCluster, Handle
from placement_bench.arrivals import Arrivals, made
from placement_bench.clusters import RuleCluster
from placement_bench.estimates import percentile
from placement_bench.mixes import NAMES, SKEW_BIG, SKEW_SMALL, SLICES, sizes
from placement_bench.options import Options
from placement_bench.results import Json, Report, Table
from placement_bench.rules import driver, first_fit, mfi
from placement_bench.simulation import Served, simulate

_GPUS = 64
_REQUESTS = 100_000
_LOAD = 0.9
_DAY = 24.0
"""Length of a day in mean service times."""
_SWING = 0.5
"""By day this share more requests than on average, by night this share fewer."""
_SPREAD = 1.3
"""Standard deviation of the logarithm of a lease's length: most are short, a few are very long."""
_WARM_UP = 0.02
AGENT = "this agent"


def day_and_night(requests: int, gpus: int, load: float, seed: int) -> Arrivals:
    """Return a made-up trace: by day more and smaller requests, by night fewer and larger ones."""
    generator = np.random.default_rng((seed, gpus, requests))
    mean_slices = (SKEW_SMALL.mean_slices + SKEW_BIG.mean_slices) / 2
    rate = load * SLICES * gpus / mean_slices
    # Thinning: arrivals at the highest rate, each kept with the share that the hour has of it.
    highest = rate * (1 + _SWING)
    drawn = np.cumsum(generator.exponential(1 / highest, 2 * requests + 1000))
    by_day = (1 + np.sin(2 * np.pi * drawn / _DAY)) / 2
    kept = generator.random(len(drawn)) * (1 + _SWING) < 1 + _SWING * (2 * by_day - 1)
    at, by_day = drawn[kept][:requests], by_day[kept][:requests]
    small = np.cumsum(SKEW_SMALL.shares)
    big = np.cumsum(SKEW_BIG.shares)
    edges = by_day[:, None] * small + (1 - by_day[:, None]) * big
    kind = (generator.random(len(at))[:, None] > edges).sum(axis=1).clip(max=len(NAMES) - 1)
    lasts = generator.lognormal(-(_SPREAD**2) / 2, _SPREAD, len(at))
    return made(at, kind.astype(np.int64), lasts)


def read_trace(path: Path) -> Arrivals:
    """Read a trace from a file. Raises ValueError naming the line that cannot be understood."""
    rows: list[tuple[float, int, float]] = []
    with path.open(newline="", encoding="utf-8") as file:
        for number, row in enumerate(csv.DictReader(file), 2):
            try:
                rows.append((float(row["at"]), NAMES.index(row["profile"]), float(row["lasts"])))
            except (KeyError, TypeError, ValueError) as error:
                message = (
                    f"cannot read {path}, line {number}: it needs at, lasts and profile, one of {', '.join(NAMES)}"
                )
                raise ValueError(message) from error
    rows.sort()
    return Arrivals(
        tuple(at for at, _, _ in rows), tuple(kind for _, kind, _ in rows), tuple(lasts for _, _, lasts in rows)
    )


class TimedCluster(AgentCluster):
    """The agent's GPUs with a stopwatch: `took` is the processor time of each placement, in microseconds."""

    def __init__(self, gpus: int) -> None:
        super().__init__(gpus, DEFAULT_POLICY)
        self.took: list[float] = []

    def place(self, kind: int, now: float) -> Handle | None:
        began = time.thread_time()
        found = super().place(kind, now)
        self.took.append(1e6 * (time.thread_time() - began))
        return found


def run(options: Options) -> Report:
    """Run the agent and three others on the same trace."""
    gpus = options.gpus[0] if options.gpus else _GPUS
    if options.trace is None:
        load = options.loads[0] if options.loads else _LOAD
        arrivals = day_and_night(options.requests or _REQUESTS, gpus, load, options.seed)
    else:
        arrivals = read_trace(options.trace)
    warm_up = round(_WARM_UP * len(arrivals))
    agent = TimedCluster(gpus)
    began = time.perf_counter()
    found = {AGENT: simulate(agent, arrivals, warm_up=warm_up)}
    seconds = time.perf_counter() - began
    for rule in (first_fit(), driver(), mfi()):
        found[rule.name] = simulate(RuleCluster(rule, gpus), arrivals, warm_up=warm_up)
    offered = sum(sizes()[kind] * lasts for kind, lasts in zip(arrivals.kind, arrivals.lasts, strict=True))
    load = offered / (SLICES * gpus * (arrivals.at[-1] - arrivals.at[0]))
    table = Table(
        f"{len(arrivals):,} requests on {gpus} GPUs, load {load:.2f}",
        ("policy", "% of requests", "% of slices", "% of 7g", "served without creating"),
        tuple(
            (
                name,
                f"{100 * served.requests:.1f}",
                f"{100 * served.slices:.1f}",
                f"{100 * served.largest:.1f}",
                f"{served.reused:.2f}",
            )
            for name, served in found.items()
        ),
    )
    speed = Table(
        "Processor time of the planner for one request, carrying out the plan in the view included",
        ("GPUs", "median, us", "99th percentile, us", "the whole trace, s"),
        ((str(gpus), f"{percentile(agent.took, 0.5):.0f}", f"{percentile(agent.took, 0.99):.0f}", f"{seconds:.0f}"),),
    )
    data = [_row(name, served) for name, served in found.items()]
    data.append(
        {
            "requests": len(arrivals),
            "gpus": gpus,
            "load": load,
            "place_microseconds_median": percentile(agent.took, 0.5),
            "place_microseconds_99": percentile(agent.took, 0.99),
            "seconds": seconds,
        }
    )
    return Report(part="trace", seed=options.seed, tables=(table, speed), data=data)


def _row(name: str, served: Served) -> dict[str, Json]:
    return {
        "policy": name,
        "request_acceptance_percent": 100 * served.requests,
        "slice_acceptance_percent": 100 * served.slices,
        "acceptance_of_7g_percent": 100 * served.largest,
        "reused_share": served.reused,
    }

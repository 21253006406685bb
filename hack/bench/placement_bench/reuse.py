"""Idle instances: how many requests are served without creating one, and what that costs in acceptance."""

from __future__ import annotations

from placement_bench.contenders import AGENT, AGENT_8, BLIND, REUSE_LOWEST, REUSE_OLDEST
from placement_bench.figures import Series, line_chart
from placement_bench.losses import Line, lines
from placement_bench.mixes import BIMODAL, SKEW_SMALL, UNIFORM
from placement_bench.options import Options
from placement_bench.results import Check, Report, Table

POLICIES = (REUSE_LOWEST, REUSE_OLDEST, AGENT_8, AGENT, BLIND)
_GPUS = 8
_LOADS = (0.5, 0.7, 0.85, 1.0)
_HELD_LOADS = (0.5, 0.85)
_REQUESTS = 20_000
_REPEATS = 5
_LEAST_REUSED = 0.6
_MOST_LOST = 0.15
"""Points of slice acceptance lost against RC that ignores idle instances."""


def run(options: Options) -> Report:
    """Run the mean of three mixes on eight GPUs."""
    loads = options.loads or _LOADS
    gpus = options.gpus[0] if options.gpus else _GPUS
    found = lines(
        POLICIES,
        [(gpus, load) for load in loads],
        (UNIFORM, SKEW_SMALL, BIMODAL),
        requests=options.requests or _REQUESTS,
        seeds=options.seeds(_REPEATS),
        jobs=options.jobs,
    )
    by_place = {(line.policy, line.load): line for line in found}
    table = Table(
        f"{gpus} GPUs: % of slices served, share of the served that needed no creation, by load",
        ("policy", *(f"{load:g}" for load in loads)),
        tuple((policy, *(_cell(by_place[policy, load]) for load in loads)) for policy in POLICIES),
    )
    checks = []
    for load in (load for load in loads if load in _HELD_LOADS):
        ours, blind = by_place[AGENT, load], by_place[BLIND, load]
        lost = blind.slices.mean - ours.slices.mean
        checks += [
            Check(what=f"reused at load {load:g}", measured=ours.reused.mean, bound=_LEAST_REUSED, at_least=True),
            Check(what=f"points of slices lost for it at load {load:g}", measured=lost, bound=_MOST_LOST),
        ]
    series = [
        Series(
            policy,
            tuple((line.load, 100 * line.reused.mean) for line in found if line.policy == policy),
            strong=policy == AGENT,
        )
        for policy in POLICIES
    ]
    chart = line_chart(
        f"{gpus} GPUs: served without creating an instance", "load (slices asked for / slices there are)", "%", series
    )
    return Report(
        part="reuse",
        seed=options.seed,
        tables=(table,),
        data=[line.as_json() for line in found],
        checks=tuple(checks),
        figures={"placement-reuse.svg": chart},
    )


def _cell(line: Line) -> str:
    return f"{line.slices.text(1)}, {line.reused.mean:.2f}"

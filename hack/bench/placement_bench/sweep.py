"""Acceptance by policy, number of GPUs and load: requests that do not fit at once are lost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from placement_bench.contenders import AGENT, BINPACK, BLIND, DRIVER, FIRST_FIT, MFI, NOS, REPACKED, SPREAD
from placement_bench.figures import Series, line_chart
from placement_bench.losses import Line, lines
from placement_bench.mixes import MIXES
from placement_bench.options import Options
from placement_bench.results import Check, Report, Table

POLICIES = (FIRST_FIT, NOS, SPREAD, BINPACK, DRIVER, MFI, AGENT, BLIND, REPACKED)
_POINTS: Mapping[int, tuple[float, ...]] = {8: (0.7, 0.85, 1.0, 1.2), 100: (0.85, 1.0, 1.2)}
"""Loads by number of GPUs. At lower loads this many GPUs serve nearly all requests."""
_LOADS = (0.7, 0.85, 1.0, 1.2)
_REQUESTS = 20_000
_REPEATS = 5
_HELD_TO: Mapping[tuple[int, float], tuple[float, float]] = {(8, 0.85): (88.4, 80.4), (100, 1.0): (95.1, 90.6)}
"""(GPUs, load) -> acceptance of requests and of slices, in percent, that the planner must reach."""


def run(options: Options) -> Report:
    """Run the mean of the four mixes."""
    points = [(gpus, load) for gpus in options.gpus or _POINTS for load in options.loads or _POINTS.get(gpus, _LOADS)]
    found = lines(
        POLICIES,
        points,
        MIXES,
        requests=options.requests or _REQUESTS,
        seeds=options.seeds(_REPEATS),
        jobs=options.jobs,
    )
    by_place = {(line.policy, line.gpus, line.load): line for line in found}
    return Report(
        part="sweep",
        seed=options.seed,
        tables=tuple(_table(gpus, points, by_place) for gpus in dict(points)),
        data=[line.as_json() for line in found],
        checks=tuple(check for point in points if point in _HELD_TO for check in _checks(by_place[AGENT, *point])),
        figures=_figures(points, found),
    )


def _table(gpus: int, points: Sequence[tuple[int, float]], found: Mapping[tuple[str, int, float], Line]) -> Table:
    loads = [load for number, load in points if number == gpus]
    return Table(
        f"{gpus} GPUs: % of requests / of slices / of 7g served, by load",
        ("policy", *(f"{load:g}" for load in loads)),
        tuple((policy, *(_cell(found[policy, gpus, load]) for load in loads)) for policy in POLICIES),
    )


def _cell(line: Line) -> str:
    return f"{line.requests.mean:.1f} / {line.slices.text(1)} / {line.largest.mean:.1f}"


def _checks(line: Line) -> tuple[Check, ...]:
    requests, slices = _HELD_TO[line.gpus, line.load]
    where = f"{line.gpus} GPUs at load {line.load:g}"
    return (
        Check(what=f"{where}: % of requests", measured=line.requests.mean, bound=requests, at_least=True),
        Check(what=f"{where}: % of slices", measured=line.slices.mean, bound=slices, at_least=True),
    )


def _slices(line: Line) -> float:
    return line.slices.mean


def _largest(line: Line) -> float:
    return line.largest.mean


def _figures(points: Sequence[tuple[int, float]], found: Sequence[Line]) -> dict[str, str]:
    figures = {}
    for gpus in dict(points):
        here = [line for line in found if line.gpus == gpus]
        for name, title, value in (
            ("acceptance", "requested slices served", _slices),
            ("acceptance-7g", "requests for a 7g served", _largest),
        ):
            series = [
                Series(
                    policy,
                    tuple((line.load, value(line)) for line in here if line.policy == policy),
                    strong=policy == AGENT,
                    dashed=policy == REPACKED,
                )
                for policy in POLICIES
                if policy != BLIND  # it would hide the line of the agent
            ]
            figures[f"placement-{name}-{gpus}.svg"] = line_chart(
                f"{gpus} GPUs: {title}, mean of four mixes", "load (slices asked for / slices there are)", "%", series
            )
    return figures

"""Estimates of when waiting requests start, against when they did: in replays of the queue's traces."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from mig_agent.core.forecast import Forecast, Situation
from mig_agent.core.load_history import RecentRequests
from mig_agent.core.model import Holder, Lease, LeaseId, NodeView, RequestId
from placement_bench.agent import request_for
from placement_bench.arrivals import Arrivals, plain_poisson
from placement_bench.estimates import percentile
from placement_bench.mixes import SKEW_SMALL, UNIFORM, Mix, Setting
from placement_bench.options import Options, run_all
from placement_bench.results import Check, Json, Report, Table
from placement_bench.trace import day_and_night
from placement_bench.waiting import Discipline, Moment, waits

SEEDS_USED = 40
"""The forecast was developed on seeds up to this one; what it is held to is checked on those after it."""
HELD_TO = 0.75
"""The least share of waits that must lie inside the interval of 80 %."""
_GPUS = 8
_REQUESTS = 1500
_REPEATS = 5
_LOADS = (0.7, 0.8)
_EVERY = 15
"""At each so many arrivals a forecast is made, if anybody waits."""
_WARM_UP = 0.2
"""The share of requests before the first forecast."""
_AGENT = Discipline("this agent")
_DEADLINE = 1.25
"""Where leases have deadlines, these are so many times as far off as the leases last."""


@dataclass(frozen=True, slots=True)
class Trace:
    """A kind of trace. Without a mix: days and nights with lease times of very unlike lengths."""

    name: str
    mix: Mix | None
    load: float
    deadlines: bool = False
    """True if every other lease has a deadline."""

    def arrivals(self, gpus: int, requests: int, seed: int) -> Arrivals:
        """Return its requests."""
        if self.mix is None:
            return day_and_night(requests, gpus, self.load, seed)
        return plain_poisson(Setting(self.mix, self.load), gpus, requests, seed)


@dataclass(frozen=True, slots=True)
class Cell:
    """The parameters of one replay."""

    trace: Trace
    gpus: int
    requests: int
    seed: int


@dataclass(frozen=True, slots=True)
class Estimated:
    """One estimate beside the truth, in mean service times from when it was made; infinite: not known."""

    at_enqueue: bool
    earliest: float
    median: float
    latest: float
    true: float

    @property
    def known(self) -> bool:
        """True if there is a median."""
        return math.isfinite(self.median)

    @property
    def inside(self) -> bool:
        """True if the truth lies inside the interval."""
        return self.earliest <= self.true <= self.latest


@dataclass(slots=True)
class Replayed:
    """All estimates of a replay, and the processor time of each forecast in seconds."""

    estimates: list[Estimated] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)


def run_cell(cell: Cell) -> Replayed:
    """Replay a trace; all but the processor times is the same whenever it is repeated."""
    arrivals = cell.trace.arrivals(cell.gpus, cell.requests, cell.seed)
    recent, replayed = RecentRequests(0.0), Replayed()
    made: list[tuple[int, bool, float, tuple[float | None, ...]]] = []

    def watch(number: int, moment: Moment) -> None:
        ttl = _ttl(cell.trace, arrivals, number)
        request = replace(request_for(arrivals.kind[number]), wait_seconds=math.inf, ttl_seconds=ttl)
        recent.came(request, moment.now)
        if number < _WARM_UP * len(arrivals) or number % _EVERY or not moment.waiting:
            return
        situation = Situation(
            view=_with_leases(moment, cell.trace, arrivals),
            waiting=[
                replace(
                    each,
                    request=replace(
                        each.request, ttl_seconds=_ttl(cell.trace, arrivals, _number(each.request.request_id))
                    ),
                )
                for each in moment.waiting
            ],
            now=moment.now,
            past=moment.lease_times.past,
            reservation_delay=moment.reservation_delay,
            demand=recent.demand(moment.now),
        )
        began = time.process_time()
        forecast = Forecast(situation, random.Random(number).random)  # noqa: S311 -- the same each time
        forecast.advance()
        replayed.seconds.append(time.process_time() - began)
        estimates = forecast.estimates()
        for each in moment.waiting:
            found = estimates.get(each.seq)
            moments = (None,) * 3 if found is None else (found.earliest, found.median, found.latest)
            mine = _number(each.request.request_id)
            made.append((mine, mine == number, moment.now, moments))

    true = waits(_AGENT, arrivals, cell.gpus, watch, lambda number: _ttl(cell.trace, arrivals, number))
    for number, at_enqueue, now, moments in made:
        earliest, median, latest = (math.inf if each is None else each - now for each in moments)
        rest = arrivals.at[number] + true[number] - now
        replayed.estimates.append(Estimated(at_enqueue, earliest, median, latest, rest))
    return replayed


def run(options: Options) -> Report:
    """Run all traces."""
    traces = [
        *(
            Trace(f"{mix.name} {load:g}", mix, load)
            for mix in (UNIFORM, SKEW_SMALL)
            for load in options.loads or _LOADS
        ),
        Trace("uniform, half with deadlines", UNIFORM, (options.loads or _LOADS)[-1], deadlines=True),
        Trace("days and nights", None, (options.loads or _LOADS)[-1]),
    ]
    gpus = options.gpus[0] if options.gpus else _GPUS
    seeds = [SEEDS_USED + each for each in options.seeds(_REPEATS)]
    cells = [Cell(trace, gpus, options.requests or _REQUESTS, seed) for trace in traces for seed in seeds]
    found = run_all(run_cell, cells, options.jobs)
    by_trace = {
        trace.name: [each for cell, each in zip(cells, found, strict=True) if cell.trace is trace] for trace in traces
    }
    return Report(
        part="waits",
        seed=options.seed,
        tables=(_table(by_trace, gpus),),
        data=[_row(name, runs, when=when) for name, runs in by_trace.items() for when in (True, False)],
        checks=tuple(check for name, runs in by_trace.items() for check in _checks(name, runs)),
    )


def coverage(estimates: Sequence[Estimated]) -> float:
    """Return which share of the waits lies inside the intervals, of those where one is known."""
    known = [each for each in estimates if each.known]
    return sum(each.inside for each in known) / len(known) if known else math.nan


def _with_leases(moment: Moment, trace: Trace, arrivals: Arrivals) -> NodeView:
    leases = {}
    for lease, (started, number) in moment.started.items():
        ttl = _ttl(trace, arrivals, number)
        leases[lease] = Lease(
            id=LeaseId(lease),
            request_id=RequestId(str(number)),
            holder=Holder(),
            instances=(),
            created_at=started,
            expires_at=None if ttl is None else started + ttl,
        )
    return replace(moment.view, leases=leases)


def _ttl(trace: Trace, arrivals: Arrivals, number: int) -> float | None:
    return _DEADLINE * arrivals.lasts[number] if trace.deadlines and number % 2 else None


def _number(request_id: RequestId) -> int:
    return int(request_id)


def _of(runs: Sequence[Replayed], *, at_enqueue: bool) -> list[Estimated]:
    return [each for one in runs for each in one.estimates if each.at_enqueue is at_enqueue]


def _errors(estimates: Sequence[Estimated]) -> list[float]:
    return [abs(each.true - each.median) for each in estimates if each.known] or [math.nan]


def _table(by_trace: Mapping[str, Sequence[Replayed]], gpus: int) -> Table:
    rows = []
    for name, runs in by_trace.items():
        for when, words in ((True, "when queued"), (False, "later")):
            estimates = _of(runs, at_enqueue=when)
            true = [each.true for each in estimates] or [math.nan]
            middle = percentile(true, 0.5)
            rows.append(
                (
                    f"{name}, {words}",
                    str(len(estimates)),
                    f"{100 * sum(each.known for each in estimates) / max(1, len(estimates)):.0f}",
                    f"{100 * coverage(estimates):.0f}",
                    f"{percentile(_errors(estimates), 0.5):.2f}",
                    f"{percentile([abs(each - middle) for each in true], 0.5):.2f}",
                    f"{middle:.2f}",
                )
            )
    seconds = [each for runs in by_trace.values() for one in runs for each in one.seconds] or [math.nan]
    return Table(
        f"{gpus} GPUs: estimates of the rest of the wait, in mean service times; processor time of a forecast: "
        f"median {1000 * percentile(seconds, 0.5):.0f} ms, 99th percentile {1000 * percentile(seconds, 0.99):.0f} ms",
        ("trace", "estimates", "% known", "% inside", "median error", "of the median wait alone", "median wait"),
        tuple(rows),
    )


def _row(name: str, runs: Sequence[Replayed], *, when: bool) -> dict[str, Json]:
    estimates = _of(runs, at_enqueue=when)
    share, error = coverage(estimates), percentile(_errors(estimates), 0.5)
    return {
        "trace": name,
        "when": "queued" if when else "later",
        "estimates": len(estimates),
        "known": sum(each.known for each in estimates),
        "coverage": None if math.isnan(share) else share,
        "median_absolute_error": None if math.isnan(error) else error,
        "median_wait": percentile([each.true for each in estimates], 0.5) if estimates else None,
    }


def _checks(name: str, runs: Sequence[Replayed]) -> tuple[Check, ...]:
    return tuple(
        Check(
            what=f"{name}, {words}: waits inside the 80 % interval",
            measured=coverage(_of(runs, at_enqueue=when)),
            bound=HELD_TO,
            at_least=True,
        )
        for when, words in ((True, "when queued"), (False, "later"))
        if any(each.known for each in _of(runs, at_enqueue=when))
    )

"""Pods that request memory, in rounds, on GPUs of several models: a trace that a real cluster can run as well.

`tests/e2e/test_scheduler.py` runs it with the reference scheduler on two nodes and compares the result with this.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from mig_agent.core.model import Layout
from mig_agent.core.planning.plan import DEFAULT_POLICY
from placement_bench import rules
from placement_bench.ceiling import ceiling
from placement_bench.contenders import AGENT, BINPACK, DRIVER, FIRST_FIT, MFI, REPACKED, SPREAD
from placement_bench.estimates import estimate
from placement_bench.mixed import MixedAgent, MixedRepacked, MixedRules, model, replay
from placement_bench.options import Options, run_all
from placement_bench.results import Json, Report, Table
from placement_bench.rounds import Asked, Rounds, made_up, read, write

MODELS = ("a100-40gb", "a100-40gb", "h100-80gb", "h100-80gb")
"""Models of the GPUs of the two nodes, by index."""
PODS = 320
A_ROUND = 16
SEED = 1
BACKWARDS = "first fit, from the last GPU"
"""Which GPU has which index is chance; this is the result with the opposite order."""
UPPER_BOUND = "nobody can surpass"
_ORDERS = 100
_REPEATS = 20
_GIGABYTE = 1_000_000_000
_ALONE = 1
_Runner = Callable[[Sequence[Layout], Rounds], frozenset[str]]


def _rule(rule: Callable[[Layout], rules.Rule]) -> _Runner:
    return lambda models, rounds: replay(MixedRules(models, rule), rounds)


RUNNERS: Mapping[str, _Runner] = {
    FIRST_FIT: _rule(rules.first_fit),
    BACKWARDS: lambda models, rounds: replay(MixedRules(models[::-1], rules.first_fit), rounds),
    SPREAD: _rule(rules.hami_spread),
    BINPACK: _rule(rules.hami_binpack),
    DRIVER: _rule(rules.driver),
    MFI: _rule(rules.mfi),
    AGENT: lambda models, rounds: replay(MixedAgent(models, DEFAULT_POLICY), rounds),
    REPACKED: lambda models, rounds: replay(MixedRepacked(models, DEFAULT_POLICY), rounds),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Reached:
    """What a policy serves of a trace."""

    pods: float
    gigabytes: float
    """Requested by the served pods, in units of 10^9 bytes."""
    lost: tuple[str, ...] = ()
    """The names of the other pods."""


def run(options: Options) -> Report:
    """Replay one trace, pod by pod; if it is made up, also the mean over many."""
    names = options.gpu_models or MODELS
    models = [model(name) for name in names]
    pods = options.requests or PODS
    rounds = read(options.trace) if options.trace else made_up(pods, A_ROUND, options.seed)
    if options.write_trace:
        write(options.write_trace, rounds)
    asked = all_of(rounds)
    if not asked:
        raise ValueError("cannot replay a trace that has no pod")
    found = {name: reached(asked, runner(models, rounds)) for name, runner in RUNNERS.items()}
    orders = other_orders(rounds, models)
    found[UPPER_BOUND] = _upper_bound(rounds, models)
    there = reached(asked, frozenset(each.name for each in asked))
    tables = [_one_trace(names, rounds, found, orders, there)]
    data: list[Mapping[str, Json]] = [_row(name, each, there) for name, each in found.items()]
    data.append(
        {
            "policy": AGENT,
            "orders": len(orders),
            "pods_served_least": min(each.pods for each in orders),
            "pods_served_most": max(each.pods for each in orders),
        }
    )
    if options.trace is None and options.repeats != _ALONE:
        table, rows = _many_traces(names, pods, options)
        tables.append(table)
        data += rows
    return Report(part="rounds", seed=options.seed, tables=tuple(tables), data=data)


def all_of(rounds: Rounds) -> list[Asked]:
    """Return the pods in the order in which they request."""
    return [asked for row in rounds for asked in row]


def reached(asked: Sequence[Asked], served: frozenset[str]) -> Reached:
    """Return the counts for these served pods."""
    return Reached(
        pods=sum(each.name in served for each in asked),
        gigabytes=sum(each.memory_bytes for each in asked if each.name in served) / _GIGABYTE,
        lost=tuple(each.name for each in asked if each.name not in served),
    )


def other_orders(rounds: Rounds, models: Sequence[Layout]) -> list[Reached]:
    """Return what the planner serves if pods of a round request in other orders, as they may on a real cluster."""
    found = []
    for number in range(_ORDERS):
        chance = random.Random(number)  # noqa: S311 -- the same ones every time
        shuffled = [chance.sample(row, len(row)) for row in rounds]
        found.append(reached(all_of(rounds), RUNNERS[AGENT](models, shuffled)))
    return found


def _upper_bound(rounds: Rounds, models: Sequence[Layout]) -> Reached:
    """Return two separate bounds: serving the most pods need not serve the most memory."""
    asked = all_of(rounds)
    pods = ceiling(rounds, models, [1.0] * len(asked))
    gigabytes = ceiling(rounds, models, [each.memory_bytes / _GIGABYTE for each in asked])
    return Reached(pods=int(pods + 1e-6), gigabytes=round(gigabytes, 3))


def _one_trace(
    names: Sequence[str], rounds: Rounds, found: Mapping[str, Reached], orders: Sequence[Reached], there: Reached
) -> Table:
    def line(name: str, each: Reached) -> tuple[str, ...]:
        return (
            name,
            f"{each.pods:g}",
            f"{100 * each.pods / there.pods:.1f}",
            f"{100 * each.gigabytes / there.gigabytes:.1f}",
        )

    least, most = min(each.pods for each in orders), max(each.pods for each in orders)
    lines = [line(name, each) for name, each in found.items()]
    lines.insert(
        len(lines) - 1, (f"this agent, {len(orders)} other orders within rounds", f"{least:g} to {most:g}", "", "")
    )
    title = f"{there.pods:g} pods in {len(rounds)} rounds on {in_words(names)}: who is served"
    return Table(title, ("policy", "pods", "% of pods", "% of memory"), tuple(lines))


def _many_traces(names: Sequence[str], pods: int, options: Options) -> tuple[Table, list[Mapping[str, Json]]]:
    """Return the results over traces with other seeds."""
    seeds = options.seeds(_REPEATS)
    by_seed = run_all(partial(_shares, tuple(names), pods), list(seeds), options.jobs)
    rows: list[Mapping[str, Json]] = []
    lines = []
    for name in by_seed[0]:
        of_pods, of_memory = (estimate([each[name][which] for each in by_seed]) for which in (0, 1))
        lines.append((name, of_pods.text(1), of_memory.text(1)))
        rows.append(
            {
                "policy": name,
                "traces": len(seeds),
                "pod_acceptance_percent": of_pods.mean,
                "pod_acceptance_percent_plus_minus": of_pods.half_width,
                "memory_acceptance_percent": of_memory.mean,
                "memory_acceptance_percent_plus_minus": of_memory.half_width,
            }
        )
    title = f"The mean of {len(seeds)} such traces"
    return Table(title, ("policy", "% of pods", "% of memory"), tuple(lines)), rows


def _shares(names: tuple[str, ...], pods: int, seed: int) -> dict[str, tuple[float, float]]:
    """Return what each policy serves of one trace, in percent of the pods and of their memory."""
    models = [model(name) for name in names]
    rounds = made_up(pods, A_ROUND, seed)
    asked = all_of(rounds)
    there = reached(asked, frozenset(each.name for each in asked))
    found = {}
    for name, runner in RUNNERS.items():
        served = reached(asked, runner(models, rounds))
        found[name] = (100 * served.pods / there.pods, 100 * served.gigabytes / there.gigabytes)
    return found


def _row(name: str, each: Reached, there: Reached) -> dict[str, Json]:
    return {
        "policy": name,
        "pods": there.pods,
        "pods_served": each.pods,
        "gigabytes": there.gigabytes,
        "gigabytes_served": each.gigabytes,
        "lost": list(each.lost),
    }


def in_words(names: Sequence[str]) -> str:
    """Return GPU models with their counts: `2 a100-40gb, 2 h100-80gb`."""
    return ", ".join(f"{names.count(name)} {name}" for name in dict.fromkeys(names))

"""Measures how far each policy falls short of the exact optimum on one GPU, over many random mixes and loads."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from functools import cache

from placement_bench import rules
from placement_bench.agent import planner_rule
from placement_bench.estimates import estimate
from placement_bench.mixes import MIXES, Setting, random_settings
from placement_bench.optimum import Ints, OneGpu, states_by_profile
from placement_bench.options import Options, run_all
from placement_bench.results import Check, Json, Report, Table

AGENT = "this agent"
_SETTINGS = 2000
"""So many that the mean does not depend on which are drawn; 250 of them give 0.20 to 0.26 % for this agent."""
_LOAD = 0.85
_DIGITS = 6
"""Further digits differ with the build of the linear algebra."""
_MOST_REGRET = 0.25
"""Percent of the optimum, on average."""


@cache
def _gpu() -> OneGpu:
    return OneGpu()


@cache
def _policies() -> Mapping[str, Ints]:
    """Return what each policy does on one GPU, as tables; how it chooses among GPUs does not matter."""
    found = {
        "lowest start": rules.first_fit(),
        "HAMi-like": rules.hami_binpack(),
        "driver order": rules.driver(),
        "MFI-like": rules.mfi(),
        AGENT: planner_rule(),
    }
    return {name: _gpu().table_of(rule.choose) for name, rule in found.items()}


def run(options: Options) -> Report:
    """Run the four mixes at one load, and random ones."""
    mixes = run_all(shares, [Setting(mix, _LOAD) for mix in MIXES], options.jobs)
    drawn = random_settings(options.repeats or _SETTINGS, options.seed)
    regrets = [_regrets(found) for found in run_all(shares, drawn, options.jobs)]
    by_mix = Table(
        f"1 GPU at load {_LOAD:g}: % of slices served, exactly",
        ("policy", *(mix.name for mix in MIXES)),
        tuple((name, *(f"{found[name]:.2f}" for found in mixes)) for name in mixes[0]),
    )
    over_all = Table(
        f"1 GPU, {len(drawn)} random mixes and loads: behind the optimum by % of it",
        ("policy", "mean", "highest"),
        tuple(
            (
                name,
                estimate([each[name] for each in regrets]).text(2),
                f"{max(each[name] for each in regrets):.1f}",
            )
            for name in _policies()
        ),
    )
    data: list[Mapping[str, Json]] = [
        {"mix": mix.name, "load": _LOAD, "policy": name, "slice_acceptance_percent": round(share, _DIGITS)}
        for mix, found in zip(MIXES, mixes, strict=True)
        for name, share in found.items()
    ]
    data += [
        {
            "settings": len(drawn),
            "policy": name,
            "regret_percent_mean": round(statistics.fmean(each[name] for each in regrets), _DIGITS),
            "regret_percent_highest": round(max(each[name] for each in regrets), _DIGITS),
        }
        for name in _policies()
    ]
    data.append({"states": len(states_by_profile()), "states_by_window": len(_gpu().states)})
    mean = round(statistics.fmean(each[AGENT] for each in regrets), _DIGITS)
    return Report(
        part="regret",
        seed=options.seed,
        tables=(by_mix, over_all),
        data=data,
        checks=(Check(what="regret on one GPU, mean %", measured=mean, bound=_MOST_REGRET),),
    )


def shares(setting: Setting) -> dict[str, float]:
    """Return the percentage of slices that each policy serves, and the optimum."""
    found = {name: 100 * _gpu().evaluate(policy, setting)[0] for name, policy in _policies().items()}
    best, _ = _gpu().optimum(setting, _policies()[AGENT])
    return {**found, OPTIMUM: 100 * best}


OPTIMUM = "optimum"


def _regrets(found: Mapping[str, float]) -> dict[str, float]:
    best = found[OPTIMUM]
    return {name: 100 * (best - share) / best for name, share in found.items()}

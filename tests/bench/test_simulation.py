"""Arrivals, the agent's GPUs and what is counted."""

from __future__ import annotations

import math

import pytest
from placement_bench.agent import AgentCluster, planner_rule
from placement_bench.arrivals import Arrivals, poisson
from placement_bench.clusters import RuleCluster
from placement_bench.estimates import estimate, percentile
from placement_bench.mixes import MIXES, NAMES, SKEW_SMALL, UNIFORM, Setting, random_settings, sizes
from placement_bench.optimum import OneGpu
from placement_bench.rules import first_fit
from placement_bench.simulation import simulate
from placement_bench.waiting import Discipline, waits

from mig_agent.core.planning.plan import DEFAULT_POLICY, Policy

ONE, DOUBLE, TWO, THREE, FOUR, SEVEN = range(len(NAMES))


@pytest.mark.parametrize("mix", MIXES, ids=lambda mix: mix.name)
def test_arrivals_ask_for_exactly_the_load_and_the_mix(mix: object) -> None:
    setting = Setting(next(each for each in MIXES if each is mix), 0.85)
    found = poisson(setting, 8, 3000, seed=1)
    work = sum(sizes()[kind] * lasts for kind, lasts in zip(found.kind, found.lasts, strict=True))
    assert work / (64 * found.at[-1]) == pytest.approx(0.85)
    for kind, share in enumerate(setting.mix.shares):
        assert abs(found.kind.count(kind) - 3000 * share) <= 1
    assert list(found.at) == sorted(found.at)


def test_arrivals_are_the_same_for_one_seed_and_unlike_for_two() -> None:
    setting = Setting(UNIFORM, 0.8)
    first, again, other = (poisson(setting, 8, 100, seed) for seed in (1, 1, 2))
    assert (first.at, first.kind, first.lasts) == (again.at, again.kind, again.lasts)
    assert first.at != other.at


def test_random_settings_stay_within_bounds() -> None:
    drawn = random_settings(50, seed=2)
    assert drawn == random_settings(50, seed=2)
    for each in drawn:
        assert sum(each.mix.shares) == pytest.approx(1)
        assert 0.3 <= each.load <= 1.2


def test_what_is_served_is_counted_after_the_warm_up() -> None:
    """A 7g, then two 1g while it runs, then a 1g when it has ended."""
    arrivals = Arrivals(at=(0.0, 1.0, 2.0, 5.0), kind=(SEVEN, ONE, ONE, ONE), lasts=(4.0, 1.0, 1.0, 1.0))
    served = simulate(RuleCluster(first_fit(), 1), arrivals, warm_up=1)
    assert served.offered == (3, 0, 0, 0, 0, 0)
    assert served.accepted == (1, 0, 0, 0, 0, 0)
    assert served.requests == served.slices == pytest.approx(1 / 3)
    assert (served.made.created, served.made.destroyed) == (1, 1)


def test_the_agent_reuses_an_idle_instance_and_destroys_one_in_the_way() -> None:
    arrivals = Arrivals(at=(0.0, 2.0, 4.0), kind=(TWO, TWO, SEVEN), lasts=(1.0, 1.0, 1.0))
    served = simulate(AgentCluster(1, DEFAULT_POLICY), arrivals, warm_up=0)
    assert sum(served.accepted) == 3
    assert (served.made.created, served.made.reused, served.made.destroyed) == (2, 1, 1)
    assert served.reused == pytest.approx(1 / 3)


def test_the_agent_blind_to_idle_instances_does_what_its_rule_says() -> None:
    """The table asked out of the planner for one GPU, and the planner itself in a simulation."""
    arrivals = poisson(Setting(UNIFORM, 0.85), 1, 1500, seed=4)
    by_table = simulate(RuleCluster(planner_rule(), 1), arrivals, warm_up=0)
    by_planner = simulate(AgentCluster(1, Policy(creation_cost=0.0)), arrivals, warm_up=0)
    assert by_planner.accepted == by_table.accepted


def test_a_simulated_gpu_comes_near_its_exact_value() -> None:
    gpu = OneGpu()
    setting = Setting(SKEW_SMALL, 0.85)
    exact, _ = gpu.evaluate(gpu.table_of(first_fit().choose), setting)
    served = simulate(RuleCluster(first_fit(), 1), poisson(setting, 1, 40_000, seed=1), warm_up=100)
    assert served.slices == pytest.approx(exact, abs=0.01)


def test_the_queue_of_strict_first_come_holds_back_what_would_fit() -> None:
    """A 7g waits behind a 1g that runs; another 1g fits beside it."""
    arrivals = Arrivals(at=(0.0, 1.0, 2.0), kind=(ONE, SEVEN, ONE), lasts=(10.0, 1.0, 20.0))
    assert waits(Discipline("strict", strict_fifo=True), arrivals, 1) == [0, 9, 9]
    assert waits(Discipline("backfill", limit=math.inf), arrivals, 1) == [0, 21, 0]
    assert waits(Discipline("limit", limit=0.5), arrivals, 1) == [0, 9, 9]


def test_estimates() -> None:
    found = estimate([1.0, 2.0, 3.0])
    assert found.mean == 2
    assert found.half_width == pytest.approx(4.30 / math.sqrt(3), abs=0.01)
    assert not estimate([1.0]).known
    assert percentile(range(1, 101), 0.99) == 99
    assert percentile([5.0], 0.5) == 5

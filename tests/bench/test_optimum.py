"""The exact optimum on one GPU against figures that were computed elsewhere."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from placement_bench import rules
from placement_bench.agent import planner_rule
from placement_bench.mixes import MIXES, UNIFORM, Setting, random_settings
from placement_bench.optimum import REFUSED, OneGpu, states_by_profile


@pytest.fixture(scope="module")
def one_gpu() -> OneGpu:
    return OneGpu()


def test_the_states_are_all_there(one_gpu: OneGpu) -> None:
    assert len(states_by_profile()) == 723
    assert len(set(one_gpu.masks)) == 192


@pytest.mark.parametrize(("number", "percent"), [(0, 49.89), (1, 56.85), (2, 48.90), (3, 44.07)])
def test_the_optimum_of_each_mix(one_gpu: OneGpu, number: int, percent: float) -> None:
    share, _ = one_gpu.optimum(Setting(MIXES[number], 0.85))
    assert 100 * share == pytest.approx(percent, abs=0.006)


@pytest.mark.parametrize(
    ("rule", "percents"),
    [
        (rules.first_fit, (47.11, 54.22, 46.86, 40.87)),
        (rules.driver, (49.84, 56.44, 48.90, 43.98)),
        (planner_rule, (49.88, 56.75, 48.90, 43.94)),
    ],
    ids=["lowest start", "driver order", "this agent"],
)
def test_what_each_policy_is_worth(
    one_gpu: OneGpu, rule: Callable[[], rules.Rule], percents: tuple[float, ...]
) -> None:
    policy = one_gpu.table_of(rule().choose)
    for mix, percent in zip(MIXES, percents, strict=True):
        share, _ = one_gpu.evaluate(policy, Setting(mix, 0.85))
        assert 100 * share == pytest.approx(percent, abs=0.011)


def test_the_optimum_is_the_same_from_wherever_it_starts(one_gpu: OneGpu) -> None:
    for setting in random_settings(3, seed=5):
        plain, _ = one_gpu.optimum(setting)
        started, policy = one_gpu.optimum(setting, one_gpu.table_of(planner_rule().choose))
        assert started == pytest.approx(plain, abs=1e-9)
        assert one_gpu.evaluate(policy, setting)[0] == pytest.approx(plain, abs=1e-9)


def test_no_policy_exceeds_the_optimum(one_gpu: OneGpu) -> None:
    policies = [one_gpu.table_of(rule.choose) for rule in (rules.first_fit(), rules.mfi(), planner_rule())]
    for setting in random_settings(5, seed=3):
        best, _ = one_gpu.optimum(setting)
        for policy in policies:
            assert one_gpu.evaluate(policy, setting)[0] <= best + 1e-9


def test_a_policy_that_refuses_what_fits_is_not_valued(one_gpu: OneGpu) -> None:
    with pytest.raises(ValueError, match="where it fits"):
        one_gpu.table_of(lambda _kind, _mask: None)


def test_a_full_gpu_refuses(one_gpu: OneGpu) -> None:
    _, policy = one_gpu.optimum(Setting(UNIFORM, 0.85))
    full = one_gpu.masks.index(0xFF)
    assert (policy[:, full] == REFUSED).all()

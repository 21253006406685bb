"""The maximum is never exceeded, the global batch is always kept, and the gradient is the exact mean."""

from __future__ import annotations

from fractions import Fraction
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as some

from mig_agent import elastic
from mig_agent.core.errors import UsageError
from mig_agent.elastic.batch_plan import BatchPlan, plan

GLOBAL, MAXIMA, DEVICES = range(1, 65), range(1, 17), range(1, 9)


def sizes(found: BatchPlan) -> list[int]:
    return [each.size for step in found.steps for each in step]


def divided(global_batch: int, max_batch: int, devices: int) -> tuple[int, int]:
    """Steps and size by plain division, as other libraries do it: it fails where ours may not."""
    steps = max(1, global_batch // (max_batch * devices))
    return steps, global_batch // (steps * devices)


def test_8192_combinations() -> None:
    combinations = list(product(GLOBAL, MAXIMA, DEVICES))
    assert len(combinations) == 8192
    above = lost = above_divided = lost_divided = 0
    for combination in combinations:
        global_batch, max_batch, devices = combination
        found = plan(*combination)
        above += max(sizes(found)) > max_batch
        lost += sum(sizes(found)) != global_batch
        steps, size = divided(*combination)
        above_divided += size > max_batch
        lost_divided += steps * size * devices != global_batch
    assert (above, lost) == (0, 0)
    assert above_divided > 1500, "the combinations are such that division goes wrong"
    assert lost_divided > 3000


def test_the_example_of_three_gpus() -> None:
    found = plan(256, 64, 3)
    assert [[each.size for each in step] for step in found.steps] == [[43, 43, 43], [43, 42, 42]]
    assert found.batch_size == 43


@given(some.integers(1, 5000), some.integers(1, 600), some.integers(1, 64))
def test_any_plan(global_batch: int, max_batch: int, devices: int) -> None:
    found = plan(global_batch, max_batch, devices)
    all_sizes = sizes(found)
    assert sum(all_sizes) == global_batch
    assert max(all_sizes) == found.batch_size <= max_batch
    assert max(all_sizes) - min(all_sizes) <= 1
    assert all(len(step) == devices for step in found.steps)
    assert (len(found.steps) - 1) * max_batch * devices < global_batch, "no step more than needed"
    starts = [each.start for step in found.steps for each in step]
    assert starts == [sum(all_sizes[:before]) for before in range(len(all_sizes))]


@given(some.lists(some.fractions(-10, 10), min_size=1, max_size=60), some.integers(1, 20), some.integers(1, 9))
def test_the_weighted_gradients_are_the_exact_mean(gradients: list[Fraction], max_batch: int, devices: int) -> None:
    """Computed in fractions: `weight` is the float next to the true one."""
    found = plan(len(gradients), max_batch, devices)
    total = Fraction(0)
    for each in (one for step in found.steps for one in step):
        assert each.weight == each.size / len(gradients)
        mine = gradients[each.start : each.start + each.size]
        if mine:
            total += Fraction(each.size, len(gradients)) * (sum(mine, Fraction(0)) / len(mine))
    assert total == sum(gradients) / len(gradients)


@pytest.mark.parametrize("wrong", [0, -1, 2.5, "64", True, None, 1 << 60])
def test_what_is_no_number_of_samples_is_refused(wrong: int) -> None:
    for arguments in ((wrong, 1, 1), (1, wrong, 1), (1, 1, wrong)):
        with pytest.raises(UsageError, match=r"^cannot take"):
            elastic.plan(*arguments)

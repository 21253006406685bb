"""Every sample of an epoch is taken once, whatever happens between two global steps."""

from __future__ import annotations

import random
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as some

from mig_agent.elastic.batch_plan import plan
from mig_agent.elastic.sample_order import LocalBatch, Position, in_order, local_batches, shuffled


def taken_by_all(
    order: Sequence[int], position: Position, *, global_batch: int, max_batch: int, processes: int, devices_here: int
) -> list[list[LocalBatch]]:
    """For each accumulation step the batch of each process."""
    batches = plan(global_batch, max_batch, processes * devices_here)
    by_process = [
        list(local_batches(order, position, batches, max_batch=max_batch, rank=rank, devices_here=devices_here))
        for rank in range(processes)
    ]
    assert len({len(each) for each in by_process}) == 1, "all go through as many steps"
    return [list(each) for each in zip(*by_process, strict=True)]


@given(
    length=some.integers(1, 60),
    global_batch=some.integers(1, 20),
    leases=some.lists(
        some.tuples(some.integers(1, 9), some.integers(1, 4), some.integers(1, 3)), min_size=1, max_size=9
    ),
    seed=some.integers(0, 9),
)
def test_nothing_is_skipped_and_nothing_comes_twice(
    length: int, global_batch: int, leases: list[tuple[int, int, int]], seed: int
) -> None:
    """After each global step the training goes on with another maximum, and on other processes and devices."""
    order = shuffled(length, seed)(3)
    position, taken, number = Position(epoch=3), list[int](), 0
    while position.sample < length:
        max_batch, processes, devices_here = leases[number % len(leases)]
        steps = taken_by_all(
            order,
            position,
            global_batch=global_batch,
            max_batch=max_batch,
            processes=processes,
            devices_here=devices_here,
        )
        last = next(index for index, each in enumerate(steps) if each[0].is_last)
        weights = 0.0
        for step in steps[: last + 1]:
            assert {each.done for each in step} == {steps[0][0].done}
            for each in step:
                assert 1 <= len(each.indices) <= max_batch * devices_here
                taken += each.indices if each.weight else ()
                weights += each.weight
        assert abs(weights - 1) < 1e-12
        position, number = steps[0][0].done, number + 1
        assert position.step == number
    assert taken == list(order)
    assert number == -(-length // global_batch)


def test_the_order_of_an_epoch_is_the_same_for_ever() -> None:
    """A training may go on with another version of Python or of this library: these numbers are never changed."""
    assert shuffled(10, 0)(0) == [8, 9, 0, 3, 7, 4, 1, 5, 2, 6]
    assert shuffled(10, 0)(1) == [8, 6, 3, 1, 2, 0, 9, 4, 5, 7]
    assert shuffled(10, 1)(0) == [5, 9, 6, 1, 8, 2, 3, 4, 7, 0]
    assert list(in_order(4)(7)) == [0, 1, 2, 3]


def test_the_order_leaves_the_programs_own_random_numbers_alone() -> None:
    random.seed(1)
    expected = random.getrandbits(60)
    random.seed(1)
    shuffled(100, 0)(0)
    assert random.getrandbits(60) == expected


def test_a_process_without_samples_computes_one_that_counts_nothing() -> None:
    """So it takes part in the exchange of gradients."""
    (step,) = taken_by_all(range(2), Position(), global_batch=8, max_batch=4, processes=3, devices_here=1)
    assert [(each.indices, each.weight) for each in step] == [((0,), 0.5), ((1,), 0.5), ((0,), 0.0)]

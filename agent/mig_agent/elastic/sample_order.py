"""Chooses the samples of each step, by index: the same on any number of devices and after any number of restarts. Pure.

The order of an epoch depends on its number and the seed alone. A global step takes the next samples of it, and the last
one of an epoch takes those that are left.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from mig_agent.elastic.batch_plan import BatchPlan, plan

Order = Callable[[int], Sequence[int]]
"""Returns the indices of an epoch's samples in order, each time the same."""


@dataclass(frozen=True)
class Position:
    """The progress of a training: whole global steps alone, since a step is done or not."""

    epoch: int = 0
    sample: int = 0
    """Samples of this epoch that are done."""
    step: int = 0
    """Global steps that are done, in all epochs."""

    def after(self, samples: int) -> Position:
        """Return the position one global step of so many samples later."""
        return replace(self, sample=self.sample + samples, step=self.step + 1)

    def next_epoch(self) -> Position:
        """Return the beginning of the next epoch."""
        return replace(self, epoch=self.epoch + 1, sample=0)


@dataclass(frozen=True)
class LocalBatch:
    """The samples that one process takes in one accumulation step."""

    indices: tuple[int, ...]
    """Samples of this process, never empty: one without samples in this step computes one of another's, with weight 0.

    So it takes part in the exchange of gradients, and the loss is a number.
    """
    weight: float
    """The part of the global step's samples that these are; 0 for a stand-in."""
    number: int
    """The accumulation step, from 1."""
    is_last: bool
    """True in the last accumulation step of its global step."""
    done: Position
    """The position once the global step is done."""


def in_order(length: int) -> Order:
    """Return the order of a data set that is read from its beginning to its end."""
    return lambda _epoch: range(length)


def shuffled(length: int, seed: int) -> Order:
    """Return a different random order for each epoch.

    It uses nothing of `random` but the sequence of `random()`, which Python promises to keep.
    """

    def order(epoch: int) -> Sequence[int]:
        chance = random.Random(f"{seed}/{epoch}").random  # noqa: S311 -- not a secret
        keys = [chance() for _ in range(length)]
        return sorted(range(length), key=keys.__getitem__)

    return order


def local_batches(
    order: Sequence[int], position: Position, batches: BatchPlan, *, max_batch: int, rank: int, devices_here: int = 1
) -> Iterator[LocalBatch]:
    """Yield what a process takes from its position to the end of the epoch.

    Each process has `devices_here` consecutive devices of the plan, and takes the samples of all of them.
    """
    mine = slice(rank * devices_here, (rank + 1) * devices_here)
    while position.sample < len(order):
        left = len(order) - position.sample
        current = batches if left >= batches.global_batch else plan(left, max_batch, batches.devices)
        done = position.after(current.global_batch)
        for number, row in enumerate(current.steps, 1):
            first = position.sample + row[mine][0].start
            size = sum(each.size for each in row[mine])
            indices = order[first : first + size] if size else order[position.sample : position.sample + 1]
            is_last = number == len(current.steps)
            yield LocalBatch(tuple(indices), size / current.global_batch, number, is_last, done)
        position = done

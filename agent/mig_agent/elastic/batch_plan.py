"""Spreads a global batch over devices and accumulation steps. Pure.

The sizes differ by at most one sample, never exceed the maximum, and always sum to the global batch. The gradient of a
mean loss is made the exact mean over the global batch by weights: the gradient of a micro-batch of n samples counts
n / global batch.
"""

from __future__ import annotations

from dataclasses import dataclass

from mig_agent.core.errors import UsageError

_MOST = 1 << 40
"""Samples; a number beyond is a mistake."""


@dataclass(frozen=True)
class MicroBatch:
    """The samples that one device computes in one accumulation step."""

    start: int
    """Index of the first sample, counted from the beginning of the global batch."""
    size: int
    """Number of samples; 0 where the global batch has fewer samples than there are devices."""
    weight: float
    """The part of the global batch that these samples are."""


@dataclass(frozen=True)
class BatchPlan:
    """The micro-batches of one global step."""

    global_batch: int
    """Samples in one step of the optimizer."""
    devices: int
    steps: tuple[tuple[MicroBatch, ...], ...]
    """The micro-batches of the devices, for each accumulation step."""

    @property
    def batch_size(self) -> int:
        """The size of the largest micro-batch."""
        return self.steps[0][0].size


def plan(global_batch: int, max_batch: int, devices: int = 1) -> BatchPlan:
    """Spread a global batch over devices, in as few accumulation steps as `max_batch` allows. Raises UsageError."""
    checked("global_batch", global_batch)
    checked("max_batch", max_batch)
    checked("devices", devices)
    number = -(-global_batch // (max_batch * devices))
    least, larger = divmod(global_batch, number * devices)
    start = 0
    steps = []
    for step in range(number):
        row = []
        for device in range(devices):
            size = least + (step * devices + device < larger)
            row.append(MicroBatch(start, size, size / global_batch))
            start += size
        steps.append(tuple(row))
    return BatchPlan(global_batch, devices, tuple(steps))


def checked(name: str, value: object) -> int:
    """Return a number of samples or devices. Raises UsageError if it is none."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise UsageError(f"cannot take {value!r} as {name}: it is not a whole number", "write a number such as 64")
    if not 1 <= value <= _MOST:
        raise UsageError(f"cannot take {value} as {name}: it must be at least 1 and at most {_MOST}")
    return value

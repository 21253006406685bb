"""The rule by which Kubernetes 1.36.3 allocates partitionable devices, exactly: first fit under counters.

Slices are tried in the order of their names, devices as they are listed, and the first that the request matches and
whose counters suffice is taken. What is left of a counter is its published amount minus what published and allocated
devices take; one counter below zero makes the whole pool invalid. A pool whose newest generation is incomplete gives
nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from mig_agent.core.dra.devices import PartitionableDevice
from mig_agent.core.dra.relisting import PublishedSlice, Relisting

Counter = tuple[str, str]
"""(counter set, counter)."""


class PoolInvalidError(Exception):
    """The allocator stops every device of the pool."""


class Allocator:
    """The API server's slices of one pool, and the scheduler's allocations."""

    def __init__(self) -> None:
        self.slices: dict[str, PublishedSlice] = {}
        self.allocated: dict[str, PartitionableDevice] = {}
        """The devices that claims have, by name, as they were when they were allocated."""
        self._listed: tuple[PartitionableDevice, ...] = ()
        self._left: dict[Counter, int] = {}
        self._is_complete = False

    @property
    def published(self) -> Sequence[PublishedSlice]:
        """The slices that are there, the newest generation last."""
        return tuple(sorted(self.slices.values(), key=lambda each: each.generation))

    @property
    def names(self) -> frozenset[str]:
        """The names of the allocated devices."""
        return frozenset(self.allocated)

    @property
    def lowest(self) -> int:
        """The lowest of all counters; the pool is invalid if it is below zero."""
        return min(self._left.values(), default=0)

    def apply(self, relisting: Relisting) -> None:
        """Make all changes of a relisting."""
        for write in relisting.writes:
            self.slices[write.object_name] = write
        for name in relisting.deletions:
            del self.slices[name]
        if relisting.writes or relisting.deletions:
            self._read()

    def allocate(self, matches: Callable[[PartitionableDevice], bool]) -> PartitionableDevice | None:
        """Return the first device that matches and fits, and allocate it; None if there is none.

        Raises PoolInvalidError if a counter is below zero.
        """
        if not self._is_complete:
            return None
        if self.lowest < 0:
            below = sorted(counter for counter, amount in self._left.items() if amount < 0)
            message = f"counters below zero: {below}"
            raise PoolInvalidError(message)
        for device in self._listed:
            if matches(device) and device.name not in self.allocated and self._fits(device):
                self.allocated[device.name] = device
                self._take([device], 1)
                return device
        return None

    def free(self, name: str) -> None:
        """Free a device when its claim is gone."""
        del self.allocated[name]
        self._take((each for each in self._listed if each.name == name), -1)

    def _read(self) -> None:
        newest = max((each.generation for each in self.published), default=0)
        slices = sorted(
            (each for each in self.published if each.generation == newest), key=lambda each: each.object_name
        )
        self._is_complete = all(each.slice_count == len(slices) for each in slices)
        self._listed = tuple(device for each in slices for device in each.content.devices)
        self._left = {
            (counters.name, counter): amount
            for each in slices
            for counters in each.content.counter_sets
            for counter, amount in counters.available
        }
        self._take((each for each in self._listed if each.name in self.allocated), 1)

    def _fits(self, device: PartitionableDevice) -> bool:
        left, counters = self._left, device.counter_set
        return all(left.get((counters, counter), 0) >= amount for counter, amount in device.consumes)

    def _take(self, devices: Iterable[PartitionableDevice], times: int) -> None:
        for device in devices:
            for counter, amount in device.consumes:
                key = (device.counter_set, counter)
                self._left[key] = self._left.get(key, 0) - times * amount

"""Sources of a job's samples: anything with a length and items by index, or a DataLoader of PyTorch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol

from mig_agent.core.errors import UsageError
from mig_agent.elastic.sample_order import LocalBatch, Order, in_order, shuffled


class SampleSource(Protocol):
    """Samples by their index."""

    @property
    def length(self) -> int:
        """The number of samples in an epoch."""
        ...

    def order(self, *, shuffle: bool | None, seed: int) -> Order:
        """Return the order of the samples; with `shuffle` None as the loader itself would have it."""
        ...

    def batches(self, local_batches: Iterable[LocalBatch]) -> Iterator[tuple[LocalBatch, Any]]:
        """Yield each local batch with its samples, in order."""
        ...


class SequenceSource:
    """Samples of a list, an array or a data set; a batch is a list of them."""

    def __init__(self, samples: Sequence[Any]) -> None:
        self._samples = samples
        self.length = len(samples)

    def order(self, *, shuffle: bool | None, seed: int) -> Order:
        """Return the order of the samples: that of the sequence, unless they are to be shuffled."""
        return shuffled(self.length, seed) if shuffle else in_order(self.length)

    def batches(self, local_batches: Iterable[LocalBatch]) -> Iterator[tuple[LocalBatch, Any]]:
        """Yield each local batch with the list of its samples."""
        for local in local_batches:
            yield local, [self._samples[index] for index in local.indices]


def source_of(loader: object) -> SampleSource:
    """Return where the samples of a loader come from. Raises UsageError if it cannot start in the middle."""
    if hasattr(loader, "dataset") and hasattr(loader, "collate_fn"):
        from mig_agent.elastic.torch import DataLoaderSource  # noqa: PLC0415 -- only for those who use PyTorch

        return DataLoaderSource(loader)
    if hasattr(loader, "__len__") and hasattr(loader, "__getitem__") and not isinstance(loader, dict):
        return SequenceSource(loader)  # type: ignore[arg-type] # it has what is used of a sequence
    raise UsageError(
        f"cannot take batches from a {type(loader).__name__}: it has no samples by index, so it cannot be resumed",
        "give a list, a data set with __len__ and __getitem__, or a DataLoader of one",
    )

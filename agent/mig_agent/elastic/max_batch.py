"""The most samples that fit on one device: a number, a table by memory, or `auto`, which halves on out-of-memory."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

from mig_agent.adapters.failpoints import FAILPOINTS
from mig_agent.core.errors import UsageError
from mig_agent.core.quantities import parse_memory
from mig_agent.elastic.batch_plan import checked

AUTO = "auto"
_MIB = 1 << 20
_LARGEST_FILE = 1 << 20
_MOST_ENTRIES = 1000
_OUT_OF_MEMORY = ("out of memory", "RESOURCE_EXHAUSTED", "CUBLAS_STATUS_ALLOC_FAILED")
"""Phrases by which CUDA, PyTorch, JAX, XLA and TensorFlow say it."""


def from_table(table: Mapping[str, int], memory_mib: int | None) -> int:
    """Return the entry of the largest amount of memory that the device has: `{"10G": 8, "40G": 40}`.

    Raises UsageError if the memory is unknown or less than the table begins with.
    """
    entries = sorted((parse_memory(memory), memory, checked("max_batch", most)) for memory, most in table.items())
    if not entries:
        raise UsageError("cannot choose max_batch: the table is empty", 'write {"10G": 8, "40G": 40}')
    if memory_mib is None:
        raise UsageError(
            "cannot choose max_batch from a table: the memory of the device is not known",
            "start the program with migctl run, or give a number",
        )
    fitting = [most for amount, _, most in entries if amount <= memory_mib * _MIB]
    if not fitting:
        raise UsageError(
            f"cannot choose max_batch: the device has {memory_mib} MiB, and the table begins with {entries[0][1]}",
            "add an entry for less memory, or ask for a larger device",
        )
    return fitting[-1]


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether this is how a framework says that the device has no memory left."""
    text = str(error)
    return type(error).__name__ == "OutOfMemoryError" or any(words in text for words in _OUT_OF_MEMORY)


def default_cache(environment: Mapping[str, str]) -> Path:
    """Return the user's file of batch sizes, below XDG_CACHE_HOME or ~/.cache."""
    folder = environment.get("XDG_CACHE_HOME", "")
    return (Path(folder) if Path(folder).is_absolute() else Path.home() / ".cache") / "mig-agent" / "batch-sizes.json"


class BatchSizeCache:
    """Remembers by name and device profile the most samples that were found to fit.

    A file that cannot be read counts as empty: what is lost is found again. It is replaced as a whole, so that a crash
    leaves the old one or the new one; of two processes that write at once, the later one wins.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def get(self, name: str, profile: str) -> int | None:
        """Return what fitted last; None if that is not known."""
        return self._read().get(_key(name, profile))

    def put(self, name: str, profile: str, most: int) -> None:
        """Remember what fits. Raises OSError."""
        key = _key(name, profile)
        found = {each: value for each, value in self._read().items() if each != key}
        # The latest are kept: the file stays small.
        kept = {**dict(list(found.items())[-(_MOST_ENTRIES - 1) :]), key: most}
        with FAILPOINTS.around("batch-size-folder"):
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with (
            FAILPOINTS.around("batch-size-file"),
            tempfile.NamedTemporaryFile(
                "w", encoding="utf-8", dir=self._path.parent, prefix=".batch-sizes-", delete=False
            ) as file,
        ):
            json.dump(kept, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        with FAILPOINTS.around("batch-size-rename"):
            Path(file.name).replace(self._path)

    def _read(self) -> dict[str, int]:
        try:
            with self._path.open("rb") as file:
                found = json.loads(file.read(_LARGEST_FILE))
        except (OSError, ValueError):
            return {}
        if not isinstance(found, dict):
            return {}
        return {key: most for key, most in found.items() if type(most) is int and most > 0}


def _key(name: str, profile: str) -> str:
    return json.dumps([name, profile])

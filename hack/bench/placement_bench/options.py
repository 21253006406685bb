"""The options with which a part is run, and the spreading of its work over processes."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

CellT = TypeVar("CellT")
FoundT = TypeVar("FoundT")


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Options of a run. None: the part uses the value that its figures in the documentation were made with."""

    seed: int = 1
    requests: int | None = None
    repeats: int | None = None
    """Repetitions, each with the next seed; random settings for `regret`."""
    gpus: tuple[int, ...] | None = None
    loads: tuple[float, ...] | None = None
    trace: Path | None = None
    write_trace: Path | None = None
    gpu_models: tuple[str, ...] | None = None
    jobs: int = 1

    def seeds(self, repeats: int) -> range:
        """Return the seeds of the repetitions."""
        return range(self.seed, self.seed + (self.repeats or repeats))


def run_all(function: Callable[[CellT], FoundT], cells: Sequence[CellT], jobs: int) -> list[FoundT]:
    """Return the function's result for every cell, in the order of the cells, with any number of processes."""
    if jobs <= 1:
        return [function(cell) for cell in cells]
    # Otherwise the linear algebra of each process uses all cores, and they wait for one another.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    # Fresh processes: one that is forked from a process with threads may hang.
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        return list(pool.map(function, cells, chunksize=max(1, len(cells) // (16 * jobs))))

"""`elastic.init`: finds the devices, chooses the largest micro-batch, and makes the job of this process."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import TypeAlias

from mig_agent.core.errors import UsageError
from mig_agent.elastic.batch_plan import checked, plan
from mig_agent.elastic.environment import ProcessPlace
from mig_agent.elastic.job import Job, Yielded
from mig_agent.elastic.max_batch import AUTO, BatchSizeCache, default_cache, from_table, is_out_of_memory
from mig_agent.elastic.notice import YieldNotice
from mig_agent.elastic.words import say

MaxBatch: TypeAlias = "int | str | Mapping[str, int]"
_MIB = 1 << 20

_jobs: list[Job] = []
"""The job of this process, which wrappers of optimizers and models take by default; empty before `init`."""


def init(global_batch: int, max_batch: MaxBatch, *, name: str = "", devices: int | None = None) -> Job:
    """Return the job of this process: a global batch in micro-batches that fit on the devices that there are.

    `max_batch`: the most samples on one device at a time: a number; a table by memory, `{"10G": 8, "40G": 40}`; or
    `auto`, which begins with what fitted last, or with all, and halves when the device is out of memory: the program
    ends with exit code 75 then, to be started again. It is remembered by `name` and the device's profile.
    `name`: the training's, in the names of files; empty: that of the program. `devices`: how many this process uses;
    None: those that CUDA_VISIBLE_DEVICES names, or one in each process of torchrun. Raises UsageError.
    """
    checked("global_batch", global_batch)
    place = ProcessPlace.from_environment(os.environ, None if devices is None else checked("devices", devices))
    name = (name or Path(sys.argv[0]).stem.lstrip("-") or "training").replace("/", "-")
    adapter = _AutomaticBatch(name, place) if max_batch == AUTO else None
    if adapter is not None:
        most = adapter.first(-(-global_batch // place.devices))
    elif isinstance(max_batch, Mapping):
        most = from_table(max_batch, place.memory_mib or _memory_mib_from_torch())
    elif isinstance(max_batch, str):
        raise UsageError(f"cannot take {max_batch!r} as max_batch", 'write a number, "auto" or {"10G": 8, "40G": 40}')
    else:
        most = checked("max_batch", max_batch)
    batches = plan(global_batch, most, place.devices)
    job = Job(batches, max_batch=most, name=name, place=place, notice=YieldNotice(os.environ))
    if adapter is not None:
        adapter.watch(most)
    _jobs[:] = [job]
    return job


def current_job() -> Job:
    """Return the job that `init` has made. Raises UsageError before that."""
    if not _jobs:
        raise UsageError("cannot find the job: there is none yet", "call elastic.init(global_batch, max_batch) first")
    return _jobs[0]


class _AutomaticBatch:
    """Finds the largest micro-batch of one program on one profile by halving it."""

    def __init__(self, name: str, place: ProcessPlace) -> None:
        self._name = name
        memory_mib = place.memory_mib or _memory_mib_from_torch()
        self._profile = place.profile or (f"{memory_mib} MiB" if memory_mib else "unknown")
        self._cache = BatchSizeCache(default_cache(os.environ))
        self._most = 0

    def first(self, most: int) -> int:
        """Return what fitted last, at most so many."""
        return min(self._cache.get(self._name, self._profile) or most, most)

    def watch(self, most: int) -> None:
        """Halve the maximum if this program ends because the device is out of memory."""
        self._most = most
        before = sys.excepthook

        def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
            if not is_out_of_memory(error) or not self._halve():
                before(kind, error, trace)
                return
            say(f"{self._most} samples do not fit on this device ({self._profile}); trying {self._most // 2}")
            raise Yielded

        sys.excepthook = hook

    def _halve(self) -> bool:
        """Remember half as many; return False if that is not possible."""
        if self._most < 2:  # noqa: PLR2004 -- one sample has no half
            return False
        try:
            self._cache.put(self._name, self._profile, self._most // 2)
        except OSError as error:
            say(f"cannot remember that {self._most} samples do not fit: {error}")
            return False
        return True


def _memory_mib_from_torch() -> int | None:
    """Return the memory of the first device as PyTorch sees it, where the program uses PyTorch."""
    if "torch" not in sys.modules:
        return None
    from mig_agent.elastic.torch import device_memory  # noqa: PLC0415 -- it is imported by now

    found = device_memory()
    return found // _MIB if found else None

"""libnvidia-ml as an object: every symbol is a C callback, so that pynvml's calls go through real C conversion."""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from ctypes import CFUNCTYPE, c_int
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from mig_agent.simulator import faults, handles
from mig_agent.simulator.cgroupfs import CgroupFs
from mig_agent.simulator.codes import Code, Failure, SimulatorError
from mig_agent.simulator.programs import write_programs
from mig_agent.simulator.state import Machine, driver_branch, has_dmem
from mig_agent.simulator.store import Store

_HANG_POLL_SECONDS = 0.02
FIRST_WITH_MEMORY_LIMITS = 615
"""The first driver branch with nvmlDeviceSetMemoryLimits_v1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Symbol:
    """One function of the library."""

    name: str
    prototype: Callable[..., object]
    function: Callable[..., int | None]
    """Takes the library and the C arguments; returns None for success."""
    before_init: bool


SYMBOLS: dict[str, Symbol] = {}


def symbol(
    name: str, *argument_types: type, answer: type = c_int, before_init: bool = False
) -> Callable[[Callable[..., int | None]], Callable[..., int | None]]:
    """Register a function under its C name."""

    def register(function: Callable[..., int | None]) -> Callable[..., int | None]:
        prototype = CFUNCTYPE(answer, *argument_types)
        SYMBOLS[name] = Symbol(name=name, prototype=prototype, function=function, before_init=before_init)
        return function

    return register


@dataclass
class EventSet:
    """The change counter of each GPU registered in the event set, as last reported."""

    seen: dict[int, int] = field(default_factory=dict)


@dataclass
class GpmCounters:
    """Counts of a GPU instance, or on a GPU without MIG mode, up to the last sample of it."""

    at: float
    """Time of the sample, in seconds of the monotonic clock."""
    busy: float = 0.0
    """Percent of the multiprocessors that were busy, times seconds."""


@dataclass(frozen=True)
class GpmSample:
    """The counters as they were at one moment."""

    at: float
    busy: float


class Library:
    """The simulated library of one process. Its attributes are the C functions; `without` plays an old driver."""

    def __init__(self, store: Store, without: Collection[str]) -> None:
        self._store = store
        self._mutex = threading.Lock()
        self._users = 0
        self.initialised_at = 0
        """The machine's revision at the last initialisation: what was deleted before is not listed."""
        self.event_sets: dict[int, EventSet] = {}
        self._event_sets_made = 0
        self.gpm_samples: dict[int, GpmSample | None] = {}
        """The buffers that were allocated and not freed, by number; None while nothing was read into one."""
        self.gpm_counters: dict[tuple[int, int], GpmCounters] = {}
        """Counters by GPU and serial number of the GPU instance; 0 for the GPU itself."""
        self._gpm_samples_made = 0
        self.monotonic: Callable[[], float] = time.monotonic
        """The clock of the counters; tests replace it."""
        self.hanging = 0
        """How many calls hang now."""
        self._named: tuple[Machine | None, dict[str, int]] = None, {}
        for each in SYMBOLS.values():
            if each.name not in without:
                setattr(self, each.name, each.prototype(partial(self._answer, each)))

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 -- the symbols have all kinds of types
        raise AttributeError(f"undefined symbol: {name}")

    def read(self) -> Machine:
        """Return the machine's state; readers never change it."""
        return self._store.read()

    @property
    def cgroups(self) -> CgroupFs:
        """The cgroups of the simulated machine."""
        return self._store.cgroups

    def handles_by_uuid(self) -> dict[str, int]:
        """Return the handles of all GPUs and MIG devices by every name that the driver accepts.

        Cached while the machine is unchanged: an agent asks before every reuse.
        """
        machine = self.read()
        known, found = self._named
        if known is not machine:
            found = handles.by_uuid(machine)
            self._named = machine, found
        return found

    @contextmanager
    def change(self, function: str, *, seconds: float = 0.0) -> Iterator[Machine]:
        """Yield the machine for a change by a call that takes `seconds`: half before, half after, outside all locks."""
        time.sleep(seconds / 2)
        with self._store.edit() as machine:
            machine["calls"][function] = machine["calls"].get(function, 0) + 1
            faults.forget_ended_processes(machine)
            yield machine
        time.sleep(seconds / 2)

    def forget_ended_processes(self) -> Machine:
        """Remove the real processes that have ended; return the machine."""
        machine = self.read()
        if faults.has_ended_processes(machine):
            with self._store.edit() as changed:
                faults.forget_ended_processes(changed)
            machine = self.read()
        return machine

    def add_event_set(self) -> int:
        """Add an event set; return its number."""
        with self._mutex:
            self._event_sets_made += 1
            self.event_sets[self._event_sets_made] = EventSet()
            return self._event_sets_made

    def remove_event_set(self, number: int) -> None:
        """Free an event set."""
        with self._mutex:
            self.event_sets.pop(number, None)

    def add_gpm_sample(self) -> int:
        """Allocate a buffer for a sample; return its number."""
        with self._mutex:
            self._gpm_samples_made += 1
            self.gpm_samples[self._gpm_samples_made] = None
            return self._gpm_samples_made

    def init(self) -> None:
        """Add a user."""
        with self._mutex:
            self._users += 1
            self.initialised_at = self.read()["revision"]

    def shutdown(self) -> None:
        """Remove a user."""
        with self._mutex:
            self._users -= 1

    def _answer(self, called: Symbol, *arguments: Any) -> int:  # noqa: ANN401 -- whatever C passes
        try:
            if not (self._users or called.before_init):
                return Code.UNINITIALIZED
            gpu = handles.gpu_of(arguments[0]) if arguments and isinstance(arguments[0], int) else None
            machine = self.read()
            if machine["faults"]:
                self._suffer(called.name, gpu)
                machine = self.read()
            if gpu is not None and gpu < len(machine["gpus"]) and machine["gpus"][gpu]["lost"]:
                return Code.GPU_IS_LOST
            answer = called.function(self, *arguments)
        except Failure as failure:
            return failure.code
        except Exception:  # noqa: BLE001 -- ctypes would turn an exception into success
            traceback.print_exc(file=sys.stderr)
            return Code.UNKNOWN
        return Code.SUCCESS if answer is None else answer

    def _suffer(self, function: str, gpu: int | None) -> None:
        if faults.hangs(self.read(), function, gpu):
            with self._mutex:
                self.hanging += 1
            while faults.hangs(self.read(), function, gpu):
                time.sleep(_HANG_POLL_SECONDS)
            with self._mutex:
                self.hanging -= 1
        if faults.may_fail(self.read(), function, gpu):
            with self._store.edit() as machine:
                faults.strike(machine, function, gpu)


def function_names() -> Collection[str]:
    """Return the names of all functions, after all have been registered."""
    from mig_agent.simulator import (  # noqa: PLC0415 -- they import this module
        device_calls,  # noqa: F401 -- the functions register themselves on import
        event_calls,  # noqa: F401 -- the same
        gpm_calls,  # noqa: F401 -- the same
        memory_limit_calls,  # noqa: F401 -- the same
        mig_calls,  # noqa: F401 -- the same
    )

    return SYMBOLS.keys()


def open_library(state_file: Path, *, without: Collection[str] = ()) -> object:
    """Return the library of the machine in this file, to be put into `pynvml.nvmlLib`.

    `without` names symbols to leave out, as in an old driver. Raises SimulatorError if there is no machine.
    """
    unknown = set(without) - set(function_names())
    if unknown:
        raise SimulatorError(f"cannot leave out what is not simulated: {', '.join(sorted(unknown))}")
    store = Store(state_file)
    machine = store.read()
    store.mend()
    write_programs(store.host.root / "usr/bin", state_file)
    store.cgroups.settle(dmem=has_dmem(machine))
    if driver_branch(machine) < FIRST_WITH_MEMORY_LIMITS:
        without = {*without, "nvmlDeviceSetMemoryLimits_v1", "nvmlDeviceGetMemoryLimits_v1"}
    return Library(store, without)

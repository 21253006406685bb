"""Injected faults that hit single calls, and real processes that end outside the simulation."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from mig_agent.simulator.codes import Failure
from mig_agent.simulator.state import Fault, Machine, Process

_VERSION = re.compile(r"_v\d+$")


def same_function(a: str, b: str) -> bool:
    """Return True if two names mean one function, with or without the version that C adds."""
    return _VERSION.sub("", a) == _VERSION.sub("", b)


def _matches(fault: Fault, function: str, gpu: int | None) -> bool:
    return same_function(fault["function"], function) and (fault["gpu"] is None or fault["gpu"] == gpu)


def hangs(machine: Machine, function: str, gpu: int | None) -> bool:
    """Return True if this call hangs."""
    return any(each["kind"] == "hang" and _matches(each, function, gpu) for each in machine["faults"])


def may_fail(machine: Machine, function: str, gpu: int | None) -> bool:
    """Return True if a fault counts calls of this function."""
    return any(each["kind"] == "fail" and _matches(each, function, gpu) for each in machine["faults"])


def strike(machine: Machine, function: str, gpu: int | None) -> None:
    """Count this call, and fail it with the code of the first fault that is due."""
    for fault in machine["faults"]:
        if fault["kind"] != "fail" or not _matches(fault, function, gpu):
            continue
        if is_due(machine, fault):
            raise Failure(fault["code"])


def is_due(machine: Machine, fault: Fault) -> bool:
    """Count a call for a matching fault; return True if it is due now, and remove it after its last time."""
    if fault["skip"]:
        fault["skip"] -= 1
        return False
    if fault["times"] is not None:
        fault["times"] -= 1
        if not fault["times"]:
            machine["faults"].remove(fault)
    return True


def start_time(pid: int) -> int | None:
    """Return the start time of a real process in ticks since boot; None if there is none or it is a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])


def process_lists(machine: Machine) -> Iterator[list[Process]]:
    """Yield all the lists that processes are in."""
    for gpu in machine["gpus"]:
        yield gpu["processes"]
        for instance in gpu["instances"]:
            yield instance["holders"]
            for compute in instance["compute"]:
                yield compute["processes"]
                yield compute["holders"]


def _ended(process: Process) -> bool:
    return process["started"] is not None and start_time(process["pid"]) != process["started"]


def has_ended_processes(machine: Machine) -> bool:
    """Return True if a real process that the machine lists has ended."""
    return any(_ended(process) for processes in process_lists(machine) for process in processes)


def forget_ended_processes(machine: Machine) -> None:
    """Remove real processes that have ended, as the kernel closes what a dead process had open."""
    for processes in process_lists(machine):
        processes[:] = [process for process in processes if not _ended(process)]

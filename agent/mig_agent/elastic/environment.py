"""Reads the environment of a process: its place among the processes of its job, its lease and its devices. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mig_agent.core.errors import UsageError

YIELD_CODE = 75
"""The exit code that says "start me again": EX_TEMPFAIL of sysexits.h."""
PROFILE_VARIABLE = "MIG_AGENT_DEVICE_PROFILE"
MEMORY_VARIABLE = "MIG_AGENT_DEVICE_MEMORY"
NOTICE_VARIABLE = "MIG_AGENT_NOTICE_FILE"
FOLDER_VARIABLE = "MIG_AGENT_CHECKPOINTS"


@dataclass(frozen=True)
class ProcessPlace:
    """The place of this process in its job."""

    rank: int = 0
    """The number of this process among those of the job; 0 is the master."""
    processes: int = 1
    devices_here: int = 1
    """Devices that this process uses together."""
    master_address: str = ""
    """The address where the master waits for the others (MASTER_ADDR); empty where there is one process."""
    profile: str = ""
    """The profile of the lease's device, such as `1g.10gb`; empty where the environment does not say."""
    memory_mib: int | None = None
    """The memory of the lease's smallest device; None where the environment does not say."""

    @property
    def devices(self) -> int:
        """The number of devices of the whole job."""
        return self.processes * self.devices_here

    @classmethod
    def from_environment(cls, environment: Mapping[str, str], devices: int | None = None) -> ProcessPlace:
        """Read what torchrun (RANK, WORLD_SIZE, MASTER_ADDR) and `migctl run` have set. Raises UsageError.

        `devices`: how many this process uses; None: one where there are several processes, or else those that
        CUDA_VISIBLE_DEVICES names.
        """
        processes = _number(environment, "WORLD_SIZE", 1, least=1)
        rank = _number(environment, "RANK", 0, least=0)
        if rank >= processes:
            raise UsageError(
                f"cannot be process {rank} of {processes}: RANK counts from 0",
                "unset RANK and WORLD_SIZE, or start the program with torchrun",
            )
        if devices is None:
            devices = 1 if processes > 1 else max(1, _visible(environment))
        return cls(
            rank=rank,
            processes=processes,
            devices_here=devices,
            master_address=environment.get("MASTER_ADDR", ""),
            profile=environment.get(PROFILE_VARIABLE, ""),
            memory_mib=_number(environment, MEMORY_VARIABLE, 0, least=0) or None,
        )


def _visible(environment: Mapping[str, str]) -> int:
    return len([each for each in environment.get("CUDA_VISIBLE_DEVICES", "").split(",") if each.strip()])


def _number(environment: Mapping[str, str], name: str, default: int, *, least: int) -> int:
    text = environment.get(name, "").strip()
    if not text:
        return default
    if not text.isdecimal() or int(text) < least:
        raise UsageError(f"cannot take {name}={text!r}: it is not a whole number from {least}", f"unset {name}")
    return int(text)

"""Ways to enforce shares: one of files, which refuses the impossible, and MPS over the simulator's programs."""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from mig_agent.adapters.host import Host
from mig_agent.adapters.nvml import Driver
from mig_agent.adapters.shares.enforcer import Enforcer, Share
from mig_agent.adapters.shares.mps_enforcer import MpsEnforcer
from mig_agent.core.errors import DriverError, DriverErrorKind
from mig_agent.core.model import Generation, GpuUuid
from mig_agent.core.shares import Enforcement

OVERHEAD_MIB = 128


class FileEnforcer:
    """Keeps each share as a file, which outlives an engine that is killed."""

    overhead_mib = OVERHEAD_MIB

    def __init__(self, folder: Path) -> None:
        self.enforcement = Enforcement.MPS
        self.needs_process = False
        self.begun: list[Share] = []
        self._folder = folder
        folder.mkdir(exist_ok=True)
        self.fails: dict[str, deque[DriverError]] = {"begin": deque(), "check": deque(), "end": deque()}
        self.why: dict[GpuUuid, str] = {}
        self.ended: list[Generation] = []
        self.processes_ended: list[tuple[Generation, int]] = []
        self.slow: Callable[[], None] = lambda: None

    def fail(self, what: str, kind: DriverErrorKind = DriverErrorKind.UNKNOWN, *, left_behind: bool = False) -> None:
        """The next such call fails; what it was to do is done all the same if it leaves something behind."""
        self.fails[what].append(DriverError(kind, f"{what} a share", detail="on demand", left_behind=left_behind))

    def lose(self, generation: Generation) -> None:
        """What enforces a limit is gone, as a daemon that was killed."""
        self._write(generation, {**self._read(generation), "lost": True})

    def reboot(self) -> None:
        """No daemon outlives that, nor does its folder in /run."""
        for _, each in self.existing():
            self._path(each).unlink()

    def use(self, generation: Generation, *pids: int) -> None:
        self._write(generation, {**self._read(generation), "pids": pids})

    def limits(self, gpu: str) -> dict[Generation, int]:
        """What is set up on a GPU, whether or not it holds."""
        found = {each: self._read(each) for _, each in self.existing()}
        return {generation: each["limit"] for generation, each in found.items() if each["gpu"] == gpu}

    def limits_by_share(self) -> dict[Generation, int]:
        """What is set up, on whatever GPU."""
        return {each: self._read(each)["limit"] for _, each in self.existing()}

    def why_not(self, gpu: GpuUuid) -> str:
        return self.why.get(gpu, "")

    def begin(self, share: Share) -> None:
        self.slow()
        self.begun.append(share)
        error = self.fails["begin"].popleft() if self.fails["begin"] else None
        if error is None or error.left_behind:
            self._write(share.generation, {"gpu": share.gpu, "limit": share.limit_mib, "uid": share.uid, "pids": ()})
        if error is not None:
            raise error

    def check(self, share: Share) -> None:
        if self.fails["check"]:
            raise self.fails["check"].popleft()
        found = self._read(share.generation) if self._path(share.generation).exists() else {"lost": True}
        if found.get("lost"):
            raise DriverError(DriverErrorKind.NOT_FOUND, "check a share", detail="what enforces it has ended")
        assert (found["gpu"], found["limit"]) == (share.gpu, share.limit_mib)

    def environment(self, share: Share) -> Mapping[str, str]:
        return {"SHARE": str(share.generation)}

    def processes(self, share: Share) -> tuple[int, ...]:
        return tuple(self._read(share.generation)["pids"]) if self._path(share.generation).exists() else ()

    def end(self, gpu: GpuUuid, generation: Generation) -> None:
        self.slow()
        if self.fails["end"]:
            raise self.fails["end"].popleft()
        if self._path(generation).exists():
            assert gpu in {"", self._read(generation)["gpu"]}
            self.ended.append(generation)
            self._path(generation).unlink()

    def end_process(self, generation: Generation, pid: int) -> None:
        self.processes_ended.append((generation, pid))

    def existing(self) -> tuple[tuple[GpuUuid | None, Generation], ...]:
        return tuple((None, Generation(int(each.name))) for each in sorted(self._folder.iterdir()))

    def _path(self, generation: Generation) -> Path:
        return self._folder / str(generation)

    def _read(self, generation: Generation) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self._path(generation).read_text())
        return found

    def _write(self, generation: Generation, found: Mapping[str, Any]) -> None:
        self._path(generation).write_text(json.dumps(found))


def mps_enforcer(driver: Driver, host: Host) -> tuple[Enforcer, ...]:
    """MPS over the simulator's programs, as an agent has it; the folder needs a short path."""
    path = f"{host.root / 'usr/bin'}:{os.environ['PATH']}"
    return (MpsEnforcer(host.root / "run/mps", driver, search_path=path, deadline_seconds=4.0),)

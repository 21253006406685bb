"""Control daemons of MPS: the stand-in of the simulator, or NVIDIA's own where it is installed."""

from __future__ import annotations

import contextlib
import ctypes
import io
import os
import re
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from mig_agent.simulator import Simulator, open_library
from mig_agent.simulator.mps import control

OTHER_UID = 65534
COMMANDS: Sequence[Mapping[str, Any]] = tomllib.loads(
    (Path(__file__).parent.parent / "simulator/mps_commands.toml").read_text(encoding="utf-8")
)["step"]
_SECONDS = 20


@dataclass(kw_only=True)
class Mps:
    """The programs, and one pipe folder."""

    folder: Path
    branch: int
    path: str
    """`PATH` of the programs."""
    env: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.pipe, self.logs = self.folder / "pipe", self.folder / "log"

    def environment(self, **more: str) -> dict[str, str]:
        folders = {"CUDA_MPS_PIPE_DIRECTORY": str(self.pipe), "CUDA_MPS_LOG_DIRECTORY": str(self.logs)}
        return {"PATH": self.path, **self.env, **folders, **more}

    def start(self, *arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
        """Starts a daemon, in the background unless told otherwise."""
        return self._run(arguments or ("-d",), "", more)

    def say(self, commands: str, *, uid: int | None = None, seconds: float = _SECONDS) -> tuple[int, str, str]:
        """Gives commands to the daemon; returns the program's exit status, output and errors."""
        done = self._run((), commands, {}, uid=uid, seconds=seconds)
        return done.returncode, done.stdout, done.stderr

    def pids(self) -> list[int]:
        """The daemon and its servers, by the pipe folder in their environment."""
        wanted = f"CUDA_MPS_PIPE_DIRECTORY={self.pipe}".encode()
        found = []
        for folder in Path("/proc").iterdir():
            try:
                is_ours = wanted in (folder / "environ").read_bytes().split(b"\0")
                words = (folder / "cmdline").read_bytes()
            except OSError:
                continue
            if is_ours and folder.name.isdigit() and b"mps" in words:
                found.append(int(folder.name))
        return sorted(found)

    def log(self) -> str:
        return (self.logs / "control.log").read_text(encoding="utf-8")

    def _run(
        self,
        arguments: Sequence[str],
        text: str,
        more: Mapping[str, str],
        *,
        uid: int | None = None,
        seconds: float = _SECONDS,
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["nvidia-cuda-mps-control", *arguments],
            input=text,
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
            env=self.environment(**more),
            user=uid,
            group=uid,
            extra_groups=None if uid is None else (),
        )


@dataclass(kw_only=True)
class StandIn(Mps):
    """The programs of a simulated machine."""

    state_file: Path

    def say(self, commands: str, *, uid: int | None = None, seconds: float = _SECONDS) -> tuple[int, str, str]:
        """Runs the program's own code in this process, which saves its start; not where it may hang."""
        if seconds != _SECONDS:
            return super().say(commands, uid=uid, seconds=seconds)
        with contextlib.ExitStack() as stack:
            out = stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
            errors = stack.enter_context(contextlib.redirect_stderr(io.StringIO()))
            stack.enter_context(mock.patch.object(sys, "stdin", io.StringIO(commands)))
            stack.enter_context(mock.patch.dict(os.environ, self.environment()))
            if uid is not None:
                stack.callback(os.seteuid, os.geteuid())
                os.seteuid(uid)
            status = control.main(str(self.state_file), ())
        return status, out.getvalue(), errors.getvalue()

    def start_cuda(self, *steps: str, **more: str) -> subprocess.Popen[str]:
        """Starts a program that uses CUDA; `hold` waits until its standard input is closed."""
        return subprocess.Popen(
            ["simulated-cuda", *steps],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=self.environment(**more),
        )

    def cuda(self, *steps: str, **more: str) -> list[str]:
        """Return what the program prints, from its beginning to its end."""
        program = self.start_cuda(*steps, **more)
        return program.communicate(timeout=_SECONDS)[0].splitlines()


def stand_in(simulator: Simulator, folder: Path) -> StandIn:
    """The programs of a simulated machine."""
    open_library(simulator.state_file)
    path = f"{simulator.host_root / 'usr/bin'}:{os.environ['PATH']}"
    branch = int(simulator.machine()["driver_version"].split(".")[0])
    return StandIn(folder=folder, branch=branch, path=path, state_file=simulator.state_file)


def real(folder: Path) -> Mps:
    """NVIDIA's programs, found on PATH. Skips the test where they are not installed."""
    if shutil.which("nvidia-cuda-mps-control") is None:
        pytest.skip("NVIDIA's nvidia-cuda-mps-control is not installed")
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        pytest.skip("NVIDIA's libcuda.so.1, which nvidia-cuda-mps-server needs, is not installed")
    version = re.search(r"libcuda\.so\.(\d+)\.", Path("/proc/self/maps").read_text(encoding="utf-8"))
    assert version is not None
    env = {name: os.environ[name] for name in ("LD_LIBRARY_PATH",) if name in os.environ}
    return Mps(folder=folder, branch=int(version[1]), path=os.environ["PATH"], env=env)


def differences(mps: Mps) -> list[str]:
    """Return each command of the table that the daemon does not answer as written."""
    found = []
    for step in COMMANDS:
        is_other = step.get("user") == "other"
        if not step.get("from", 0) <= mps.branch <= step.get("until", 999) or (is_other and os.geteuid() != 0):
            continue
        status, out, errors = mps.say(f"{step['say']}\n", uid=OTHER_UID if is_other else None)
        expected = f"{step['out']}\n" if "out" in step else ""
        if (status, out, errors) != (0, expected, ""):
            found.append(f"{step['say']!r}: {status} {out!r} {errors!r}, not {expected!r}")
        deadline = time.monotonic() + 2  # a server ends on its own
        while step.get("log", "") not in mps.log() and time.monotonic() < deadline:
            time.sleep(0.01)
        if step.get("log", "") not in mps.log():
            found.append(f"{step['say']!r}: control.log does not tell {step['log']!r}")
    return found

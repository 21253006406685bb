"""The demo's environment: a folder, an agent over simulated GPUs, and `migctl` called as a person would."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

GPUS = "a100-40gb:1,h100-80gb:2"
_READY_SECONDS = 60.0
_END_SECONDS = 20.0
_POLL_SECONDS = 0.05
_LOG_LINES = 15
_LONGEST_TEMPORARY_PATH = 60
_SHORT_PLACE = "/tmp"  # noqa: S108 -- the folder in it is made by mkdtemp


class DemoStepError(Exception):
    """A step did not do what the demo says it does."""


class Stage:
    """The folder and processes of a demo, which all end with it, whatever happens."""

    def __init__(self) -> None:
        # A socket's path must be short, whatever TMPDIR is.
        place = tempfile.gettempdir() if len(tempfile.gettempdir()) < _LONGEST_TEMPORARY_PATH else _SHORT_PLACE
        self._temporary = tempfile.TemporaryDirectory(prefix="mig-agent-demo-", dir=place)
        self.folder = Path(self._temporary.name)
        self.address = f"unix://{self.folder}/agent.sock"
        self._log = self.folder / "agent.log"
        self._agent: subprocess.Popen[bytes] | None = None
        self._workloads: list[subprocess.Popen[bytes]] = []
        # The user's own settings and remembered tokens are not used.
        clean = {name: value for name, value in os.environ.items() if not name.startswith("MIG_AGENT_")}
        self._environment = clean | {"MIG_AGENT_ADDRESS": self.address, "XDG_STATE_HOME": str(self.folder / "person")}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in (*self._workloads, self._agent):
            if process is not None:
                _end(process)
        self._temporary.cleanup()

    # The agent

    def start_agent(self) -> None:
        """Run `mig-agent serve` and wait until it answers."""
        command = [
            *(sys.executable, "-m", "mig_agent", "serve"),
            *("--simulate", GPUS),
            *("--state-dir", str(self.folder)),
            *("--listen", self.address),
            *("--metrics", "off"),
            *("--node", "demo"),
        ]
        _print_command(f"mig-agent serve --simulate {GPUS} --state-dir {self.folder} --listen {self.address} &")
        with self._log.open("wb") as log:
            self._agent = subprocess.Popen(  # noqa: S603 -- our own program
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self._environment,
                cwd="/",
                start_new_session=True,  # Ctrl-C reaches only this program, which then ends the others in order
            )
        deadline = time.monotonic() + _READY_SECONDS
        while self._migctl_quietly("status").returncode != 0:
            if self._agent.poll() is not None or time.monotonic() > deadline:
                raise DemoStepError(f"the agent does not serve:\n{self.log_tail()}")
            time.sleep(_POLL_SECONDS)

    def stop_agent(self) -> int | None:
        """Send SIGTERM and return the exit code."""
        if self._agent is None:
            return None
        self._agent.terminate()
        return self._agent.wait(_END_SECONDS)

    def log_tail(self) -> str:
        """Return the end of the agent's log."""
        lines = self._log.read_text(errors="replace").splitlines() if self._log.exists() else []
        return "\n".join(lines[-_LOG_LINES:])

    # What a person types

    def migctl(self, *arguments: str) -> None:
        """Print a command and run it with its output. Raises DemoStepError if it fails."""
        _print_command(f"migctl {shlex.join(arguments)}")
        done = self._migctl(*arguments, stdout=None)
        if done.returncode != 0:
            raise DemoStepError(f"migctl ended with exit code {done.returncode}\n{self.log_tail()}")

    def run_in_background(self, *arguments: str, shown: Sequence[str]) -> subprocess.Popen[bytes]:
        """Start a command in the background, and print it as a person would type it."""
        _print_command(f"migctl {shlex.join(shown)} &")
        process = subprocess.Popen(  # noqa: S603 -- our own program
            [sys.executable, "-m", "mig_agent.migctl", *arguments],
            stdin=subprocess.DEVNULL,
            env=self._environment,
            cwd=self.folder,
            start_new_session=True,
        )
        self._workloads.append(process)
        return process

    # What the demo checks it with

    def status(self) -> Mapping[str, Any]:
        """Return the answer of `migctl status -o json`."""
        done = self._migctl_quietly("status", "-o", "json")
        if done.returncode != 0:
            raise DemoStepError(f"migctl status ended with exit code {done.returncode}\n{self.log_tail()}")
        answer: Mapping[str, Any] = json.loads(done.stdout)
        return answer

    def nvml_calls(self, function: str) -> int:
        """Return how often the agent has called a function of the simulated driver."""
        machine = json.loads((self.folder / "simulated-gpus.json").read_text(encoding="utf-8"))
        return int(machine["calls"].get(function, 0))

    def simulator(self, *arguments: str) -> None:
        """Change the simulated machine by a command of the simulator."""
        command = [sys.executable, "-m", "mig_agent.simulator", "--state-dir", str(self.folder), *arguments]
        subprocess.run(command, check=True, capture_output=True, env=self._environment)  # noqa: S603 -- our own program

    def _migctl_quietly(self, *arguments: str) -> subprocess.CompletedProcess[bytes]:
        return self._migctl(*arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE)

    def _migctl(
        self, *arguments: str, stdout: int | None, stderr: int | None = None
    ) -> subprocess.CompletedProcess[bytes]:
        return subprocess.run(  # noqa: S603 -- our own program
            [sys.executable, "-m", "mig_agent.migctl", *arguments],
            check=False,
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            env=self._environment,
        )


def _print_command(text: str) -> None:
    bold = ("\x1b[1m", "\x1b[0m") if sys.stdout.isatty() and not os.environ.get("NO_COLOR") else ("", "")
    print(f"\n{bold[0]}$ {text}{bold[1]}", flush=True)  # noqa: T201 -- the demo prints


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process and all that it started."""
    if process.poll() is None:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(_END_SECONDS)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # what is left of its session
    process.wait()

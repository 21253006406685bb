"""`mig-agent serve` as a real process over simulated GPUs, for tests of its faces."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from mig_agent.simulator import STATE_FILE, Simulator
from support import forks

GENEROUS_SECONDS = 60.0
"""For whatever ought to happen at once, on a machine that has other things to do."""
PROCESS_SECONDS = 3 * GENEROUS_SECONDS
"""For a program from its start to its end: twenty others may be starting beside it. Less than a test's own deadline."""
SERVING = int(health_pb2.HealthCheckResponse.ServingStatus.Value("SERVING"))
CHECK_THREADS = "MIG_AGENT_CHECK_THREADS"
"""Has an agent fail where its engine is used off the event loop."""
_POLL_SECONDS = 0.02
_PROGRAM = [sys.executable, *forks.AGENT]
_AT_ONCE = ("--simulate-create-seconds", "0", "--simulate-destroy-seconds", "0")


def eventually(condition: Callable[[], Any], what: str = "", seconds: float = GENEROUS_SECONDS) -> Any:
    """The first true answer of the condition; AssertionError when there is none in time."""
    deadline = time.monotonic() + seconds
    while True:
        answer = condition()
        if answer:
            return answer
        assert time.monotonic() < deadline, f"it did not happen: {what or condition}"
        time.sleep(_POLL_SECONDS)


@contextlib.contextmanager
def short_folder() -> Iterator[Path]:
    """A temporary folder whose path is short enough for sockets in it."""
    path = Path(tempfile.mkdtemp(prefix="mig-"))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def environment(folder: Path, **more: str) -> dict[str, str]:
    """Of a person who has set nothing: only the tests' own folder is remembered in."""
    clean = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("MIG_AGENT_") and name not in {"CUDA_VISIBLE_DEVICES", "NOTIFY_SOCKET"}
    }
    own = {"XDG_STATE_HOME": str(folder / "person"), "XDG_CONFIG_HOME": str(folder / "person"), "XDG_CONFIG_DIRS": "/-"}
    return clean | own | {"NO_COLOR": "1", "COLUMNS": "100", CHECK_THREADS: "1"} | more


class Agent:
    """An agent that has answered SERVING; killed at the end, and restarted on the same state with `start`."""

    def __init__(
        self,
        folder: Path,
        gpus: str = "a100-40gb:1,h100-80gb:1",
        *,
        flags: Sequence[str] = (),
        variables: Mapping[str, str] | None = None,
        listen: Sequence[str] = (),
        forked: bool = True,
    ) -> None:
        """`gpus` are simulated ones; without any it is the real ones. `forked`: the process need not be a new one."""
        self.folder = folder
        self.state_dir = folder / "state"
        self.socket = folder / "agent.sock"
        self.address = listen[0] if listen else f"unix://{self.socket}"
        self.log_file = folder / "agent.log"
        self.process: subprocess.Popen[bytes] | forks.ForkedProcess | None = None
        self._forked = forked
        self._command = [
            *_PROGRAM,
            "serve",
            *(("--simulate", gpus, *_AT_ONCE) if gpus else ()),
            *("--state-dir", str(self.state_dir)),
            *(part for each in listen or [self.address] for part in ("--listen", each)),
            *("--admin-listen", f"unix://{folder}/admin.sock"),
            *("--metrics", "off", "--node", "tested"),
            *flags,
        ]
        self._environment = environment(folder, **(variables or {}))

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            print(f"--- {self.log_file}\n{self.log()}")  # noqa: T201 -- pytest shows it with the failure
        self.kill()

    # The process

    def launch(self) -> subprocess.Popen[bytes] | forks.ForkedProcess:
        """Starts the process and waits for nothing."""
        command, environment = self._command, self._environment
        with self.log_file.open("ab") as log:
            if self._forked and command[: len(_PROGRAM)] == _PROGRAM:
                self.process = forks.start(command[1:], env=environment, output=log, errors=log, cwd=self.folder)
            else:
                self.process = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, cwd=self.folder
                )
        return self.process

    def start(self) -> None:
        """Starts the process and waits until it serves."""
        process = self.launch()

        def serving() -> bool:
            assert process.poll() is None, f"the agent ended with {process.returncode}:\n{self.log()}"
            # To ask costs more than to look.
            return (not self.address.endswith(str(self.socket)) or self.socket.exists()) and (
                health(self.address) == SERVING
            )

        eventually(serving, "the agent serves")

    def stop(self) -> int:
        """SIGTERM; the exit code."""
        return self.signal(signal.SIGTERM)

    def signal(self, number: signal.Signals) -> int:
        """Sends a signal and waits for the end; the exit code."""
        assert self.process is not None
        self.process.send_signal(number)
        return self.process.wait(GENEROUS_SECONDS)

    def kill(self) -> None:
        """As a crash would; harmless where it has ended."""
        if self.process is not None:
            self.process.kill()
            self.process.wait(GENEROUS_SECONDS)

    def restart_after_crash(self) -> None:
        """Killed, and started again on what it left."""
        self.kill()
        self.start()

    def log(self) -> str:
        """All that it has logged so far."""
        return self.log_file.read_text(errors="replace") if self.log_file.exists() else ""

    def serving(self) -> dict[str, Any]:
        """The first line of the log that says where it serves; it may come a moment after the first answer."""

        def line() -> dict[str, Any] | None:
            whole = (each for each in self.log().splitlines(keepends=True) if each.endswith("\n"))
            return next((each for each in map(json.loads, whole) if each["event"] == "serving"), None)

        found: dict[str, Any] = eventually(line, "the agent serves")
        return found

    # What is around it

    @property
    def simulator(self) -> Simulator:
        """The machine that it runs on."""
        return Simulator(self.state_dir / STATE_FILE)

    def migctl(
        self, *arguments: str, code: int | None = 0, variables: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Runs a command to its end, and checks its exit code unless it is None."""
        done = forks.run(*forks.MIGCTL, *arguments, env=self.person(variables), timeout=PROCESS_SECONDS)
        words = f"migctl {' '.join(arguments)} ended with {done.returncode}\n{done.stdout}{done.stderr}"
        assert code is None or done.returncode == code, words
        return done

    def ask(self, *arguments: str, code: int = 0) -> Any:
        """What a command prints with `-o json`."""
        return json.loads(self.migctl(*arguments, "-o", "json", code=code).stdout)

    def begin(self, *arguments: str) -> subprocess.Popen[str]:
        """A command that goes on."""
        return subprocess.Popen(
            [sys.executable, "-m", "mig_agent.migctl", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=self.person(),
        )

    def person(self, more: Mapping[str, str] | None = None) -> dict[str, str]:
        """The environment of somebody who uses this agent."""
        return environment(self.folder, MIG_AGENT_ADDRESS=self.address, **(more or {}))

    def instances(self, state: str = "") -> list[dict[str, Any]]:
        """The instances of all GPUs, or those in one state."""
        found = [each for gpu in self.ask("status")["gpus"] for each in gpu["instances"]]
        return [each for each in found if state in {"", each["state"]}]


def health(address: str, service: str = "") -> int:
    """What the agent says of its health; 0 (UNKNOWN) where nobody answers."""
    # Not one that another try left behind and that waits longer after every failure.
    with grpc.insecure_channel(address, options=(("grpc.use_local_subchannel_pool", 1),)) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        try:
            answer = stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=GENEROUS_SECONDS)
        except grpc.RpcError:
            return 0
        return int(answer.status)

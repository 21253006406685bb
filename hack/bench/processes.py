"""Starts what is measured: the agent over simulated GPUs, and the echo server that is its baseline."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import grpc

HERE = Path(__file__).resolve().parent
_READY_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Served:
    """A server that answers on `address`, and how long its start took."""

    address: str
    pid: int
    seconds_to_ready: float


@contextlib.contextmanager
def agent(
    gpus: str,
    *,
    state_dir: Path | None = None,
    create_seconds: float = 0.0,
    destroy_seconds: float = 0.0,
    program: tuple[str, ...] = ("-m", "mig_agent"),
) -> Iterator[Served]:
    """Run `mig-agent serve` with these simulated GPUs; kill it at the end. `program` is what Python runs."""
    with contextlib.ExitStack() as stack:
        folder = state_dir or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="mig-bench-")))
        address = f"unix://{folder}/agent.sock"
        command = [
            *(sys.executable, *program, "serve"),
            *("--simulate", gpus),
            *("--state-dir", str(folder)),
            *("--listen", address),
            *("--admin-listen", f"unix://{folder}/admin.sock"),
            *("--metrics", "off"),
            *("--simulate-create-seconds", str(create_seconds)),
            *("--simulate-destroy-seconds", str(destroy_seconds)),
        ]
        # The log goes to a file, as with systemd.
        log = stack.enter_context((folder / "agent.log").open("ab"))
        yield stack.enter_context(_running(command, address, log=log.fileno()))


@contextlib.contextmanager
def echo() -> Iterator[Served]:
    """Run the bare gRPC server of echo.py."""
    with tempfile.TemporaryDirectory(prefix="mig-bench-") as folder:
        address = f"unix://{folder}/echo.sock"
        with _running([sys.executable, str(HERE / "echo.py"), address], address, log=subprocess.DEVNULL) as served:
            yield served


@contextlib.contextmanager
def _running(command: list[str], address: str, *, log: int) -> Iterator[Served]:
    began = time.perf_counter()
    process = subprocess.Popen(command, stdout=log, stderr=log, env=os.environ)
    try:
        _wait_until_it_answers(process, address)
        yield Served(address=address, pid=process.pid, seconds_to_ready=time.perf_counter() - began)
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait_until_it_answers(process: subprocess.Popen[bytes], address: str) -> None:
    path = Path(address.removeprefix("unix://"))
    deadline = time.monotonic() + _READY_SECONDS
    while not path.exists():
        if process.poll() is not None:
            message = f"cannot measure: {process.args!r} ended with {process.returncode}"
            raise RuntimeError(message)
        if time.monotonic() > deadline:
            message = f"cannot measure: {process.args!r} does not answer"
            raise RuntimeError(message)
        time.sleep(0.002)
    with grpc.insecure_channel(address) as channel:
        grpc.channel_ready_future(channel).result(timeout=_READY_SECONDS)

"""The stand-in for nvidia-cuda-mps-control: starts the daemon, or sends it the commands of standard input."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

from mig_agent.simulator.mps.daemon import CannotStartError, Daemon
from mig_agent.simulator.mps.wire import DEFAULT_LOG, DEFAULT_PIPE, LOG_VARIABLE, PIPE_VARIABLE, connect
from mig_agent.simulator.state import driver_branch
from mig_agent.simulator.store import Store

_FIRST_WITH_MULTI_USER = 555


def main(state_file: str, arguments: Sequence[str]) -> int:
    """Do what the real program does with these arguments. Returns the exit status."""
    path = Path(state_file)
    store = Store(path)
    branch = driver_branch(store.read())
    pipe = Path(os.environ.get(PIPE_VARIABLE) or store.host.root / DEFAULT_PIPE)
    logs = Path(os.environ.get(LOG_VARIABLE) or store.host.root / DEFAULT_LOG)
    known = {"-d", "-f", *(("-multiuser-server",) if branch >= _FIRST_WITH_MULTI_USER else ())}
    if set(arguments) - known:
        if branch >= _FIRST_WITH_MULTI_USER:
            _print("CUDA MPS Control for simulated GPUs.")
            return 1
        return _send(pipe)
    if not {"-d", "-f"} & set(arguments):
        return _send(pipe)
    is_foreground = "-f" in arguments
    daemon = Daemon(
        path, pipe, logs, log_to=sys.stdout if is_foreground else None, multi_user="-multiuser-server" in arguments
    )
    return _run(daemon) if is_foreground else _in_background(daemon)


def _run(daemon: Daemon) -> int:
    try:
        daemon.open()
    except CannotStartError as error:
        if str(error):
            _print(str(error), sys.stderr)
        return 1
    daemon.serve()
    time.sleep(0.01)  # for the answer to `quit`
    return 0


def _in_background(daemon: Daemon) -> int:
    """Start the daemon as a child of init, and wait until it serves."""
    opened, says = os.pipe()
    if os.fork():
        os.close(says)
        return 0 if os.read(opened, 1) else 1
    os.setsid()
    if os.fork():
        os._exit(0)
    os.close(opened)
    try:
        daemon.open()
    except CannotStartError as error:
        if str(error):
            _print(str(error), sys.stderr)
        os._exit(1)
    nothing = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(nothing, fd)
    os.write(says, b"1")
    os.close(says)
    daemon.serve()
    time.sleep(0.01)
    os._exit(0)


def _send(pipe: Path) -> int:
    """Send each line of standard input; print the answers. Ends with the status that `quit` answers."""
    try:
        link = connect(pipe)
    except OSError:
        _print("Cannot find MPS control daemon process", sys.stderr)
        return 1
    with contextlib.closing(link):
        for line in sys.stdin:
            link.send({"kind": "command", "command": line.rstrip("\n")})
            answer = link.receive()
            if answer is None:
                _print("Cannot send command to MPS control daemon process", sys.stderr)
                return 1
            lines = answer.get("lines")
            for each in lines if isinstance(lines, list) else ():
                _print(str(each))
            if answer.get("quit"):
                return 1 if answer.get("code") else 0
    return 0


def _print(text: str, to: TextIO | None = None) -> None:
    print(text, file=to, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))

"""Processes forked from one that has imported the agent's programs: importing is nine tenths of a program's start.

What runs in the child is the program itself, from its `main()` to its end, or a script.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import importlib
import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from mig_agent.adapters.failpoints import FAILPOINTS, Failpoints

TESTS = Path(__file__).resolve().parent.parent
AGENT, MIGCTL = ("-m", "mig_agent"), ("-m", "mig_agent.migctl")
"""What makes a Python these programs."""
_IMPORTED = (
    *(f"{each}.__main__" for _, each in (AGENT, MIGCTL)),
    *(
        "mig_agent.program",
        "mig_agent.daemon.serve",
        "mig_agent.migctl.cli",
        "mig_agent.client",
        "support.failpoint_control",
    ),
    *(f"mig_agent.simulator.{each}_calls" for each in ("device", "event", "mig")),
    *(f"mig_agent.migctl.commands.{each}" for each in ("request", "lease_changes", "status", "admin", "events")),
)
_READ_AT_START = re.compile("PYTHON|LANG|LC_")
"""Variables that the interpreter reads, so that they would come too late for a forked process."""
_MOST_BYTES = 1 << 17


class ForkedProcess:
    """A child of the fork server, with as much of `subprocess.Popen` as tests use. Thread-safe."""

    def __init__(self, pid: int, exit_code: int) -> None:
        """`exit_code` is the descriptor from which it can be read when the process has ended."""
        self.pid = pid
        self.returncode: int | None = None
        self._exit_code = open(exit_code, "rb", buffering=0)  # noqa: SIM115 -- closed with the process's end
        self._mutex = threading.Lock()

    def poll(self) -> int | None:
        """Return the exit code, negative for a signal; None while the process runs."""
        with self._mutex:
            return self._wait(0.0)

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end and return the exit code. Raises `subprocess.TimeoutExpired`."""
        with self._mutex:
            code = self._wait(timeout)
        if code is None:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
        return code

    def send_signal(self, number: int) -> None:
        """Send a signal; harmless when the process has ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)

    def _wait(self, seconds: float | None) -> int | None:
        if self.returncode is None:
            waiting = select.poll()
            waiting.register(self._exit_code, select.POLLIN)
            if waiting.poll(None if seconds is None else seconds * 1000):
                # Without an exit code the fork server was killed, and its children with it.
                self.returncode = int(self._exit_code.read() or -signal.SIGKILL)
                self._exit_code.close()
        return self.returncode


def start(
    arguments: Sequence[str],
    *,
    env: Mapping[str, str],
    output: BinaryIO,
    errors: BinaryIO,
    cwd: Path | None = None,
    control: Path | None = None,
) -> ForkedProcess | subprocess.Popen[bytes]:
    """Start Python with these arguments, `-m` and a program or `-c` and a script first, and without any input.

    It is forked unless it would then differ from a new process: where variables are set that only a new interpreter
    reads, or where this thread has another user or umask than the tests. `control` is the folder of a
    `support.failpoint_control.Control`, for forked processes alone.
    """
    set_apart = any(_READ_AT_START.match(name) for name, _ in env.items() ^ _server().environment.items())
    if set_apart or _inherited() != _server().inherited:
        assert control is None
        command = [sys.executable, *arguments]
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=errors, env=env, cwd=cwd)
    order = {
        "arguments": arguments,
        "environment": dict(env),
        "cwd": str(cwd or Path.cwd()),
        "control": str(control or ""),
    }
    return _server().fork(order, output.fileno(), errors.fileno())


def run(
    *arguments: str, env: Mapping[str, str] | None = None, timeout: float = 120.0
) -> subprocess.CompletedProcess[str]:
    """Run what `start` takes to its end. Raises `subprocess.TimeoutExpired`."""
    env = os.environ if env is None else env
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        process = start(arguments, env=env, output=output, errors=errors)
        try:
            code = process.wait(timeout)
        except BaseException:
            process.kill()
            process.wait()
            raise
        texts = []
        for file in (output, errors):
            file.seek(0)
            texts.append(file.read().decode())
    return subprocess.CompletedProcess(arguments, code, *texts)


def _inherited() -> tuple[object, ...]:
    """Return what a child inherits from the thread that starts it, and tests change."""
    with open("/proc/thread-self/status", encoding="ascii") as status:  # noqa: PTH123 -- shorter than two lines
        umask = next(line for line in status if line.startswith("Umask"))
    return os.getresuid(), os.getresgid(), umask


class _Server:
    """The fork server, as the tests' process sees it."""

    def __init__(self) -> None:
        self.inherited = _inherited()
        self.environment = dict(os.environ)
        self._mutex = threading.Lock()
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        script = f"import sys; sys.path.insert(0, {str(TESTS)!r}); from support.forks import serve; serve()"
        with theirs:
            self._process = subprocess.Popen([sys.executable, "-c", script], stdin=theirs.fileno())
        atexit.register(self._close)

    def fork(self, order: Mapping[str, object], output: int, errors: int) -> ForkedProcess:
        exit_code, theirs = os.pipe()
        try:
            with self._mutex:
                socket.send_fds(self._socket, [json.dumps(order).encode()], [output, errors, theirs])
                pid = int(self._socket.recv(_MOST_BYTES))
        finally:
            os.close(theirs)
        return ForkedProcess(pid, exit_code)

    def _close(self) -> None:
        self._socket.close()
        self._process.wait()


@functools.cache
def _server() -> _Server:
    return _Server()


# In the fork server


def serve() -> None:
    """Fork a process for each order that comes on stdin, and write each exit code; end when the tests have ended."""
    for module in _IMPORTED:
        importlib.import_module(module)
    gc.freeze()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it ends with the tests
    woken, waker = os.pipe()
    os.set_blocking(waker, False)
    signal.signal(signal.SIGCHLD, lambda _number, _frame: None)
    signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
    exit_codes: dict[int, int] = {}
    with socket.socket(fileno=os.dup(0)) as orders:
        waiting = select.poll()
        waiting.register(orders, select.POLLIN)
        waiting.register(woken, select.POLLIN)
        while True:
            ready = {descriptor for descriptor, _ in waiting.poll()}
            if woken in ready:
                os.read(woken, _MOST_BYTES)
                _reap(exit_codes)
            if orders.fileno() not in ready:
                continue
            message, descriptors, _, _ = socket.recv_fds(orders, _MOST_BYTES, 3)
            if not message:
                break
            pid = os.fork()
            if not pid:
                orders.detach()
                _become(json.loads(message), *descriptors[:2])
            *streams, exit_codes[pid] = descriptors
            for each in streams:
                os.close(each)
            orders.send(str(pid).encode())
    for pid in exit_codes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _reap(exit_codes: dict[int, int]) -> None:
    for pid in tuple(exit_codes):
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            told = exit_codes.pop(pid)
            os.write(told, str(os.waitstatus_to_exitcode(status)).encode())
            os.close(told)


def _become(order: Mapping[str, Any], output: int, errors: int) -> NoReturn:
    """Be a new process of the program, as far as it can tell."""
    code: object = 1
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        null = os.open(os.devnull, os.O_RDONLY)
        for descriptor, number in ((null, 0), (output, 1), (errors, 2)):
            os.dup2(descriptor, number)
        os.closerange(3, min(_MOST_BYTES, os.sysconf("SC_OPEN_MAX")))
        os.environ.clear()
        os.environ.update(order["environment"])
        os.chdir(order["cwd"])
        if order["control"]:
            from support.failpoint_control import listen  # noqa: PLC0415 -- it imports this module

            listen(Path(order["control"]))
        armed = Failpoints.from_environment(os.environ)
        FAILPOINTS.arm(armed._name, armed._remaining)
        option, what, *arguments = order["arguments"]
        if option == "-c":
            sys.argv = ["-c", *arguments]
            exec(what, {"__name__": "__main__"})  # noqa: S102 -- as the interpreter does
            code = 0
        else:
            main = sys.modules[f"{what}.__main__"]
            sys.argv = [str(main.__file__), *arguments]
            code = main.main()
    except SystemExit as end:
        code = end.code
    except BaseException:  # noqa: BLE001 -- as the interpreter does
        traceback.print_exc()
    finally:
        with contextlib.suppress(OSError):
            sys.stdout.flush()
        if isinstance(code, str):
            sys.stderr.write(f"{code}\n")
            code = 1
        os._exit(int(code or 0))  # type: ignore[call-overload]  # None or an int by now

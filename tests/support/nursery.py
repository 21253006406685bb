"""Agents that are forked from a process which has imported everything already: starting one takes a fifth of the time.

What runs in the child is `mig-agent serve` itself, from its command line to its end. Beside it a listener at every
crash point reads a control file: it writes down which places are reached, and kills the process at the one named there.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from support.agent import GENEROUS_SECONDS, Agent

TESTS = Path(__file__).resolve().parent.parent
_POLL_SECONDS = 0.002


class Control:
    """What the listener in the agent is told, and what it tells; two small files."""

    def __init__(self, folder: Path) -> None:
        self._orders = folder / "crash.json"
        self._told = folder / "reached"
        self.stand_by()

    def stand_by(self) -> None:
        """Nothing is written down, nobody is killed."""
        self._give({})

    def record(self) -> None:
        """From now on the places are written down."""
        self._told.unlink(missing_ok=True)
        self._give({"record": True})

    def arm(self, place: str, count: int) -> None:
        """From now on the process dies when it reaches the place for the `count`-th time."""
        self._give({"place": place, "count": count, "order": time.monotonic()})

    def reached(self) -> Counter[str]:
        """The places written down."""
        return Counter(self._told.read_text().splitlines()) if self._told.exists() else Counter()

    def _give(self, orders: Mapping[str, object]) -> None:
        temporary = self._orders.with_suffix(".new")
        temporary.write_text(json.dumps(orders))
        temporary.replace(self._orders)


class Listener:
    """In the agent's process, at every crash point."""

    def __init__(self, folder: Path) -> None:
        self._orders = folder / "crash.json"
        self._told = folder / "reached"
        self._order = 0.0
        self._seen = 0

    def __call__(self, place: str) -> None:
        orders = json.loads(self._orders.read_text())
        if orders.get("record"):
            with self._told.open("a") as told:
                told.write(f"{place}\n")
        if orders.get("place") != place:
            return
        if orders["order"] != self._order:
            self._order, self._seen = orders["order"], 0
        self._seen += 1
        if self._seen == orders["count"]:
            os.kill(os.getpid(), signal.SIGKILL)


def serve() -> None:
    """The nursery itself: each line is an order, each is answered with a line."""
    for module in (
        "mig_agent.daemon.serve",
        *(f"mig_agent.simulator.{each}_calls" for each in ("device", "event", "mig")),
    ):
        importlib.import_module(module)
    children: set[int] = set()
    for line in sys.stdin:
        order = json.loads(line)
        if "start" in order:
            answer: int | None = os.fork()
            if not answer:
                _be_an_agent(order["start"])
            children.add(int(answer or 0))
        else:
            answer = _ended(order["wait"], order["seconds"])
            if answer is not None:
                children.discard(order["wait"])
        sys.stdout.write(f"{json.dumps(answer)}\n")
        sys.stdout.flush()
    for child in children:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)


def _be_an_agent(order: Mapping[str, Any]) -> None:
    try:
        from mig_agent.adapters.failpoints import FAILPOINTS  # noqa: PLC0415 -- the same
        from mig_agent.program import run  # noqa: PLC0415 -- in the child alone

        folder = Path(order["folder"])
        log = os.open(folder / "agent.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        null = os.open(os.devnull, os.O_RDONLY)
        for descriptor, stands_for in ((null, 0), (log, 1), (log, 2)):
            os.dup2(descriptor, stands_for)
        os.environ.clear()
        os.environ.update(order["environment"])
        os.chdir(folder)
        FAILPOINTS.listener = Listener(folder)
        run(order["arguments"])
    finally:
        os._exit(1)  # serving ends the process by itself


def _ended(pid: int, seconds: float) -> int | None:
    deadline = time.monotonic() + seconds
    while True:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() >= deadline:
            return None
        time.sleep(_POLL_SECONDS)


class Nursery:
    """The nursery as its tests see it."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def ask(self, **order: object) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{json.dumps(order)}\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())


class Child:
    """A forked agent, with as much of Popen as Agent wants."""

    def __init__(self, nursery: Nursery, pid: int) -> None:
        self._nursery = nursery
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        return self._look(0.0)

    def wait(self, timeout: float = GENEROUS_SECONDS) -> int:
        code = self._look(timeout)
        assert code is not None, f"the agent did not end in {timeout:g} s"
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _look(self, seconds: float) -> int | None:
        if self.returncode is None:
            self.returncode = self._nursery.ask(wait=self.pid, seconds=seconds)
        return self.returncode


class ForkedAgent(Agent):
    """An agent out of the nursery, with its control."""

    def __init__(self, nursery: Nursery, folder: Path, gpus: str, *, flags: Sequence[str] = ()) -> None:
        super().__init__(folder, gpus, flags=flags)
        self._nursery = nursery
        self.control = Control(folder)

    def launch(self) -> Any:
        """Starts the process and waits for nothing."""
        arguments = self._command[self._command.index("serve") :]
        order = {"folder": str(self.folder), "environment": self._environment, "arguments": arguments}
        child: Any = Child(self._nursery, self._nursery.ask(start=order))
        self.process = child
        return child


@contextlib.contextmanager
def nursery() -> Iterator[Nursery]:
    """A nursery that ends with the block, and its children with it."""
    script = f"import sys; sys.path.insert(0, {str(TESTS)!r}); from support.nursery import serve; serve()"
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        yield Nursery(process)
        assert process.stdin is not None
        process.stdin.close()

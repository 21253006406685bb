"""Agents that tests kill at failpoints: which places are reached is written down, and at one named there it dies."""

from __future__ import annotations

import json
import os
import signal
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from mig_agent.adapters.failpoints import FAILPOINTS
from support import forks
from support.agent import Agent


class Control:
    """The orders to the listener in the agent's process, and its reports: two small files."""

    def __init__(self, folder: Path) -> None:
        self._orders = folder / "crash.json"
        self._told = folder / "reached"
        self.stand_by()

    def stand_by(self) -> None:
        """Stop recording and disarm."""
        self._give({})

    def record(self) -> None:
        """Record from now on which places are reached."""
        self._told.unlink(missing_ok=True)
        self._give({"record": True})

    def arm(self, place: str, count: int) -> None:
        """Have the process die when it reaches the place for the `count`-th time from now."""
        self._give({"place": place, "count": count, "order": time.monotonic()})

    def reached(self) -> Counter[str]:
        """Return how often each place was reached while that was recorded."""
        return Counter(self._told.read_text().splitlines()) if self._told.exists() else Counter()

    def _give(self, orders: Mapping[str, object]) -> None:
        temporary = self._orders.with_suffix(".new")
        temporary.write_text(json.dumps(orders))
        temporary.replace(self._orders)


class Listener:
    """Called in the agent's process at every failpoint."""

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


def listen(folder: Path) -> None:
    """Have a control in this folder rule this process."""
    FAILPOINTS.listener = Listener(folder)


class ControlledAgent(Agent):
    """A forked agent with its control."""

    def __init__(self, folder: Path, gpus: str, *, flags: Sequence[str] = ()) -> None:
        super().__init__(folder, gpus, flags=flags)
        self.control = Control(folder)

    def launch(self) -> forks.ForkedProcess:
        """Start the process and wait for nothing."""
        with self.log_file.open("ab") as log:
            process = forks.start(
                self._command[1:],
                env=self._environment,
                output=log,
                errors=log,
                cwd=self.folder,
                control=self.folder,
            )
        assert isinstance(process, forks.ForkedProcess)
        self.process = process
        return process

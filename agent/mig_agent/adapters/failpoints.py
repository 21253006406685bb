"""The one door for everything that an adapter changes, with a place before it and one after it.

Commits, changing calls of the driver, device nodes, files: each is made inside `FAILPOINTS.around(NAME)`. Going in
reaches the place `before-NAME`; coming out, when the change was made, `after-NAME`. A test can have the process killed
at any of them: `MIG_AGENT_CRASH_AT=before-commit:3` kills it with SIGKILL, as a power cut would, when it reaches that
place for the third time. Without the variable a door costs two comparisons. `tests/faults/test_doors.py` fails where a
change goes round it.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Mapping
from types import TracebackType

from mig_agent.core.errors import ConfigError

VARIABLE = "MIG_AGENT_CRASH_AT"


class Failpoints:
    """Counts how often the armed place is reached. Thread-safe."""

    def __init__(self, name: str = "", count: int = 1) -> None:
        self._name = name
        self._left = count
        self._mutex = threading.Lock()
        self.listener: Callable[[str], None] | None = None
        """Hears of every place that is reached, in the thread that reaches it."""

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> Failpoints:
        """Armed with what the variable says: `NAME:N`, or `NAME` for the first time. Raises ConfigError."""
        text = environment.get(VARIABLE, "")
        if not text:
            return cls()
        name, _, count = text.partition(":")
        if not name or not (count or "1").isdigit() or int(count or "1") < 1:
            raise ConfigError(f"cannot read {VARIABLE}={text}", "write a place and a number, such as before-commit:3")
        return cls(name, int(count or "1"))

    def arm(self, name: str, count: int) -> None:
        """Crashes at this place instead, at the `count`-th time from now."""
        with self._mutex:
            self._name, self._left = name, count

    def around(self, name: str) -> _Door:
        """What is changed inside is done between the places `before-NAME` and `after-NAME`."""
        return _Door(self, name)

    def reach(self, name: str) -> None:
        """Called at each place, with its name."""
        if self.listener is not None:
            self.listener(name)
        if name != self._name:
            return
        with self._mutex:
            self._left -= 1
            if self._left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
                # The first process of a container cannot be killed from within it; this is as sudden.
                os._exit(128 + signal.SIGKILL)

    @property
    def _idle(self) -> bool:
        return not self._name and self.listener is None


class _Door:
    """One way through; an error inside passes through it, and the place after is not reached then."""

    __slots__ = ("_name", "_points")

    def __init__(self, points: Failpoints, name: str) -> None:
        self._points = points
        self._name = name

    def __enter__(self) -> None:
        if not self._points._idle:  # noqa: SLF001 -- its own
            self._points.reach(f"before-{self._name}")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None and not self._points._idle:  # noqa: SLF001 -- its own
            self._points.reach(f"after-{self._name}")


FAILPOINTS = Failpoints.from_environment(os.environ)
"""Of this process. The one thing that is read from the environment on import, since it concerns a process and not an
agent, and a test must be able to reach it through any way of starting one."""

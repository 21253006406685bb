"""Failpoints: named places before and after every change of the outside world, where a test can kill the process.

Commits, changing driver calls, device nodes, files: each is made inside `FAILPOINTS.around(NAME)`. Entering reaches the
failpoint `before-NAME`; leaving after success reaches `after-NAME`. `MIG_AGENT_CRASH_AT` set to `before-commit:3` kills
the process with SIGKILL, as a power cut would, when it reaches that failpoint for the third time. Without the variable
a failpoint costs two comparisons. `tests/faults/test_failpoint_coverage.py` fails if a change is made outside one.
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
    """Counts how often the armed failpoint is reached. Thread-safe."""

    def __init__(self, name: str = "", count: int = 1) -> None:
        self._name = name
        self._remaining = count
        self._mutex = threading.Lock()
        self.listener: Callable[[str], None] | None = None
        """Called with the name of every failpoint, in the thread that reaches it."""

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> Failpoints:
        """Arm the failpoint that the variable names: `NAME:N`, or `NAME` for the first time. Raises ConfigError."""
        text = environment.get(VARIABLE, "")
        if not text:
            return cls()
        name, _, count = text.partition(":")
        if not name or not (count or "1").isdigit() or int(count or "1") < 1:
            raise ConfigError(f"cannot read {VARIABLE}={text}", "write a place and a number, such as before-commit:3")
        return cls(name, int(count or "1"))

    def arm(self, name: str, count: int) -> None:
        """Crash at this failpoint instead, at the `count`-th time from now."""
        with self._mutex:
            self._name, self._remaining = name, count

    def around(self, name: str) -> _Change:
        """Return a context for one change, between the failpoints `before-NAME` and `after-NAME`."""
        return _Change(self, name)

    def reach(self, name: str) -> None:
        """Count the failpoint, and kill the process if it is due."""
        if self.listener is not None:
            self.listener(name)
        if name != self._name:
            return
        with self._mutex:
            self._remaining -= 1
            if self._remaining == 0:
                os.kill(os.getpid(), signal.SIGKILL)
                # The first process of a container cannot be killed from within it; this is as sudden.
                os._exit(128 + signal.SIGKILL)

    @property
    def _idle(self) -> bool:
        return not self._name and self.listener is None


class _Change:
    """The context of one change; an error inside propagates without reaching the failpoint after it."""

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
"""The failpoints of this process.

The only thing read from the environment on import: it concerns the process and not an agent, and a test must be able to
set it for any way of starting one.
"""

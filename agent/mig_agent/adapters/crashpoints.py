"""Places where a test can have this process killed: before and after each commit and each changing call of the driver.

`MIG_AGENT_CRASH_AT=before-commit:3` kills the process with SIGKILL, as a power cut would, when it reaches that place
for the third time. Without the variable a crash point costs one comparison.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Mapping

from mig_agent.core.errors import ConfigError

VARIABLE = "MIG_AGENT_CRASH_AT"


class CrashPoints:
    """Counts how often the armed place is reached. Thread-safe."""

    def __init__(self, name: str = "", count: int = 1) -> None:
        self._name = name
        self._left = count
        self._mutex = threading.Lock()

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> CrashPoints:
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

    def reach(self, name: str) -> None:
        """Called at each place, with its name."""
        if name != self._name:
            return
        with self._mutex:
            self._left -= 1
            if self._left == 0:
                os.kill(os.getpid(), signal.SIGKILL)


CRASH_POINTS = CrashPoints.from_environment(os.environ)
"""Of this process. The one thing that is read from the environment on import, since it concerns a process and not an
agent, and a test must be able to reach it through any way of starting one."""

"""Reading the configuration again where the file does not answer: the next reload is not held up by it."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from mig_agent.config.load import Reading
from mig_agent.config.problems import Problem
from mig_agent.daemon import reload as reload_module
from mig_agent.daemon.reload import Reloader


class Recorded:
    """Records what the engine is told of reloads."""

    def __init__(self) -> None:
        self.failures: list[str] = []

    def report_problem(self, part: str, words: str) -> None:
        """Record a problem, which status shows."""

    def record_failed_reload(self, message: str) -> None:
        self.failures.append(message)


async def test_a_file_that_never_answers_does_not_hold_up_the_next_reload(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pipe, or a file of a file server that is away: the thread that reads it is left behind."""
    monkeypatch.setattr(reload_module, "_READING_SECONDS", 0.1)
    answered, asked, recorded = threading.Event(), 0, Recorded()

    def read() -> Reading:
        nonlocal asked
        asked += 1
        if asked == 1:
            answered.wait()
        return Reading(settings=None, problems=(Problem(message=f"cannot use reading {asked}"),), given={})

    async def check_certificates() -> None:
        """There are none."""

    agent: Any = SimpleNamespace(
        roles=None, manager=recorded, servers=SimpleNamespace(check_certificates=check_certificates)
    )
    log: Any = None
    reloader = Reloader(agent, read, log)
    try:
        await reloader.reload()
        assert recorded.failures[-1].endswith("stays in use: it could not be read in 0.1 s")
        await reloader.reload()
        assert recorded.failures[-1].endswith("stays in use: cannot use reading 2")
    finally:
        answered.set()
    await reloader.reload()
    assert recorded.failures[-1].endswith("stays in use: cannot use reading 3")
    assert len(recorded.failures) == 3

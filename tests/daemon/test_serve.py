"""How the process ends when something goes wrong that nobody expected."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from support.agent import PROCESS_SECONDS, environment, short_folder

SABOTAGED = """
import mig_agent.daemon.serve as serve
from mig_agent.__main__ import main

async def broken(*_):
    {how}

serve.start_agent = broken
main()
"""


@pytest.mark.parametrize("how", ["raise ZeroDivisionError('by nothing')", "1 / 0", "raise OSError(5, 'no luck')"])
@pytest.mark.parametrize("level", ["info", "debug"])
def test_an_unexpected_failure_is_one_line_and_exit_code_1(how: str, level: str) -> None:
    with short_folder() as folder:
        done = subprocess.run(
            [sys.executable, "-c", SABOTAGED.format(how=how), "serve", "--simulate", "a30", "--log-level", level],
            env=environment(folder),
            capture_output=True,
            text=True,
            check=False,
            timeout=PROCESS_SECONDS,
        )
    assert done.returncode == 1
    first, *others = [json.loads(line) for line in done.stderr.splitlines()]
    assert first["level"] == "critical"
    assert "Error: " in first["error"]
    # Where it was is told to those who ask.
    assert len(others) == (level == "debug")

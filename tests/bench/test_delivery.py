"""Small storms, so that the script goes on working: calls that leave at any moment, and short waits on a full node.

It takes a minute and more, since it waits until the time of grace of an agent as it is shipped is over.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from support.figures import Figure

ROOT = Path(__file__).resolve().parents[2]
LEAVING = 150
WAITING = 800


def delivery(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "hack/bench/delivery.py", *arguments],
        check=False,
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=280,
    )


def test_no_lease_is_orphaned_and_every_wait_is_answered(figure: Figure) -> None:
    done = delivery("--leaving", str(LEAVING), "--waiting", str(WAITING), "--migctl", "0", "-o", "json")
    assert done.returncode == 0, done.stdout + done.stderr
    figures = json.loads(done.stdout)
    assert figures["calls that left before they confirmed"] >= LEAVING
    assert figures["leases of theirs when the last had left"] > 0, "nobody left too late: nothing was tried"
    assert figures["leases left after the time of grace"] == 0
    assert figures["requests that waited up to 200 ms"] == WAITING
    assert figures["without an answer"] == 0
    assert figures["failures in the agent's log"] == 0
    figure("calls that left before they had confirmed their lease", figures["calls that left before they confirmed"])
    figure("requests with waits of up to 200 ms on a full node", WAITING)


@pytest.mark.parametrize("arguments", [["--leaving", "-1"], ["--waiting", "many"]])
def test_a_command_line_that_cannot_be_meant(arguments: list[str]) -> None:
    assert delivery(*arguments).returncode == 2

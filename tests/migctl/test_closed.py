"""Daemons and cron start programs with nothing behind stdout or stderr, or with something that is full."""

from __future__ import annotations

import subprocess
import sys

import pytest

MIGCTL = f"{sys.executable} -m mig_agent.migctl"


@pytest.mark.parametrize(
    ("command", "code"),
    [
        ("--version >&-", 0),
        ("--version 2>&- <&-", 0),
        ("plan --gpu-memory 4 >&-", 2),
        ("plan --gpu-memory 4 2>&-", 2),
        ("plan --gpu-memory 4 -o json >/dev/full", 1),
        ("status --address unix:///nowhere >&- 2>&-", 4),
    ],
)
def test_it_ends_as_always_and_without_a_traceback(command: str, code: int) -> None:
    done = subprocess.run(["sh", "-c", f"{MIGCTL} {command}"], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == code
    assert "Traceback" not in done.stderr + done.stdout

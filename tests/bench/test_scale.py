"""The scale benchmark over a handful of agents, so that the script goes on working."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SMALL = ("--agents", "3", "--rounds", "1", "--seconds", "1", "--rates", "0", "50")


def scale(*arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "hack/bench/scale.py", *SMALL, *arguments],
        check=False,
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_both_ways_are_measured() -> None:
    found = json.loads(scale("-o", "json"))
    assert found["agents"] == 3
    assert [each["at_once"] for each in found["decisions"]] == [1, 1, 16]
    assert all(each["per_second"] > 0 for each in found["decisions"])
    quiet, busy = found["fan_in"]
    assert quiet["heard"] == 0
    assert busy["heard"] > 0
    assert busy["delay_p99_ms"] >= busy["delay_p50_ms"]


def test_people_get_tables() -> None:
    shown = scale()
    assert "Decisions over 3 nodes of 8 GPUs" in shown
    assert "| plans are kept by Watch" in shown

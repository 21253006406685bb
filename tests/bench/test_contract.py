"""The benchmark of what each part of the contract costs takes every part out, whatever its code is called today."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_every_part_can_be_taken_out() -> None:
    code = "from without import PARTS, without; [without(part) for part in PARTS]; print(*PARTS)"
    ran = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(ROOT / "hack/bench")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert "confirmation" in ran.stdout.split()


def test_it_measures_a_part() -> None:
    ran = subprocess.run(
        [sys.executable, str(ROOT / "hack/bench/contract.py"), "--rounds", "1", "--part", "confirmation"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert "| confirmation | " in ran.stdout
    assert "| relay | " not in ran.stdout
    assert "two bare echoes" in ran.stdout

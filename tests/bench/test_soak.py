"""A small soak, so that the script goes on working; and what it would say of a run that did not stay flat."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from steadiness import REMEMBERED, Sample, verdict

from support.figures import Figure

ROOT = Path(__file__).resolve().parents[2]
PAIRS = 300


def soak(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "hack/bench/soak.py", *arguments],
        check=False,
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=280,
    )


def test_a_small_soak_with_kills_of_clients_and_agents_and_trouble_leaves_nothing_behind(figure: Figure) -> None:
    done = soak(
        *("--pairs", str(PAIRS), "--clients", "4", "--restart-every", "120", "--kill-client-every", "100"),
        *("--trouble-every", "10", "--sample-seconds", "0.2", "-o", "json"),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    figures = json.loads(done.stdout)
    assert figures["pairs"] >= PAIRS
    assert figures["agents_killed_or_stopped"] >= 1
    assert figures["clients_killed"] >= 1
    assert figures["trouble_made"] >= 1
    assert figures["wrong"] == []
    assert figures["ledger_mib"] > 0
    figure("acquire and release pairs of the small soak", figures["pairs"])


def test_it_prints_progress_and_ends_in_time() -> None:
    done = soak("--pairs", "1000000", "--seconds", "2", "--sample-seconds", "0.5", "--clients", "2")
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert any("pairs/s" in line and "threads" in line for line in lines)
    assert lines[-1].split() == ["wrong", "nothing"]


@pytest.mark.parametrize("arguments", [["--pairs", "0"], ["--clients", "0"], ["--pairs", "many"]])
def test_a_command_line_that_cannot_be_meant(arguments: list[str]) -> None:
    assert soak(*arguments).returncode == 2


def samples(change: Callable[[Sample], Sample] = lambda each: each) -> list[Sample]:
    run = (
        Sample(seconds=10.0 * number, pairs=4000 * number, memory_mib=60.0, files=30, threads=12, ledger_mib=1.0)
        for number in range(1, 31)
    )
    return [change(each) for each in run]


def test_a_flat_run_is_flat() -> None:
    assert verdict(samples()) == []
    # While it still fills its memory of ended leases it may grow; a gradual growth afterwards is a leak.
    assert verdict(samples(lambda each: replace(each, memory_mib=60 + 30 * min(each.pairs, REMEMBERED) / 10_000))) == []


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda each: replace(each, memory_mib=60 + each.pairs / 4000), "memory grew by 10.0 MiB"),
        (lambda each: replace(each, files=30 + each.pairs // 4000), "files grew by 10"),
        (lambda each: replace(each, threads=12 + each.pairs // 4000), "threads grew by 10"),
    ],
)
def test_a_leak_is_named(change: Callable[[Sample], Sample], what: str) -> None:
    (words,) = verdict(samples(change))
    assert words.startswith(what)

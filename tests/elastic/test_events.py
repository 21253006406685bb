"""A training that is shrunk, grown, moved, reclaimed and killed ends with the weights of one that was left alone.

A few events in every run; `ELASTIC_EVENTS=200` for as many by hand.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from support import forks
from support.documents import ROOT
from support.elastic_training import SAMPLES, STEPS_AN_EPOCH
from support.reached import REACHED

EVENTS = int(os.environ.get("ELASTIC_EVENTS", "10"))
EVERY = 6
"""Global steps between checkpoints without a notice."""
_SCRIPT = "import sys; from support.elastic_training import main; main({}, {}, {!r}, {})"


@dataclass
class Training:
    """One training over many processes."""

    folder: Path
    epochs: int
    pause: float = 0.0
    every: int = EVERY

    @property
    def log(self) -> Path:
        return self.folder / "log"

    @property
    def notice(self) -> Path:
        return self.folder / "notice"

    def start(self, max_batch: int, devices: int, **more: str) -> forks.ForkedProcess | subprocess.Popen[bytes]:
        environment = {
            **os.environ,
            "ELASTIC_MAX": str(max_batch),
            "ELASTIC_DEVICES": str(devices),
            "MIG_AGENT_CHECKPOINTS": str(self.folder / "checkpoints"),
            "MIG_AGENT_NOTICE_FILE": str(self.notice),
            **more,
        }
        script = _SCRIPT.format(self.epochs, self.every, str(self.log), self.pause)
        with (self.folder / "output").open("ab") as output:
            return forks.start(["-c", script], env=environment, output=output, errors=output, cwd=ROOT)

    def steps_of(self, pid: int) -> list[int]:
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        return [int(step) for process, step in map(str.split, lines) if int(process) == pid]

    def state(self) -> dict[str, Any]:
        newest = max((self.folder / "checkpoints").glob("step-*"))
        found: dict[str, Any] = json.loads((newest / "state").read_text())
        return found

    def output(self) -> str:
        return (self.folder / "output").read_text()


def undisturbed(folder: Path, epochs: int) -> dict[str, Any]:
    folder.mkdir()
    training = Training(folder, epochs)
    assert training.start(1000, 1).wait(120) == 0, training.output()
    return training.state()


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found["taken"] == expected["taken"], "no sample is skipped or doubled"
    for name in ("weights", "momentum"):
        assert max(abs(a - b) for a, b in zip(found[name], expected[name], strict=True)) < 1e-12


@pytest.mark.timeout(1200)
def test_random_events(tmp_path: Path) -> None:
    chance = random.Random(os.environ.get("ELASTIC_SEED", "0"))  # noqa: S311 -- not a secret
    epochs = max(4, 12 * EVENTS // STEPS_AN_EPOCH)
    expected = undisturbed(tmp_path / "alone", epochs)
    training = Training(tmp_path, epochs, pause=0.002)
    reached, last, seen = 0, "", list[str]()
    while len(seen) < EVENTS:
        process = training.start(chance.randint(1, 12), chance.randint(1, 3))
        event = chance.choice(["shrink", "grow", "move", "reclaim", "kill"])
        steps = chance.randint(1, 8)
        deadline = time.monotonic() + 60
        while len(training.steps_of(process.pid)) < steps and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.001)
        time.sleep(chance.random() * 0.004)  # in the middle of a step
        if event == "kill":
            process.kill()
        elif event == "reclaim":
            process.send_signal(signal.SIGTERM)
        elif event == "move":
            process.send_signal(signal.SIGUSR1)
        else:
            training.notice.write_text(f"{event} {len(seen)}")
        code = process.wait(60)
        assert code == (-signal.SIGKILL if event == "kill" else 75), f"{event}: {code}\n{training.output()}"
        done = training.steps_of(process.pid)
        if done:
            lost = reached - (done[0] - 1)
            assert 0 <= lost <= (EVERY if last == "kill" else 1 if last else 0), f"{lost} steps lost after {last}"
            assert done == list(range(done[0], done[0] + len(done)))
            reached, last = done[-1], event
        seen.append(event)
    assert training.start(5, 2).wait(120) == 0, training.output()
    assert_same(training.state(), expected)
    assert len(expected["taken"]) == epochs * SAMPLES
    if EVENTS >= 100:
        assert set(seen) == {"shrink", "grow", "move", "reclaim", "kill"}


@pytest.mark.parametrize("door", sorted(REACHED["elastic checkpoint"]))
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_crash_at_any_point_of_a_checkpoint(when: str, door: str, tmp_path: Path) -> None:
    """Killed the first time, then the second time: at the first checkpoint, and at one with others before it."""
    expected = undisturbed(tmp_path / "alone", 4)
    training = Training(tmp_path, 4, every=2)
    for count in (1, 2):
        if door in {"checkpoint-folder", "checkpoint-lock"} and count > 1:
            continue  # once in each process
        code = training.start(5, 1, MIG_AGENT_CRASH_AT=f"{when}-{door}:{count}").wait(60)
        assert code == -signal.SIGKILL, training.output()
    assert training.start(4, 2).wait(60) == 0, training.output()
    assert_same(training.state(), expected)
    assert not list((tmp_path / "checkpoints").glob(".writing-*"))
    assert "ignoring" not in training.output(), "a crash never leaves a damaged one"


def test_a_signal_to_all_processes_of_a_job_makes_each_yield(tmp_path: Path) -> None:
    """Without a notice file, and with the state as it was when the step ended."""
    training = Training(tmp_path, 50, pause=0.01)
    process = training.start(4, 1)
    while not training.steps_of(process.pid):
        time.sleep(0.001)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 75
    done = training.steps_of(process.pid)[-1]
    assert f"elastic: yielding after step {done}\n" in training.output()
    assert (tmp_path / "checkpoints" / f"step-{done:012d}").is_dir()

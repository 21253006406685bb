"""The demo says what it does, does what it says, and leaves nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from mig_agent.demo import show
from mig_agent.demo.stage import Stage
from support.agent import PROCESS_SECONDS, environment, eventually

COMMAND = [sys.executable, "-m", "mig_agent", "demo", "--fast"]


def left_over(folder: Path) -> list[str]:
    """What is still there of a demo: its folder, and processes that know it."""
    found = [str(path) for path in folder.glob("mig-agent-demo-*")]
    for process in psutil.process_iter(["cmdline"]):
        words = " ".join(process.info["cmdline"] or ())
        if f"{folder}/mig-agent-demo-" in words:
            found.append(words)
    return found


def test_it_shows_the_main_job(folder: Path) -> None:
    done = subprocess.run(
        COMMAND,
        env=environment(folder, TMPDIR=str(folder)),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    told = [line for line in done.stdout.splitlines() if line.startswith("ok: ")]
    assert len(told) == 12
    assert "Where to go next" in done.stdout
    assert not left_over(folder)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_it_leaves_nothing_behind_when_it_is_interrupted(number: signal.Signals, folder: Path) -> None:
    with (folder / "out").open("wb") as out:
        process = subprocess.Popen(
            COMMAND,
            env=environment(folder, TMPDIR=str(folder), PYTHONUNBUFFERED="1"),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
        )
    try:

        def workload_runs() -> bool:
            shown = (folder / "out").read_text()
            assert process.poll() is None, shown
            return "ok: the workload has its device" in shown

        eventually(workload_runs, "the workload runs", seconds=120)
        process.send_signal(number)
        assert process.wait(PROCESS_SECONDS) == 130
    finally:
        process.kill()
        process.wait()
    assert "nothing is left running" in (folder / "out").read_text()
    eventually(lambda: not left_over(folder), "all of it is gone")


def test_it_fails_where_a_step_is_not_as_told(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """As though the idle instance had been made anew."""
    calls = iter(range(100))
    monkeypatch.setattr(Stage, "nvml_calls", lambda _stage, _function: next(calls))
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        assert show(fast=True) == 1
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    printed = capfd.readouterr()
    assert "NOT AS TOLD: the idle instance served the next request, with no NVML create" in printed.err
    assert "Where to go next" not in printed.out
    assert not left_over(folder)


def test_it_is_not_disturbed_by_what_the_person_has_set(folder: Path) -> None:
    """CUDA_VISIBLE_DEVICES and MIG_AGENT_ADDRESS of a person who works on the machine."""
    set_already = {"CUDA_VISIBLE_DEVICES": "7", "MIG_AGENT_ADDRESS": "unix:///elsewhere.sock", "MIG_AGENT_GPUS": "9"}
    done = subprocess.run(
        COMMAND,
        env=os.environ | set_already | {"TMPDIR": str(folder)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr

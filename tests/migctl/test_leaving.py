"""Ctrl-C, broken pipes and full disks, against a real agent: nothing is left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.agent import GENEROUS_SECONDS, Agent, eventually, short_folder


@pytest.fixture(scope="module")
def agent() -> Iterator[Agent]:
    """One A100-40GB; every test leaves it as it was."""
    with short_folder() as folder, Agent(folder, "a100-40gb:1") as running:
        yield running


@pytest.fixture
def full(agent: Agent) -> Iterator[None]:
    """Somebody holds all of it."""
    lease = agent.ask("request", "--mig-profile", "7g.40gb")["lease"]
    yield
    agent.migctl("release", lease)


@pytest.mark.usefixtures("full")
@pytest.mark.parametrize("verb", [("request",), ("run",)], ids=["request", "run"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["ctrl-c", "sigterm"])
def test_interrupting_a_wait_removes_the_request_from_the_queue(
    agent: Agent, verb: tuple[str, ...], number: signal.Signals
) -> None:
    command = ("--", "true") if verb == ("run",) else ()
    waiting = agent.begin(*verb, "--gpu-memory", "4G", "--wait", "10m", *command)
    eventually(lambda: agent.ask("status")["queue"], "it waits")
    waiting.send_signal(number)
    out, err = waiting.communicate(timeout=GENEROUS_SECONDS)
    assert waiting.returncode == (130 if number == signal.SIGINT else -signal.SIGTERM)
    assert out == ""
    assert ("the request has left the queue" in err) == (number == signal.SIGINT)
    assert "Traceback" not in err
    eventually(lambda: not agent.ask("status")["queue"], "it has left the queue")


@pytest.mark.usefixtures("full")
@pytest.mark.parametrize("verb", ["request", "run"])
def test_interrupted_request_is_reported_as_json(agent: Agent, verb: str) -> None:
    command = ("--", "true") if verb == "run" else ()
    waiting = agent.begin(verb, "--gpu-memory", "4G", "--wait", "10m", "-o", "json", *command)
    eventually(lambda: agent.ask("status")["queue"], "it waits")
    waiting.send_signal(signal.SIGINT)
    out, _ = waiting.communicate(timeout=GENEROUS_SECONDS)
    assert waiting.returncode == 130
    error = json.loads(out)["error"]
    assert (error["reason"], error["retryable"]) == ("cancelled", True)
    assert error["message"].startswith("cannot wait any longer")


@pytest.mark.usefixtures("full")
def test_the_place_is_shown_when_it_changes(agent: Agent) -> None:
    first = agent.begin("request", "--mig-profile", "7g.40gb", "--wait", "10m")
    eventually(lambda: agent.ask("status")["queue"], "the first waits")
    second = agent.begin("request", "--mig-profile", "7g.40gb", "--wait", "10m")
    eventually(lambda: len(agent.ask("status")["queue"]) == 2, "the second waits")
    first.send_signal(signal.SIGINT)
    first.communicate(timeout=GENEROUS_SECONDS)
    assert second.stderr is not None
    shown = [second.stderr.readline() for _ in range(2)]
    assert "place 2 in the queue" in shown[0]
    assert "next in the queue" in shown[1]
    second.send_signal(signal.SIGINT)
    second.communicate(timeout=GENEROUS_SECONDS)
    eventually(lambda: not agent.ask("status")["queue"], "nobody waits")


def test_a_reader_that_goes_away_is_no_mistake(agent: Agent) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as pipe:
        done = subprocess.run(
            [sys.executable, "-m", "mig_agent.migctl", "status"],
            check=False,
            stdout=pipe,
            stderr=subprocess.PIPE,
            text=True,
            env=agent.person(),
            timeout=GENEROUS_SECONDS,
        )
    assert done.returncode == 141
    assert done.stderr == ""


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="only Linux has /dev/full")
@pytest.mark.parametrize("output", ["text", "json", "env"])
def test_a_lease_that_cannot_be_printed_is_released(agent: Agent, output: str) -> None:
    with Path("/dev/full").open("w", encoding="utf-8") as full_disk:
        done = subprocess.run(
            [sys.executable, "-m", "mig_agent.migctl", "request", "--gpu-memory", "4G", "-o", output],
            check=False,
            stdout=full_disk,
            stderr=subprocess.PIPE,
            text=True,
            env=agent.person(),
            timeout=GENEROUS_SECONDS,
        )
    assert done.returncode == 1
    assert done.stderr.startswith("migctl: cannot ")
    assert "Traceback" not in done.stderr
    assert not agent.ask("status")["leases"]


def test_events_are_followed_as_they_happen(agent: Agent) -> None:
    following = agent.begin("events", "--since", "1h", "--follow", "-o", "json")
    assert following.stdout is not None
    assert json.loads(following.stdout.readline())["kind"] == "agent-started", "first comes what has happened"
    lease = agent.ask("request", "--gpu-memory", "4G")["lease"]
    agent.migctl("release", lease)
    told = {"kind": "", "lease": ""}
    while (told["kind"], told["lease"]) != ("lease-ended", lease):
        told = json.loads(following.stdout.readline())
    following.send_signal(signal.SIGINT)
    following.communicate(timeout=GENEROUS_SECONDS)
    assert following.returncode == 130


def test_a_command_whose_lease_is_released_is_told_what_that_means(agent: Agent) -> None:
    running = agent.begin("run", "--gpu-memory", "4G", "--name", "job", "--", "sh", "-c", "echo ready; sleep 60")
    assert running.stdout is not None
    assert running.stdout.readline().strip() == "ready"
    agent.migctl("release", "job")
    assert running.stderr is not None
    told = running.stderr.readline()
    running.terminate()
    running.communicate(timeout=GENEROUS_SECONDS)
    assert told.startswith("migctl: cannot hold this lease any longer: lease ")
    assert told.count("lease ") == 2
    assert told.endswith("the command goes on, and its device is leased to others once no process uses it\n")

"""A client that is killed leaves nothing behind: while it waits, while it holds, and in the middle of Acquire."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mig_agent.client import Client
from support.agent import GENEROUS_SECONDS, Agent, eventually


def test_while_it_waits_it_leaves_the_queue(agent: Agent) -> None:
    blocking = agent.ask("request", "--mig-profile", "7g.80gb")
    waiting = agent.begin("request", "--mig-profile", "7g.80gb", "--wait", "forever")
    eventually(lambda: agent.ask("status")["queue"], "it waits")
    waiting.kill()
    waiting.communicate(timeout=GENEROUS_SECONDS)
    eventually(lambda: not agent.ask("status")["queue"], "it has left the queue")
    agent.migctl("release", blocking["lease"])
    assert not agent.ask("status")["leases"]


def test_while_it_holds_its_lease_ends(agent: Agent) -> None:
    running = agent.begin("run", "--gpu-memory", "4G", "--", sys.executable, "-c", "import time; time.sleep(600)")
    eventually(lambda: agent.ask("status")["leases"], "it runs")
    running.kill()
    eventually(lambda: not agent.ask("status")["leases"], "its lease has ended")
    assert [each["state"] for each in agent.instances()] == ["idle"]
    running.communicate(timeout=GENEROUS_SECONDS)


@pytest.mark.parametrize("verb", ["request", "run"])
def test_in_the_middle_of_acquire_it_gets_nothing(verb: str, folder: Path) -> None:
    with Agent(folder) as agent:
        fault = agent.simulator.hang("nvmlDeviceCreateGpuInstanceWithPlacement")
        command = [] if verb == "request" else ["--", "true"]
        asking = agent.begin(verb, "--gpu-memory", "4G", *command)
        eventually(lambda: agent.instances("creating"), "its instance is being created")
        asking.kill()
        asking.communicate(timeout=GENEROUS_SECONDS)
        agent.simulator.clear(fault)
        eventually(lambda: not agent.instances("creating"), "the creation has come to its end")
        eventually(lambda: not agent.ask("status")["leases"], "nobody holds it")
        assert not agent.instances("leased")


def test_at_any_moment_of_many_requests_nothing_leaks(agent: Agent) -> None:
    """Killed a little later each time: before it connects, while it asks, after it was answered."""
    for _ in range(3):
        asking = [agent.begin("run", "--gpu-memory", "4G", "--", "true") for _ in range(4)]
        asking[0].kill()
        eventually(lambda: agent.ask("status")["leases"] or asking[-1].poll() is not None, "one has got so far")  # noqa: B023 -- called at once
        for each in asking:
            each.kill()
            each.communicate(timeout=GENEROUS_SECONDS)
    eventually(lambda: not agent.ask("status")["leases"], "all leases have ended")
    eventually(lambda: {each["state"] for each in agent.instances()} <= {"idle"}, "all instances are idle")


def test_a_request_that_is_killed_before_it_has_printed_its_lease_has_not_confirmed_it(agent: Agent) -> None:
    """It hangs in printing, into a pipe that is full: the agent's answer is there, and no person has seen it."""
    command = [sys.executable, "-m", "mig_agent.migctl", "request", "--gpu-memory", "4G", "--request-id"]
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    try:
        with contextlib.suppress(BlockingIOError):
            while True:
                os.write(writer, b"x" * 4096)
        os.set_blocking(writer, True)
        asking = subprocess.Popen([*command, "unseen"], stdout=writer, env=agent.person())
        eventually(lambda: agent.ask("status")["leases"], "it has its lease")
        asking.kill()
        asking.wait(timeout=GENEROUS_SECONDS)
    finally:
        os.close(reader)
        os.close(writer)
    agent.migctl(*command[3:], "seen")
    with Client(agent.address) as client:
        again = {each: client.acquire(gpu_memory="4G", request_id=each, confirm=False) for each in ("unseen", "seen")}
    assert {each: lease.grant.confirm_by is None for each, lease in again.items()} == {"unseen": False, "seen": True}

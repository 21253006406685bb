"""`migctl usage` and `migctl advise` against a real agent that is killed at random moments."""

from __future__ import annotations

import csv
import random
import threading
import time
from datetime import datetime
from pathlib import Path

from support.agent import Agent

SECOND_OF_ALL_MIB = 80 * 1024.0
"""What one second of the largest GPU here counts for."""
ROUNDS = 4


def test_what_is_accounted_is_what_was_leased_though_the_agent_is_killed(folder: Path) -> None:
    """What was leased is taken from the answers and the events."""
    chance = random.Random(14)  # noqa: S311 -- no secret
    began = time.time()
    leased: dict[str, tuple[str, float]] = {}
    with Agent(folder, flags=("--sample-usage", "200ms")) as agent:
        for number in range(ROUNDS):
            for _ in range(2):
                tenant, memory = f"team-{number % 3}", chance.choice(["4G", "9G"])
                asking = ("request", "--gpu-memory", memory, "--tenant", tenant, "--name", f"run-{number}")
                answer = agent.ask(*asking)
                leased[answer["lease"]] = (tenant, sum(each["memory_mib"] for each in answer["devices"]))
            gone = chance.choice(sorted(leased))
            killing = threading.Timer(chance.uniform(0.0, 0.3), agent.kill)
            killing.start()
            agent.migctl("release", gone, code=None)
            killing.join()
            agent.start()
        account = agent.ask("usage", "--since", "1h")
        until = datetime.fromisoformat(account["until"]).timestamp()
        spans: dict[str, list[float]] = {lease: [began, until] for lease in leased}
        for event in agent.ask("events", "--since", "1h")["events"]:
            at = datetime.fromisoformat(event["at"]).timestamp()
            if event["kind"] == "lease-granted":
                spans[event["lease"]][0] = at
            elif event["kind"] == "lease-ended":
                spans[event["lease"]][1] = at
        expected: dict[str, float] = {}
        for lease, (tenant, mib) in leased.items():
            expected[tenant] = expected.get(tenant, 0.0) + mib * (spans[lease][1] - spans[lease][0])
        found = {each["key"]: each["memory_mib_seconds"] for each in account["rows"]}
        assert found.keys() == expected.keys()
        for tenant, mib_seconds in expected.items():
            assert abs(found[tenant] - mib_seconds) < SECOND_OF_ALL_MIB
        assert abs(account["total"]["memory_mib_seconds"] - sum(expected.values())) < SECOND_OF_ALL_MIB
        assert account["total"]["leases"] == len(leased)
        rows = list(csv.DictReader(agent.migctl("usage", "--by", "name", "-o", "csv").stdout.splitlines()))
        assert {each["name"] for each in rows} == {f"run-{number}" for number in range(ROUNDS)}
        assert "total" in agent.migctl("usage", "--by", "profile").stdout


def test_mistakes_and_an_empty_node(agent: Agent) -> None:
    assert agent.migctl("usage", "--by", "user").stdout.startswith("no leases\nThe records begin at ")
    assert agent.migctl("advise").stdout == "no leases of yours\n"
    assert agent.migctl("advise", "--name", "train").stdout == "no leases of yours named train\n"
    assert agent.ask("advise") == {"advice": []}
    for wrong in (
        ["usage", "--by", "colour"],
        ["usage", "--since", "yesterday"],
        ["usage", "--since", "2026-02-30"],
        ["usage", "--since", "1h", "--until", "2h"],
        ["usage", "-o", "yaml"],
        ["advise", "-o", "csv"],
    ):
        done = agent.migctl(*wrong, code=None)
        assert done.returncode in {2, 3}, wrong
        assert done.stderr.startswith("migctl: cannot ")

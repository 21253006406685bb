"""A real agent that has lost its ledger, and holders who present their tokens: `migctl recover`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mig_agent.adapters.failpoints import VARIABLE
from mig_agent.adapters.ledger.lease_evidence import evidence_of
from mig_agent.adapters.ledger.store import LEDGER_FILE
from support.agent import Agent, eventually, health, short_folder
from support.figures import Figure


@pytest.fixture
def folder() -> Iterator[Path]:
    with short_folder() as path:
        yield path


def part(agent: Agent, ending: str = "") -> Path:
    return agent.state_dir / f"{LEDGER_FILE}{ending}"


def overwritten(agent: Agent) -> None:
    part(agent).write_bytes(b"this is no ledger\n" * 1000)


def emptied(agent: Agent) -> None:
    part(agent).write_bytes(b"")


def without_its_log(agent: Agent) -> None:
    part(agent, "-wal").unlink()


def without_its_counter(agent: Agent) -> None:
    part(agent, "-commits").unlink()


def removed(agent: Agent) -> None:
    for ending in ("", "-wal", "-commits", "-shm"):
        part(agent, ending).unlink(missing_ok=True)


DAMAGES = [overwritten, emptied, without_its_log, without_its_counter, removed]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_holder_takes_the_lease_back(folder: Path, damage: Callable[[Agent], None]) -> None:
    with Agent(folder, "a100-40gb:2,h100-80gb") as agent:
        mine = agent.ask("request", "--device", "3g.20gb", "--device", "1g.5gb")
        ended = agent.ask("request", "--mig-profile", "2g.10gb")
        agent.migctl("release", ended["lease"], "--token", ended["token"])
        others = agent.ask("request", "--mig-profile", "2g.10gb")
        assert others["devices"][0]["uuid"] == ended["devices"][0]["uuid"]
        agent.kill()
        damage(agent)
        agent.start()
        assert {each["state"] for each in agent.instances()} == {"foreign"}
        assert agent.ask("status")["ledger_doubt"]["recoverable"] == 2
        assert "migctl recover" in agent.migctl("status").stdout

        wrong = agent.ask("recover", mine["lease"], "--token", ended["token"], code=3)
        assert wrong["error"]["reason"] == "wrong-token"
        stale = agent.migctl("recover", ended["lease"], "--token", ended["token"], code=None)
        assert stale.returncode
        assert f"cannot recover lease {ended['lease']}" in stale.stderr

        done = agent.migctl("recover", mine["lease"])  # its token is remembered
        assert done.stdout == f"lease {mine['lease']} has its {len(mine['devices'])} devices again\n"
        again = agent.migctl("recover", mine["lease"])
        assert "is there already" in again.stdout
        held = {each["uuid"] for each in agent.instances("leased")}
        assert held == {each["uuid"] for each in mine["devices"]}
        # The rest of what migctl remembers.
        rest = agent.ask("recover")
        assert {each["lease"]["lease"]: each["anew"] for each in rest["recovered"]} == {
            mine["lease"]: False,
            others["lease"]: True,
        }
        assert not agent.instances("foreign")
        agent.restart_after_crash()
        assert {each["lease"] for each in agent.ask("status")["leases"]} == {mine["lease"], others["lease"]}
        for each in (mine, others):
            agent.migctl("release", each["lease"], "--token", each["token"])
        assert "Traceback" not in agent.log()


def test_after_an_administrator_adopted_it_is_too_late(folder: Path) -> None:
    with Agent(folder, "a100-40gb:1") as agent:
        mine = agent.ask("request", "--mig-profile", "3g.20gb")
        agent.kill()
        emptied(agent)
        agent.start()
        agent.migctl("adopt", mine["devices"][0]["uuid"], "--address", f"unix://{folder}/admin.sock")
        before = agent.instances()
        refused = agent.ask("recover", mine["lease"], code=3)["error"]
        assert refused["reason"] == "lease-ended"
        assert "was taken over meanwhile" in refused["message"]
        assert agent.instances() == before
        assert "was taken over meanwhile" in agent.migctl("recover", code=3).stderr


def test_without_the_evidence_an_agent_starts_and_says_no(folder: Path) -> None:
    with Agent(folder, "a100-40gb:1") as agent:
        mine = agent.ask("request", "--mig-profile", "3g.20gb")
        agent.kill()
        emptied(agent)
        evidence_of(part(agent)).write_bytes(b"\0" * 4096)
        agent.start()
        refused = agent.ask("recover", mine["lease"], code=3)["error"]
        assert refused["reason"] == "unknown-lease"
        assert "migctl adopt" in refused["hint"]
        assert {each["state"] for each in agent.instances()} == {"foreign"}


def test_killed_at_every_commit_of_such_a_start_and_of_recovering(folder: Path, figure: Figure) -> None:
    """It comes back all the same, once, with its devices."""
    kills = 0
    with Agent(folder, "a100-40gb:1") as agent:
        mine = agent.ask("request", "--mig-profile", "3g.20gb")
        for place in ("before-commit", "after-commit", "before-lease-evidence", "after-lease-evidence"):
            for number in range(1, 30):
                agent.kill()
                emptied(agent)
                alive = recovered_under(agent, mine, f"{place}:{number}")
                agent.kill()
                agent.start()
                # However far it came, the next try goes through, and there is one lease.
                agent.migctl("recover", mine["lease"])
                (lease,) = agent.ask("status")["leases"]
                assert lease["lease"] == mine["lease"]
                assert [each["uuid"] for each in agent.instances("leased")] == [mine["devices"][0]["uuid"]]
                if alive:
                    break
                kills += 1
            else:
                pytest.fail("it is killed each time")
    figure("kills while a lease is recovered", kills)


def recovered_under(agent: Agent, mine: dict[str, Any], place: str) -> bool:
    """Start an agent that is killed at a place, and recover; whether it lives."""
    agent._environment[VARIABLE] = place
    try:
        process = agent.launch()
    finally:
        del agent._environment[VARIABLE]
    eventually(lambda: process.poll() is not None or health(agent.address), "it serves or is dead")
    asked = agent.begin("recover", mine["lease"])
    eventually(lambda: process.poll() is not None or asked.poll() is not None, "it answers or is dead")
    asked.kill()
    asked.communicate()
    return process.poll() is None


def test_json_and_mistakes(folder: Path) -> None:
    with Agent(folder, "a100-40gb:1") as agent:
        mine = agent.ask("request", "--mig-profile", "3g.20gb")
        found = agent.ask("recover", mine["lease"])
        assert [each["anew"] for each in found["recovered"]] == [False]
        assert found["refused"] == []
        assert "with its whole id and its token" in agent.migctl("recover", "nothing-known", code=3).stderr
        assert "without its lease" in agent.migctl("recover", "--token", "f" * 64, code=2).stderr
        agent.migctl("release", mine["lease"])
        assert agent.migctl("recover").stdout == "migctl remembers no lease of this agent\n"
        assert json.loads(agent.migctl("recover", "-o", "json").stdout) == {"recovered": [], "refused": []}

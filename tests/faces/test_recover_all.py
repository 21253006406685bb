"""`migctl recover` without a lease: what comes back, what had ended, and an exit code that tells of failures."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from mig_agent.adapters.ledger.store import LEDGER_FILE
from mig_agent.client.tokens import RememberedTokens
from support.agent import Agent, eventually, short_folder


@pytest.fixture
def agent() -> Iterator[Agent]:
    with short_folder() as folder, Agent(folder, "a100-40gb:2") as running:
        yield running


def remembered(agent: Agent) -> RememberedTokens:
    return RememberedTokens(agent.folder / "person/mig-agent")


def test_where_nothing_was_lost_ended_leases_are_no_failure_and_are_forgotten(agent: Agent) -> None:
    kept = agent.ask("request", "--mig-profile", "1g.5gb")
    ended = agent.ask("request", "--mig-profile", "1g.5gb", "--ttl", "1s")
    eventually(lambda: len(agent.ask("status")["leases"]) == 1, "its time is over")
    done = agent.migctl("recover")
    assert done.stdout == f"lease {kept['lease']} is there already, with its 1 device\n"
    assert done.stderr == ""
    assert not remembered(agent).token(ended["lease"])
    assert remembered(agent).token(kept["lease"])
    told = agent.ask("recover")
    assert ([each["lease"]["lease"] for each in told["recovered"]], told["refused"]) == ([kept["lease"]], [])


def test_one_lease_is_recovered_by_its_name(agent: Agent) -> None:
    """After the loss of the ledger only the one who asked for it knows the name."""
    lease = agent.ask("request", "--mig-profile", "1g.5gb", "--name", "train")["lease"]
    twins = [agent.ask("request", "--mig-profile", "1g.5gb", "--name", "twin")["lease"] for _ in range(2)]
    agent.kill()
    Path(agent.state_dir / LEDGER_FILE).write_bytes(b"")
    agent.start()
    assert agent.migctl("recover", "train").stdout == f"lease {lease} has its 1 device again\n"
    assert agent.migctl("recover", lease[:7]).stdout == f"lease {lease} is there already, with its 1 device\n"
    several = agent.migctl("recover", "twin", code=2).stderr
    assert several.startswith("migctl: cannot tell which lease twin is: 2 leases match: ")
    assert all(f"{each} (twin)" in several for each in twins)
    none = agent.ask("recover", "nothing", code=3)["error"]
    assert none["message"] == (
        "cannot recover lease nothing: migctl remembers none that is called so, and none is active"
    )


def test_one_that_does_not_come_back_fails_and_hides_no_other(agent: Agent) -> None:
    first, second = (agent.ask("request", "--mig-profile", "3g.20gb", "--gpu", gpu) for gpu in ("0", "1"))
    agent.kill()
    Path(agent.state_dir / LEDGER_FILE).write_bytes(b"")
    agent.start()
    agent.migctl("adopt", first["devices"][0]["uuid"], "--address", f"unix://{agent.folder}/admin.sock")
    done = agent.migctl("recover", code=3)
    assert done.stdout == f"lease {second['lease']} has its 1 device again\n"
    assert f"cannot recover lease {first['lease']}: its device" in done.stderr
    assert done.stderr.splitlines()[-1] == "migctl: cannot recover 1 of 2 leases"
    told = agent.ask("recover", code=3)
    assert [each["lease"] for each in told["refused"]] == [first["lease"]]
    assert [each["lease"]["lease"] for each in told["recovered"]] == [second["lease"]]

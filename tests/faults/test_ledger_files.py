"""A real agent that finds a ledger it cannot use: damaged, newer than itself, or another agent's."""

from __future__ import annotations

import sqlite3
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from mig_agent.adapters.ledger.schema import PATCHES
from mig_agent.adapters.ledger.store import LEDGER_FILE
from mig_agent.simulator.state import mig_uuid
from support.agent import GENEROUS_SECONDS, SERVING, Agent, eventually, health, short_folder

NEXT = PATCHES[-1].number + 1
NEWER = f"""
import sys
from mig_agent.adapters.ledger.store import Ledger
from mig_agent.adapters.ledger.schema import PATCHES, Patch
added = Patch(number={NEXT}, least_reader=PATCHES[-1].least_reader, statements=(
    "CREATE TABLE quota (tenant TEXT PRIMARY KEY, slices INTEGER NOT NULL) WITHOUT ROWID",
    "ALTER TABLE lease ADD COLUMN purpose TEXT NOT NULL DEFAULT 'unknown'",
    "ALTER TABLE instance ADD COLUMN made_by TEXT NOT NULL DEFAULT ''",
))
Ledger.open.__func__.__kwdefaults__["patches"] = (*PATCHES, added)
from mig_agent.__main__ import main
sys.exit(main())
"""
"""The next version of the agent, whose ledger has more in it."""


@pytest.fixture
def folder() -> Iterator[Path]:
    with short_folder() as path:
        yield path


def ledger_of(agent: Agent) -> Path:
    return agent.state_dir / LEDGER_FILE


def uuids(agent: Agent) -> set[str]:
    """The MIG devices that are really there."""
    return {
        mig_uuid(gpu, instance["id"], compute["id"])
        for gpu in agent.simulator.machine()["gpus"]
        for instance in gpu["instances"]
        for compute in instance["compute"]
    }


# ---------------------------------------------------------------- damaged


def overwritten(path: Path) -> None:
    """As by somebody who redirected into the wrong file."""
    path.write_bytes(b"this is no ledger\n" * 1000)


def torn(path: Path) -> None:
    """The header is whole, pages behind it are not."""
    with path.open("r+b") as file:
        file.seek(1024)
        file.write(b"\xa5" * (path.stat().st_size - 1024))


def cut(path: Path) -> None:
    """The end is missing."""
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size // 2 + 100)


@pytest.mark.parametrize("damage", [overwritten, torn, cut])
def test_a_damaged_ledger_is_kept_aside_and_what_it_held_is_nobodys_to_destroy(folder: Path, damage: Any) -> None:
    with Agent(folder, "a100-40gb:1") as agent:
        leased = agent.ask("request", "--mig-profile", "3g.20gb")
        busy = agent.ask("request", "--mig-profile", "2g.10gb")
        agent.migctl("release", agent.ask("request", "--mig-profile", "1g.5gb")["lease"])
        pid = agent.simulator.occupy(busy["devices"][0]["uuid"])
        assert agent.stop() == 0
        before = uuids(agent)
        damage(ledger_of(agent))
        as_found = ledger_of(agent).read_bytes()
        agent.start()

        # Kept as it was found, and told: where it is, and what that means.
        aside = ledger_of(agent).with_name(f"{LEDGER_FILE}.damaged-1")
        assert aside.read_bytes() == as_found
        (told,) = [line for line in agent.log().splitlines() if "ledger-quarantined" in line]
        assert str(aside) in told
        assert "migctl adopt" in told
        assert '"level": "error"' in told
        assert any(each["kind"] == "ledger-quarantined" for each in agent.ask("events")["events"])

        # Nothing that was there is given or destroyed, whatever is asked.
        assert {each["state"] for each in agent.instances()} == {"foreign"}
        assert not agent.ask("status")["leases"]
        for asked in (["--mig-profile", "3g.20gb"], ["--num-gpus", "1"], ["--mig-profile", "7g.40gb"]):
            assert agent.ask("request", *asked, code=3)["error"]["reason"]
        new = agent.ask("request", "--mig-profile", "1g.5gb")
        assert new["devices"][0]["uuid"] not in before
        agent.migctl("release", new["lease"])
        agent.migctl("reclaim", "--address", f"unix://{agent.folder}/admin.sock")
        assert uuids(agent) == before
        # Who has the token of a lease that is not known any more has nothing to give back, and is told no mistake.
        agent.migctl("release", leased["lease"], "--token", leased["token"])
        assert uuids(agent) == before

        # Everybody is told so, with what to type next.
        page = agent.migctl("status").stdout
        assert f"the former one is kept as {aside}" in page
        assert "migctl adopt" in page
        doubt = agent.ask("status")["ledger_doubt"]
        assert (doubt["kept_as"], doubt["restored"]) == (str(aside), False)

        # The setting `foreign: adopt` is about other people's instances, not about these.
        agent.stop()
        adopting = Agent(folder, "a100-40gb:1", flags=["--foreign", "adopt", "--reread", "1s"])
        with adopting:
            assert len(adopting.instances("foreign")) == len(before)
            # The administrator says so: what nobody uses is taken over now, the rest when it is free.
            admin = f"unix://{folder}/admin.sock"
            adopted = adopting.ask("adopt", "--all", "--address", admin)["adopted"]
            assert {each["state"] for each in adopted} == {"idle", "blocked"}
            assert [each["uuid"] for each in adopted if each["state"] == "blocked"] == [busy["devices"][0]["uuid"]]
            again = adopting.ask("request", "--mig-profile", "3g.20gb")
            assert again["devices"][0]["reused"]
            assert adopting.ask("status")["ledger_doubt"] is None
            adopting.simulator.vacate(pid)
            eventually(lambda: len(adopting.instances("idle")) == len(before) - 1, "the one that was in use is idle")
        assert "Traceback" not in agent.log()


def test_a_second_damaged_ledger_does_not_replace_the_first(folder: Path) -> None:
    with Agent(folder, "a30") as agent:
        for number in (1, 2):
            assert agent.stop() == 0  # else its log mends the file
            ledger_of(agent).write_bytes(b"damage %d" % number)
            agent.start()
        for number in (1, 2):
            assert ledger_of(agent).with_name(f"{LEDGER_FILE}.damaged-{number}").read_bytes() == b"damage %d" % number


@pytest.mark.parametrize("endings", [("",), ("-wal",), ("", "-wal", "-shm", "-commits")], ids=" ".join)
def test_a_ledger_that_is_removed_under_the_agent_is_noticed_and_written_anew(
    folder: Path, endings: tuple[str, ...]
) -> None:
    with Agent(folder, "a100-40gb:1") as agent:
        before = agent.ask("request", "--mig-profile", "1g.5gb")
        for ending in endings:
            ledger_of(agent).with_name(LEDGER_FILE + ending).unlink()
        eventually(lambda: "was removed; the ledger is written anew" in agent.log(), "it is noticed")
        eventually(ledger_of(agent).exists, "it is there again")
        after = agent.ask("request", "--mig-profile", "1g.5gb")
        agent.restart_after_crash()
        status = agent.ask("status")
        assert {each["lease"] for each in status["leases"]} == {before["lease"], after["lease"]}
        assert status["ledger_doubt"] is None


# ---------------------------------------------------------------- other versions


def test_a_ledger_that_needs_a_newer_version_is_refused_and_left_alone(folder: Path) -> None:
    with Agent(folder, "a30") as agent:
        lease = agent.ask("request", "--gpu-memory", "4G")
        agent.stop()
        path = ledger_of(agent)
        before = path.read_bytes()
        with closing(sqlite3.connect(path)) as ledger:
            ledger.execute(f"PRAGMA user_version = {NEXT + 1}")
            ledger.execute("UPDATE fact SET value = ? WHERE name = 'least_reader'", (str(NEXT + 1),))
            ledger.commit()
        newer = path.read_bytes()
        assert agent.launch().wait(GENEROUS_SECONDS) == 1
        last = agent.log().splitlines()[-1]
        assert "cannot use the ledger" in last
        assert str(path) in last
        assert "a newer version of the agent wrote it" in last
        assert path.read_bytes() == newer
        assert not list(agent.state_dir.glob("*damaged*"))
        path.write_bytes(before)
        agent.start()
        assert [each["lease"] for each in agent.ask("status")["leases"]] == [lease["lease"]]


def test_an_upgrade_and_the_way_back_under_live_leases_lose_nothing(folder: Path) -> None:
    """There and back twice, killed each time, with leases given and ended by either version."""
    with Agent(folder, "a100-40gb:1") as agent:
        old = list(agent._command)
        new = [old[0], "-c", NEWER, *old[3:]]
        standing: dict[str, str] = {}
        answers: list[dict[str, Any]] = []
        for command in (old, new, old, new, old):
            agent.kill()
            agent._command[:] = command
            agent.start()
            assert {each["lease"] for each in agent.ask("status")["leases"]} == set(standing)
            assert {each["state"] for each in agent.instances()} <= {"leased", "idle"}
            answer = agent.ask("request", "--mig-profile", "1g.5gb", "--name", f"number {len(answers)}")
            answers.append(answer)
            standing[answer["lease"]] = answer["token"]
            if len(standing) > 2:
                lease = next(iter(standing))
                agent.migctl("release", lease, "--token", standing.pop(lease))
        assert schema(agent) == NEXT
        held = {each["lease"]: each["devices"][0]["uuid"] for each in answers if each["lease"] in standing}
        assert {each["lease"]: each["uuid"] for each in agent.instances("leased")} == held
        for lease, token in standing.items():
            agent.migctl("release", lease, "--token", token)


def schema(agent: Agent) -> int:
    with closing(sqlite3.connect(f"file:{ledger_of(agent)}?mode=ro", uri=True)) as ledger:
        return int(ledger.execute("PRAGMA user_version").fetchone()[0])


def test_of_several_agents_that_start_at_once_one_serves(folder: Path) -> None:
    with Agent(folder, "a30") as first:
        lease = first.ask("request", "--gpu-memory", "4G")
        first.kill()
        agents = [Agent(folder, "a30") for _ in range(4)]
        for number, each in enumerate(agents):
            each.log_file = folder / f"{number}.log"
        try:
            processes = [each.launch() for each in agents]
            eventually(
                lambda: sum(each.poll() is None for each in processes) == 1 and health(first.address) == SERVING,
                "one of them serves",
            )
            for agent, process in zip(agents, processes, strict=True):
                if process.poll() is not None:
                    assert process.returncode == 1
                    assert "cannot use the state directory" in agent.log()
            assert [each["lease"] for each in first.ask("status")["leases"]] == [lease["lease"]]
            assert {each["state"] for each in first.instances()} == {"leased"}
        finally:
            for each in agents:
                each.kill()


def test_the_next_version_is_what_this_test_says(folder: Path) -> None:
    """Else the way back above would be no way back."""
    with Agent(folder, "a30") as agent:
        agent.stop()
        agent._command[:3] = [sys.executable, "-c", NEWER]
        agent.start()
        agent.ask("request", "--gpu-memory", "4G")
        with closing(sqlite3.connect(f"file:{ledger_of(agent)}?mode=ro", uri=True)) as ledger:
            assert ledger.execute("SELECT purpose FROM lease").fetchall() == [("unknown",)]

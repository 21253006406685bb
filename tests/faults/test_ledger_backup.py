"""Backing a ledger up under a running agent, and putting the copy in its place; killed on the way, too."""

from __future__ import annotations

import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from mig_agent.adapters.failpoints import FAILPOINTS
from mig_agent.adapters.ledger.backup import back_up, restore
from mig_agent.adapters.ledger.store import LEDGER_FILE, Ledger
from mig_agent.core.errors import LedgerError
from support import forks
from support.agent import Agent, short_folder
from support.figures import Figure
from support.reached import REACHED

SCRIPTS = {
    "ledger backed up": "from mig_agent.adapters.ledger.backup import back_up as do; args = (ledger, other)",
    "ledger restored": "from mig_agent.adapters.ledger.backup import restore as do; args = (ledger, other)",
}
SCRIPT = """
import sys
from pathlib import Path
folder = Path(sys.argv[1])
ledger, other = folder / "ledger.sqlite3", folder / "backup"
{what}
do(*args)
"""


@pytest.fixture
def folder() -> Iterator[Path]:
    with short_folder() as path:
        yield path


def mig_agent(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "mig_agent", *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        env={name: value for name, value in os.environ.items() if not name.startswith("MIG_AGENT_")},
    )


def test_a_backup_into_a_folder_that_does_not_exist_is_refused(folder: Path) -> None:
    Ledger.open(folder / LEDGER_FILE).close()
    refused = mig_agent("backup", folder / "missing" / "backup", "--state-dir", folder)
    assert refused.returncode == 1
    assert refused.stderr.strip() == (
        f"mig-agent: cannot write {folder}/missing/backup: there is no folder {folder}/missing"
    )


def test_a_backup_is_taken_under_load_and_restored(folder: Path) -> None:
    with Agent(folder, "a100-40gb:2") as agent:
        backup = folder / "backup"
        kept = agent.ask("request", "--mig-profile", "3g.20gb", "--gpu", "0")
        stopping = threading.Event()

        def busy() -> None:
            while not stopping.is_set():
                agent.migctl("release", agent.ask("request", "--mig-profile", "1g.5gb", "--gpu", "1")["lease"])

        load = threading.Thread(target=busy)
        load.start()
        try:
            for _ in range(3):
                done = mig_agent("backup", backup, "--state-dir", agent.state_dir, "--force")
                assert done.returncode == 0, done.stderr
                assert "backed up" in done.stdout
        finally:
            stopping.set()
            load.join()
        assert backup.stat().st_mode & 0o777 == 0o600
        assert {each.name for each in folder.glob("*backup*")} == {"backup"}
        refused = mig_agent("backup", backup, "--state-dir", agent.state_dir)
        assert refused.returncode == 1
        assert "cannot write" in refused.stderr
        later = agent.ask("request", "--mig-profile", "3g.20gb", "--gpu", "1")

        # Not under an agent that runs.
        refused = mig_agent("restore", backup, "--state-dir", agent.state_dir)
        assert refused.returncode == 1
        assert f"the agent with pid {agent.process.pid if agent.process else 0}" in refused.stderr
        agent.stop()
        restored = mig_agent("restore", backup, "--state-dir", agent.state_dir)
        assert restored.returncode == 0, restored.stderr
        former = agent.state_dir / f"{LEDGER_FILE}.replaced-1"
        assert str(former) in restored.stdout
        agent.start()
        status = agent.ask("status")
        assert kept["lease"] in {each["lease"] for each in status["leases"]}
        assert status["ledger_doubt"]["restored"]
        assert str(backup) in status["ledger_doubt"]["why"]
        found = {each["uuid"]: each["state"] for each in agent.instances()}
        assert found[kept["devices"][0]["uuid"]] == "leased"
        assert found[later["devices"][0]["uuid"]] == "foreign"
        assert "idle" not in found.values()
        assert "ledger-restored" in agent.log()
        # The way back: the former one knows what was leased since, and is as good a backup.
        agent.stop()
        assert mig_agent("restore", former, "--state-dir", agent.state_dir).returncode == 0
        agent.start()
        assert later["lease"] in {each["lease"] for each in agent.ask("status")["leases"]}


@pytest.mark.parametrize("what", ["rubbish", "another program's", "cut", "a changed row", "missing"])
def test_what_is_no_backup_is_not_restored(folder: Path, what: str) -> None:
    ledger, backup = folder / LEDGER_FILE, folder / "backup"
    Ledger.open(ledger).close()
    back_up(ledger, backup)
    before = {each.name: each.read_bytes() for each in folder.iterdir() if each != backup}
    if what == "rubbish":
        backup.write_bytes(b"rubbish" * 1000)
    elif what == "cut":
        os.truncate(backup, 2048)
    elif what == "missing":
        backup.unlink()
    else:
        with closing(sqlite3.connect(backup)) as connection, connection:
            changing = what == "a changed row"
            connection.execute("UPDATE fact SET value = '1 '" if changing else "PRAGMA application_id = 7")
    with pytest.raises(LedgerError, match="cannot restore"):
        restore(ledger, backup)
    assert {each.name: each.read_bytes() for each in folder.iterdir() if each != backup} == before


@pytest.mark.parametrize("name", SCRIPTS)
def test_killed_at_every_step(folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, figure: Figure) -> None:
    def fresh(number: str) -> Path:
        here = folder / number
        here.mkdir()
        Ledger.open(here / LEDGER_FILE).close()
        if name == "ledger restored":
            back_up(here / LEDGER_FILE, here / "backup")
        return here

    example = fresh("example")
    reached: list[str] = []
    with monkeypatch.context() as patch:
        patch.setattr(FAILPOINTS, "listener", reached.append)
        if name == "ledger backed up":
            back_up(example / LEDGER_FILE, example / "backup")
        else:
            restore(example / LEDGER_FILE, example / "backup")
    assert {each.partition("-")[2] for each in reached} == REACHED[name]
    for number, place in enumerate(reached):
        here = fresh(str(number))
        before = (here / LEDGER_FILE).read_bytes()
        armed = f"{place}:{reached[: number + 1].count(place)}"
        script = SCRIPT.format(what=SCRIPTS[name])
        done = forks.run("-c", script, str(here), env={**os.environ, "MIG_AGENT_CRASH_AT": armed})
        assert done.returncode == -signal.SIGKILL, (armed, done.stderr)
        ledger = Ledger.open(here / LEDGER_FILE)
        ledger.close()
        doubt = ledger.contents.doubt
        kept = here / f"{LEDGER_FILE}.replaced-1"
        if name == "ledger backed up":
            assert doubt is None
            back_up(here / LEDGER_FILE, here / "again")
        else:  # it was restored whole, or it was not
            assert kept.exists() == (doubt is not None)
            assert doubt is None or doubt.restored
            assert (kept if doubt else here / LEDGER_FILE).read_bytes() == before
        shutil.rmtree(here)
    figure("crash points x kinds, each killed for real", 2 * len(REACHED[name]))
    figure("kills while a ledger is backed up or restored", len(reached))


def test_who_has_no_right_to_the_ledger_is_told_so(folder: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can be another user as well")
    folder.chmod(0o755)
    state = folder / "state"
    state.mkdir(mode=0o700)
    Ledger.open(state / LEDGER_FILE).close()
    assert mig_agent("backup", folder / "backup", "--state-dir", state).returncode == 0
    (folder / "backup").chmod(0o644)
    # It becomes the stranger by itself, when all is imported: Python may live where strangers cannot go.
    script = """
import os, sys
import mig_agent.adapters.filelock, mig_agent.adapters.ledger.backup, mig_agent.adapters.ledger.store
from mig_agent.program import program
os.setgroups([])
os.setresgid(*3 * [61001])
os.setresuid(*3 * [61001])
program()
"""
    for verb, file in (("backup", "other"), ("restore", "backup")):
        done = subprocess.run(
            [sys.executable, "-c", script, verb, str(folder / file), "--state-dir", str(state)],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 1
        assert "Traceback" not in done.stderr
        assert "Permission denied" in done.stderr
        assert "root" in done.stderr


def test_a_backup_that_is_not_there_cannot_be_restored(folder: Path) -> None:
    state = folder / "state"
    state.mkdir(mode=0o700)
    Ledger.open(state / LEDGER_FILE).close()
    done = mig_agent("restore", folder / "missing", "--state-dir", state)
    assert done.returncode == 1
    assert f"cannot restore {folder}/missing: there is no such file" in done.stderr
    for content, why in ((b"", "it is empty"), (b"hello" * 1000, "it is no ledger of an agent")):
        (folder / "backup").write_bytes(content)
        done = mig_agent("restore", folder / "backup", "--state-dir", state)
        assert done.returncode == 1
        assert done.stderr == f"mig-agent: cannot restore {folder}/backup: {why}\n"


def test_a_backup_is_not_restored_into_a_folder_that_is_not_there(folder: Path) -> None:
    state, typo, backup = folder / "state", folder / "sate", folder / "backup"
    for each in (state, folder / "new"):
        each.mkdir(mode=0o700)
    Ledger.open(state / LEDGER_FILE).close()
    back_up(state / LEDGER_FILE, backup)
    refused = mig_agent("restore", backup, "--state-dir", typo)
    assert refused.returncode == 1
    assert f"cannot restore {typo}/{LEDGER_FILE}: there is no folder {typo}" in refused.stderr
    assert not typo.exists()
    done = mig_agent("restore", backup, "--state-dir", folder / "new")
    assert (done.returncode, done.stderr) == (0, "")
    assert "there was no ledger before" in done.stdout
    assert "kept as" not in done.stdout
    assert "the former ledger is kept as" in mig_agent("restore", backup, "--state-dir", state).stdout

"""`mig-agent backup` and `restore` name the ledger that they mean, and take no other than the running agent's."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from mig_agent import program
from mig_agent.adapters.ledger.store import LEDGER_FILE, Ledger
from support import forks
from support.agent import Agent, environment, short_folder


@pytest.fixture
def folder() -> Iterator[Path]:
    with short_folder() as path:
        yield path


def ends(
    folder: Path, *arguments: object, variables: dict[str, str] | None = None, seconds: float = 60.0
) -> tuple[int, str, str]:
    given = environment(folder, **(variables or {}))
    done = forks.run(*forks.AGENT, *map(str, arguments), env=given, timeout=seconds)
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, done.stdout, done.stderr


def test_another_ledger_than_the_running_agents_is_refused(folder: Path) -> None:
    other = folder / "other"
    other.mkdir(mode=0o700)
    Ledger.open(other / LEDGER_FILE).close()
    config = folder / "config.yaml"
    with Agent(folder) as agent:
        assert agent.process is not None
        config.write_text(f"state_dir: {other}\nlisten: {agent.address}\n")
        expected = f"the agent (pid {agent.process.pid}) at {agent.address} keeps its ledger in {agent.state_dir}"
        for verb in ("backup", "restore"):
            for given, variables in (
                (("--config", config), {}),
                ((), {"MIG_AGENT_CONFIG": str(config)}),
                ((), {"MIG_AGENT_STATE_DIR": str(other), "MIG_AGENT_LISTEN": agent.address}),
                ((), {"MIG_AGENT_STATE_DIR": str(other), "MIG_AGENT_ADDRESS": agent.address}),
            ):
                code, out, error = ends(folder, verb, folder / "copy", *given, variables=variables)
                assert (code, out) == (1, ""), error
                assert expected in error
                assert f"--state-dir {agent.state_dir}" in error
                assert not (folder / "copy").exists()
        # What is named on the command line is meant, and the one that is asked for is copied.
        code, out, _ = ends(
            folder, "backup", folder / "one", "--state-dir", other, variables={"MIG_AGENT_ADDRESS": agent.address}
        )
        assert (code, f"backed up {other / LEDGER_FILE}" in out) == (0, True)
        right = {"MIG_AGENT_ADDRESS": agent.address, "MIG_AGENT_STATE_DIR": str(agent.state_dir)}
        agent.migctl("request", "--gpu-memory", "4G")
        code, out, error = ends(folder, "backup", folder / "two", variables=right)
        assert (code, error) == (0, "")
        assert out == f"backed up {agent.state_dir / LEDGER_FILE}, 1 lease, to {folder}/two\n"


def test_a_ledger_without_leases_is_said_to_have_none(folder: Path) -> None:
    Ledger.open(folder / LEDGER_FILE).close()
    code, out, error = ends(folder, "backup", folder / "copy", "--state-dir", folder)
    assert code == 0
    assert out == f"backed up {folder / LEDGER_FILE}, 0 leases, to {folder}/copy\n"
    assert error.startswith(f"warning: {folder / LEDGER_FILE} has no leases. Hint: ")


def test_the_usual_configuration_is_read_where_none_is_given(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = folder / "state"
    state.mkdir(mode=0o700)
    Ledger.open(state / LEDGER_FILE).close()
    config = folder / "config.yaml"
    config.write_text(f"state_dir: {state}\nlisten: unix://{folder}/a.sock\n")
    monkeypatch.setattr(program, "DEFAULT_CONFIG", config)
    for name in [each for each in os.environ if each.startswith("MIG_AGENT_")]:
        monkeypatch.delenv(name)
    done = CliRunner().invoke(program.program, ["backup", str(folder / "copy")])
    assert done.exit_code == 0, done.output
    assert f"backed up {state / LEDGER_FILE}, 0 leases, to " in done.output


def make(path: Path, kind: str) -> Path:
    """A thing that is no ledger, backup, bundle or configuration."""
    match kind:
        case "fifo":
            os.mkfifo(path)
        case "folder":
            path.mkdir()
        case "zero":
            return Path("/dev/zero")
        case "sparse":
            with path.open("wb") as file:
                file.truncate(10 << 30)
        case "bytes":
            path.write_bytes(b"\xff\xfe\x00 a: b" * 100)
        case "dangling":
            path.symlink_to(path.with_name("nothing"))
        case "itself":
            path.symlink_to(path)
        case "empty":
            path.touch()
    return path


KINDS = ("fifo", "folder", "zero", "sparse", "bytes", "dangling", "itself", "empty")


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_no_ledger_is_refused_in_words(folder: Path, kind: str) -> None:
    state = folder / "state"
    state.mkdir(mode=0o700)
    thing = make(state / LEDGER_FILE, kind)
    if kind == "zero":
        (state / LEDGER_FILE).symlink_to(thing)
    code, out, error = ends(folder, "backup", folder / "copy", "--state-dir", state, seconds=20)
    assert (code, out) == (1, "")
    assert error.startswith("mig-agent: cannot back up ")
    assert not (folder / "copy").exists()
    assert not list(folder.glob(".copy*"))


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_no_backup_is_not_restored(folder: Path, kind: str) -> None:
    state = folder / "state"
    state.mkdir(mode=0o700)
    Ledger.open(state / LEDGER_FILE).close()
    before = (state / LEDGER_FILE).stat().st_ino
    thing = make(folder / "backup", kind)
    code, out, error = ends(folder, "restore", thing, "--state-dir", state, seconds=20)
    assert (code, out) == (1, "")
    assert error.startswith("mig-agent: cannot restore ")
    assert (state / LEDGER_FILE).stat().st_ino == before


def test_a_device_is_not_replaced_by_a_backup(folder: Path) -> None:
    Ledger.open(folder / LEDGER_FILE).close()
    os.mkfifo(folder / "device")
    for target in (folder / "device", folder):
        code, out, error = ends(folder, "backup", target, "--state-dir", folder, "--force")
        assert (code, out) == (1, ""), error
        assert error.startswith(f"mig-agent: cannot write {target}: it is no plain file")
    assert stat.S_ISFIFO((folder / "device").stat().st_mode)


@pytest.mark.parametrize("name", [LEDGER_FILE, f"{LEDGER_FILE}-wal", f"{LEDGER_FILE}-commits", "token.key", "link"])
def test_the_agents_own_files_are_never_replaced_by_a_backup(folder: Path, name: str) -> None:
    """The running agent would go on writing to the file that was replaced."""
    with Agent(folder) as agent:
        lease = agent.ask("request", "--gpu-memory", "4G")["lease"]
        target = agent.state_dir / name
        if name == "link":
            target = folder / "link"
            os.link(agent.state_dir / LEDGER_FILE, target)
        before = target.stat().st_ino
        code, out, error = ends(folder, "backup", target, "--state-dir", agent.state_dir, "--force")
        assert (code, out) == (1, "")
        assert error.startswith(f"mig-agent: cannot write {target}: it is one of the agent's own files")
        assert target.stat().st_ino == before
        agent.restart_after_crash()
        assert [each["lease"] for each in agent.ask("status")["leases"]] == [lease]

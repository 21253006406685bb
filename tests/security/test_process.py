"""What the agent's process does not leave to who starts it: modes of files, core dumps, a terminal that goes away."""

from __future__ import annotations

import os
import signal
import stat
from collections.abc import Mapping
from pathlib import Path

from support.agent import Agent, eventually


def modes(folder: Path) -> Mapping[str, str]:
    """The mode of everything below a folder."""
    return {str(path.relative_to(folder)): stat.filemode(path.lstat().st_mode) for path in folder.rglob("*")}


def made_under(umask: int, folder: Path) -> Mapping[str, str]:
    """What an agent with this umask makes, in folders that are not there."""
    folder.mkdir()
    before = os.umask(umask)
    try:
        agent = Agent(
            folder,
            "a100-40gb:1",
            forked=False,
            listen=[f"unix://{folder}/made/run/agent.sock"],
            flags=[
                *("--state-dir", f"{folder}/made/var/state"),
                *("--simulate-dir", f"{folder}/machine"),
                *("--admin-listen", f"unix://{folder}/made/run/admin.sock"),
            ],
        )
        with agent:
            agent.ask("request", "--gpu-memory", "4G")
            uuid = agent.ask("status")["gpus"][0]["uuid"]
            found = {**modes(folder / "made"), **modes(folder / "machine/host/run")}
            return {path.replace(uuid, "GPU"): mode for path, mode in found.items()}
    finally:
        os.umask(before)


def test_files_come_out_the_same_under_every_umask(folder: Path) -> None:
    usual = made_under(0o022, folder / "usual")
    assert {name: usual[name] for name in ("run", "run/agent.sock", "run/admin.sock", "var", "var/state")} == {
        "run": "drwxr-xr-x",
        "run/agent.sock": "srw-rw----",
        "run/admin.sock": "srw-------",
        "var": "drwxr-xr-x",
        "var/state": "drwx------",
    }
    assert usual["var/state/ledger.sqlite3"] == usual["var/state/token.key"] == "-rw-------"
    assert {mode for name, mode in usual.items() if name.endswith(("lock", ".lock"))} == {"-rw-------"}
    assert made_under(0o000, folder / "open") == usual
    assert made_under(0o077, folder / "closed") == usual


def test_a_hangup_ends_nothing(folder: Path) -> None:
    with Agent(folder, forked=False) as agent:
        assert agent.process is not None
        lease = agent.ask("request", "--gpu-memory", "4G")["lease"]
        for _ in range(3):
            agent.process.send_signal(signal.SIGHUP)
        eventually(lambda: "the configuration was read again: nothing changed" in agent.log())
        assert [each["lease"] for each in agent.ask("status")["leases"]] == [lease]
        assert agent.process.poll() is None
        assert agent.stop() == 0


def test_a_hangup_while_it_starts_ends_nothing(folder: Path) -> None:
    """From the moment on that it knows what it was started for."""
    agent = Agent(folder, forked=False)
    process = agent.launch()
    hangup = 1 << (signal.SIGHUP - 1)

    def ignored() -> bool:
        lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
        (mask,) = [line.split()[1] for line in lines if line.startswith("SigIgn:")]
        return bool(int(mask, 16) & hangup)

    try:
        eventually(ignored)
        for _ in range(20):
            process.send_signal(signal.SIGHUP)
        eventually(lambda: '"event": "serving"' in agent.log() or process.poll() is not None)
        assert process.poll() is None
    finally:
        agent.kill()


def test_it_leaves_no_core(folder: Path) -> None:
    """The keys would be in it."""
    with Agent(folder, forked=False) as agent:
        assert agent.process is not None
        limits = Path(f"/proc/{agent.process.pid}/limits").read_text().splitlines()
        (line,) = [each for each in limits if each.startswith("Max core file size")]
        assert line.split()[4:6] == ["0", "0"]

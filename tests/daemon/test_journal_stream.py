"""Priorities of lines that systemd's journal reads."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mig_agent.daemon.journal_stream import is_journal, with_priority
from support.agent import PROCESS_SECONDS, environment


def as_journal(descriptor: int) -> dict[str, str]:
    """What systemd sets for a process with this standard error."""
    there = os.fstat(descriptor)
    return {"JOURNAL_STREAM": f"{there.st_dev}:{there.st_ino}"}


def run(folder: Path, *arguments: str, journal: bool) -> str:
    """Standard error of `mig-agent` with these arguments."""
    path = folder / "journal"
    with path.open("wb") as journal_stream:
        variables = as_journal(journal_stream.fileno()) if journal else {"JOURNAL_STREAM": "1:2"}
        subprocess.run(
            [sys.executable, "-m", "mig_agent", *arguments],
            stdin=subprocess.DEVNULL,
            stderr=journal_stream,
            env=environment(folder, **variables),
            check=False,
            timeout=PROCESS_SECONDS,
        )
    return path.read_text()


def test_the_journal_is_known_by_device_and_inode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JOURNAL_STREAM", raising=False)
    assert not is_journal()
    with (tmp_path / "stream").open("wb") as stream:
        monkeypatch.setenv("JOURNAL_STREAM", as_journal(stream.fileno())["JOURNAL_STREAM"])
        assert is_journal(stream.fileno())
        assert not is_journal(1)
    assert not is_journal(1000)


def test_each_line_has_its_priority() -> None:
    assert with_priority("a", "error") == "<3>a"
    assert with_priority("a\nb", "warning") == "<4>a\n<4>b"
    assert with_priority("a", "info") == with_priority("a", "anything") == "<6>a"


@pytest.mark.parametrize("log_format", ["json", "text"])
def test_errors_in_the_journal_are_errors(tmp_path: Path, log_format: str) -> None:
    """`journalctl -p err -u mig-agent` shows them."""
    (tmp_path / "state").write_text("no folder")
    flags = ["--simulate", "a30", "--state-dir", f"{tmp_path}/state", "--listen", f"unix://{tmp_path}/a.sock"]
    arguments = ["serve", *flags, "--log-format", log_format]
    (line,) = run(tmp_path, *arguments, journal=True).splitlines()
    assert line.startswith("<3>")
    if log_format == "json":
        assert json.loads(line.removeprefix("<3>"))["level"] == "error"
    else:
        assert "/state: File exists. Hint: " in line, "the style of all errors for people"
    (plain,) = run(tmp_path, *arguments, journal=False).splitlines()
    assert not plain.startswith("<")


def test_wrong_usage_is_one_line_of_the_journal_each(tmp_path: Path) -> None:
    lines = run(tmp_path, "serve", "--reread", "soon", "--max-waiting", "many", journal=True).splitlines()
    assert [line.partition(" ")[0] for line in lines] == ["<3>mig-agent:"] * 2
    (line,) = run(tmp_path, "serve", "--no-such-flag", journal=True).splitlines()
    assert line.startswith(
        "<3>mig-agent: cannot understand --no-such-flag: there is no such option. Hint: see `mig-agent"
    )

"""Whose settings are examined: those of the process that listens, as it was started."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from mig_agent.doctor.agent_settings import find_settings, listener_of
from mig_agent.doctor.probe import Probe
from support.examined import ROOT, tree


@pytest.fixture
def listening(tmp_path: Path) -> Iterator[Path]:
    """This process listens; what the tree tells of its pid is up to the test."""
    path = tmp_path / "s.sock"
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(path))
        made.listen()
        yield path


def probe(root: Path, *words: str, environment: str = "") -> Probe:
    files = {"cmdline": "\0".join(words) + "\0", "environ": environment} if words else {}
    tree(root, {f"proc/{os.getpid()}/{name}": text for name, text in files.items()})
    return Probe(root=root, person=ROOT, run=lambda _: None, environment={})


def test_the_listener_is_found(listening: Path, tmp_path: Path) -> None:
    assert listener_of(listening) == os.getpid()
    assert listener_of(tmp_path / "none") is None


def test_flags_and_variables_of_the_agent_count_and_no_others(
    listening: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MIG_AGENT_NODE", "of-this-person")
    (tmp_path / "c.yaml").write_text("reread: 7s\nnode: of-the-file\n")
    of = probe(
        tmp_path,
        *("/opt/x/bin/python3", "/usr/bin/mig-agent", "serve", "--config", str(tmp_path / "c.yaml")),
        *("--simulate", "a100-40gb:1", "--strict-fifo"),
        environment="PATH=/bin\0MIG_AGENT_NODE=of-the-agent\0SECRET=x\0",
    )
    found = find_settings(of, listening)
    assert found.settings is not None
    assert (found.settings.node, found.settings.reread, found.settings.simulate) == ("of-the-agent", 7.0, "a100-40gb:1")
    assert found.settings.strict_fifo
    assert (found.pid, found.partly) == (os.getpid(), False)


def test_another_program_on_the_socket(listening: Path, tmp_path: Path) -> None:
    found = find_settings(probe(tmp_path, "nc", "-lU", "s.sock"), listening)
    assert found.where == "the defaults"


def test_a_mistake_in_the_file(tmp_path: Path) -> None:
    tree(tmp_path, {"etc/mig-agent/config.yaml": "max_wating: 5\n"})
    found = find_settings(probe(tmp_path), None)
    assert found.settings is None
    assert found.error is not None
    assert "did you mean max_waiting?" in found.error.hint

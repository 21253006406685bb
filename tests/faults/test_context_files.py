"""Kills while `migctl context` writes: the file of contexts is as before or as it should be, and is written again."""

from __future__ import annotations

import signal
import stat
from pathlib import Path

import pytest

from mig_agent.adapters.context_files import read_contexts
from mig_agent.adapters.failpoints import VARIABLE
from support import forks
from support.agent import environment
from support.figures import Figure
from support.reached import CONTEXTS, REACHED


def add(folder: Path, name: str, place: str = "") -> int:
    variables = environment(folder, **({VARIABLE: place} if place else {}))
    return forks.run(*forks.MIGCTL, "context", "add", name, "--address", "unix:///x", "--use", env=variables).returncode


@pytest.mark.parametrize("first", [True, False], ids=["a first file", "a file before"])
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("door", sorted(door for kind in CONTEXTS for door in REACHED[kind]))
def test_killed_at_a_door(tmp_path: Path, door: str, when: str, first: bool, figure: Figure) -> None:
    there = [] if first else ["old"]
    for each in there:
        assert add(tmp_path, each) == 0
    assert add(tmp_path, "new", f"{when}-{door}") == -signal.SIGKILL
    found = read_contexts(environment(tmp_path))
    is_written = (when, door) == ("after", "contexts-rename")
    assert list(found.by_name) == ([*there, "new"] if is_written else there)
    assert found.current[0] == ("new" if is_written else "".join(there))
    # Whatever was left, the next one does it, and leaves nothing behind that others may read.
    assert add(tmp_path, "third") == 0
    assert list(read_contexts(environment(tmp_path)).by_name) == [*there, *(["new"] if is_written else []), "third"]
    (own,) = (each.path for each in found.files[:1])
    modes = {each.name: stat.S_IMODE(each.stat().st_mode) for each in own.parent.iterdir()}
    assert modes == {"contexts.yaml": 0o600, ".contexts.yaml.lock": 0o600}
    if not first:
        figure("crash points x kinds, each killed for real", 1)
        figure("kills of a process with one adapter", 1)

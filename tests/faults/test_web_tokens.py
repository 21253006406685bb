"""Kills while the tokens of the web page are written or removed: none is left that too many may read."""

from __future__ import annotations

import os
import signal
import socket
import stat
from pathlib import Path

import pytest

from mig_agent.adapters.failpoints import VARIABLE
from support import forks
from support.agent import short_folder
from support.figures import Figure
from support.reached import REACHED, WEB

PROGRAM = """
import sys
from pathlib import Path
from mig_agent.config import Settings, UnixAddress
from mig_agent.daemon.web.access import Access, remove_tokens

folder, verb = Path(sys.argv[1]), sys.argv[2]
settings = Settings(state_dir=folder / "state", listen=(UnixAddress(folder / "agent.sock"),))
if verb == "write":
    Access.of(settings)
else:
    remove_tokens(settings)
"""
VERBS = {"web page's tokens": "write", "web page off": "remove"}
MODES = {"agent.sock": 0o666, "admin.sock": 0o600}
READABLE = {"agent.sock.web-token": 0o444, "admin.sock.web-token": 0o400}


def run(folder: Path, verb: str, place: str = "") -> int:
    environment = os.environ | ({VARIABLE: place} if place else {})
    return forks.run("-c", PROGRAM, str(folder), verb, env=environment).returncode


def tokens(folder: Path) -> dict[str, int]:
    """The files of tokens with their permissions, half-written ones too."""
    return {each.name: stat.S_IMODE(each.stat().st_mode) for each in folder.iterdir() if "web-token" in each.name}


def test_the_table_is_that_of_this_test() -> None:
    assert set(WEB) == set(VERBS)


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize(("kind", "door"), [(kind, door) for kind in VERBS for door in sorted(REACHED[kind])])
def test_killed_at_a_door(kind: str, door: str, when: str, figure: Figure) -> None:
    with short_folder() as folder:
        (folder / "state").mkdir(mode=0o700)
        for name, mode in MODES.items():
            with socket.socket(socket.AF_UNIX) as bound:
                bound.bind(str(folder / name))
            (folder / name).chmod(mode)
        if VERBS[kind] == "remove":
            assert run(folder, "write") == 0
        assert run(folder, VERBS[kind], f"{when}-{door}") == -signal.SIGKILL
        for name, mode in tokens(folder).items():
            assert mode & ~READABLE[name.removeprefix(".").removesuffix(".new")] == 0, name
        # Whatever was left, the same again does it.
        assert run(folder, VERBS[kind]) == 0
        assert tokens(folder) == (READABLE if VERBS[kind] == "write" else {})
        figure("crash points x kinds, each killed for real", 1)
        figure("kills of a process with one adapter", 1)

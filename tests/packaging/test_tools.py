"""`pipx install .` and `uv tool install .`, as pages tell people whose Python is Debian's (PEP 668)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mig_agent import __version__
from support.wheel import ROOT

pytestmark = pytest.mark.timeout(600)


def in_a_new_home(home: Path, *command: str | Path) -> str:
    """What a command prints for somebody who has nothing yet."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("XDG_", "UV_", "PIPX_"))}
    found = subprocess.run(
        [str(part) for part in command],
        cwd=ROOT,
        env=kept | {"HOME": str(home), "UV_PYTHON": sys.executable},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert found.returncode == 0, found.stdout
    return found.stdout


@pytest.mark.parametrize("tool", [("uv", "tool", "install", "."), ("pipx", "install", ".")], ids=" ".join)
def test_it_installs_both_programs(tool: tuple[str, ...], tmp_path: Path) -> None:
    name, *arguments = tool
    in_a_new_home(tmp_path, Path(sys.executable).parent / name, *arguments)
    programs = tmp_path / ".local/bin"
    assert in_a_new_home(tmp_path, programs / "mig-agent", "version").strip() == f"mig-agent {__version__}"
    assert in_a_new_home(tmp_path, programs / "migctl", "--version").strip() == __version__
    assert " ".join(tool) in (ROOT / "README.md").read_text()
    assert " ".join(tool) in (ROOT / "docs/admin.md").read_text()

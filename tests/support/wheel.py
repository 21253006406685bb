"""The wheel as pip builds it, and the programs as pip installs them from it."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_PIP = (sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check")


def run(*command: str | Path, cwd: Path, **variables: str) -> str:
    """Runs a command that must not fail, and returns what it prints."""
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=os.environ | variables,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    return done.stdout


def build(folder: Path) -> Path:
    """Builds the wheel of this checkout into the folder."""
    run(*_PIP, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", folder, ROOT, cwd=folder)
    (found,) = folder.glob("*.whl")
    return found


def install(wheel: Path, folder: Path) -> Path:
    """Makes an environment that has the wheel and not the checkout, and returns the folder of its programs."""
    run(sys.executable, "-m", "venv", "--without-pip", folder, cwd=folder)
    run(*_PIP, "--python", folder / "bin/python", "install", "--no-deps", "--no-index", wheel, cwd=folder)
    return folder / "bin"


def libraries() -> Mapping[str, str]:
    """The variable by which installed programs find what they depend on.

    It comes from the tests' own environment; a path there brings no editable installs with it.
    """
    return {"PYTHONPATH": sysconfig.get_paths()["purelib"]}


def installed(programs: Path, program: str, *arguments: str) -> str:
    """Runs an installed program that must not fail, and returns what it prints."""
    return run(programs / program, *arguments, cwd=programs, **libraries())

"""The Debian package of this checkout, built for tests."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_FAST = {"DPKG_DEB_COMPRESSOR_TYPE": "gzip", "DPKG_DEB_COMPRESSOR_LEVEL": "1"}
"""For dpkg-deb: a larger file, and a third of the time."""


def build(folder: Path) -> Path:
    """Builds the package into the folder."""
    done = _run(str(ROOT / "hack/package.sh"), "deb", "--out", str(folder))
    (found,) = folder.glob("*.deb")
    assert done.splitlines()[-1] == str(found)
    return found


def next_version(package: Path, folder: Path) -> Path:
    """Builds the same with a higher version into the folder, for an upgrade."""
    _run("dpkg-deb", "--raw-extract", str(package), str(folder / "files"))
    control = folder / "files/DEBIAN/control"
    control.write_text(control.read_text().replace("Version: ", "Version: 1:"))
    _run("dpkg-deb", "--root-owner-group", "--build", str(folder / "files"), str(folder / "next.deb"))
    return folder / "next.deb"


def _run(*command: str) -> str:
    done = subprocess.run(
        command, env=os.environ | _FAST, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout

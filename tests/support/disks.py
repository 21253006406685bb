"""Disks that fill up or turn read-only under a program, as far as this machine lets a test have them."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


class SmallDisk:
    """A file system of a few MiB, mounted on a folder."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._filler = path / "filler"

    def fill(self) -> None:
        """Not one more byte fits."""
        with self._filler.open("ab", buffering=0) as filler:
            for size in (65_536, 4096, 1):
                with contextlib.suppress(OSError):
                    while filler.write(b"x" * size):
                        pass

    def empty(self) -> None:
        """There is room again."""
        self._filler.unlink()

    def read_only(self, *, on: bool = True) -> None:
        """Nothing can be written any more, or again."""
        _mount("-o", f"remount,{'ro' if on else 'rw'}", str(self.path))


@contextlib.contextmanager
def small_disk(path: Path, mib: int = 4) -> Iterator[SmallDisk]:
    """Skips the test where nothing can be mounted: that takes root, and a container may not let it."""
    path.mkdir(parents=True)
    if os.geteuid() != 0 or _mount("-t", "tmpfs", "-o", f"size={mib}m", "tmpfs", str(path), check=False):
        pytest.skip("no file system can be mounted here")
    try:
        yield SmallDisk(path)
    finally:
        subprocess.run(["umount", "--lazy", str(path)], check=True)


def _mount(*arguments: str, check: bool = True) -> int:
    try:
        return subprocess.run(["mount", *arguments], check=check, capture_output=True).returncode
    except FileNotFoundError:
        return 1

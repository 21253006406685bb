"""The cgroup of a node, in every hierarchy that the machine has (version 1, version 2, or both)."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

_PATIENCE_SECONDS = 10.0
_PAUSE_SECONDS = 0.05


def hierarchies() -> Iterator[Path]:
    """Where each is mounted."""
    for line in Path("/proc/mounts").read_text().splitlines():
        _, place, kind, *_ = line.split()
        if kind in {"cgroup", "cgroup2"}:
            yield Path(place)


def make(name: str) -> None:
    """One that pods can be put into; where cpuset is a hierarchy of its own, with all of the machine's processors."""
    for root in hierarchies():
        own = root / name
        own.mkdir(exist_ok=True)
        for file in ("cpuset.cpus", "cpuset.mems"):
            if (own / file).exists() and (root / file).exists():
                (own / file).write_text((root / file).read_text())
        controllers = root / "cgroup.controllers"
        if controllers.exists():
            for place in (root, own):
                for controller in controllers.read_text().split():
                    with contextlib.suppress(OSError):  # used by a hierarchy of version 1, or not to be delegated
                        (place / "cgroup.subtree_control").write_text(f"+{controller}")


def remove(name: str) -> list[Path]:
    """Innermost first, with some patience for processes that are still going. Returns what could not be removed."""
    left: list[Path] = []
    for root in hierarchies():
        own = root / name
        if own.is_dir():
            inner = sorted((path for path in own.rglob("*") if path.is_dir()), key=lambda path: -len(path.parts))
            left += [path for path in (*inner, own) if not _removed(path)]
    return left


def _removed(path: Path) -> bool:
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while True:
        try:
            path.rmdir()
        except FileNotFoundError:
            return True
        except OSError:
            if time.monotonic() > deadline:
                return False
            time.sleep(_PAUSE_SECONDS)
        else:
            return True

"""A folder that plays cgroup v2: what the kernel shows in it, and who is in which cgroup.

Nothing watches the folder: `settle` does what the kernel would have done meanwhile. It is called by whatever asks for
cgroups. A file that was written to before it existed is taken as if it had existed.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath

from mig_agent.simulator.codes import Code, Failure

INTERFACE_FILES = ("cgroup.controllers", "cgroup.procs", "cgroup.subtree_control")
"""Files of every cgroup. Removing a folder takes removing these first, which the kernel does not ask for."""
DMEM_FILES = ("dmem.min", "dmem.max", "dmem.current")
_CONTROLLERS = ("cpu", "memory", "pids")


def lineage(cgroup: str) -> Iterator[str]:
    """Yield a cgroup and its ancestors except the root: `/a/b`, `/a`."""
    path = PurePosixPath(cgroup)
    while path.name:
        yield str(path)
        path = path.parent


class CgroupFs:
    """The cgroups of one machine, named by their path from the root, such as `/mig-agent/7`."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def folder(self, cgroup: str) -> Path:
        """Return the folder of a cgroup."""
        return self.root / cgroup.lstrip("/")

    def name_of(self, folder: str) -> str:
        """Return the cgroup of a folder by its full path. Raises Failure (OPERATING_SYSTEM) if it is none."""
        path = Path(folder)
        if not path.is_dir() or self.root not in path.parents:
            raise Failure(Code.OPERATING_SYSTEM)
        return f"/{path.relative_to(self.root)}"

    def exists(self, cgroup: str) -> bool:
        """Return True if the cgroup is there, and has been since the last `settle`."""
        return (self.folder(cgroup) / "cgroup.controllers").exists()

    def can_limit_memory(self, cgroup: str) -> bool:
        """Return True if every ancestor has dmem in its `cgroup.subtree_control`, the root included."""
        parents = [each for each in self.folder(cgroup).parents if each == self.root or self.root in each.parents]
        return all("dmem" in _enabled(each) for each in parents)

    def of_process(self, pid: int) -> str | None:
        """Return the cgroup that a process is in, itself or by an ancestor of it; None if none has been said."""
        members = dict(self._members())
        ancestor: int | None = pid
        while ancestor is not None and ancestor not in members:
            ancestor = _parent(ancestor)
        if ancestor is None:
            return None
        if ancestor != pid:
            self._add(pid, members[ancestor])
        return members[ancestor]

    def settle(self, *, dmem: bool) -> None:
        """Make the files of new cgroups, forget ended processes, and take what was written to `subtree_control`."""
        self.root.mkdir(parents=True, exist_ok=True)
        for text, _, _ in os.walk(self.root):
            folder = Path(text)
            offered = _enabled(folder.parent) if folder != self.root else {*_CONTROLLERS, *({"dmem"} if dmem else ())}
            with contextlib.suppress(FileNotFoundError):  # it was removed meanwhile
                _put(folder / "cgroup.controllers", offered)
                _put(folder / "cgroup.subtree_control", _enabled(folder) & offered)
                (folder / "cgroup.procs").touch()
        self._inherit()
        for procs in self.root.rglob("cgroup.procs"):
            with contextlib.suppress(FileNotFoundError):
                pids = procs.read_text().split()
                living = [pid for pid in pids if _parent(int(pid)) is not None]
                if living != pids:
                    procs.write_text("".join(f"{pid}\n" for pid in living))

    def remove_all(self) -> None:
        """Remove every cgroup but the root, as a reboot does."""
        for folder in (each for each in self.root.iterdir() if each.is_dir()) if self.root.is_dir() else ():
            shutil.rmtree(folder)
        (self.root / "cgroup.procs").unlink(missing_ok=True)
        (self.root / "cgroup.subtree_control").unlink(missing_ok=True)

    def show(self, cgroup: str, files: Mapping[str, Mapping[str, int]]) -> None:
        """Write the dmem files of a cgroup: by file, the number of each GPU by its name."""
        with contextlib.suppress(FileNotFoundError):
            for name, numbers in files.items():
                path = self.folder(cgroup) / name
                path.write_text("".join(f"{gpu} {number}\n" for gpu, number in numbers.items()))

    def _inherit(self) -> None:
        """Put what members have started into their cgroups, where the kernel has it from its first moment on."""
        members = dict(self._members())
        for pid, cgroup in tuple(members.items()):
            below = list(_children(pid))
            for each in below:  # which grows meanwhile
                if each not in members:
                    self._add(each, cgroup)
                    below += _children(each)

    def _add(self, pid: int, cgroup: str) -> None:
        with contextlib.suppress(FileNotFoundError), (self.folder(cgroup) / "cgroup.procs").open("a") as file:
            file.write(f"{pid}\n")

    def _members(self) -> Iterator[tuple[int, str]]:
        for procs in sorted(self.root.rglob("cgroup.procs")):
            for pid in procs.read_text().split():
                yield int(pid), f"/{procs.parent.relative_to(self.root)}"


def _enabled(folder: Path) -> set[str]:
    """Return the controllers in `cgroup.subtree_control`: `dmem` as the kernel shows it, `+dmem` as it was written."""
    try:
        words = (folder / "cgroup.subtree_control").read_text().split()
    except FileNotFoundError:
        return set()
    on = {word.removeprefix("+") for word in words if not word.startswith("-")}
    return on - {word[1:] for word in words if word.startswith("-")}


def _put(path: Path, words: set[str]) -> None:
    text = f"{' '.join(sorted(words))}\n"
    if not path.exists() or path.read_text() != text:
        path.write_text(text)


def _parent(pid: int) -> int | None:
    """Return the parent of a process; None if it has ended, reaped or not."""
    try:
        state, parent = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[:2]
    except OSError:
        return None
    return None if state in {"Z", "X"} else int(parent)


def _children(pid: int) -> Iterator[int]:
    """Yield the children of a process, as far as the kernel tells."""
    for file in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            yield from map(int, file.read_text().split())

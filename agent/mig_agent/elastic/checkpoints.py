"""Checkpoints in a folder: each is whole or is not there, and the last good one is kept.

A checkpoint is a folder `step-000000000120` with what the program saved (`state`, a file or a folder) and a manifest:
the position, and the size and checksum of each file. It is written under another name, synced to disk and renamed, so
that a crash at any moment leaves the one before. What is damaged afterwards is found by its checksum and passed over.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import shutil
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from mig_agent.adapters.failpoints import FAILPOINTS
from mig_agent.core.errors import MigAgentError, UsageError
from mig_agent.elastic.sample_order import Position
from mig_agent.elastic.words import say

_STATE, _MANIFEST, _LOCK = "state", "manifest.json", "lock"
_PREFIX, _UNFINISHED = "step-", ".writing-"
_LOCK_SECONDS = 10.0
"""Time to wait for the process before this one, which may be ending."""
_LARGEST_MANIFEST = 64 << 20
_PIECE = 1 << 20


class CheckpointError(MigAgentError):
    """A checkpoint that cannot be written."""


@dataclass(frozen=True)
class Checkpoint:
    """A whole checkpoint."""

    position: Position
    state: Path


class CheckpointFolder:
    """The checkpoints of one training."""

    def __init__(self, path: Path, *, keep: int = 2) -> None:
        """`keep`: how many good ones are kept, the newest."""
        if keep < 1:
            raise UsageError(f"cannot keep {keep} checkpoints: it must be at least 1")
        self.path = path
        self._keep = keep
        self._lock: int | None = None
        self._damaged: set[Path] = set()
        """Checkpoints that were found to be damaged; their files may have the right sizes."""

    def open(self) -> None:
        """Make the folder, keep other processes from writing to it, and remove what a crash has left unfinished.

        Raises UsageError if another process has it, or it cannot be made.
        """
        try:
            with FAILPOINTS.around("checkpoint-folder"):
                self.path.mkdir(parents=True, exist_ok=True)
            with FAILPOINTS.around("checkpoint-lock"):
                self._lock = os.open(self.path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            self._take_lock(self._lock)
        except OSError as error:
            raise UsageError(
                f"cannot keep checkpoints in {self.path}: {error.strerror or error}", "name another folder"
            ) from error
        for each in self.path.glob(f"{_UNFINISHED}*"):
            with FAILPOINTS.around("checkpoint-removal"):
                shutil.rmtree(each, ignore_errors=True)

    def close(self) -> None:
        """Let other processes write to the folder."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def newest(self) -> Checkpoint | None:
        """Return the newest whole checkpoint; what is damaged is named on standard error and passed over."""
        for folder in self._by_step():
            try:
                return _read(folder)
            except (OSError, ValueError, KeyError, TypeError) as error:
                say(f"ignoring the checkpoint {folder}: {error}")
                self._damaged.add(folder)
        return None

    def write(self, position: Position, save: Callable[[Path], object]) -> None:
        """Have `save` write the state to a path, and make it the newest checkpoint. Raises CheckpointError.

        What `save` raises passes through; the checkpoint before is still there then.
        """
        target = self.path / f"{_PREFIX}{position.step:012d}"
        if self._is_whole(target):
            return
        temporary: Path | None = None
        try:
            with FAILPOINTS.around("checkpoint-begun"):
                temporary = Path(tempfile.mkdtemp(prefix=_UNFINISHED, dir=self.path))
            with FAILPOINTS.around("checkpoint-state"):
                save(temporary / _STATE)
            self._finish(temporary, target, position)
        except OSError as error:
            raise CheckpointError(
                f"cannot save a checkpoint in {self.path}: {error.strerror or error}; the one before is still there"
            ) from error
        finally:
            if temporary is not None and temporary.exists():
                with FAILPOINTS.around("checkpoint-removal"):
                    shutil.rmtree(temporary, ignore_errors=True)
        self._remove_old()

    def _finish(self, temporary: Path, target: Path, position: Position) -> None:
        if not (temporary / _STATE).exists():
            raise UsageError("cannot save a checkpoint: save(path) has written nothing to its path")
        files = {}
        for path in _below(temporary / _STATE):
            _sync(path)
            if path.is_file():
                files[path.relative_to(temporary).as_posix()] = list(_sum(path))
        manifest = json.dumps({"version": 1, "position": asdict(position), "files": files})
        with FAILPOINTS.around("checkpoint-manifest"):
            (temporary / _MANIFEST).write_text(manifest, encoding="utf-8")
        _sync(temporary / _MANIFEST)
        _sync(temporary)
        if target.exists():  # a damaged one
            with FAILPOINTS.around("checkpoint-removal"):
                shutil.rmtree(target)
        with FAILPOINTS.around("checkpoint-rename"):
            temporary.rename(target)
        _sync(self.path)
        self._damaged.discard(target)

    def _remove_old(self) -> None:
        """Remove all but the newest whole checkpoints."""
        whole = 0
        for folder in self._by_step():
            if whole >= self._keep:
                with FAILPOINTS.around("checkpoint-removal"):
                    shutil.rmtree(folder, ignore_errors=True)
            elif self._is_whole(folder):
                whole += 1

    def _by_step(self) -> list[Path]:
        """Return the checkpoints that are there, the newest first."""
        found = [each for each in self.path.glob(f"{_PREFIX}*") if each.name.removeprefix(_PREFIX).isdecimal()]
        return sorted(found, key=lambda each: int(each.name.removeprefix(_PREFIX)), reverse=True)

    def _is_whole(self, folder: Path) -> bool:
        """Return whether a checkpoint is there and not known to be damaged; only `newest` reads all of its files."""
        try:
            manifest = json.loads((folder / _MANIFEST).read_bytes())
            right = all((folder / name).stat().st_size == size for name, (size, _) in manifest["files"].items())
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return False
        return right and folder not in self._damaged

    def _take_lock(self, lock: int) -> None:
        until = time.monotonic() + _LOCK_SECONDS
        while True:
            try:
                fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno not in {errno.EACCES, errno.EAGAIN}:
                    return  # a file system without locks
                if time.monotonic() > until:
                    raise UsageError(
                        f"cannot keep checkpoints in {self.path}: another process does, and has not ended",
                        "give each training a folder of its own",
                    ) from None
                time.sleep(0.05)
            else:
                return


def _read(folder: Path) -> Checkpoint:
    """Return a checkpoint after comparing all of its files. Raises OSError, ValueError, KeyError or TypeError."""
    with (folder / _MANIFEST).open("rb") as file:
        manifest = json.loads(file.read(_LARGEST_MANIFEST))
    if manifest["version"] != 1:
        raise ValueError(f"it has version {manifest['version']}, which this program does not know")
    for name, (size, checksum) in manifest["files"].items():
        found = _sum(folder / name)
        if found[0] != size:
            raise ValueError(f"{name} has {found[0]} of {size} bytes")
        if found[1] != checksum:
            raise ValueError(f"{name} is not what was written")
    return Checkpoint(Position(**manifest["position"]), folder / _STATE)


def _sum(path: Path) -> tuple[int, int]:
    """Return the size and the CRC-32 of a file."""
    size = checksum = 0
    with path.open("rb") as file:
        while piece := file.read(_PIECE):
            size += len(piece)
            checksum = zlib.crc32(piece, checksum)
    return size, checksum


def _below(path: Path) -> Iterator[Path]:
    """Yield a file, or a folder's contents and then the folder."""
    if path.is_dir():
        for each in sorted(path.iterdir()):
            yield from _below(each)
    yield path


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # a file system that cannot sync folders
            raise
    finally:
        with contextlib.suppress(OSError):
            os.close(descriptor)

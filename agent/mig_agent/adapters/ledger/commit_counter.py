"""The commit counter: a small file beside the ledger with the number of commits that the ledger must have.

It is written after a commit has returned, without waiting for the disk. So the ledger never has fewer commits than the
counter, after a kill as after a power cut; a ledger with fewer was truncated, lost its log, or is an older copy.
"""

from __future__ import annotations

import os
import stat
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path

from mig_agent.adapters.failpoints import FAILPOINTS
from mig_agent.adapters.ledger.damage import DamagedError

SUFFIX = "-commits"
_MAGIC = b"MIGACNT1"
_LAYOUT = struct.Struct("<8s16sQ")
_CHECKSUM = struct.Struct("<I")
_BYTES = _LAYOUT.size + _CHECKSUM.size


@dataclass(frozen=True, slots=True)
class Count:
    """A ledger's identity and its number of commits."""

    ledger: str
    """32 hexadecimal digits, drawn when the ledger was created."""
    number: int

    def encode(self) -> bytes:
        """Return the content of the file: always of one length, and far shorter than a sector."""
        body = _LAYOUT.pack(_MAGIC, bytes.fromhex(self.ledger), self.number)
        return body + _CHECKSUM.pack(zlib.crc32(body))


def counter_of(ledger: Path) -> Path:
    """Return the path of a ledger's commit counter."""
    return ledger.with_name(ledger.name + SUFFIX)


def read_counter(path: Path) -> Count:
    """Read a commit counter. Raises DamagedError if it is missing or damaged, OSError."""
    try:
        data = read_regular(path, _BYTES + 1)
    except FileNotFoundError:
        raise DamagedError(f"its commit counter {path.name} is missing") from None
    if len(data) == _BYTES and data[-_CHECKSUM.size :] == _CHECKSUM.pack(zlib.crc32(data[: _LAYOUT.size])):
        magic, ledger, number = _LAYOUT.unpack(data[: _LAYOUT.size])
        if magic == _MAGIC:
            return Count(ledger.hex(), number)
    raise DamagedError(f"its commit counter {path.name} cannot be read")


def read_regular(path: Path, most: int) -> bytes:
    """Return the first `most` bytes of a regular file, or all with -1; nothing for any other file. Raises OSError."""
    if not stat.S_ISREG(path.lstat().st_mode):
        return b""
    # The file may have been replaced meanwhile: opening a pipe must not block the agent.
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    with os.fdopen(descriptor, "rb") as file:
        return file.read(most) if stat.S_ISREG(os.fstat(descriptor).st_mode) else b""


def write_counter(path: Path, count: Count) -> None:
    """Replace a commit counter, on the disk when this returns. Raises OSError."""
    temporary = path.with_name(f".{path.name}.new")
    with FAILPOINTS.around("ledger-counter"):
        temporary.unlink(missing_ok=True)  # whatever it is: opening a pipe would block for ever
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.write(descriptor, count.encode())
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        temporary.rename(path)
    sync_folder(path.parent)


def open_counter(path: Path) -> int:
    """Open a commit counter for writing in place and return the descriptor. Raises OSError."""
    with FAILPOINTS.around("ledger-counter"):
        return os.open(path, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)


def sync_folder(folder: Path) -> None:
    """Wait until the names in a folder are on the disk. Raises OSError."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

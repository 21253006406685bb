"""The commit counter: a small file beside the ledger that says how many commits the ledger must have.

It is written after a commit has returned, without waiting for the disk. So the ledger never has fewer commits than the
counter says, after a kill as after a power cut; one that does was cut, lost its log, or is an older copy.
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
    """Which ledger, and how many commits it has had."""

    ledger: str
    """32 hexadecimal digits, drawn when the ledger was made."""
    number: int

    def encode(self) -> bytes:
        """Return the content of the file: always of one length, and far shorter than a sector."""
        body = _LAYOUT.pack(_MAGIC, bytes.fromhex(self.ledger), self.number)
        return body + _CHECKSUM.pack(zlib.crc32(body))


def counter_of(ledger: Path) -> Path:
    """Return the path of a ledger's commit counter."""
    return ledger.with_name(ledger.name + SUFFIX)


def read_counter(path: Path) -> Count:
    """Read a commit counter. Raises DamagedError where it is missing or not as it was written, OSError."""
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
    """Return the beginning of a file; nothing for what is no regular file, be it a link to one. Raises OSError."""
    if not stat.S_ISREG(path.lstat().st_mode):
        return b""
    # Should it be another thing by now: a pipe must not keep the agent waiting.
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    with os.fdopen(descriptor, "rb") as file:
        return file.read(most) if stat.S_ISREG(os.fstat(descriptor).st_mode) else b""


def write_counter(path: Path, count: Count) -> None:
    """Make a commit counter anew, on the disk when this returns. Raises OSError."""
    temporary = path.with_name(f".{path.name}.new")
    with FAILPOINTS.around("ledger-counter"):
        temporary.unlink(missing_ok=True)  # whatever it is: to open a pipe would take for ever
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.write(descriptor, count.encode())
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        temporary.rename(path)
    sync_folder(path.parent)


def open_counter(path: Path) -> int:
    """Open a commit counter to be written in place; the descriptor. Raises OSError."""
    with FAILPOINTS.around("ledger-counter"):
        return os.open(path, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)


def sync_folder(folder: Path) -> None:
    """Wait until the names in a folder are on the disk. Raises OSError."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

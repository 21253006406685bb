"""Reads files that somebody else may have put there: only plain ones, and never more than a bound."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import BinaryIO


def open_plain(path: Path) -> BinaryIO:
    """Open a plain file to read it. Raises OSError, also for a pipe, which would be waited for, or a device."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        mode = os.fstat(descriptor).st_mode
        if not stat.S_ISREG(mode):
            raise OSError(0, "it is a folder" if stat.S_ISDIR(mode) else "it is no plain file", str(path))  # noqa: TRY301 -- with the descriptor to close
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def read_plain(path: Path, most: int) -> bytes:
    """Return the contents of a plain file. Raises OSError, also if it has more than `most` bytes."""
    with open_plain(path) as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise OSError(0, f"it is larger than {most / (1 << 20):g} MiB", str(path))
    return content


def read_end(path: Path, most: int) -> tuple[bytes, bool]:
    """Return at most so many bytes of the end of a plain file, and whether that is all of it. Raises OSError."""
    with open_plain(path) as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(size - most, 0))
        return file.read(most), size <= most

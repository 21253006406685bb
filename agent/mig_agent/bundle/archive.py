"""The file of a bundle: a tar.gz whose bytes depend on its contents alone, with a manifest."""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import io
import json
import os
import tarfile
import tempfile
import zlib
from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from typing import Final

from mig_agent.adapters.plain_files import open_plain
from mig_agent.client.to_json import Json
from mig_agent.core.errors import UsageError

FOLDER: Final = "mig-agent-bundle"
MANIFEST: Final = "manifest.json"
FORMAT: Final = 1
_MODE: Final = 0o600
MOST_BYTES: Final = 256 << 20
"""The most that is unpacked of a bundle; its sender may have made it up."""
_MOST_FILES: Final = 1000
"""The most files of a bundle that are looked at."""
_GZIP: Final = b"\x1f\x8b"


def pack(files: Mapping[str, str], manifest: Mapping[str, Json]) -> bytes:
    """Return the archive: the files in order of their names, without times and owners, and a manifest of them."""
    raw = {name: text.encode("utf-8", errors="replace") for name, text in files.items()}
    listed: dict[str, Json] = {
        name: {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        for name, content in sorted(raw.items())
    }
    whole: dict[str, Json] = {"format": FORMAT, **manifest, "files": listed}
    raw[MANIFEST] = (json.dumps(whole, indent=2) + "\n").encode("utf-8", errors="replace")
    packed = io.BytesIO()
    with (
        gzip.GzipFile(filename="", mode="wb", fileobj=packed, mtime=0) as compressed,
        tarfile.open(mode="w", fileobj=compressed, format=tarfile.PAX_FORMAT) as archive,
    ):
        for name, content in sorted(raw.items()):
            member = tarfile.TarInfo(f"{FOLDER}/{name}")
            member.size, member.mode = len(content), _MODE
            archive.addfile(member, io.BytesIO(content))
    return packed.getvalue()


def write(path: Path, content: bytes, *, force: bool) -> None:
    """Write a file for its owner alone, whole or not at all. Raises UsageError.

    A process that dies here leaves at most a file with a leading dot. Without `force` no file is replaced, also none
    that is made meanwhile.
    """
    if path.exists() and not path.is_file():  # a device or a pipe would be replaced
        raise UsageError(f"cannot write {path}: it is no plain file", "give the name of a new file")
    exists = UsageError(f"cannot write {path}: there is such a file", "give another name, or --force")
    if not force and path.exists():
        raise exists
    try:
        descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)  # for its owner alone
        temporary = Path(name)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            if force:
                temporary.replace(path)
            else:
                os.link(temporary, path)  # unlike a rename, never replaces a file
        finally:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
    except FileExistsError:
        raise exists from None
    except OSError as error:
        raise UsageError(
            f"cannot write {path}: {error.strerror or error}",
            "give the name of a file in a folder that you may write to",
        ) from error


def is_archive(path: Path) -> bool:
    """Return True if a file begins as a bundle does. Raises OSError, also for what is no plain file."""
    with open_plain(path) as file:
        return file.read(len(_GZIP)) == _GZIP


def read(path: Path, name: str) -> str:
    """Return one file of a bundle. Raises UsageError if there is none of that name, or this is no bundle."""
    try:
        return _text_of(path, name)
    except UsageError:
        raise
    except (OSError, EOFError, ValueError, tarfile.TarError, zlib.error) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else "it is no tar.gz of `migctl bundle`"
        raise UsageError(f"cannot read {path}: {why}", "give a file that `migctl bundle` has written") from error


def _text_of(path: Path, name: str) -> str:
    with open_plain(path) as file, gzip.open(file) as whole:
        unpacked = whole.read(MOST_BYTES + 1)
    if len(unpacked) > MOST_BYTES:
        raise UsageError(f"cannot read {path}: unpacked it is larger than {MOST_BYTES >> 20} MiB")
    with tarfile.open(fileobj=io.BytesIO(unpacked), mode="r:") as archive:
        members = islice(archive, _MOST_FILES)
        member = next((each for each in members if each.name == f"{FOLDER}/{name}"), None)
        if member is None:
            why = "its manifest.json says what could not be had, and why"
            raise UsageError(f"cannot read {path}: it has no {name}", why)
        # The size of one with holes is what its sender says.
        content = archive.extractfile(member) if member.isreg() and not member.issparse() else None
        if content is None:
            raise UsageError(f"cannot read {name} in {path}: it is no plain file")
        return content.read(MOST_BYTES).decode("utf-8", errors="replace")

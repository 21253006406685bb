"""Certificates in a folder as the kubelet mounts a Secret: links to a link to a folder, which is swapped as a whole."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from support.certificates import Pem

FILES = ("tls.crt", "tls.key", "ca.crt")


def mount(folder: Path, pem: Pem, authorities: str) -> None:
    """A new one, with these authorities (PEM, one or several)."""
    folder.mkdir()
    swap(folder, pem, authorities)
    for name in FILES:
        (folder / name).symlink_to(f"..data/{name}")


def swap(folder: Path, pem: Pem, authorities: str) -> None:
    """As the kubelet's AtomicWriter does it: a new folder, a new link beside the old one, and a rename over it."""
    data = Path(tempfile.mkdtemp(prefix="..2026_11_21_", dir=folder))
    shutil.copy(pem.cert, data / "tls.crt")
    shutil.copy(pem.key, data / "tls.key")
    (data / "ca.crt").write_text(authorities)
    link = folder / "..data"
    former = folder / link.readlink() if link.is_symlink() else None
    (folder / "..data_tmp").symlink_to(data.name)
    (folder / "..data_tmp").rename(link)
    if former is not None and former.exists():
        shutil.rmtree(former)

"""Small container images, packed here: no registry and no daemon is needed for them."""

from __future__ import annotations

import hashlib
import io
import json
import platform
import subprocess
import tarfile
from collections.abc import Mapping
from pathlib import Path

from support.cluster.parts import PAUSE

BUSYBOX = "docker.io/library/busybox:1"
"""What `image: busybox:1` in a pod means."""
_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
_BUSYBOX_FILE = Path("/bin/busybox")


def _layer() -> bytes:
    """Busybox under all of its names, and the folders that programs expect."""
    applets = subprocess.run([_BUSYBOX_FILE, "--list"], capture_output=True, text=True, check=True).stdout.split()
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for folder, mode in (("bin", 0o755), ("etc", 0o755), ("root", 0o700), ("tmp", 0o1777), ("run", 0o755)):
            entry = tarfile.TarInfo(folder)
            entry.type, entry.mode = tarfile.DIRTYPE, mode
            tar.addfile(entry)
        _add(tar, "bin/busybox", _BUSYBOX_FILE.read_bytes(), 0o755)
        _add(tar, "etc/passwd", b"root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534:nobody:/:/bin/false\n", 0o644)
        _add(tar, "etc/group", b"root:x:0:\nnogroup:x:65534:\n", 0o644)
        for applet in sorted({*applets} - {"busybox"}):
            entry = tarfile.TarInfo(f"bin/{applet}")
            entry.type, entry.linkname, entry.mode = tarfile.SYMTYPE, "busybox", 0o777
            tar.addfile(entry)
    return out.getvalue()


def _add(tar: tarfile.TarFile, name: str, data: bytes, mode: int) -> None:
    entry = tarfile.TarInfo(name)
    entry.size, entry.mode = len(data), mode
    tar.addfile(entry, io.BytesIO(data))


def pack(archive: Path) -> None:
    """Writes a docker-archive with busybox and the pause image, for `ctr images import`."""
    # A sandbox only has to stay until it is killed.
    images = {BUSYBOX: ["sh"], PAUSE: ["/bin/sleep", "2147483647"]}
    with tarfile.open(archive, "w") as tar:
        manifest = _layered(tar, _layer(), images, "/bin")
        _add(tar, "manifest.json", json.dumps(manifest).encode(), 0o644)


def pack_programs(archive: Path, programs: Mapping[str, Path]) -> None:
    """Writes a docker-archive with images, by name, of one program each and nothing else."""
    with tarfile.open(archive, "w") as tar:
        manifest = []
        for name, program in programs.items():
            out = io.BytesIO()
            with tarfile.open(fileobj=out, mode="w") as layer:
                _add(layer, f"usr/local/bin/{program.name}", program.read_bytes(), 0o755)
            manifest += _layered(tar, out.getvalue(), {name: []}, "/usr/local/bin")
        _add(tar, "manifest.json", json.dumps(manifest).encode(), 0o644)


def _layered(tar: tarfile.TarFile, layer: bytes, images: Mapping[str, list[str]], path: str) -> list[dict[str, object]]:
    """Adds images of the same layer, each with its command; returns what the manifest says of them."""
    digest = hashlib.sha256(layer).hexdigest()
    _add(tar, f"{digest}/layer.tar", layer, 0o644)
    manifest: list[dict[str, object]] = []
    for name, command in images.items():
        config = json.dumps(
            {
                "architecture": _ARCHITECTURES.get(platform.machine(), platform.machine()),
                "os": "linux",
                "config": {"Cmd": command, "Env": [f"PATH={path}"]},
                "rootfs": {"type": "layers", "diff_ids": [f"sha256:{digest}"]},
            }
        ).encode()
        file = f"{hashlib.sha256(config).hexdigest()}.json"
        _add(tar, file, config, 0o644)
        manifest.append({"Config": file, "RepoTags": [name], "Layers": [f"{digest}/layer.tar"]})
    return manifest

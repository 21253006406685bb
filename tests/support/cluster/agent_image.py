"""The agent's image from Dockerfile.agent, with neither registry nor daemon: buildah on a base of Debian's packages."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from support.cluster.failures import ClusterError
from support.cluster.programs import ROOT, cache

NAME = "docker.io/library/mig-agent"
"""What the image is called in the cluster; its tag is the hash of what it was made from."""
_DOCKERFILE = "Dockerfile.agent"
_MADE_FROM = (
    _DOCKERFILE,
    "pyproject.toml",
    "README.md",
    "LICENSE",
    "agent",
    "profiles",
    "deploy/requirements.txt",
    "deploy/requirements-build.txt",
)
_SUITE = "bookworm"
_PACKAGES = ("python3", "python3-venv", "ca-certificates")
_BASE = "localhost/base"
_KEPT = 2
"""How many images of the agent stay in the cache."""
_MOST_STORED = 4 << 30
"""Bytes of buildah's layers that are kept for the next build; above, all of them go."""
_FROM_THE_MACHINE = ("/etc/pip.conf", "/etc/ssl/certs", "/etc/resolv.conf")
"""How this machine reaches the package index."""


def build() -> tuple[str, Path]:
    """The image's name with its tag, and a docker-archive with it; from the cache where nothing has changed.

    Minutes when the cache is empty. ClusterError with the end of buildah's words.
    """
    with _alone("agent"), tempfile.TemporaryDirectory(dir=cache(), prefix=".agent-") as temporary:
        aside = Path(temporary)
        # Copied first: whoever edits the checkout meanwhile changes neither the hash nor the image.
        _copy(aside / "context")
        digest = _digest(aside / "context")
        name, archive = f"{NAME}:{digest}", cache() / f"agent-{digest}.tar"
        if archive.exists():
            archive.touch()
        else:
            print("building the agent's image ...", file=sys.stderr, flush=True)
            _buildah(aside, name, _base())
            (aside / "image.tar").rename(archive)
            _forget_older()
    return name, archive


def _copy(context: Path) -> None:
    context.mkdir()
    for path in _MADE_FROM:
        source = ROOT / path
        if source.is_dir():
            shutil.copytree(source, context / path, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            (context / path).parent.mkdir(exist_ok=True)
            shutil.copy(source, context / path)


def _digest(context: Path) -> str:
    """Of names and contents."""
    digest = hashlib.sha256(" ".join((_SUITE, *_PACKAGES)).encode())
    for file in sorted(path for path in context.rglob("*") if path.is_file()):
        digest.update(f"\0{file.relative_to(context)}\0".encode())
        digest.update(file.read_bytes())
    return digest.hexdigest()[:12]


def _base() -> Path:
    """A tar of the file system that the image stands on."""
    key = hashlib.sha256(" ".join((_SUITE, *_PACKAGES)).encode()).hexdigest()[:12]
    base = cache() / f"base-{key}.tar"
    if not base.exists():
        aside = base.with_suffix(".part.tar")
        _run("mmdebstrap", "--quiet", "--variant=minbase", f"--include={','.join(_PACKAGES)}", _SUITE, str(aside))
        aside.rename(base)
    return base


def _buildah(aside: Path, name: str, base: Path) -> None:
    """Writes `image.tar` into the folder. Layers are kept: what Dockerfile.agent installs first is installed once."""
    store = cache() / "buildah"
    if _size(store) > _MOST_STORED:
        shutil.rmtree(store)
    (aside / "base").mkdir()
    (aside / "base" / "base.tar").hardlink_to(base)
    (aside / "base" / "Dockerfile").write_text("FROM scratch\nADD base.tar /\n")
    storage = ("--root", str(store), "--runroot", str(aside / "run"))
    volumes = [f"--volume={path}:{path}:ro" for path in _FROM_THE_MACHINE if Path(path).exists()]
    where = aside / "image.tar"
    _run("buildah", *storage, "bud", "--quiet", "--layers", "--tag", _BASE, str(aside / "base"))
    _run(
        *(
            "buildah",
            *storage,
            "bud",
            "--quiet",
            "--layers",
            "--format=docker",
            *volumes,
            "--build-arg",
            f"BASE={_BASE}",
            "--tag",
            name,
        ),
        *("--file", str(aside / "context" / _DOCKERFILE), str(aside / "context")),
    )
    _run("buildah", *storage, "push", "--quiet", name, f"docker-archive:{where}:{name}")


def _size(folder: Path) -> int:
    """Bytes on the disk below it; 0 where there is none."""
    if not folder.exists():
        return 0
    told = subprocess.run(
        ["du", "--summarize", "--block-size=1", str(folder)], capture_output=True, text=True, check=False
    )
    return int(told.stdout.split()[0])


def _run(*command: str) -> None:
    environment = os.environ | {"BUILDAH_ISOLATION": "chroot", "STORAGE_DRIVER": "overlay"}
    # In a mount namespace of its own: what a build that was killed has mounted goes with it.
    done = subprocess.run(
        ["unshare", "--mount", "nice", "-n", "10", *command],
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        words = "\n".join((done.stdout + done.stderr).splitlines()[-30:])
        raise ClusterError(f"cannot build the agent's image: {' '.join(command)} ended with {done.returncode}\n{words}")


@contextmanager
def _alone(what: str) -> Iterator[None]:
    """Whoever comes second waits for the first, and finds its work done."""
    cache().mkdir(parents=True, exist_ok=True)
    with (cache() / f"{what}.lock").open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for left in cache().glob(f".{what}-*"):  # by a build that was killed
            shutil.rmtree(left)
        yield


def _forget_older() -> None:
    archives = sorted(cache().glob("agent-*.tar"), key=lambda path: path.stat().st_mtime)
    for archive in archives[:-_KEPT]:
        archive.unlink()

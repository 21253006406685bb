"""Bundles and recordings made to harm whoever replays them: bounded in time and memory, and refused in words."""

from __future__ import annotations

import gzip
import io
import os
import re
import subprocess
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from mig_agent.bundle import archive
from mig_agent.bundle.contents import RECORDING
from mig_agent.bundle.replaying import replay_and_report
from mig_agent.core.errors import UsageError
from mig_agent.core.planning.plan import DEFAULT_POLICY
from mig_agent.core.planning.planner import plan
from mig_agent.core.planning.recording import RecordedPlan, record, to_json
from support import forks
from support.agent import PROCESS_SECONDS
from support.nodes import H100, Machine, memory, node, request

MIB = 1 << 20
SCRIPT = """
import resource, sys
resource.setrlimit(resource.RLIMIT_AS, ({limit}, {limit}))
from mig_agent.program import run
run(["replay", sys.argv[1]])
"""
MEMBER = f"{archive.FOLDER}/{RECORDING}"


def tar_of(*members: tuple[tarfile.TarInfo, bytes]) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(mode="w:gz", fileobj=packed) as opened:
        for member, content in members:
            opened.addfile(member, io.BytesIO(content))
    return packed.getvalue()


def plain(name: str, content: bytes = b"{}") -> tuple[tarfile.TarInfo, bytes]:
    member = tarfile.TarInfo(name)
    member.size = len(content)
    return member, content


def link(name: str, target: str, kind: bytes) -> tuple[tarfile.TarInfo, bytes]:
    member = tarfile.TarInfo(name)
    member.type, member.linkname = kind, target
    return member, b""


def sparse() -> bytes:
    """A member of no bytes that says it is of 64 GiB, with a hole in it."""
    member = tarfile.TarInfo(MEMBER)
    member.pax_headers = {"GNU.sparse.size": str(64 << 30), "GNU.sparse.map": f"{64 << 30},0"}
    packed = io.BytesIO()
    with tarfile.open(mode="w:gz", fileobj=packed, format=tarfile.PAX_FORMAT) as opened:
        opened.addfile(member, io.BytesIO())
    return packed.getvalue()


def many() -> bytes:
    """More members than a bundle has files."""
    block = tarfile.TarInfo("x").tobuf()
    return gzip.compress(block * (100 * MIB // len(block)) + plain(MEMBER)[0].tobuf() + b"{}".ljust(512, b"\0"), 1)


def long_header() -> bytes:
    member = tarfile.TarInfo(MEMBER)
    member.pax_headers = {"comment": "x" * (50 * MIB)}
    packed = io.BytesIO()
    with tarfile.open(mode="w:gz", fileobj=packed, format=tarfile.PAX_FORMAT, compresslevel=1) as opened:
        opened.addfile(member, io.BytesIO())
    return packed.getvalue()


BUNDLES: dict[str, Callable[[], bytes]] = {
    "bomb": lambda: gzip.compress(bytes(600 * MIB), 1),
    "sparse member": sparse,
    "many members": many,
    "long header": long_header,
    "symbolic link": lambda: tar_of(link(MEMBER, "/etc/shadow", tarfile.SYMTYPE)),
    "hard link": lambda: tar_of(plain("x"), link(MEMBER, "x", tarfile.LNKTYPE)),
    "device": lambda: tar_of(link(MEMBER, "", tarfile.CHRTYPE)),
    "pipe": lambda: tar_of(link(MEMBER, "", tarfile.FIFOTYPE)),
    "absolute name": lambda: tar_of(plain(f"/{MEMBER}"), plain("/etc/cron.d/x")),
    "name upwards": lambda: tar_of(plain(f"../../{MEMBER}")),
    "deep": lambda: tar_of(plain(MEMBER, b"[" * MIB)),
    "deep objects": lambda: tar_of(plain(MEMBER, b'{"recording":' * (MIB // 16))),
    "long number": lambda: tar_of(plain(MEMBER, b"1" * MIB)),
    "cut": lambda: tar_of(plain(MEMBER, b"x" * 4096))[:-40],
    "no text": lambda: tar_of(plain(MEMBER, os.urandom(4096))),
    "no archive in it": lambda: gzip.compress(b"nothing"),
}


def replayed(path: Path, limit: int = 2000 * MIB) -> subprocess.CompletedProcess[str]:
    return forks.run("-c", SCRIPT.format(limit=limit), str(path), timeout=PROCESS_SECONDS)


def check_refused(done: subprocess.CompletedProcess[str]) -> None:
    assert done.returncode == 2, done.stderr[-2000:]
    assert not done.stdout
    assert done.stderr.startswith("mig-agent: cannot re"), done.stderr[-2000:]
    assert len(done.stderr.splitlines()) == 1
    assert len(done.stderr) < 1000


@pytest.mark.parametrize("name", BUNDLES)
def test_a_hostile_bundle_is_refused_in_words(name: str, tmp_path: Path) -> None:
    path = tmp_path / "b.tar.gz"
    path.write_bytes(BUNDLES[name]())
    check_refused(replayed(path))
    assert [each.name for each in tmp_path.iterdir()] == ["b.tar.gz"]  # nothing is ever unpacked to the disk


@pytest.mark.parametrize("kind", ["fifo", "folder", "zero", "sparse", "bytes", "dangling", "itself", "empty"])
def test_what_is_no_bundle_is_refused_in_words(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "b"
    match kind:
        case "fifo":
            os.mkfifo(path)
        case "folder":
            path.mkdir()
        case "zero":
            path = Path("/dev/zero")
        case "sparse":
            with path.open("wb") as file:
                file.truncate(10 << 30)
        case "bytes":
            path.write_bytes(b"\xff\xfe\x00" * 100)
        case "dangling":
            path.symlink_to("nothing")
        case "itself":
            path.symlink_to(path)
        case "empty":
            path.touch()
    check_refused(replayed(path))


def test_a_device_or_pipe_is_never_replaced(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "p")
    with pytest.raises(UsageError, match="it is no plain file"):
        archive.write(tmp_path / "p", b"x", force=True)
    assert (tmp_path / "p").is_fifo()


def test_a_recording_that_contradicts_itself_is_refused_in_words(tmp_path: Path) -> None:
    """The planner finds windows on a GPU that cannot be partitioned."""
    view = node(Machine(H100), Machine(H100))
    asking = request(memory("4G"), memory("30G"), memory("30G"))
    plans = (RecordedPlan(request=asking, outcome=plan(view, asking), waits=False),)
    text = to_json(record(view, DEFAULT_POLICY, 0.0, plans, "1"))
    inverted = re.sub(r"\b(true|false)\b", lambda word: "false" if word[0] == "true" else "true", text)
    path = tmp_path / RECORDING
    path.write_text(inverted)
    with pytest.raises(UsageError, match="is not as an agent writes it"):
        replay_and_report(path, lambda _line: None, verbose=False)

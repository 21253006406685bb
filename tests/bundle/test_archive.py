"""The file itself: the same contents give the same bytes, it is its owner's alone, and nothing is overwritten."""

from __future__ import annotations

import io
import json
import os
import tarfile
import threading
from pathlib import Path

import pytest

from mig_agent.bundle import archive
from mig_agent.core.errors import UsageError

FILES = {"status.json": "{}\n", "log.txt": "a line\n"}


def test_the_same_contents_give_the_same_bytes() -> None:
    packed = archive.pack(FILES, {"node": "gpu-17"})
    assert packed == archive.pack(dict(reversed(FILES.items())), {"node": "gpu-17"})
    with tarfile.open(fileobj=io.BytesIO(packed)) as opened:
        members = opened.getmembers()
        assert [each.name.partition("/")[2] for each in members] == ["log.txt", "manifest.json", "status.json"]
        assert {(each.mtime, each.uid, each.uname, each.mode) for each in members} == {(0, 0, "", 0o600)}


def test_the_manifest_counts_what_is_there(tmp_path: Path) -> None:
    archive.write(tmp_path / "b.tar.gz", archive.pack(FILES, {"missing": []}), force=False)
    manifest = json.loads(archive.read(tmp_path / "b.tar.gz", "manifest.json"))
    assert manifest["format"] == 1
    assert {name: each["bytes"] for name, each in manifest["files"].items()} == {"log.txt": 7, "status.json": 3}


def test_it_is_for_its_owner_alone_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        archive.write(tmp_path / "b", b"x", force=False)
    finally:
        os.umask(before)
    assert (tmp_path / "b").stat().st_mode & 0o777 == 0o600
    assert [each.name for each in tmp_path.iterdir()] == ["b"]


def test_nothing_is_overwritten_without_force(tmp_path: Path) -> None:
    path = tmp_path / "b"
    path.write_bytes(b"before")
    with pytest.raises(UsageError, match="there is such a file"):
        archive.write(path, b"after", force=False)
    assert path.read_bytes() == b"before"
    archive.write(path, b"after", force=True)
    assert path.read_bytes() == b"after"


def test_two_at_once_give_one_file(tmp_path: Path) -> None:
    refused: list[str] = []

    def write() -> None:
        try:
            archive.write(tmp_path / "b", b"x", force=False)
        except UsageError as error:
            refused.append(error.message)

    threads = [threading.Thread(target=write) for _ in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert len(refused) == 3
    assert (tmp_path / "b").read_bytes() == b"x"


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="No such file"):
        archive.write(tmp_path / "none/b", b"x", force=False)


@pytest.mark.parametrize("content", [b"", b"no archive", b"\x1f\x8b\x08\x00" + b"\0" * 20])
def test_what_is_no_bundle(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "b").write_bytes(content)
    with pytest.raises(UsageError, match=r"^cannot read"):
        archive.read(tmp_path / "b", "recording.json")


def test_a_part_that_is_missing(tmp_path: Path) -> None:
    archive.write(tmp_path / "b", archive.pack(FILES, {}), force=False)
    with pytest.raises(UsageError, match=r"it has no recording.json") as caught:
        archive.read(tmp_path / "b", "recording.json")
    assert "manifest.json" in caught.value.hint

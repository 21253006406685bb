"""The log in a bundle: its end, in bounded time and memory, whatever `--log` names."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from mig_agent.bundle.contents import BundleContents, add_log_file
from mig_agent.client.to_json import Json


def log_of(path: Path, lines: int = 3) -> tuple[str | None, list[Json]]:
    contents = BundleContents()
    add_log_file(contents, path, lines)
    return contents.files.get("log.txt"), contents.missing


def test_the_last_lines_are_taken(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text("".join(f"line {n}\n" for n in range(10)))
    assert log_of(path) == ("line 7\nline 8\nline 9\n", [])
    assert log_of(path, 100)[0] == path.read_text()


def test_a_log_without_line_ends_is_cut(tmp_path: Path) -> None:
    path = tmp_path / "log"
    with path.open("wb") as file:
        file.truncate(10 << 30)
    text, missing = log_of(path)
    assert text is not None
    assert len(text) == 1 << 16
    assert "only the last 16 MiB" in str(missing)


def test_what_is_no_utf8_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"caf\xe9 \xff\n")
    assert log_of(path)[0] == "caf\ufffd \ufffd\n"


@pytest.mark.parametrize("kind", ["fifo", "folder", "zero", "dangling", "itself"])
def test_what_is_no_log_is_missing_with_the_reason(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "log"
    match kind:
        case "fifo":
            os.mkfifo(path)
        case "folder":
            path.mkdir()
        case "zero":
            path = Path("/dev/zero")
        case "dangling":
            path.symlink_to("nothing")
        case "itself":
            path.symlink_to(path)
    text, missing = log_of(path)
    assert text is None
    assert str(path) in str(missing)

"""Remembered tokens: nobody else's to read, and never in the way."""

from __future__ import annotations

import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from mig_agent.client.tokens import MOST_REMEMBERED, RememberedTokens


def test_a_token_is_remembered_until_it_is_forgotten(tmp_path: Path) -> None:
    tokens = RememberedTokens(tmp_path / "mig-agent")
    assert tokens.token("lease") == ""
    tokens.remember("lease", "secret", "unix:///x")
    assert RememberedTokens(tmp_path / "mig-agent").token("lease") == "secret"
    tokens.forget("lease")
    tokens.forget("lease")
    assert tokens.token("lease") == ""


def test_nobody_else_may_read_it(tmp_path: Path) -> None:
    folder = tmp_path / "state" / "mig-agent"
    RememberedTokens(folder).remember("lease", "secret", "unix:///x")
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    for file in folder.iterdir():
        assert stat.S_IMODE(file.stat().st_mode) == 0o600, file


def test_where_it_is(tmp_path: Path) -> None:
    tokens = RememberedTokens.of_this_person({"XDG_STATE_HOME": str(tmp_path)})
    tokens.remember("lease", "secret", "unix:///x")
    assert (tmp_path / "mig-agent" / "tokens.json").exists()


def test_a_file_that_cannot_be_read_counts_as_nothing_remembered(tmp_path: Path) -> None:
    file = tmp_path / "tokens.json"
    for content in (b"", b"[1]", b'{"lease": "text"}', b"\xff\xfe", b'{"lease": {"token": 5, "at": "x"}}'):
        file.write_bytes(content)
        tokens = RememberedTokens(tmp_path)
        assert tokens.token("other") == ""
        tokens.remember("new", "secret", "unix:///x")
        assert tokens.token("new") == "secret"


def test_many_at_once_lose_nothing(tmp_path: Path) -> None:
    """Several shells of one person, each with a process of its own; threads take the same lock."""
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda n: RememberedTokens(tmp_path).remember(f"lease-{n}", f"t{n}", "x"), range(40)))
    tokens = RememberedTokens(tmp_path)
    assert [tokens.token(f"lease-{n}") for n in range(40)] == [f"t{n}" for n in range(40)]


def test_the_oldest_are_forgotten_first(tmp_path: Path) -> None:
    tokens = RememberedTokens(tmp_path)
    with tokens._locked():
        tokens._write({f"lease-{n}": {"token": "t", "address": "x", "at": n} for n in range(MOST_REMEMBERED)})
    tokens.remember("newest", "t", "x")
    assert tokens.token("newest") == "t"
    assert tokens.token("lease-0") == ""
    assert tokens.token("lease-1") == "t"

"""Tokens and the key that they are made with."""

from __future__ import annotations

import multiprocessing
import os
from pathlib import Path

import pytest

from mig_agent.adapters.tokens import KEY_FILE, Tokens
from mig_agent.core.errors import ConfigError
from mig_agent.core.model import LeaseId

LEASE = LeaseId("lease-1")


def test_a_token_is_the_same_again_after_a_restart(tmp_path: Path) -> None:
    first = Tokens.load_or_make(tmp_path / KEY_FILE).token(LEASE)
    again = Tokens.load_or_make(tmp_path / KEY_FILE)
    assert again.token(LEASE) == first
    assert again.matches(LEASE, first)
    assert len(first) == 64


def test_a_token_is_hmac_sha256_of_the_lease() -> None:
    # RFC 4231, test case 2.
    tokens = Tokens(b"Jefe")
    expected = "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843"
    assert tokens.token(LeaseId("what do ya want for nothing?")) == expected


@pytest.mark.parametrize("wrong", ["", "x", "0" * 64, "\udcff", "ä" * 64])
def test_no_other_text_is_the_token(tmp_path: Path, wrong: str) -> None:
    tokens = Tokens.load_or_make(tmp_path / KEY_FILE)
    assert not tokens.matches(LEASE, wrong)
    assert not tokens.matches(LEASE, tokens.token(LEASE).upper())
    assert not tokens.matches(LEASE, tokens.token(LeaseId("lease-2")))


def test_other_keys_make_other_tokens(tmp_path: Path) -> None:
    first = Tokens.load_or_make(tmp_path / "a").token(LEASE)
    assert Tokens.load_or_make(tmp_path / "b").token(LEASE) != first


def test_the_key_is_for_its_owner_alone(tmp_path: Path) -> None:
    path = tmp_path / KEY_FILE
    Tokens.load_or_make(path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert [each.name for each in tmp_path.iterdir()] == [KEY_FILE]
    path.chmod(0o640)
    with pytest.raises(ConfigError, match="others than its owner") as refused:
        Tokens.load_or_make(path)
    assert "chmod 600" in refused.value.hint


def test_what_is_no_key_is_refused(tmp_path: Path) -> None:
    path = tmp_path / KEY_FILE
    for content in (b"", b"short", b"x" * 33):
        path.write_bytes(content)
        path.chmod(0o600)
        with pytest.raises(ConfigError, match="it is not a key"):
            Tokens.load_or_make(path)


def test_what_is_no_file_of_its_own_is_refused_in_words(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").write_bytes(b"x" * 32)
    (tmp_path / "elsewhere").chmod(0o600)
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "dangling").symlink_to(tmp_path / "missing")
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe", 0o600)
    for name, words in {
        "link": "it is a link",
        "dangling": "it is a link",
        "folder": "it is a folder",
        "pipe": "it is no regular file",
    }.items():
        with pytest.raises(ConfigError, match=f"cannot use {tmp_path}/{name}: {words}"):
            Tokens.load_or_make(tmp_path / name)
    assert not (tmp_path / "missing").exists()
    with pytest.raises(ConfigError, match="cannot make the key of the tokens"):
        Tokens.load_or_make(tmp_path / "nowhere" / KEY_FILE)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_a_key_of_another_user_is_refused(tmp_path: Path) -> None:
    """Who owns it knows every token, whatever its mode."""
    path = tmp_path / KEY_FILE
    Tokens.load_or_make(path)
    os.chown(path, 61001, 61001)
    with pytest.raises(ConfigError, match="it belongs to uid 61001"):
        Tokens.load_or_make(path)


def _token(path: str) -> str:
    return Tokens.load_or_make(Path(path)).token(LEASE)


def test_two_who_make_the_key_at_once_end_with_one(tmp_path: Path) -> None:
    with multiprocessing.get_context("spawn").Pool(4) as pool:
        tokens = pool.map(_token, [str(tmp_path / KEY_FILE)] * 16)
    assert len(set(tokens)) == 1
    assert [each.name for each in tmp_path.iterdir()] == [KEY_FILE]

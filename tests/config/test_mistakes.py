"""Every mistake in a configuration is told with its place and what would be right."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mig_agent.config import load
from mig_agent.config.load import read
from mig_agent.config.settings import ROWS
from mig_agent.core.errors import ConfigError

IN_FILE = [
    ("stat_dir: /x\n", "line 1", "did you mean state_dir?"),
    ("\n\nSocket-Mode: 0660\n", "line 3", "did you mean socket_mode?"),
    ("colour: blue\n", "line 1", "docs/configuration.md"),
    ("reread: 30\n", "line 1: cannot take 30 as a duration", "30s"),
    ("max_waiting: many\n", "as a whole number", "1000"),
    ("max_waiting: -1\n", "as a whole number", "1000"),
    ("creation_cost: nan\n", "as a number", "2.5"),
    ("socket_mode: 660x\n", "permissions of a socket", "0660"),
    ("socket_mode: 0777\n", "permissions of a socket", "0660"),
    ("socket_mode: 432\n", "permissions of a socket", "0600"),
    ("foreign: ignore\n", "ignore", "respect or adopt"),
    ("strict_fifo: perhaps\n", "perhaps", "yes or no"),
    ("log_level: loud\n", "loud", "debug, info, warning or error"),
    ("gpus: [0.5]\n", "0.5 as a GPU", "indices or UUIDs"),
    ("gpus: []\n", "gpus names none", "leave it out"),
    ("state_dir: [a, b]\n", "cannot take a list", "one value"),
    ("state_dir: {a: b}\n", "a value or a plain list", "write state_dir: /var/lib/mig-agent"),
    ("listen: 7400\n", "cannot listen on 7400", "unix:///path"),
    ("listen: unix-abstract:x\n", "abstract", "unix:///path"),
    (f"listen: unix:///{'x' * 120}\n", "a socket's at most 107", "shorter"),
    ("listen: 0.0.0.0:7400\n", "TCP is served only with certificates", "unix:///path"),
    ("listen: 0.0.0.0:74000\n", "65535", "HOST:PORT"),
    ("listen: unix:///a/admin.sock\n", "for administrators alike", "another admin_listen"),
    ("admin_listen: 127.0.0.1:80\n", "not a Unix socket", "unix:///path"),
    ("tls_cert: /a\n", "without tls_key and tls_client_ca", "all three or none"),
    ("advertise: node-status\n", "cannot advertise by node-status: kubernetes is off", "switch it on"),
    ("advertise: both\n", "cannot take both", "device-plugin, dra, node-status or none"),
    ("metrics: on\n", "cannot listen on on", "HOST:PORT"),
    ("reread: 1s\nreread: 2s\n", "line 1 sets it already", "remove one"),
    ("- state_dir\n", "holds no settings", "name: value"),
    ("just words\n", "holds no settings", "name: value"),
    ("a: [1\n", "line 2", "YAML"),
    ("a: b: c\n", "line 1", "YAML"),
    ("reread: !!python/object:os.system x\n", "line 1: cannot understand x", "90s"),
]


@pytest.mark.parametrize(("text", "message", "hint"), IN_FILE, ids=[text.strip()[:30] for text, _, _ in IN_FILE])
def test_a_mistake_in_the_file_is_told(text: str, message: str, hint: str, tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load(path)
    assert caught.value.message.startswith("cannot ")
    assert message in caught.value.message
    assert hint in caught.value.hint
    assert "\n" not in caught.value.message


def test_the_file_and_the_line_are_named(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("# comment\nreread: 1s\n\ncall_deadline: soon\n")
    with pytest.raises(ConfigError, match=rf"call_deadline in {path}, line 4"):
        load(path)


def test_a_file_that_cannot_be_read_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        load(tmp_path / "missing.yaml")
    with pytest.raises(ConfigError, match="Is a directory"):
        load(tmp_path)
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="not UTF-8"):
        load(tmp_path / "binary.yaml")
    (tmp_path / "control.yaml").write_text("reread: \x01\n")
    with pytest.raises(ConfigError, match="cannot read"):
        load(tmp_path / "control.yaml")


def test_a_mistake_in_a_variable_or_a_flag_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="cannot use --reread: cannot understand soon"):
        load(flags={"reread": "soon"})
    monkeypatch.setenv("MIG_AGENT_REREAD", "soon")
    with pytest.raises(ConfigError, match="cannot use MIG_AGENT_REREAD: cannot understand soon"):
        load()


def test_a_mistyped_variable_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MIG_AGENT_STATEDIR", "/x")
    with pytest.raises(ConfigError) as caught:
        load()
    assert caught.value.hint == "did you mean MIG_AGENT_STATE_DIR?"


def test_every_mistake_is_found_in_one_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MIG_AGENT_STATEDIR", "/x")
    path = tmp_path / "config.yaml"
    path.write_text(
        """\
max_wating: 5
reread: soon
listen: [unix:///run/a.sock, 0.0.0.0:7400]
state_dir: {a: b}
reread: 5s
tls_cert: /etc/cert.pem
advertise: none
log_level: loud
"""
    )
    reading = read(path, {"call_deadline": "never"})
    assert reading.settings is None
    assert [(each.setting, each.line) for each in reading.problems] == [
        ("", 1),
        ("state_dir", 4),
        ("reread", 5),
        ("", None),
        ("reread", 2),
        ("log_level", 8),
        ("call_deadline", None),
        ("listen", 3),
    ]
    assert all(each.file == path for each in reading.problems if each.line)
    assert reading.problems[-1].message.endswith(f"(listen in {path}, line 3)")
    with pytest.raises(ConfigError, match="max_wating"):
        load(path)


def test_what_follows_from_another_mistake_is_not_reported(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(
        "listen: 0.0.0.0:7400\ntls_cert: /c\ntls_key: [a, b]\ntls_client_ca: /ca\nadmin_listen: unix:///a\n"
    )
    assert [each.setting for each in read(path).problems] == ["tls_key"]


def refusal_of(action: Callable[[], object]) -> str:
    try:
        action()
    except ConfigError as error:
        return error.message
    return ""


@given(name=st.sampled_from(sorted(ROWS)), text=st.text(max_size=60))
def test_whatever_is_written_as_a_value_is_taken_or_refused_in_words(name: str, text: str) -> None:
    message = refusal_of(lambda: load(flags={name: text}))
    assert not message or (message.startswith("cannot ") and "\n" not in message)


@given(data=st.binary(max_size=200))
def test_whatever_the_file_holds_is_taken_or_refused_in_words(
    data: bytes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.getbasetemp() / "fuzzed.yaml"
    path.write_bytes(data)
    message = refusal_of(lambda: load(path))
    assert not message or message.startswith("cannot ")

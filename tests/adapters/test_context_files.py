"""Files of contexts: what is read from them, what a mistake is said to be, and how they are written."""

from __future__ import annotations

import stat
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mig_agent.adapters.context_files import (
    FILE_NAME,
    KEYS,
    AgentContext,
    ContextFile,
    change_file,
    check_name,
    read_contexts,
    system_files,
    user_file,
)
from mig_agent.adapters.context_yaml import dump_file, parse_file
from mig_agent.core.errors import ConfigError

TEXT = """\
current_context: gpu3
contexts:
  gpu3:
    address: gpu3:7400
    tls_ca: ca.crt
    tls_cert: ~/alice.crt
    tls_key: /keys/alice.key
  here: {address: "unix:///run/mig-agent/mig-agent.sock"}
"""


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def environment(folder: Path) -> dict[str, str]:
    return {"XDG_CONFIG_HOME": str(folder / "own"), "XDG_CONFIG_DIRS": f"{folder}/first:{folder}/second:relative"}


def test_what_a_file_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/alice")
    path = write(tmp_path / "contexts.yaml", TEXT)
    found = parse_file(path)
    assert (found.current, found.current_line) == ("gpu3", 1)
    gpu3, here = found.contexts.values()
    assert (gpu3.name, gpu3.address, gpu3.mistake) == ("gpu3", "gpu3:7400", "")
    assert gpu3.tls_file("tls_ca") == str(tmp_path / "ca.crt"), "beside the file that names it"
    assert gpu3.tls_file("tls_cert") == "/alice/alice.crt"
    assert gpu3.tls_file("tls_key") == "/keys/alice.key"
    assert here.tls_file("tls_ca") == ""
    assert (gpu3.place(), gpu3.place("tls_key")) == (f"{path}, line 3", f"{path}, line 7")


@pytest.mark.parametrize("text", ["", "# nothing\n", "contexts:\n", "contexts: {}\n"])
def test_files_without_contexts(tmp_path: Path, text: str) -> None:
    found = parse_file(write(tmp_path / "contexts.yaml", text))
    assert (found.contexts, found.current) == ({}, None)


MISTAKES = [
    ("contexts: [", "line 1: expected the node content"),
    ("- a", "it holds no contexts"),
    ("context:\n  a: {address: h:1}\n", "line 1: there is no such key. Hint: did you mean contexts?"),
    ("clusters: 1\n", "there is no such key. Hint: such a file has current_context and contexts"),
    ("current_context: [a]\n", "current_context in FILE, line 1: it takes the name of a context"),
    ("contexts: gpu3\n", "contexts in FILE, line 1: it holds no names"),
    ("contexts: {}\ncontexts: {}\n", "line 2: line 1 sets it already"),
    ("contexts:\n  a: {address: h:1}\n  a: {address: h:2}\n", "context a in FILE, line 3: line 2 has one of that name"),
    ("a: !!python/object:os.system x\n", "there is no such key"),
    ("[" * 5000, "cannot read FILE: it is nested too deeply"),
    ("contexts: \x00", "has characters that YAML does not allow"),
]


@pytest.mark.parametrize(("text", "words"), MISTAKES, ids=[text[:20] for text, _ in MISTAKES])
def test_mistakes_in_a_file(tmp_path: Path, text: str, words: str) -> None:
    path = write(tmp_path / "contexts.yaml", text)
    with pytest.raises(ConfigError) as raised:
        parse_file(path)
    said = f"{raised.value.message}. Hint: {raised.value.hint}"
    assert said.startswith("cannot ")
    assert words.replace("FILE", str(path)) in said


MISTAKES_IN_ONE = [
    ("gpu3: host:1", "context gpu3 in FILE, line 2: it has no address. Hint: write address: gpu3.example.com:7400"),
    ("gpu3: {}", "context gpu3 in FILE, line 2: it has no address"),
    (
        "gpu3: {adress: h:1}",
        "adress of context gpu3 in FILE, line 2: there is no such key. Hint: did you mean address?",
    ),
    ("gpu3: {token: secret}", "there is no such key. Hint: it takes address, tls_ca, tls_cert, tls_key"),
    ("gpu3: {address: [a]}", "address of context gpu3 in FILE, line 2: it takes a text"),
    ("gpu3: {address: a, address: b}", "line 2: line 2 sets it already"),
    ("gpu 3: {address: h:1}", "cannot name a context gpu 3 (FILE, line 2)"),
    ("[a]: {address: h:1}", "cannot name a context with an empty text (FILE, line 2)"),
]


@pytest.mark.parametrize(("text", "words"), MISTAKES_IN_ONE, ids=[text for text, _ in MISTAKES_IN_ONE])
def test_a_mistake_in_one_context_leaves_the_others(tmp_path: Path, text: str, words: str) -> None:
    path = write(tmp_path / "contexts.yaml", f"contexts:\n  {text}\n  good: {{address: h:1}}\n")
    bad, good = parse_file(path).contexts.values()
    assert words.replace("FILE", str(path)) in f"{bad.mistake}. Hint: {bad.hint}"
    assert bad.mistake.startswith("cannot ")
    assert (good.address, good.mistake) == ("h:1", "")


def test_the_users_contexts_come_before_the_systems(tmp_path: Path) -> None:
    variables = environment(tmp_path)
    write(
        tmp_path / "first" / FILE_NAME, "current_context: a\ncontexts: {a: {address: first:1}, b: {address: first:1}}"
    )
    write(tmp_path / "second" / FILE_NAME, "current_context: b\ncontexts: {b: {address: x:1}, c: {address: second:1}}")
    found = read_contexts(variables)
    assert {name: each.address for name, each in found.by_name.items()} == {
        "a": "first:1",
        "b": "first:1",
        "c": "second:1",
    }
    assert found.current == ("a", f"current_context in {tmp_path}/first/{FILE_NAME}, line 1")
    write(tmp_path / "own" / FILE_NAME, "current_context:\ncontexts: {a: {address: own:1}}")
    found = read_contexts(variables)
    assert found.by_name["a"].address == "own:1"
    assert found.current[0] == "", "the user wants none, whatever the system says"


def test_where_files_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert user_file({}) == user_file({"XDG_CONFIG_HOME": "relative"}) == tmp_path / ".config" / FILE_NAME
    assert system_files({}) == (Path("/etc/xdg") / FILE_NAME,)
    monkeypatch.setattr(Path, "home", lambda: (_ for _ in ()).throw(RuntimeError))
    assert user_file({}) is None
    assert read_contexts({"XDG_CONFIG_DIRS": "/-"}).by_name == {}, "commands work without a home folder"
    with pytest.raises(ConfigError, match="no home folder"):
        change_file(lambda before: before, {})


def added(name: str) -> AgentContext:
    return AgentContext(name=name, file=Path(), address="h:1")


def test_a_change_keeps_the_rest(tmp_path: Path) -> None:
    variables = environment(tmp_path)
    path = write(tmp_path / "own" / FILE_NAME, TEXT)
    path.chmod(0o644)
    change_file(lambda file: replace(file, contexts={**file.contexts, "new": added("new")}), variables)
    before, after = parse_file(write(tmp_path / "before.yaml", TEXT)), parse_file(path)
    assert list(after.contexts) == ["gpu3", "here", "new"]
    assert after.current == "gpu3"
    for name, each in before.contexts.items():
        assert all(getattr(each, key) == getattr(after.contexts[name], key) for key in KEYS), "as it was written"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    change_file(lambda file: replace(file, current=""), variables)
    assert parse_file(path).current == ""


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    """Some keep their settings in a repository, and link to them."""
    kept = write(tmp_path / "dotfiles" / "contexts", TEXT)
    link = tmp_path / "own" / FILE_NAME
    link.parent.mkdir(parents=True)
    link.symlink_to(kept)
    change_file(lambda file: replace(file, current="here"), environment(tmp_path))
    assert link.is_symlink()
    assert parse_file(kept).current == "here"


def test_a_file_with_a_mistake_is_not_written_over(tmp_path: Path) -> None:
    path = write(tmp_path / "own" / FILE_NAME, "contexts:\n  bad: {adress: h:1}\n")
    with pytest.raises(ConfigError, match=f"cannot change {path}: cannot use adress"):
        change_file(lambda before: before, environment(tmp_path))
    assert "adress" in path.read_text()


def test_changes_at_once_are_all_kept(tmp_path: Path) -> None:
    def add(number: int) -> None:
        name = f"n{number}"
        change_file(lambda file: replace(file, contexts={**file.contexts, name: added(name)}), environment(tmp_path))

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(add, range(24)))
    assert set(read_contexts(environment(tmp_path)).by_name) == {f"n{number}" for number in range(24)}


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "own").write_text("no folder")
    with pytest.raises(ConfigError, match="cannot write") as raised:
        change_file(lambda before: before, environment(tmp_path))
    assert "XDG_CONFIG_HOME" in raised.value.hint


@pytest.mark.parametrize("name", ["", "a b", "a,b", "-a", "a/b", "x" * 64, "\u00e9", "a\n"])
def test_names_that_cannot_be(name: str) -> None:
    with pytest.raises(ConfigError, match="cannot name a context"):
        check_name(name)


_TEXTS = st.text(st.characters(codec="utf-8", exclude_categories=("Cc", "Cs", "Cn")), min_size=1, max_size=20)
_VALUES = st.fixed_dictionaries({"address": _TEXTS}, optional=dict.fromkeys(KEYS[1:], _TEXTS))


@given(values=_VALUES, name=st.from_regex(r"\A[A-Za-z0-9][A-Za-z0-9._-]{0,62}\Z"), is_current=st.booleans())
def test_what_is_written_is_read_again(
    tmp_path_factory: pytest.TempPathFactory, values: dict[str, str], name: str, is_current: bool
) -> None:
    """Names such as `null`, `1e3` and `no`, which YAML takes for other things, are texts here."""
    path = tmp_path_factory.getbasetemp() / "round.yaml"
    context = AgentContext(
        name=name,
        file=path,
        address=values["address"],
        tls_ca=values.get("tls_ca", ""),
        tls_cert=values.get("tls_cert", ""),
        tls_key=values.get("tls_key", ""),
        tls_server_name=values.get("tls_server_name", ""),
    )
    file = ContextFile(path=path, contexts={name: context}, current=name if is_current else None)
    path.write_text(dump_file(file), encoding="utf-8")
    found = parse_file(path)
    assert found.current == file.current
    (again,) = found.contexts.values()
    assert replace(again, lines={}) == context

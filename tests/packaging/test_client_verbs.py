"""Verbs of the distribution mig-agent-client all end in words: with what it declares to need, and with less."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mig_agent.bundle import archive
from mig_agent.migctl.cli import cli, run_command_line
from support.agent import PROCESS_SECONDS, Agent, environment, short_folder
from support.wheel import ROOT

_DECLARED = tomllib.loads((ROOT / "client/pyproject.toml").read_text())
_FILES = _DECLARED["tool"]["hatch"]["build"]["targets"]["wheel"]["force-include"]
_LIBRARIES = ("google", "grpc", "cython_runtime", "_cython", "typing_extensions")
_FOR_MIGCTL = ("click", "rich", "markdown_it", "mdurl", "pygments", "yaml", "_yaml")
PROGRAM = """
import importlib.abc, io, json, os, sys, traceback
from contextlib import redirect_stderr, redirect_stdout
staged, allowed, lines = sys.argv[1], set(json.loads(sys.argv[2])), json.loads(sys.argv[3])

class Only(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        if top in allowed or top in sys.stdlib_module_names or top == "mig_agent":
            return None
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.path.insert(0, staged)
sys.meta_path.insert(0, Only())
from mig_agent.migctl.cli import run_command_line
ends = []
for words in lines:
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        try:
            code = run_command_line(words)
        except SystemExit as end:
            code = end.code
        except BaseException:
            code = "traceback: " + traceback.format_exc()
    ends.append([words, code, out.getvalue(), err.getvalue()])
print(json.dumps(ends), flush=True)
os._exit(0)
"""
ARGUMENTS = {
    "request": [["--gpu-memory", "4G", "-o", "json"]],
    "run": [["--gpu-memory", "4G", "--", "true"]],
    "release": [["nothing-such"], ["--mine"]],
    "renew": [["nothing-such"]],
    "recover": [["nothing-such"], []],
    "cancel": [["nothing-such"]],
    "status": [[], ["--leases"], ["-o", "svg"], ["-o", "json"]],
    "show": [["nothing-such"]],
    "plan": [["--gpu-memory", "4G"], ["--gpu-memory", "4G", "--explain"]],
    "cordon": [["--gpu", "0"]],
    "uncordon": [["--gpu", "0"]],
    "mode": [["enable", "--gpu", "0"]],
    "adopt": [["--all"]],
    "pause": [["--reason", "x"]],
    "top": [["--once"], []],
    "usage": [[], ["-o", "csv"]],
    "advise": [["--name", "x"]],
    "completion": [["bash"]],
    "context": [[], ["list"], ["add", "x", "--address", "unix:///x"], ["list"], ["use", "x"], ["remove", "x"]],
    "bundle": [["{folder}/b.tar.gz"]],
    "doctor": [[], ["-o", "json"], ["--config", "{folder}/none.yaml"]],
}


@pytest.fixture(scope="module")
def staged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Stage what the wheel installs, without building one."""
    folder = tmp_path_factory.mktemp("staged")
    for source, target in _FILES.items():
        path = ROOT / "client" / source
        if path.is_dir():
            shutil.copytree(path, folder / target, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            (folder / target).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, folder / target)
    return folder


@pytest.fixture(scope="module")
def agent() -> Iterator[Agent]:
    with short_folder() as folder, Agent(folder) as running:
        yield running


def ends(
    staged: Path, lines: list[list[str]], variables: dict[str, str], *, without: tuple[str, ...] = ()
) -> list[tuple[list[str], Any, str, str]]:
    """Return how each command line ends: its words, its exit code or traceback, and what it prints."""
    allowed = [each for each in (*_LIBRARIES, *_FOR_MIGCTL) if each not in without]
    done = subprocess.run(
        [sys.executable, "-I", "-c", PROGRAM, str(staged), json.dumps(allowed), json.dumps(lines)],
        env=variables,
        capture_output=True,
        text=True,
        check=False,
        stdin=subprocess.DEVNULL,
        timeout=PROCESS_SECONDS,
    )
    assert done.returncode == 0, done.stderr
    return [(words, code, out, err) for words, code, out, err in json.loads(done.stdout)]


def command_lines(folder: Path) -> list[list[str]]:
    verbs = cli.list_commands(None)  # type: ignore[arg-type]  # it takes no notice of the context
    # `run` replaces or outlives this process, so only its mistakes are tried here.
    lines = [[verb, "--help"] for verb in verbs]
    for verb in verbs:
        if verb not in {"run", "resume", "undrain"}:
            given = ARGUMENTS.get(verb, [[]])
            lines += [[verb, *(each.format(folder=folder) for each in words)] for words in given]
    return [*lines, ["resume"], ["undrain"], ["run"], ["no-such-verb"]]


def check_words(found: list[tuple[list[str], Any, str, str]]) -> None:
    for words, code, out, err in found:
        assert isinstance(code, int), (words, code)
        assert "Traceback" not in out + err, words
        assert "No module named" not in out + err, (words, out, err)
        assert code == 0 or out or err, words


def test_every_verb_with_an_agent(staged: Path, agent: Agent, tmp_path: Path) -> None:
    found = ends(staged, command_lines(tmp_path), dict(agent.person({"HOME": str(tmp_path)})))
    check_words(found)
    failed = {words[0]: err for words, code, _, err in found if code and words[1:] == ["--help"]}
    assert not failed
    by_words = {" ".join(words): (code, out, err) for words, code, out, err in found}
    told = json.loads(by_words["doctor -o json"][1])
    by_check = {each["check"]: each for each in told["findings"]}
    assert by_check["agent.serves"]["status"] == "ok"
    assert by_check["driver.nvml"]["status"] == "unknown"
    assert by_check["agent.settings"]["status"] == "unknown"
    assert "this client is installed without the agent" in by_check["agent.settings"]["message"]
    code, out, err = by_words[f"bundle {tmp_path}/b.tar.gz"]
    assert (code, err) == (0, ""), out + err
    assert "recording.json" in json.loads(archive.read(tmp_path / "b.tar.gz", "manifest.json"))["files"]


def test_every_verb_without_an_agent(staged: Path, tmp_path: Path) -> None:
    variables = environment(tmp_path, MIG_AGENT_ADDRESS=f"unix://{tmp_path}/none.sock")
    check_words(ends(staged, command_lines(tmp_path), dict(variables)))


def test_only_contexts_need_yaml(staged: Path, agent: Agent, tmp_path: Path) -> None:
    lines = [["status"], ["top", "--once"], ["context", "list"], ["context", "add", "x", "--address", "unix:///x"]]
    variables = dict(agent.person({"HOME": str(tmp_path), "XDG_CONFIG_HOME": str(tmp_path)}))
    found = ends(staged, lines, variables, without=("yaml", "_yaml"))
    check_words(found)
    assert [code for _, code, _, _ in found] == [0, 0, 0, 127]
    assert "there is no yaml here. Hint: pip install 'mig-agent-client[migctl]'" in found[-1][3]


def test_every_verb_without_rich(staged: Path, agent: Agent, tmp_path: Path) -> None:
    """The environment is that of `pip install mig-agent-client click`."""
    variables = dict(agent.person({"HOME": str(tmp_path)}))
    check_words(ends(staged, command_lines(tmp_path), variables, without=("rich",)))


@pytest.mark.parametrize(
    ("missing", "words"),
    [
        ("rich.live", "there is no rich here. Hint: pip install 'mig-agent-client[migctl]'"),
        (
            "mig_agent.config",
            "this client is installed without mig_agent.config. Hint: run the migctl of the agent's own",
        ),
    ],
)
def test_a_library_that_is_missing_later_is_named(
    missing: str, words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def import_module(name: str) -> None:
        raise ModuleNotFoundError(name, name=missing)

    monkeypatch.setattr("mig_agent.migctl.cli.importlib.import_module", import_module)
    assert run_command_line(["status"]) == 127
    assert capsys.readouterr().err.startswith(f"migctl: cannot go on: {words}")

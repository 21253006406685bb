"""Contexts: which agent a command asks, `migctl context`, and several agents in one view."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from click.shell_completion import ShellComplete

from mig_agent.migctl.cli import cli
from support import forks
from support.agent import Agent, environment, short_folder
from support.certificates import Authority

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with short_folder() as path:
        yield path


@pytest.fixture(scope="module")
def agents(folder: Path) -> Iterator[tuple[Agent, Agent]]:
    """The agents of n1, which also listens on TCP, and of n2. Ann has a lease on n1, and bob one on n2."""
    authority = Authority(folder, "clients")
    server, client = authority.issue("server"), authority.issue("client")
    client.cert.rename(folder / "client.crt")
    client.key.rename(folder / "client.key")
    flags = ["--tls-cert", str(server.cert), "--tls-key", str(server.key), "--tls-client-ca", str(authority.ca)]
    folders = [folder / "1", folder / "2"]
    for each in folders:
        each.mkdir()
    listen = [f"unix://{folders[0]}/agent.sock", "127.0.0.1:0"]
    with (
        Agent(folders[0], "a100-40gb", flags=[*flags, "--node", "n1"], listen=listen) as one,
        Agent(folders[1], "h100-80gb:2", flags=["--node", "n2"]) as two,
    ):
        one.ask("request", "--gpu-memory", "4G", "--name", "ann")
        two.ask("request", "--mig-profile", "1g.10gb", "--name", "bob")
        yield one, two


@pytest.fixture
def person(tmp_path: Path) -> dict[str, str]:
    return environment(tmp_path)


@pytest.fixture
def migctl(person: dict[str, str]) -> Run:
    def run(*arguments: str, code: int = 0, **variables: str) -> subprocess.CompletedProcess[str]:
        done = forks.run(*forks.MIGCTL, *arguments, env=person | variables)
        assert done.returncode == code, done.stdout + done.stderr
        assert "Traceback" not in done.stderr
        return done

    return run


@pytest.fixture
def two(migctl: Run, agents: tuple[Agent, Agent]) -> Run:
    """A person with contexts n1 and n2."""
    for name, each in zip(("n1", "n2"), agents, strict=True):
        migctl("context", "add", name, "--address", each.address)
    return migctl


def file_of(person: dict[str, str]) -> Path:
    return Path(person["XDG_CONFIG_HOME"]) / "mig-agent/contexts.yaml"


def node(done: subprocess.CompletedProcess[str]) -> str:
    return done.stdout.partition(":")[0]


def test_which_agent_a_command_asks(two: Run, agents: tuple[Agent, Agent]) -> None:
    assert "/run/mig-agent/mig-agent.sock" in two("status", code=4).stderr, "none is current"
    assert node(two("--context", "n1", "status")) == node(two("status", "--context", "n1")) == "n1"
    two("context", "use", "n2")
    assert node(two("status")) == "n2"
    assert node(two("status", MIG_AGENT_CONTEXT="n1")) == "n1"
    assert node(two("status", "--context", "n2", MIG_AGENT_CONTEXT="n1")) == "n2"
    address = agents[0].address
    assert node(two("status", "--address", address)) == "n1", "an address comes before the current context"
    assert node(two("status", MIG_AGENT_ADDRESS=address, MIG_AGENT_CONTEXT="n2")) == "n1"
    assert node(two("status", "--context", "n2", MIG_AGENT_ADDRESS=address)) == "n2", "an option before a variable"
    assert node(two("status", "--context", "n2", "--address", address)) == "n1"
    two("context", "use", "--none")
    assert "/run/mig-agent/mig-agent.sock" in two("status", code=4).stderr


def test_over_tcp_with_the_files_of_the_context(
    migctl: Run, agents: tuple[Agent, Agent], folder: Path, person: dict[str, str]
) -> None:
    address = str(agents[0].serving()["listen"][1])
    files = ("--tls-ca", f"{folder}/clients-ca.pem", "--tls-cert", f"{folder}/client.crt")
    partial = migctl("context", "add", "gpu", "--address", address, *files, code=2)
    assert "cannot use TLS without tls_key (context gpu, " in partial.stderr
    migctl("context", "add", "gpu", "--address", address, *files, "--tls-key", f"{folder}/client.key")
    assert node(migctl("--context", "gpu", "status")) == "n1"
    elsewhere = migctl("--context", "gpu", "status", "--tls-server-name", "elsewhere", code=4)
    assert "its certificate has another name" in elsewhere.stderr
    named = (*files, "--tls-key", f"{folder}/client.key", "--tls-server-name", "elsewhere")
    migctl("context", "add", "named", "--address", address, *named)
    assert "its certificate has another name" in migctl("--context", "named", "status", code=4).stderr
    assert node(migctl("--context", "named", "status", "--tls-server-name", "localhost")) == "n1"
    assert "BEGIN" not in file_of(person).read_text(), "names of files, and no key"
    missing = file_of(person)
    missing.write_text(missing.read_text().replace("client.crt", "gone.crt"))
    done = migctl("--context", "gpu", "status", code=2)
    assert f"cannot read {folder}/gone.crt: No such file" in done.stderr
    assert f"(tls_cert of context gpu, {missing}, line 6)" in done.stderr
    assert node(migctl("--context", "gpu", "status", "--tls-cert", f"{folder}/client.crt")) == "n1"


def test_one_whose_certificate_is_not_trusted_is_one_line(
    migctl: Run, agents: tuple[Agent, Agent], folder: Path, tmp_path: Path, person: dict[str, str]
) -> None:
    """The gRPC library would log it, too. That is settled when it is imported, so this process is not forked."""
    address = str(agents[0].serving()["listen"][1])
    files = ("--tls-cert", f"{folder}/client.crt", "--tls-key", f"{folder}/client.key")
    migctl("context", "add", "gpu", "--address", address, *files, "--tls-ca", str(Authority(tmp_path, "other").ca))
    command = [sys.executable, "-m", "mig_agent.migctl", "status", "--all-contexts"]
    done = subprocess.run(command, env=person, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stderr) == (4, "")
    assert f"\ngpu: cannot trust the agent at {address}: its certificate is not good" in done.stdout


def test_add_list_use_and_remove(migctl: Run, person: dict[str, str], tmp_path: Path) -> None:
    assert migctl("context", "list").stdout == "no contexts: migctl context add NAME --address HOST:PORT adds one\n"
    assert migctl("context", "add", "gpu3", "--address", "gpu3:7400").stdout == "added context gpu3 (gpu3:7400)\n"
    again = ("context", "add", "gpu3", "--address", "gpu4:7400")
    assert f"there is one in {file_of(person)}, line 3. Hint: --replace" in migctl(*again, code=2).stderr
    migctl(*again, "--replace", "--use")
    migctl("context", "add", "here", "--address", "unix:///run/mig-agent/mig-agent.sock")
    assert [line.split() for line in migctl("context", "list").stdout.splitlines()] == [
        ["NAME", "ADDRESS", "CERTIFICATE"],
        ["*", "gpu3", "gpu4:7400", "-"],
        ["here", "unix:///run/mig-agent/mig-agent.sock", "-"],
    ]
    found = json.loads(migctl("context", "list", "-o", "json").stdout)
    assert found["current"] == "gpu3"
    assert found["contexts"][0] == {
        "context": "gpu3",
        "current": True,
        "address": "gpu4:7400",
        "tls_ca": None,
        "tls_cert": None,
        "tls_key": None,
        "tls_server_name": None,
        "file": str(file_of(person)),
        "line": 4,
        "error": None,
    }
    warned = migctl("context", "use", "here", MIG_AGENT_ADDRESS="h:1")
    assert warned.stdout == "current context: here (unix:///run/mig-agent/mig-agent.sock)\n"
    assert "MIG_AGENT_ADDRESS is set to h:1, and comes before the current context. Hint: unset" in warned.stderr
    assert migctl("context", "remove", "here").stdout == "removed context here; it was the current one\n"
    system = tmp_path / "etc"
    (system / "mig-agent").mkdir(parents=True)
    (system / "mig-agent/contexts.yaml").write_text("contexts: {shared: {address: h:1}}\n")
    listed = migctl("context", "list", XDG_CONFIG_DIRS=str(system)).stdout
    assert f"in {system}/mig-agent/contexts.yaml" in listed
    done = migctl("context", "remove", "shared", code=2, XDG_CONFIG_DIRS=str(system))
    assert f"cannot remove context shared: it is in {system}/mig-agent/contexts.yaml, line 1" in done.stderr


MISTAKES = [
    (("status", "--context", "n3"), "cannot find context n3"),
    (("status", "--context", "m1"), "cannot find context m1. Hint: `migctl context list`"),
    (("context", "use", "n3"), "cannot find context n3"),
    (("context", "use"), "cannot tell which context to use"),
    (("context", "use", "n1", "--none"), "cannot tell which context to use"),
    (("context", "remove", "n3"), "cannot find context n3"),
    (("context", "add", "n3"), "cannot add context n3 without --address"),
    (("context", "add", "n 3", "--address", "h:1"), "cannot name a context n 3"),
    (("context", "add", "n3", "--address", "nonsense"), "cannot take nonsense as the agent's address"),
    (("context", "frob"), "no such command 'frob'"),
    (("request", "--gpu-memory", "4G", "--context", "n1,n2"), "cannot do that with several contexts (n1,n2)"),
    (("status", "--context", "n1,,n2"), "a name is empty"),
    (("status", "--context", "n1,n3"), "cannot find context n3"),
    (("status", "--all-contexts", "--context", "n1"), "cannot show several contexts and one agent"),
    (("status", "--all-contexts", "--address", "h:1"), "cannot show several contexts and one agent"),
    (("status", "--context", "n1,n2", "--address", "h:1"), "cannot show several contexts and one agent"),
    (("status", "--all-contexts", "--watch"), "cannot watch several contexts. Hint: give the name of one"),
    (("status", "--all-contexts", "--gpu", "0"), "cannot choose GPUs of several contexts"),
    (("status", "--all-contexts", "-o", "svg"), "cannot draw several contexts"),
]


@pytest.mark.parametrize(("typed", "words"), MISTAKES, ids=[" ".join(typed) for typed, _ in MISTAKES])
def test_mistakes(two: Run, typed: tuple[str, ...], words: str) -> None:
    done = two(*typed, code=2)
    assert done.stdout == ""
    assert done.stderr.startswith("migctl: cannot ")
    assert words in done.stderr
    assert done.stderr.count("\n") == 1


def test_mistakes_in_the_file_name_it_and_the_line(two: Run, person: dict[str, str]) -> None:
    path = file_of(person)
    text = path.read_text()
    path.write_text(text + "  bad: {adress: h:1}\n  worse: {address: nonsense}\ncurrent_context: gone\n")
    assert f"cannot find context gone (current_context in {path}, line 9)" in two("status", code=2).stderr
    done = two("status", "--context", "bad", code=2)
    assert f"cannot use adress of context bad in {path}, line 7: there is no such key. Hint: did you" in done.stderr
    done = two("status", "--context", "worse", code=2)
    assert f"cannot take nonsense as the agent's address (context worse, {path}, line 8)" in done.stderr
    assert node(two("status", "--context", "n1")) == "n1", "a mistake in one is none of another's"
    page = two("status", "--all-contexts", code=4).stdout
    assert "4 contexts, 3 GPUs, 2 leases, no answer from 2 contexts" in page
    assert f"\nbad: cannot use adress of context bad in {path}, line 7" in page
    assert "line 7" in two("context", "list").stdout
    assert f"cannot change {path}: cannot use adress" in two("context", "remove", "n1", code=2).stderr
    path.write_text("contexts:\n  ? [1]\n  : {address: b}\n")
    assert not two("context", "list").stdout.splitlines()[1].startswith("*"), (
        "one without a name is not the current one"
    )
    path.write_text("contexts: [")
    assert f"cannot read {path}, line 1" in two("status", code=2).stderr
    assert node(two("status", "--address", "unix:///nowhere", code=4)) == "", "whoever names an address needs no file"


def test_several_in_one_view(two: Run, agents: tuple[Agent, Agent]) -> None:
    page = two("status", "--all-contexts").stdout
    lines = page.splitlines()
    assert lines[0] == "2 contexts, 3 GPUs, 2 leases"
    assert [line.partition(" (")[0] for line in lines if line.startswith("n")] == [
        "n1: 1 GPU, 1 lease",
        "n2: 2 GPUs, 1 lease",
    ]
    assert "\n".join(lines).count("\nfits now (up to 79.25 GiB), any one of: ") == 1
    assert two("status", "--context", "n2,n1").stdout.splitlines()[2].startswith("n2: "), "in the order of the names"
    header, first, second = two("status", "--all-contexts", "--leases").stdout.partition("\nCONTEXT")[2].split("\n")[:3]
    assert header.split()[:3] == ["LEASE", "HOLDER", "GPU"]
    assert (first.split()[0], first.split()[2]) == ("n1", "ann")
    assert (second.split()[0], second.split()[2]) == ("n2", "bob")
    filtered = two("status", "--all-contexts", "--user", "bob").stdout
    assert "bob" in filtered
    assert "ann" not in filtered
    found = json.loads(two("status", "--all-contexts", "-o", "json").stdout)
    assert [(each["context"], each["address"], each["error"]) for each in found["contexts"]] == [
        ("n1", agents[0].address, None),
        ("n2", agents[1].address, None),
    ]
    assert found["contexts"][1]["status"]["leases"][0]["holder"] == "bob"
    assert {each["profile"] for each in found["available"]} >= {"1g.5gb", "7g.80gb"}


def test_one_that_does_not_answer_is_one_line(two: Run, tmp_path: Path) -> None:
    two("context", "add", "away", "--address", "unix:///nowhere/agent.sock")
    done = two("status", "--all-contexts", code=4)
    assert "no answer from 1 context" in done.stdout
    assert "\naway: cannot reach the agent at unix:///nowhere/agent.sock: there is no such socket\n" in done.stdout
    assert "n2: 2 GPUs" in done.stdout
    done = two("status", "--all-contexts", "--user", "bob", code=4)
    assert done.stderr.startswith("away: cannot reach")
    with socket.socket(socket.AF_UNIX) as silent:
        path = Path(f"/tmp/mig-silent-{tmp_path.parent.name}-{time.monotonic_ns()}.sock")  # noqa: S108 -- short enough
        silent.bind(str(path))
        silent.listen()
        two("context", "add", "hangs", "--address", f"unix://{path}")
        began = time.monotonic()
        done = two("status", "--context", "hangs,n1", code=4)
        path.unlink()
    assert "\nhangs: no answer within 5 s\n" in done.stdout
    assert "n1: 1 GPU" in done.stdout
    assert time.monotonic() - began < 20


def test_an_agent_with_two_names_counts_once(two: Run, agents: tuple[Agent, Agent]) -> None:
    two("context", "add", "twin", "--address", agents[0].address)
    page = two("status", "--all-contexts", "--leases").stdout
    assert page.startswith("3 contexts, 3 GPUs, 2 leases\n")
    assert "\ntwin: the same agent as n1\n" in page
    assert page.count("  ann  ") == 1, "the table has its lease once"
    assert two("top", "--all-contexts").stdout.count("ann") == 1


def test_top_of_several(two: Run) -> None:
    two("context", "add", "away", "--address", "unix:///nowhere/agent.sock")
    done = two("top", "--all-contexts", code=4)
    first, _, header, away, one, other = done.stdout.splitlines()
    assert first.startswith("3 contexts, no answer from 1 context, 2 leases, ")
    assert header.split()[:3] == ["CONTEXT", "GPU", "PROFILE"]
    assert away.startswith("away: cannot reach the agent")
    assert (one.split()[0], other.split()[0]) == ("n1", "n2")
    assert "ann" not in two("top", "--context", "n1,n2", "--filter", "n2").stdout, "the name is a part of the row"
    found = json.loads(two("top", "--context", "n1,n2", "-o", "json").stdout)
    assert [each["top"]["node"] for each in found["contexts"]] == ["n1", "n2"]
    assert found["contexts"][0]["top"]["instances"][0]["holder"] == "ann"


def test_names_are_completed(two: Run, person: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    two("context", "add", "gpu3", "--address", "h:1")
    for name in ("XDG_CONFIG_HOME", "XDG_CONFIG_DIRS"):
        monkeypatch.setenv(name, person[name])

    def words(*typed: str) -> list[str]:
        completion = ShellComplete(cli, {}, "migctl", "_MIGCTL_COMPLETE")
        return [each.value for each in completion.get_completions(list(typed[:-1]), typed[-1])]

    assert words("--context", "") == ["n1", "n2", "gpu3"]
    assert words("status", "--context", "n") == ["n1", "n2"]
    assert words("status", "--context", "n1,g") == ["n1,gpu3"]
    assert words("context", "use", "g") == words("context", "remove", "g") == ["gpu3"]
    assert words("context", "") == ["add", "list", "remove", "use"]
    file_of(person).write_text("contexts: [")
    assert words("context", "use", "") == []

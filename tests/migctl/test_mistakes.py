"""Whatever is typed: one line in words, the right exit code, and never a traceback. No agent is needed to know it."""

from __future__ import annotations

import json
import shlex
import string
from dataclasses import replace
from pathlib import Path

import click
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mig_agent.client import Refused
from mig_agent.core.errors import THE_GPU, Blocker
from mig_agent.migctl import failures
from mig_agent.migctl.cli import cli, run_command_line

NOWHERE = ["--address", "unix:///nowhere/mig-agent.sock"]
VERBS = ["request", "run", "release", "renew", "status", "profiles", "plan", "reclaim", "cordon", "uncordon", "mode"]
VERBS += ["pause", "resume", "events", "top", "completion", "show", "help", "version"]


@pytest.fixture(autouse=True)
def nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A person who has set nothing."""
    for name in ("XDG_STATE_HOME", "XDG_CONFIG_HOME", "XDG_CONFIG_DIRS"):
        monkeypatch.setenv(name, str(tmp_path))
    for name in ("ADDRESS", "CONTEXT", "TLS_CA", "TLS_CERT", "TLS_KEY"):
        monkeypatch.delenv(f"MIG_AGENT_{name}", raising=False)


MISTAKES = [
    ("frob", "no such command"),
    ("help frob", "no such command"),
    ("topp", "did you mean top?"),
    ("request --mem 4G", "did you mean --gpu-memory?"),
    ("request --user x", "Hint: see `migctl request --help`"),
    ("request --model h100", "did you mean --gpu-model?"),
    ("status --gpus 1", "did you mean --gpu?"),
    ("reqest --gpu-memory 4G", "did you mean request?"),
    ("cordn 0", "did you mean cordon?"),
    ("--frob status", "--frob"),
    ("status --frob", "--frob"),
    ("status extra", "extra"),
    ("status -o yaml", "cannot print as yaml"),
    ("status -o env", "cannot print as env"),
    ("status -o", "requires an argument"),
    ("--address nonsense status", "address"),
    ("--address unix:// status", "address"),
    ("--tls-ca x --address h:1 status", "cert and key"),
    ("--address h:1 status", "without TLS"),
    ("request", "nothing"),
    ("request --gpu-memory 4", "write 4G, 4Gi"),
    ("request --gpu-memory 4GX", "4GX"),
    ("request --gpu-memory 0G", "zero"),
    ("request --gpu-memory 0", "it is zero. Hint: write a number with a unit"),
    ("events --since 0", "it is zero. Hint: write a number with a unit, such as 90s"),
    ("top --interval 0", "it is zero"),
    ("request --device foo", "as a device. Hint: write a profile such as 1g.10gb, a quantity of memory such as 4G"),
    ("request --num-gpus 99", "Hint: `migctl status` shows how many there are"),
    ("request --gpu-memory -1G", "negative"),
    ("request --gpu-memory nan", "not a number"),
    ("request --gpu-memory 4,5G", "comma"),
    ("request --gpu-memory", "requires an argument"),
    ("request --gpu-fraction 1.5", "more than a whole"),
    ("request --gpu-fraction 4G", "--gpu-memory 4G"),
    ("request --gpu-fraction inf", "infinite"),
    ("request --num-gpus 0", "0 whole GPUs"),
    ("request --num-gpus 99999999999999999999", "as a number of GPUs: it is too large"),
    ("request --device ''", "cannot take an empty text as a device. Hint: write a profile such as 1g.10gb"),
    ("request --device 1g.10gb,4G", "as a device: it has a comma. Hint: repeat it: --device 1g.10gb --device 4G"),
    ("request --gpu-memory 4G --gpu-model ''", "cannot take an empty text as a model of GPU"),
    ("show", "cannot call `migctl show` without LEASE"),
    ("mode", "cannot call `migctl mode` without enable|disable"),
    ("status --user ''", "cannot take an empty text as a user"),
    ("cancel x --user ''", "cannot take an empty text as a user"),
    ("usage --by ''", "cannot group by an empty text. Hint: --by takes user, tenant, name or profile"),
    ("adopt ''", "cannot take an empty text as the UUID of an instance"),
    ("run --gpu-memory 4G -- ''", "cannot run an empty text"),
    ("events --limit 99999999999999999999", "as a number of events: it is too large"),
    ("request --num-gpus 1.5", "number of GPUs"),
    ("request --num-gpus -1", "-1 whole GPUs"),
    ("request --gpu 0.2", "--gpu-fraction 0.2"),
    ("request --gpu-memory 4G --gpu 4G", "--gpu-memory 4G"),
    ("request --gpu-memory 4G --gpu 0,x", "cannot take x as a GPU"),
    ("request --gpu-memory 4G --gpu x", "UUID, GPU-..., as `nvidia-smi -L` does"),
    ("request --gpu-memory 4G --mig-profile 1g.5gb", "--gpu-memory and --mig-profile"),
    ("request --mig-profile 1g.5gb --min-compute 2", "--min-compute"),
    ("request --num-gpus 1 --attribute me", "--attribute"),
    ("request --gpu-memory 4G --min-compute 0", "compute slices"),
    ("request --gpu-memory 4G --min-compute two", "cannot take two"),
    ("request --gpu-memory 4G --attribute 5", "attribute"),
    ("request --gpu-memory 4G --wait 10", "write 10s"),
    ("request --gpu-memory 4G --wait soon", "soon"),
    ("run --gpu-memory 4G --wait -- true", "cannot take '--' as the value of --wait. Hint: write --wait TIME, then --"),
    ("run --gpu-memory 4G --name -- true", "cannot take '--' as the value of --name"),
    ("run --device -- true", "cannot take '--' as the value of --device"),
    ("request --gpu-memory 4G --ttl 0s", "zero"),
    ("request --gpu-memory 4G --ttl forever", "cannot lease"),
    ("request --gpu-memory 4G --priority high", "cannot take high as a priority"),
    ("request --gpu-memory 4G --priority 99999999999", "priority"),
    ("request --gpu-memory 4G --pid 0", "process 0"),
    ("request --gpu-memory 4G --pid x", "process id"),
    ("request --device", "requires an argument"),
    ("request --device 4", "write 4G"),
    ("plan", "nothing"),
    ("plan --gpu-memory 4", "write 4G"),
    ("run", "nothing"),
    ("run --gpu-memory 4G", "cannot run nothing"),
    ("run --gpu-memory 4 -- true", "write 4G"),
    ("run -- true", "nothing"),
    ("run --device 1g.5gb --device 4G -- true", "--each"),
    ("release", "without LEASE"),
    ("release a b --token t", "one token for several"),
    ("renew", "without LEASE"),
    ("renew a --ttl 5", "write 5s"),
    ("renew a", "cannot renew a lease without --ttl. Hint: --ttl 2h sets a deadline, --ttl none removes it"),
    ("renew a --ttl forever", "forever"),
    ("cancel", "cannot do that without REQUEST"),
    ("cancel --mine train", "cannot cancel all of yours and only some"),
    (f"cancel {'x' * 200}", "as a waiting request"),
    ("reclaim --gpu x", "cannot take x as a GPU"),
    ("cordon", "without its name"),
    ("cordon --gpu 0.5", "as a GPU"),
    ("uncordon", "without its name"),
    (f"pause --reason {'x' * 300}", "a reason of 300 bytes"),
    ("pause now", "now"),
    ("resume --reason x", "--reason"),
    ("mode", "enable|disable"),
    ("mode on --gpu 0", "cannot set MIG mode to on. Hint: write enable or disable"),
    ("mode enable --gpu 0,1", "several GPUs"),
    ("mode enable", "without its name"),
    ("events --since yesterday", "yesterday"),
    ("events --since 2", "write 2s"),
    ("events --limit none", "cannot take none as a number of events. Hint: write a number, or all"),
    ("events --limit -1", "as a number of events"),
    ("release --mine a", "only some"),
    ("show", "without LEASE"),
    ("cancel x --reason", "option '--reason' requires an argument. Hint: see `migctl cancel --help`"),
    ("usage --since never", "such as 90s, 10m, 2h or 1h30m, or a date such as 2026-01-31"),
    ("usage --since 2026-13-01", "cannot take 2026-13-01 as a date"),
    ("usage --since 1h --until 2h", "cannot count from 1h to 2h: that is earlier"),
    ("usage --until 8d", "cannot count from 7d to 8d: that is earlier"),
    ("events --since 2026-02-30", "cannot take 2026-02-30 as a date"),
    ("events --since 3000-01-01", "cannot look back to 3000-01-01: that is in the future"),
    ("request --gpu-memory 4G --request-id=", "cannot take an empty text as a request id"),
    ("events --gpu 1.5", "as a GPU"),
    ("top --interval 2", "write 2s"),
    ("completion", "bash|zsh|fish"),
    ("completion tcsh", "tcsh"),
]


@pytest.mark.parametrize(("typed", "words"), MISTAKES, ids=[typed or "nothing" for typed, _ in MISTAKES])
def test_a_mistake_gets_one_line_and_2(typed: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command_line(shlex.split(typed)) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("migctl: cannot ")
    assert err.count("\n") == 1
    assert words in err


@pytest.mark.parametrize("typed", ["request --gpu-memory 4", "run --gpu-memory 4 x", "frob", "status --frob", "cordon"])
@pytest.mark.parametrize("asked", [["-o", "json"], ["-ojson"], ["--output", "json"], ["--output=json"]])
def test_programs_get_it_as_json(typed: str, asked: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command_line([*asked, *typed.split()]) == 2
    out, err = capsys.readouterr()
    error = json.loads(out)["error"]
    assert set(error) == {"reason", "message", "hint", "retryable", "blockers"}
    assert error["reason"] == "invalid-request"
    assert error["retryable"] is False
    assert error["message"] in err


def test_what_follows_two_dashes_is_the_commands_own(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command_line(["run", "--gpu-memory", "4", "--", "x", "-o", "json"]) == 2
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    "typed",
    [
        "request --gpu-memory 4G",
        "request --gpu-memory 4G -o env",
        "request --gpu-memory 4G --dry-run",
        "status",
        "profiles",
        "plan --num-gpus 2",
        "release x",
        "renew x --ttl 2h",
        "reclaim",
        "cordon 0 --gpu 1,2",
        "uncordon 0",
        "show x",
        "status --mine --watch",
        "release --mine",
        "pause --reason driver",
        "resume",
        "mode enable --gpu 0",
        "events --since 2h --gpu 1",
        "events -f",
        "top --once",
    ],
)
def test_without_an_agent_it_is_4(typed: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command_line([*NOWHERE, *typed.split()]) == 4
    out, err = capsys.readouterr()
    assert out == ("false\n" if typed.endswith("-o env") else "")
    assert "cannot reach the agent" in err
    assert err.count("\n") == 1
    assert run_command_line([*NOWHERE, "-o", "json", "status"]) == 4
    assert json.loads(capsys.readouterr().out)["error"]["reason"] == "no-agent"


def test_run_without_an_agent_is_125(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command_line([*NOWHERE, "run", "--gpu-memory", "4G", "--", "true"]) == 125
    assert "cannot reach the agent" in capsys.readouterr().err


@pytest.mark.parametrize("verb", ["", *VERBS])
def test_every_verb_has_help(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command_line([*verb.split(), "--help"]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("Usage: migctl")
    assert err == ""
    if verb not in {"", "completion", "help"}:
        assert out.count("--address") == out.count("--tls") == 1, "one line leads to all of them"
        assert "migctl help connection" in out
        assert "--output" in out


@pytest.mark.parametrize("verb", ["", *cli.list_commands(click.Context(cli))])
def test_help_fits_a_terminal_and_nothing_in_it_is_cut(
    verb: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert run_command_line([*verb.split(), "--help"]) == 0
    _, *lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert not [line for line in lines if line.endswith("...")]


@pytest.mark.parametrize("typed", ["", "help", "-h", "-o json"])
def test_help_is_no_mistake(typed: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command_line(typed.split()) == 0
    out, err = capsys.readouterr()
    assert out.startswith("Usage: migctl [OPTIONS] [COMMAND]")
    assert err == ""


def test_help_of_a_command_and_of_the_connection(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command_line(["help", "run"]) == 0
    helped = capsys.readouterr().out
    assert run_command_line(["run", "--help"]) == 0
    assert capsys.readouterr().out == helped
    assert run_command_line(["help", "connection"]) == 0
    topic = capsys.readouterr().out
    for option in ("--address", "--tls-ca", "--tls-cert", "--tls-key", "--tls-server-name", "MIG_AGENT_ADDRESS"):
        assert option in topic


def test_the_help_of_plan_has_only_what_changes_a_plan(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command_line(["plan", "--help"]) == 0
    out = capsys.readouterr().out
    assert "--gpu-memory" in out
    for option in ("--ttl", "--pid", "--request-id", "--dry-run", "--wait"):
        assert option not in out
    assert run_command_line([*NOWHERE, "plan", "--gpu-memory", "4G", "--ttl", "1h", "--dry-run"]) == 4, "all are taken"


def test_the_version_as_a_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command_line(["--version"]) == run_command_line(["version"]) == 0
    first, second = capsys.readouterr().out.split()
    assert first == second


def test_what_blocks_each_gpu_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    names = ("alice", "bob", "alice")
    full = [
        Blocker(gpu_index=gpu, what=f"1g.10gb on slice {at}", state="leased", lease=f"l{gpu}{at}", holder=names[at])
        for gpu in range(20)
        for at in range(3)
    ]
    single = Blocker(gpu_index=30, what="7g.80gb on slices 0-7", state="blocked")
    failures.report(Refused(reason="no-capacity", message="cannot", blockers=(single, *full)), json=True)
    out, err = capsys.readouterr()
    lines = err.splitlines()
    assert lines[1] == "  GPU 30: 7g.80gb on slices 0-7 is blocked"
    assert lines[2] == "  GPU 0: leased to alice, bob"
    assert lines[-1] == "  and 5 more GPUs"
    assert len(lines) == 1 + failures.MOST_GPUS + 1
    assert len(json.loads(out)["error"]["blockers"]) == 61, "programs get all of it"


def test_what_the_message_says_of_a_blocker_is_not_said_twice(capsys: pytest.CaptureFixture[str]) -> None:
    held = Blocker(gpu_index=2, what="7g.80gb on slices 0-7", state="leased", lease="l1", holder="hog")
    message = f"cannot disable MIG mode on GPU 2: {held.what} {held.condition}"
    for blockers, lines in (
        ((held,), 1),
        ((Blocker(gpu_index=3, what=THE_GPU, state="cordoned"), held), 2),
        ((replace(held, gpu_index=3), held), 2),
    ):
        failures.report(Refused(reason="in-use", message=message, blockers=blockers), json=False)
        printed = capsys.readouterr().err.splitlines()
        assert len(printed) == lines
        assert printed[0] == f"migctl: {message}"
    cordoned = Blocker(gpu_index=1, what=THE_GPU, state="cordoned")
    failures.report(
        Refused(reason="x", message="cannot place 4G: GPU 1 is cordoned by root", blockers=(cordoned,)), json=False
    )
    assert capsys.readouterr().err == "migctl: cannot place 4G: GPU 1 is cordoned by root\n"


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command_line(["--version"]) == 0
    assert capsys.readouterr().out.strip()[0].isdigit()


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command_line(["completion", shell]) == 0
    assert "_MIGCTL_COMPLETE" in capsys.readouterr().out


words = st.one_of(
    st.sampled_from(
        ["4G", "4", "0.5", "1g.5gb", "-1", "nan", "inf", "", "--", "-o", "json", "env", "-h", "whole", "0", "10m", "x"]
    ),
    st.text(string.printable, max_size=12),
    st.text(max_size=8).filter(lambda text: "\x00" not in text),
)
FLAGS = (
    *("--gpu-memory", "--mig-profile", "--gpu-fraction", "--num-gpus", "--device", "--min-compute", "--attribute"),
    *(
        "--gpu",
        "--wait",
        "--priority",
        "--ttl",
        "--pid",
        "--dry-run",
        "--explain",
        "--request-id",
        "--tenant",
        "--name",
        "--each",
    ),
    *("--token", "--since", "--limit", "--interval", "--once", "--reason", "--output", "--tls-ca", "--help"),
)
flags = st.sampled_from(FLAGS)
command_lines = st.lists(flags | words, max_size=8)


@given(st.sampled_from(VERBS), command_lines)
@settings(max_examples=300)
def test_nothing_that_can_be_typed_ends_in_a_traceback(verb: str, rest: list[str]) -> None:
    """With no agent to be found: 0 for help and completion, 2 for what cannot be meant, 4 or 125 for what can."""
    assert run_command_line([*NOWHERE, verb, *rest]) in {0, 2, 4, 125}


def test_a_changed_revision_is_in_the_json(capsys: pytest.CaptureFixture[str]) -> None:
    words = "cannot go by revision 5: the node has changed and is at 7"
    refused = Refused(
        reason="revision-changed", message=words, retryable=True, revision=7, changed=("lease-granted", "gpu-cordoned")
    )
    failures.report(refused, json=True)
    error = json.loads(capsys.readouterr().out)["error"]
    assert (error["revision"], error["changed"]) == (7, ["lease-granted", "gpu-cordoned"])
    failures.report(Refused(reason="too-large", message="cannot"), json=True)
    assert not {"revision", "changed"} & set(json.loads(capsys.readouterr().out)["error"])

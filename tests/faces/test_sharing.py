"""Limits, cancel and drain as people meet them: a real agent with a configuration file, and migctl."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from mig_agent.client import Client, Refused
from support.agent import Agent, eventually
from support.people import BOB, Person, needs_root

CONFIG = """\
limits:
  users:
    root:
      leases: 2
      longest_ttl: 2h
"""


def waiting(agent: Agent) -> list[dict[str, object]]:
    found: list[dict[str, object]] = agent.ask("status")["queue"]
    return found


def started(agent: Agent, *typed: str) -> subprocess.Popen[str]:
    """A `migctl` that waits in the queue when this returns."""
    before = len(waiting(agent))
    process = agent.begin(*typed)
    eventually(lambda: len(waiting(agent)) > before, "it waits")
    return process


def test_a_limit_is_told_with_the_line_that_sets_it(folder: Path) -> None:
    config = folder / "config.yaml"
    config.write_text(CONFIG)
    with Agent(folder, flags=("--config", str(config))) as agent:
        first = agent.ask("request", "--gpu-memory", "4G")
        assert first["expires_at"] is not None
        agent.ask("request", "--gpu-memory", "4G")
        error = agent.ask("request", "--gpu-memory", "4G", code=3)["error"]
        assert (error["reason"], error["retryable"]) == ("limit-exceeded", True)
        assert error["message"] == (
            f"cannot serve 4G: root holds 2 of at most 2 leases (set by limits.users.root.leases in {config}, line 4)"
        )
        assert agent.ask("plan", "--gpu-memory", "4G", code=3)["error"]["reason"] == "limit-exceeded"
        assert agent.ask("request", "--gpu-memory", "4G", "--ttl", "3h", code=3)["error"]["reason"] == "outside-limits"
        process = started(agent, "request", "--gpu-memory", "4G", "--wait", "10m", "-o", "json")
        (entry,) = waiting(agent)
        assert "root holds 2 of at most 2 leases" in str(entry["limit"])
        agent.migctl("release", first["lease"])
        printed, _ = process.communicate(timeout=60)
        assert json.loads(printed)["lease"]


def test_a_waiting_migctl_is_cancelled_and_says_by_whom(agent: Agent) -> None:
    for gpu in ("0", "1"):
        agent.ask("request", "--num-gpus", "1", "--gpu", gpu)
    process = started(agent, "request", "--gpu-memory", "4G", "--wait", "10m", "--request-id", "abc-1", "-o", "json")
    printed = agent.migctl("cancel", "abc", "--reason", "the node is needed").stdout
    assert printed.startswith("cancelled abc-1: 4G, of root")
    answer, _ = process.communicate(timeout=60)
    error = json.loads(answer)["error"]
    assert (process.returncode, error["reason"], error["retryable"]) == (3, "cancel-requested", False)
    assert error["message"].endswith("the request was cancelled by root (an administrator): the node is needed")
    assert agent.ask("cancel", "abc", code=3)["error"]["reason"] == "unknown-request"
    other = started(agent, "request", "--gpu-memory", "4G", "--wait", "10m")
    assert len(agent.ask("cancel", "--mine")["cancelled"]) == 1
    other.communicate(timeout=60)
    assert other.returncode == 3
    assert agent.migctl("cancel", "--mine").stdout == "no request of yours waits\n"
    assert agent.ask("cancel", code=2)["error"]["hint"].startswith("name the requests")


def test_a_waiting_request_is_cancelled_by_its_name_or_what_status_shows(agent: Agent) -> None:
    leases = [agent.ask("request", "--num-gpus", "1", "--gpu", gpu, "--name", f"whole-{gpu}") for gpu in ("0", "1")]
    ask = ("request", "--gpu-memory", "4G", "--wait", "10m", "--name")
    processes = [started(agent, *ask, name) for name in ("train", "sweep", "sweep")]
    ids = {str(each["request_id"]) for each in waiting(agent) if "sweep" in str(each["holder"])}
    shown = [line.split()[1] for line in agent.migctl("status").stdout.splitlines() if "sweep" in line]
    assert [sum(each.startswith(prefix) for each in ids) for prefix in shown] == [1, 1]
    error = agent.ask("cancel", "train", "sweep", code=2)["error"]
    assert "cannot tell which waiting request sweep is: 2 waiting requests match: " in error["message"]
    assert all(f"{prefix} of sweep: 4G, place " in error["message"] for prefix in shown)
    assert len(waiting(agent)) == 3, "a mistake cancels none"
    error = agent.ask("cancel", "nonsense", code=3)["error"]
    assert (error["reason"], error["hint"]) == ("unknown-request", "`migctl status` lists those that wait")
    error = agent.ask("cancel", "whole-1", code=3)["error"]
    assert f"it does not wait, it is lease {leases[1]['lease']} of whole-1" in error["message"]
    assert error["hint"] == f"`migctl release {leases[1]['lease']}` ends it"
    assert agent.migctl("cancel", "train", shown[0]).stdout.count("cancelled ") == 2
    assert len(agent.ask("cancel", "sweep")["cancelled"]) == 1, "one is left, so that its name will do"
    for each in processes:
        each.communicate(timeout=60)
        assert each.returncode == 3


_TWIN = ("request", "--gpu-memory", "4G", "--wait", "10m", "--request-id", "train", "--name")


@needs_root
def test_anothers_request_is_refused_with_who_to_ask(folder: Path) -> None:
    folder.chmod(0o711)  # other users may reach the socket
    with Agent(folder, "a100-40gb", flags=["--socket-mode", "0666"]) as agent:
        agent.ask("request", "--num-gpus", "1")
        process = started(agent, "request", "--gpu-memory", "4G", "--wait", "10m", "--name", "sweep")
        person = Person(BOB, agent.socket, folder)
        bob = ("--address", f"unix://{person.path}")
        try:
            error = agent.ask(*bob, "cancel", "sweep", code=3)["error"]
            assert error["message"] == "cannot cancel sweep: it is a request of sweep"
            assert error["hint"] == "ask root or an administrator"
            assert "REQUEST" not in agent.migctl(*bob, "status").stdout, "only what can be cancelled has an id"
            page = agent.migctl("status", "--mine").stdout
            assert "LEASE" in page, "root's lease"
            assert "sweep" in page, "and root's waiting request"
            twins = [started(agent, *bob, *_TWIN, "theirs"), started(agent, *_TWIN, "mine")]
            eventually(lambda: len(waiting(agent)) == 3, "both wait")
            raw = Client(agent.address)
            with raw, pytest.raises(Refused, match=rf"train of .* \(uid {BOB}\)") as both:
                raw.cancel("train")
            assert "(uid 0)" in both.value.message, "both are named"
            assert agent.migctl("cancel", "train").stdout == "cancelled train: 4G, of mine\n", "one's own goes first"
            assert agent.ask("cancel", "train", "--user", "carol", code=3)["error"]["reason"] == "unknown-request"
            twins[1].communicate(timeout=60)
            twins.append(started(agent, *_TWIN, "mine"))
            (done,) = agent.ask("cancel", "train", "--user", str(BOB))["cancelled"]
            assert done["caller"] == f"uid {BOB}"
            twins[0].communicate(timeout=60)
        finally:
            person.close()
        agent.migctl("cancel", "--mine")
        process.communicate(timeout=60)
        twins[-1].communicate(timeout=60)


def test_drain_and_undrain(agent: Agent) -> None:
    """Over a kill of the agent, too."""
    lease = agent.ask("request", "--gpu-memory", "4G", "--gpu", "1")["lease"]
    printed = agent.migctl("drain", "--gpu", "1", "--deadline", "2h", "--reason", "a new fan").stdout
    assert printed.startswith("GPU 1 is being drained by root: a new fan; what is leased there ends in 2h\n")
    assert f"lease {lease} of root is still there" in printed
    agent.kill()
    agent.start()
    status = agent.ask("status")
    assert status["gpus"][1]["draining"] is True
    assert status["gpus"][1]["drain_deadline"]
    (shown,) = status["leases"]
    assert shown["warning"].startswith("GPU 1 is drained by root: a new fan; the lease ends in 1h59m")
    page = agent.migctl("show", lease).stdout
    assert "\n  warning  GPU 1 is drained by root: a new fan; the lease ends in 1h59m" in page
    assert "unused" not in page
    kinds = [each["kind"] for each in agent.ask("events", "--since", "1h")["events"]]
    assert {"gpu-cordoned", "lease-warned"} <= set(kinds)
    agent.migctl("release", lease)
    eventually(lambda: "is drained: nothing is leased there" in agent.migctl("events", "--since", "1h").stdout)
    assert agent.migctl("undrain").stdout == "GPU 1 is ready\n"
    assert agent.migctl("undrain").stdout == "no GPU is drained\n"
    assert agent.ask("drain", "--deadline", "0s", code=2)["error"]["reason"] == "invalid-request"
    assert [each["index"] for each in agent.ask("drain")["gpus"]] == [0, 1]


def test_the_python_client(agent: Agent) -> None:
    with Client(agent.address) as client:
        assert client.drain(0, deadline="1h", reason="a fan").gpus[0].draining
        assert not client.undrain()[0].draining
        assert client.cancel(mine=True) == ()
        with pytest.raises(Refused) as refused:
            client.cancel("nothing")
        assert refused.value.reason == "unknown-request"

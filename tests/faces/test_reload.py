"""SIGHUP: the configuration is read again while the agent runs."""

from __future__ import annotations

import os
import signal
import stat
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.agent import GENEROUS_SECONDS, eventually
from support.reloaded import Reloaded
from support.service_manager import ServiceManager, service_manager


@pytest.fixture
def manager(folder: Path) -> Iterator[ServiceManager]:
    with service_manager(folder) as manager:
        yield manager


@pytest.fixture
def agent(folder: Path, manager: ServiceManager) -> Iterator[Reloaded]:
    with Reloaded(folder, "metrics: off\n", variables=manager.variables) as agent:
        manager.until("READY")
        yield agent


def test_what_can_change_does_and_leases_stay(agent: Reloaded, manager: ServiceManager) -> None:
    lease = agent.ask("request", "--gpu-memory", "30G")["lease"]
    event = agent.reload(
        "metrics: 127.0.0.1:0\nmax_waiting: 0\nlog_level: debug\nsocket_mode: 0666\ncreation_cost: 8\n"
    )
    assert event["kind"] == "config-reloaded"
    assert event["message"] == (
        "the configuration was read again: socket_mode is 0666 (was 0660), creation_cost is 8 (was 2), "
        "max_waiting is 0 (was 1000), metrics is 127.0.0.1:0 (was off), log_level is debug (was info)"
    )
    assert event["data"]["changed"] == "socket_mode,creation_cost,max_waiting,metrics,log_level"
    begun = manager.until("RELOADING", "1")
    assert begun["MONOTONIC_USEC"].isdigit()
    assert manager.until("READY", "1")["STATUS"] == "1 GPU, 1 lease"
    assert [each["lease"] for each in agent.ask("status")["leases"]] == [lease]
    assert agent.ask("status")["problems"] == []
    assert stat.S_IMODE(agent.socket.stat().st_mode) == 0o666
    refused = agent.migctl("request", "--gpu-memory", "30G", "--wait", "1h", code=None)
    assert "queue-full" in refused.stderr or "0 requests wait" in refused.stderr, refused.stderr
    agent.migctl("renew", lease, "--ttl", "1h", "--token", "", code=None)
    eventually(lambda: '"level": "debug"' in agent.log(), "details are logged")


def test_what_cannot_change_is_named_and_the_rest_changes(agent: Reloaded) -> None:
    event = agent.reload("metrics: off\nlock_dir: /elsewhere\nkubelet_dir: /other\nmax_waiting: 5\n")
    assert event["message"] == (
        "the configuration was read again: max_waiting is 5 (was 1000), only a restart changes lock_dir and kubelet_dir"
    )
    assert event["data"]["at_restart"] == "lock_dir,kubelet_dir"
    assert "cannot change lock_dir and kubelet_dir while the agent runs" in agent.log()
    needs = "configuration: a restart is needed to change lock_dir and kubelet_dir"
    assert agent.ask("status")["problems"] == [needs]
    assert needs in agent.migctl("status").stdout
    assert agent.reload("metrics: off\n")["data"]["changed"] == "max_waiting"
    assert agent.ask("status")["problems"] == []
    assert agent.reload("metrics: off\n")["message"] == "the configuration was read again: nothing changed"


@pytest.mark.parametrize(
    ("text", "messages"),
    [
        ("max_wating: 5\nlog_level: loud\nstate_dir: /x\n", ["max_wating", "line 1", "log_level", "line 2"]),
        ("max_waiting: 5\nsocket_schedulers: [no-such-user]\n", ["no-such-user", "there is no such user"]),
        ("max_waiting: 5\nsocket_group: no-such-group\n", ["no-such-group", "there is no such group"]),
        ("a: [1\n", ["line 2"]),
    ],
)
def test_an_invalid_configuration_changes_nothing_and_is_reported(
    agent: Reloaded, manager: ServiceManager, text: str, messages: list[str]
) -> None:
    before = agent.socket.stat()
    event = agent.reload(text)
    assert event["kind"] == "config-reload-failed"
    assert event["message"].startswith("the configuration cannot be used, and the former one stays in use: cannot ")
    assert all(each in event["message"] for each in messages)
    manager.until("RELOADING")
    assert manager.until("READY")["STATUS"].startswith("1 GPU, 0 leases; configuration: the former one stays in use")
    (problem,) = agent.ask("status")["problems"]
    assert messages[0] in problem
    assert '"level": "error"' in next(line for line in agent.log().splitlines() if "stays in use" in line)
    after = agent.socket.stat()
    assert (after.st_mode, after.st_gid, after.st_ino) == (before.st_mode, before.st_gid, before.st_ino)
    # Had max_waiting been taken up, it would be named here.
    assert agent.reload("metrics: off\n")["message"] == "the configuration was read again: nothing changed"
    assert agent.ask("status")["problems"] == []


def test_the_metrics_move(agent: Reloaded) -> None:
    agent.reload("metrics: 127.0.0.1:7481\nlog_level: debug\n")
    if not agent.ask("status")["problems"]:  # another agent of this machine may have the port
        with urllib.request.urlopen("http://127.0.0.1:7481/metrics", timeout=GENEROUS_SECONDS) as answer:
            assert b"mig_agent_" in answer.read()
    assert agent.reload("metrics: off\n")["data"]["changed"] == "metrics,log_level"


@pytest.mark.skipif(os.getuid() != 0, reason="takes root, who may give the socket to any group")
def test_the_group_of_the_socket_changes_also_where_it_is_bound_again(agent: Reloaded) -> None:
    agent.reload("metrics: off\nsocket_group: '4711'\nsocket_mode: 0600\n")
    assert (agent.socket.stat().st_gid, stat.S_IMODE(agent.socket.stat().st_mode)) == (4711, 0o600)
    agent.socket.unlink()
    eventually(agent.socket.exists, "it is bound again")
    assert (agent.socket.stat().st_gid, stat.S_IMODE(agent.socket.stat().st_mode)) == (4711, 0o600)
    agent.reload("metrics: off\n")
    assert (agent.socket.stat().st_gid, stat.S_IMODE(agent.socket.stat().st_mode)) == (os.getegid(), 0o660)


def test_limits_change_with_the_file_and_not_with_a_mistake(agent: Reloaded) -> None:
    role = "scheduler" if os.getuid() == 0 else "user"
    limits = f"metrics: off\nlimits:\n  roles:\n    {role}: {{leases: 1}}\n    admin: {{leases: 9}}\n"
    assert agent.reload(limits)["data"]["changed"] == "limits"
    held = agent.ask("request", "--mig-profile", "1g.5gb")["lease"]
    refused = agent.migctl("request", "--mig-profile", "1g.5gb", code=3).stderr
    assert f"set by limits.roles.{role}.leases in {agent.config}, line 4" in refused

    # A mistake leaves the former limits in use, also those that the file has right.
    event = agent.reload(limits.replace("leases: 1", "leases: 5", 1) + "  users:\n    alice: {lease: 2, share: 4G}\n")
    assert event["kind"] == "config-reload-failed"
    assert "limits.users.alice.lease in" in event["message"]
    assert "limits.users.alice.share in" in event["message"]
    assert "line 4" in agent.migctl("request", "--mig-profile", "1g.5gb", code=3).stderr

    # Another value counts at once, a lower one ends nothing, and without the section there are no limits.
    assert agent.reload(limits.replace("leases: 1", "leases: 2", 1))["data"]["changed"] == "limits"
    second = agent.ask("request", "--mig-profile", "1g.5gb")["lease"]
    agent.reload(limits.replace("leases: 1", "leases: 0", 1))
    assert {each["lease"] for each in agent.ask("status")["leases"]} == {held, second}
    agent.migctl("request", "--mig-profile", "1g.5gb", code=3)
    removed = agent.reload("metrics: off\n")
    assert removed["data"]["changed"] == "limits"
    assert "limits is {} (was {roles:" in removed["message"]
    agent.ask("request", "--mig-profile", "1g.5gb")


def test_a_pipe_in_place_of_the_file_is_refused_and_the_file_is_read_again(agent: Reloaded) -> None:
    agent.config.unlink()
    os.mkfifo(agent.config)
    assert agent.process is not None
    agent.process.send_signal(signal.SIGHUP)
    event = eventually(agent.told, "it is refused")[-1]
    assert event["kind"] == "config-reload-failed"
    assert "it is no plain file" in event["message"]
    agent.config.unlink()
    assert agent.reload("metrics: off\nmax_waiting: 5\n")["data"]["changed"] == "max_waiting"

"""The agent's Unix sockets removed or replaced under it: it notices, says so, and has them again."""

from __future__ import annotations

import json
import shutil
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mig_agent.adapters.failpoints import VARIABLE
from mig_agent.client import Client
from support.agent import PROCESS_SECONDS, SERVING, Agent, eventually, health, short_folder
from support.figures import Figure
from support.reached import REACHED


@pytest.fixture
def folder() -> Iterator[Path]:
    with short_folder() as path:
        yield path


def told(agent: Agent, kind: str) -> list[dict[str, Any]]:
    lines = (line for line in agent.log().splitlines() if f'"{kind}"' in line)
    return [json.loads(line) for line in lines]


def admin_of(agent: Agent) -> str:
    return f"unix://{agent.folder}/admin.sock"


@pytest.mark.parametrize("name", ["agent.sock", "admin.sock"])
def test_one_that_is_removed_is_bound_again_while_clients_wait(folder: Path, name: str) -> None:
    with Agent(folder, "a100-40gb:1", flags=["--socket-mode", "0660"]) as agent:
        path = folder / name
        mode = path.stat().st_mode
        kept = agent.ask("request", "--mig-profile", "7g.40gb")
        waiting = agent.begin("request", "--mig-profile", "3g.20gb", "--wait", "120s", "-o", "json")
        with Client(agent.address) as client:
            eventually(lambda: client.status().queue, "it waits")
            for number in (1, 2):
                path.unlink()
                eventually(lambda: health(f"unix://{path}") == SERVING, "a new client is served")
                assert path.stat().st_mode == mode
                eventually(lambda: len(told(agent, "socket-restored")) >= number, "it is said")  # noqa: B023 -- at once
                assert len(told(agent, "socket-restored")) == number  # once for each occurrence
            assert f"{path} was removed; it was bound again" in told(agent, "socket-restored")[0]["event"]
            assert len(client.status().queue) == 1  # a connection that was open goes on
            assert client.status().socket_problems == ()
            agent.migctl("release", kept["lease"])
            done, _ = waiting.communicate(timeout=PROCESS_SECONDS)
            assert json.loads(done)["devices"]
        kinds = [each["kind"] for each in agent.ask("events")["events"]]
        assert kinds.count("socket-restored") == 2
        # A second agent is kept off, and this one takes its socket away when it stops.
        assert Agent(folder, "a100-40gb:1").launch().wait(60) == 1
        assert agent.stop() == 0
        assert not path.exists()


def test_what_has_taken_its_place_is_left_alone_and_named(folder: Path) -> None:
    with Agent(folder, "a100-40gb:1") as agent:
        admin, path = admin_of(agent), agent.socket
        path.unlink()
        path.write_text("somebody's")
        eventually(lambda: told(agent, "socket-lost"), "it is noticed")
        words = told(agent, "socket-lost")[0]["event"]
        assert f"{path} was replaced by a file of " in words
        assert "left alone" in words
        (problem,) = agent.ask("status", "--address", admin)["socket_problems"]
        assert problem in words
        assert problem in agent.migctl("status", "--address", admin).stdout
        assert path.read_text() == "somebody's"

        path.unlink()
        with socket.socket(socket.AF_UNIX) as other:
            other.bind(str(path))
            other.listen()
            eventually(lambda: "another socket of" in told(agent, "socket-lost")[-1]["event"], "the other is noticed")
            assert "listens" in told(agent, "socket-lost")[-1]["event"]
        path.unlink()
        eventually(lambda: health(agent.address) == SERVING, "it is back")
        eventually(lambda: not agent.ask("status")["socket_problems"], "and says so")
        eventually(lambda: told(agent, "socket-restored"), "in the log, too")
        assert len(told(agent, "socket-lost")) in {2, 3}  # it may be seen gone in between, but is said once each
        assert told(agent, "socket-restored")


def test_one_that_was_replaced_is_not_removed_at_the_end(folder: Path) -> None:
    with Agent(folder, "a100-40gb:1") as agent:
        agent.socket.unlink()
        agent.socket.write_text("somebody's")
        assert agent.stop() == 0
        assert agent.socket.read_text() == "somebody's"


@pytest.mark.parametrize("door", sorted(REACHED["socket bound again"]))
@pytest.mark.parametrize("when", ["before", "after"])
def test_killed_while_it_is_bound_again(folder: Path, when: str, door: str, figure: Figure) -> None:
    times = 3 if door == "socket-folder" else 1  # the folders of both sockets are made at the start
    with Agent(folder, "a100-40gb:1", variables={VARIABLE: f"{when}-{door}:{times}"}) as agent:
        lease = agent.ask("request", "--mig-profile", "3g.20gb")
        agent.socket.unlink()
        assert agent.process is not None
        assert agent.process.wait(60) == -signal.SIGKILL
        del agent._environment[VARIABLE]
        agent.start()
        assert [each["lease"] for each in agent.ask("status")["leases"]] == [lease["lease"]]
        agent.socket.unlink()
        eventually(lambda: health(agent.address) == SERVING, "it is bound again")
    figure("crash points x kinds, each killed for real", 1)


def test_the_whole_folder_removed(folder: Path) -> None:
    run = folder / "run"
    with Agent(folder, "a100-40gb:1", listen=[f"unix://{run}/agent.sock"]) as agent:
        lease = agent.ask("request", "--mig-profile", "3g.20gb")
        shutil.rmtree(run)
        eventually(lambda: health(agent.address) == SERVING, "it is there again")
        assert [each["lease"] for each in agent.ask("status")["leases"]] == [lease["lease"]]
        # Its lock is, too.
        second = Agent(folder / "other", "a100-40gb:1", listen=[agent.address])
        second.folder.mkdir()
        assert second.launch().wait(60) == 1
        assert "the agent with pid" in second.log()
        agent.restart_after_crash()
        assert agent.ask("status")["leases"]


def test_another_agent_that_has_taken_the_path_keeps_it(folder: Path) -> None:
    run = folder / "run"
    with Agent(folder, "a100-40gb:1", listen=[f"unix://{run}/agent.sock"]) as agent:
        shutil.rmtree(run)
        (folder / "other").mkdir()
        with Agent(folder / "other", "a100-40gb:1", listen=[agent.address]) as second:
            # Whichever of both was first; the other says so, and nobody is let in by two.
            eventually(lambda: told(agent, "socket-lost") or told(agent, "socket-restored"), "it is noticed")
            assert second.process is not None
            assert health(agent.address) == SERVING
            assert f"pid {second.process.pid} listens" in told(agent, "socket-lost")[-1]["event"]
            assert second.stop() == 0
        eventually(lambda: health(agent.address) == SERVING, "it has it again")
        assert agent.ask("status")["node"] == "tested"

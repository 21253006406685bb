"""The real agent, killed at every crash point that a kind of request reaches, and restarted on what it left."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path

import grpc
import pytest

from mig_agent.adapters.failpoints import VARIABLE
from support.agent import GENEROUS_SECONDS, PROCESS_SECONDS, Agent, short_folder
from support.doors import doors
from support.failpoint_control import ControlledAgent
from support.figures import Figure
from support.kinds import KINDS, Kind
from support.reached import (
    API_SERVER,
    CDI,
    CGROUP,
    CONTEXTS,
    CREATE,
    DRIVER,
    ELASTIC,
    KUBELET,
    LEDGER,
    MPS,
    REACHED,
    SOCKET,
    WEB,
)
from support.restarted import GPUS, World, world
from support.starts import STARTS

ON_DISK = ("commit", "aside", "Destroy", "Instance")
MOST = 40
"""Times that one kind of request reaches one place."""
LATER_SECONDS = 10.0
"""For an agent that starts to come to a place another time, if it does."""


@pytest.fixture
def folder() -> Iterator[Path]:
    with short_folder() as path:
        yield path


def counted(name: str, places: Iterable[str]) -> None:
    """The places are those before and after each door that the table names."""
    assert set(places) == {f"{when}-{door}" for door in REACHED[name] for when in ("before", "after")}


def test_the_table_is_complete() -> None:
    elsewhere = {*LEDGER, *SOCKET, *CDI, *KUBELET, *DRIVER, *MPS, *CGROUP, *WEB, *CONTEXTS, *API_SERVER, *ELASTIC}
    assert set(REACHED) == {*KINDS, *STARTS, "stop"} | elsewhere
    assert frozenset().union(*REACHED.values()) == doors()


@pytest.mark.parametrize("name", KINDS)
def test_killed_at_every_point_of_a_request(folder: Path, name: str, figure: Figure) -> None:
    kills = 0
    with world(ControlledAgent(folder, GPUS)) as there:
        places = reached_by(there, KINDS[name])
        counted(name, places)
        for place in places:
            for count in range(1, MOST):
                if not killed_at(there, KINDS[name](there), place, count):
                    break
                kills += 1
            assert 1 < count < MOST, f"{place} is not reached any more"
    figure("crash points x kinds, each killed for real", len(places))
    figure("kills of the real agent", kills)


@pytest.mark.parametrize("name", STARTS)
def test_killed_at_every_point_of_a_start(folder: Path, name: str, figure: Figure) -> None:
    kills = 0
    agent = ControlledAgent(folder, GPUS)
    with world(agent) as there:
        agent.kill()
        start = STARTS[name](there)
        start.prepare()
        start.keep()
        start.restore()
        agent.control.record()
        agent.start()
        agent.control.stand_by()
        there.connect()
        start.check()
        places = agent.control.reached()
        counted(name, places)
        for place, times in sorted(places.items()):
            # Each lock and each socket is one file after another: the last of them does.
            for count in range(1, times + 1) if place.endswith(ON_DISK) else (times,):
                agent.kill()
                start.restore()
                agent.control.arm(place, count)
                if not dies(agent, must=count == 1 or not place.endswith(ON_DISK)):
                    break
                agent.control.stand_by()
                agent.start()
                there.connect()
                start.check()
                kills += 1
    figure("crash points x kinds, each killed for real", len(places))
    figure("kills of the real agent", kills)


def dies(agent: ControlledAgent, *, must: bool) -> bool:
    """Whether it is killed as it starts. Commits that meet become one, so a later one need not come about each time."""
    try:
        code = agent.launch().wait(GENEROUS_SECONDS if must else LATER_SECONDS)
    except subprocess.TimeoutExpired:
        if must:
            raise
        return False
    assert code == -signal.SIGKILL
    return True


def test_killed_at_every_point_of_the_end(folder: Path, figure: Figure) -> None:
    kills = 0
    agent = ControlledAgent(folder, GPUS)
    with world(agent) as there:
        agent.control.record()
        assert agent.stop() == 0
        places = agent.control.reached()
        counted("stop", places)
        for place, times in sorted(places.items()):
            for count in {1, times}:
                agent.start()
                there.connect()
                there.check()
                agent.control.arm(place, count)
                assert agent.stop() == -signal.SIGKILL
                agent.control.stand_by()
                kills += 1
        agent.start()
        there.connect()
        there.check()
    figure("crash points x kinds, each killed for real", len(places))
    figure("kills of the real agent", kills)


def test_the_variable_kills_the_program_as_it_is_installed(folder: Path) -> None:
    """No fork and no listener here; and migctl itself asks again when the agent is back."""
    armed = Agent(folder, GPUS, variables={VARIABLE: "after-ledger-counter"}, forked=False)
    assert armed.launch().wait() == -signal.SIGKILL
    with Agent(folder, GPUS, variables={VARIABLE: f"after-{CREATE}"}, forked=False) as armed:
        client = armed.begin("request", "--gpu-memory", "4G", "-o", "json")
        assert armed.process is not None
        assert armed.process.wait(GENEROUS_SECONDS) == -signal.SIGKILL
    with Agent(folder, GPUS, forked=False) as agent:
        output, words = client.communicate(timeout=PROCESS_SECONDS)
        assert client.returncode == 0, words
        (lease,) = agent.ask("status")["leases"]
        assert lease["lease"] == json.loads(output)["lease"]
        assert len(agent.instances()) == 2  # the other is the whole GPU without MIG mode
        assert [len(each["compute"]) for gpu in agent.simulator.machine()["gpus"] for each in gpu["instances"]] == [1]


def reached_by(there: World, make: type[Kind]) -> list[str]:
    """The places on the way of an undisturbed request."""
    kind = make(there)
    kind.prepare()
    there.settle()
    there.agent.control.record()
    kind.answer = kind.ask()
    there.agent.control.stand_by()
    there.settle()
    kind.check()
    there.undo()
    return sorted(there.agent.control.reached())


def killed_at(there: World, kind: Kind, place: str, count: int) -> bool:
    """Whether it came so far. Everything that has to hold after the restart is checked here."""
    kind.prepare()
    there.settle()
    there.agent.control.arm(place, count)
    answer = None
    try:
        answer = kind.ask()
        there.agent.control.stand_by()
        there.settle()
    except grpc.RpcError:
        assert there.agent.process is not None
        assert there.agent.process.wait() == -signal.SIGKILL
    else:
        kind.answer = answer
        kind.check()
        there.undo()
        return False
    there.agent.control.stand_by()
    there.agent.start()
    there.connect()
    there.agent.simulator.clear()
    kind.back()
    there.check()
    found = there.leases().get(kind.request)
    retried = kind.answer = kind.again()
    if answer is not None:
        assert found is not None
        assert retried == answer
    if found is not None and retried is not None:
        assert (retried.lease, retried.devices) == (found.lease, found.devices)
    assert kind.again() == retried
    there.check()
    kind.check()
    there.undo()
    there.check()
    return True

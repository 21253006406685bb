"""An agent that is away for long: held leases stay, and requests that wait go on waiting."""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from mig_agent.client import AsyncClient, Client, ClientError, NoAgent
from mig_agent.client.absence import AWAY_SECONDS, Absence
from mig_agent.client.types import Grant
from support.agent import GENEROUS_SECONDS, Agent, eventually

HOUR = 3600.0


@dataclass
class Clock:
    """The clock of this process's clients, which can be put on."""

    ahead: float = 0.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock, real = Clock(), time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: real() + clock.ahead)
    return clock


def test_only_an_absence_that_is_longer_than_a_restart_is_reported_and_once(clock: Clock) -> None:
    said: list[ClientError | None] = []
    absence, error = Absence(said.append), NoAgent("cannot reach the agent")
    absence.failed(error)
    absence.over()
    assert not said
    absence.failed(error)
    clock.ahead += AWAY_SECONDS
    absence.failed(error)
    absence.failed(error)
    assert said == [error]
    absence.over()
    absence.over()
    assert said == [error, None]


def test_a_held_lease_outlives_an_agent_that_is_away_for_hours(agent: Agent, clock: Clock) -> None:
    lost: queue.Queue[ClientError] = queue.Queue()
    away: queue.Queue[ClientError | None] = queue.Queue()
    with Client(agent.address, patience=0.1) as client:
        with client.lease(gpu_memory="4G", on_lost=lost.put, on_away=away.put) as lease:
            assert agent.stop() == 0
            clock.ahead = 5 * HOUR
            error = away.get(timeout=GENEROUS_SECONDS)
            assert isinstance(error, NoAgent)
            assert "there is no such socket" in error.message
            agent.start()
            assert away.get(timeout=GENEROUS_SECONDS) is None
            assert [each.id for each in client.status().leases] == [lease.id]
            assert lease.lost is None
        assert not client.status().leases
    assert lost.empty()


async def test_a_held_lease_on_an_event_loop_does_so_too(agent: Agent, clock: Clock) -> None:
    lost: list[ClientError] = []
    away: asyncio.Queue[ClientError | None] = asyncio.Queue()
    async with AsyncClient(agent.address, patience=0.1) as client:
        async with client.lease(gpu_memory="4G", on_lost=lost.append, on_away=away.put_nowait) as lease:
            assert await asyncio.to_thread(agent.stop) == 0
            clock.ahead = 5 * HOUR
            assert isinstance(await asyncio.wait_for(away.get(), GENEROUS_SECONDS), NoAgent)
            await asyncio.to_thread(agent.start)
            assert await asyncio.wait_for(away.get(), GENEROUS_SECONDS) is None
            assert [each.id for each in (await client.status()).leases] == [lease.id]
        assert not (await client.status()).leases
    assert not lost


def test_a_lease_that_was_given_up_while_the_agent_was_away_ends_when_it_is_back(agent: Agent) -> None:
    """Its process lives on, so that the agent would keep it."""
    with Client(agent.address, patience=0.1) as client:
        lease = client.lease(gpu_memory="4G")
        agent.kill()
        with pytest.raises(NoAgent):
            lease.release()
    agent.start()
    eventually(lambda: not agent.ask("status")["leases"], "it has been released")


async def test_a_lease_on_an_event_loop_that_was_given_up_meanwhile_ends_as_well(agent: Agent) -> None:
    async with AsyncClient(agent.address, patience=0.1) as client:
        lease = await client.lease(gpu_memory="4G")
        agent.kill()
        with pytest.raises(NoAgent):
            await lease.release()
        await asyncio.to_thread(agent.start)
        await asyncio.to_thread(eventually, lambda: not agent.ask("status")["leases"], "it has been released")


def test_an_agent_that_has_lost_the_lease_does_not_attach_its_client_to_another(agent: Agent) -> None:
    lost: queue.Queue[ClientError] = queue.Queue()
    with Client(agent.address, patience=0.1) as client:
        lease = client.lease(gpu_memory="4G", wait="1h", on_lost=lost.put)
        agent.kill()
        for each in agent.state_dir.glob("ledger*"):
            each.unlink()
        agent.start()
        error = lost.get(timeout=GENEROUS_SECONDS)
        assert error.message.startswith(f"cannot hold lease {lease.id} any longer: the agent does not know it any more")
        eventually(lambda: not agent.ask("status")["leases"], "nothing is held instead")


def waiting_client(agent: Agent, how: str, said: queue.Queue[object]) -> Callable[[], None]:
    """Return a function that waits for a 7g.40gb for an hour and puts all that it is told into `said`."""

    def wait() -> None:
        with Client(agent.address, patience=0.1) as client:
            try:
                lease = getattr(client, how)(mig_profile="7g.40gb", wait="1h", on_queued=said.put, on_away=said.put)
            except ClientError as error:
                said.put(error)
            else:
                said.put(lease.grant)

    return wait


@pytest.mark.parametrize(
    ("how", "graceful"), [("lease", True), ("acquire", True), ("acquire", False)], ids=["lease", "acquire", "killed"]
)
def test_a_request_that_waits_goes_on_waiting_while_the_agent_is_away(
    agent: Agent, clock: Clock, how: str, graceful: bool
) -> None:
    """It waits on also where its place in the queue was all that this client ever heard of the agent."""
    blocking = agent.ask("request", "--mig-profile", "7g.40gb")["lease"]
    said: queue.Queue[object] = queue.Queue()
    thread = threading.Thread(target=waiting_client(agent, how, said))
    thread.start()
    assert said.get(timeout=GENEROUS_SECONDS) == 1
    if graceful:
        assert agent.stop() == 0
    else:
        agent.kill()
    clock.ahead = HOUR / 2
    assert isinstance(said.get(timeout=GENEROUS_SECONDS), ClientError)
    agent.start()
    answers = {repr(said.get(timeout=GENEROUS_SECONDS)) for _ in range(2)}
    assert answers == {"None", "1"}, "it is back, and the request waits again"
    agent.migctl("release", blocking)
    assert isinstance(said.get(timeout=GENEROUS_SECONDS), Grant)
    thread.join()


@pytest.mark.parametrize("how", ["lease", "acquire"])
def test_a_request_that_waits_gives_up_when_its_time_is_over(agent: Agent, clock: Clock, how: str) -> None:
    agent.ask("request", "--mig-profile", "7g.40gb")
    said: queue.Queue[object] = queue.Queue()
    thread = threading.Thread(target=waiting_client(agent, how, said))
    thread.start()
    assert said.get(timeout=GENEROUS_SECONDS) == 1
    agent.kill()
    clock.ahead = HOUR
    thread.join(GENEROUS_SECONDS)
    assert isinstance(list(said.queue)[-1], NoAgent)

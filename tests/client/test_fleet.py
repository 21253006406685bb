"""Several agents as a scheduler has them: real ones, each in a process of its own."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import socket
from collections.abc import AsyncIterator, Iterator

import pytest

from mig_agent.client import AsyncClient, AsyncFleet, Client, NoAgent, Pod, Refused, UsageError
from mig_agent.client.types import LeaseInfo
from support.agent import Agent, short_folder

GPUS = {"one": "a100-40gb:1", "two": "h100-80gb:1"}
_numbers = itertools.count(1)


@pytest.fixture(scope="module")
def running() -> Iterator[dict[str, Agent]]:
    with contextlib.ExitStack() as stack:
        agents = {}
        for node, gpus in GPUS.items():
            agents[node] = stack.enter_context(Agent(stack.enter_context(short_folder()), gpus))
        yield agents


@pytest.fixture
def agents(running: dict[str, Agent]) -> Iterator[dict[str, Agent]]:
    """With nothing leased, before and after."""
    yield running
    for agent in running.values():
        with Client(f"unix://{agent.folder}/admin.sock") as admin:
            for lease in admin.status().leases:
                admin.release(lease.id)
            admin.reclaim()


@pytest.fixture
def pod() -> Pod:
    """Another one for each test: what was asked for by a pod's ids is remembered."""
    return Pod(namespace="team-a", name="train", uid=f"uid-{next(_numbers)}")


@pytest.fixture
def where(agents: dict[str, Agent]) -> dict[str, str]:
    """Their administrators' sockets: whoever runs the tests may act for pods there."""
    return {node: f"unix://{agent.folder}/admin.sock" for node, agent in agents.items()}


@pytest.fixture
async def fleet(where: dict[str, str]) -> AsyncIterator[AsyncFleet]:
    async with AsyncFleet(answer=30) as opened:  # a busy machine leaves no node out
        assert await opened.update(where) == {}
        yield opened


def leases(agent: Agent) -> tuple[LeaseInfo, ...]:
    with Client(agent.address) as client:
        return client.status().leases


async def test_plans_of_all_nodes_and_the_words_of_those_that_cannot(fleet: AsyncFleet) -> None:
    plans, refusals = await fleet.plan(gpu_memory="4G")
    assert plans["one"].score < plans["two"].score, "5 GB fit 4 GB better than 10 GB do"
    assert refusals == {}
    plans, refusals = await fleet.plan(devices=["80G"])
    assert set(plans) == {"two"}
    assert refusals["one"].startswith("cannot ")
    plans, refusals = await fleet.plan(but={"two"}, gpu_memory="4G")
    assert (set(plans), refusals) == ({"one"}, {})
    with pytest.raises(UsageError):
        await fleet.plan(gpu_memory="much")


async def test_a_promise_is_the_same_however_often_and_by_whom_it_is_asked_for(
    fleet: AsyncFleet, where: dict[str, str], agents: dict[str, Agent], pod: Pod
) -> None:
    assert fleet.promised(pod) is None
    first, again = await asyncio.gather(*(fleet.acquire("one", pod, gpu_memory="4G") for _ in range(2)))
    async with AsyncFleet(answer=30) as other:  # the scheduler after this one, which was killed
        await other.update(where)
        assert other.promised(pod) == fleet.promised(pod) == "one"
        third = await other.acquire("one", pod, gpu_memory="4G")
    assert {first.lease.id, again.lease.id, third.lease.id} == {first.lease.id}
    assert first.lease.token == third.lease.token
    (lease,) = leases(agents["one"])
    assert (lease.pod, lease.promised, [each.uuid for each in lease.devices]) == (pod, True, first.uuids)


async def test_a_promise_has_a_deadline_until_it_is_confirmed_and_when_it_lapses(
    fleet: AsyncFleet, agents: dict[str, Agent], pod: Pod
) -> None:
    promise = await fleet.acquire("one", pod, gpu_memory="4G")
    assert leases(agents["one"])[0].expires_at is not None
    await promise.commit()
    assert leases(agents["one"])[0].expires_at is None
    await promise.expire()
    assert leases(agents["one"])[0].expires_at is not None
    assert fleet.promised(pod) is None
    again = await fleet.acquire("one", pod, gpu_memory="4G")
    assert again.lease.id == promise.lease.id


async def test_what_lapses_ends_when_the_pod_is_bound_elsewhere(
    fleet: AsyncFleet, agents: dict[str, Agent], pod: Pod
) -> None:
    first = await fleet.acquire("one", pod, gpu_memory="4G")
    await first.expire()
    second = await fleet.acquire("two", pod, gpu_memory="4G")
    await second.commit()
    assert leases(agents["one"]), "it may still be bound there"
    assert fleet.expiring(pod) == ["one"]
    await second.committed()
    assert not leases(agents["one"])
    assert [each.id for each in leases(agents["two"])] == [second.lease.id]
    assert fleet.expiring(pod) == []


async def test_what_lapsed_and_was_bound_after_all_stays(fleet: AsyncFleet, agents: dict[str, Agent], pod: Pod) -> None:
    await (await fleet.acquire("one", pod, gpu_memory="4G")).expire()
    again = await fleet.acquire("one", pod, gpu_memory="4G")
    await again.commit()
    await again.committed()
    assert [each.id for each in leases(agents["one"])] == [again.lease.id]


async def test_what_was_given_back_is_taken_by_the_next_id(
    fleet: AsyncFleet, agents: dict[str, Agent], pod: Pod
) -> None:
    ids = set()
    for _ in range(3):
        promise = await fleet.acquire("one", pod, gpu_memory="4G")
        ids.add(promise.lease.id)
        await promise.give_back()
        assert not leases(agents["one"])
        with pytest.raises(Refused):
            await promise.commit()
    assert len(ids) == 3


async def test_an_id_by_which_something_else_was_asked_for_is_passed_over(fleet: AsyncFleet, pod: Pod) -> None:
    small = await fleet.acquire("two", pod, gpu_memory="4G")
    large = await fleet.acquire("two", pod, gpu_memory="30G")
    assert large.lease.id != small.lease.id
    assert large.lease.grant.request_id == f"{pod.uid}-2"


async def test_a_plan_that_was_overtaken_is_refused_and_nothing_is_promised(fleet: AsyncFleet, pod: Pod) -> None:
    plans, _ = await fleet.plan(gpu_memory="4G")
    await fleet.agents["one"].acquire(gpu_memory="4G")
    with pytest.raises(Refused) as refused:
        await fleet.acquire("one", pod, gpu_memory="4G", if_revision=plans["one"].revision)
    assert (refused.value.reason, refused.value.retryable) == ("revision-changed", True)
    assert fleet.promised(pod) is None


async def test_pods_that_wait_no_more_are_forgotten(fleet: AsyncFleet, pod: Pod) -> None:
    other = Pod(namespace="team-a", name="other", uid="another")
    await fleet.acquire("one", pod, gpu_memory="4G")
    await fleet.acquire("two", other, gpu_memory="4G")
    fleet.forget_all_but([other])
    assert (fleet.promised(pod), fleet.promised(other)) == (None, "two")


async def test_what_cannot_be_meant_is_refused_here(fleet: AsyncFleet, pod: Pod) -> None:
    with pytest.raises(UsageError, match="without its UID"):
        await fleet.acquire("one", Pod(namespace="team-a", name="train"), gpu_memory="4G")
    with pytest.raises(NoAgent, match="none has been met there"):
        await fleet.acquire("three", pod, gpu_memory="4G")


async def test_agents_come_go_and_move(where: dict[str, str], agents: dict[str, Agent], pod: Pod) -> None:
    async with AsyncFleet(answer=30) as fleet:
        silent = await fleet.update({"one": where["one"], "two": "unix:///there/is/none.sock"})
        assert set(fleet.agents) == {"one"}
        assert silent["two"].startswith("cannot ask the agent of two: cannot reach the agent at unix:///there/is/none")
        assert await fleet.update(where) == {}
        before = fleet.agents["one"]
        promise = await fleet.acquire("two", pod, gpu_memory="4G")
        assert await fleet.update({"one": where["one"]}) == {}
        assert fleet.promised(pod) is None, "its agent is not there"
        assert await fleet.update({"one": where["two"]}) == {}, "another address is another agent"
        assert fleet.agents["one"] is not before
        assert fleet.promised(pod) == "one"
        again = await fleet.acquire("one", pod, gpu_memory="4G")
        assert again.lease.id == promise.lease.id
    assert len(leases(agents["two"])) == 1, "the end of the fleet ends no lease"


async def test_who_does_not_answer_holds_nobody_up(where: dict[str, str]) -> None:
    """A node that takes connections and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as deaf, short_folder() as folder:
        silent = f"unix://{folder}/deaf.sock"
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(f"{folder}/deaf.sock")
            listener.listen()
            async with AsyncFleet(answer=1) as fleet:
                words = await fleet.update({"deaf": silent, "unsafe": f"127.0.0.1:{deaf.getsockname()[1]}"})
                assert set(words) == {"deaf", "unsafe"}
                assert "no answer in 1 s" in words["deaf"]
                assert "without TLS" in words["unsafe"]
                assert not fleet.agents
        async with AsyncFleet(answer=30) as fleet:
            assert await fleet.update(where) == {}


async def test_a_lapsed_lease_whose_place_is_taken_is_forgotten(fleet: AsyncFleet, pod: Pod) -> None:
    promise = await fleet.acquire("one", pod, mig_profile="7g.40gb")
    await promise.expire()
    await promise.lease.release()  # as at its deadline
    await fleet.agents["one"].acquire(mig_profile="7g.40gb")
    assert fleet.expiring(pod) == ["one"]
    with pytest.raises(Refused) as refused:
        await fleet.acquire("one", pod, mig_profile="7g.40gb")
    assert refused.value.reason == "no-capacity"
    assert fleet.expiring(pod) == []


@pytest.mark.parametrize("reason", ["shutting-down", "queue-full"])
async def test_what_is_refused_before_the_agent_looked_forgets_no_promise(
    fleet: AsyncFleet, pod: Pod, monkeypatch: pytest.MonkeyPatch, reason: str
) -> None:
    """The lease stands, and would be in the way of a plan for its own pod."""

    async def refuse(*_: object, **__: object) -> None:
        raise Refused(reason=reason, message="cannot serve now", retryable=True)

    first = await fleet.acquire("one", pod, mig_profile="7g.40gb")
    await first.commit()
    with monkeypatch.context() as patched:
        patched.setattr(AsyncClient, "acquire", refuse)
        with pytest.raises(Refused):
            await fleet.acquire("one", pod, mig_profile="7g.40gb")
    assert fleet.promised(pod) == "one"
    assert (await fleet.acquire("one", pod, mig_profile="7g.40gb")).lease.id == first.lease.id


async def test_a_pod_that_was_promised_nothing_is_free_to_go_elsewhere(
    fleet: AsyncFleet, pod: Pod, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(*_: object, **__: object) -> None:
        raise Refused(reason="queue-full", message="cannot serve now", retryable=True)

    monkeypatch.setattr(AsyncClient, "acquire", refuse)
    with pytest.raises(Refused):
        await fleet.acquire("one", pod, gpu_memory="4G")
    assert fleet.promised(pod) is None


async def test_what_may_not_have_been_given_back_is_asked_for_again(
    fleet: AsyncFleet, agents: dict[str, Agent], pod: Pod, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def unheard(*_: object) -> None:
        raise NoAgent("cannot reach it")

    promise = await fleet.acquire("one", pod, mig_profile="7g.40gb")
    await promise.commit()
    with monkeypatch.context() as patched:
        patched.setattr(AsyncClient, "release", unheard)
        with pytest.raises(NoAgent):
            await promise.give_back()
    assert leases(agents["one"])
    assert fleet.promised(pod) == "one"
    again = await fleet.acquire("one", pod, mig_profile="7g.40gb")
    await again.give_back()
    assert not leases(agents["one"])
    assert fleet.promised(pod) is None

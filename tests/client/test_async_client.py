"""The asynchronous client against a real agent in a process of its own, and beside the synchronous one."""

from __future__ import annotations

import asyncio
import inspect
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from mig_agent.client import AsyncClient, AsyncLease, Client, ClientError, Lease, NoAgent, Refused, Tls, UsageError
from mig_agent.client.types import NoPlan, Plan
from support.agent import GENEROUS_SECONDS, Agent, eventually
from support.certificates import Authority
from support.tls import port_of, serving


@pytest.fixture
async def speaking(agent: Agent) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(agent.address) as opened:
        yield opened


def faces(kind: type) -> dict[str, list[str]]:
    """The public methods, with the names of their arguments."""
    members = {name: getattr(kind, name) for name in dir(kind) if not name.startswith("_")}
    return {
        name: list(inspect.signature(member).parameters) if callable(member) else ["(a property)"]
        for name, member in members.items()
    }


@pytest.mark.parametrize(("plain", "waiting"), [(Client, AsyncClient), (Lease, AsyncLease)])
def test_both_clients_have_the_same_surface(plain: type, waiting: type) -> None:
    assert faces(plain) == faces(waiting)


async def test_a_lease_lives_as_long_as_its_block(speaking: AsyncClient) -> None:
    async with speaking.lease(gpu_memory="4G", gpus=[0]) as lease:
        (device,) = lease.devices
        assert device.profile == "1g.5gb"
        assert lease.env["CUDA_VISIBLE_DEVICES"] == device.uuid
        (there,) = (await speaking.status()).leases
        assert (there.id, there.hold) == (lease.id, True)
        assert lease.token
        assert lease.token not in repr(lease)
    assert not (await speaking.status()).leases
    assert lease.lost is None
    await lease.release()  # once more is nothing


async def test_a_lease_is_given_by_its_id_or_as_it_is(speaking: AsyncClient) -> None:
    kept = await speaking.acquire(gpu_memory="4G", ttl="10m")
    assert (await speaking.renew(kept, ttl="2h")).expires_at == kept.expires_at
    assert (await speaking.renew(kept.grant, ttl="none")).expires_at is None
    assert (await speaking.recover(kept)).lease.id == kept.id
    assert {each.lease for each in await speaking.events(lease=kept)} == {kept.id}
    await speaking.release(kept)
    assert not (await speaking.status()).leases


async def test_a_lease_can_be_awaited_and_ends_when_the_client_does(agent: Agent) -> None:
    lost: list[ClientError] = []
    async with AsyncClient(agent.address) as first:
        lease = await first.lease(gpu_memory="4G", on_lost=lost.append)
        async with AsyncClient(agent.address) as second:
            assert [each.id for each in (await second.status()).leases] == [lease.id]
    assert not any(each.get_name() == f"mig-agent-hold-{lease.id}" for each in asyncio.all_tasks())
    await asyncio.to_thread(eventually, lambda: not agent.ask("status")["leases"], "the lease ends")
    assert not lost


async def test_the_same_request_is_the_same_lease_and_stays(agent: Agent, speaking: AsyncClient) -> None:
    first, again = await asyncio.gather(
        speaking.acquire(gpu_memory="4G", request_id="mine", ttl="10m"),
        speaking.acquire(gpu_memory="4G", request_id="mine", ttl="10m"),
    )
    assert (first.id, first.token) == (again.id, again.token)
    before = first.expires_at
    assert before is not None
    await first.renew("2h")
    assert first.expires_at is not None
    assert first.expires_at > before + 3600
    async with AsyncClient(agent.address) as other:
        await other.release(first.id, first.token)
        assert not (await other.status()).leases


async def test_both_clients_get_the_same_answers(agent: Agent, speaking: AsyncClient) -> None:
    async with speaking.acquire(gpu_memory="4G", name="bob") as lease:
        askings = [{"gpu_memory": "4G"}, {"mig_profile": "9g.99gb"}]
        with Client(agent.address) as plain:

            def ask() -> list[object]:
                return [
                    plain.status(),
                    plain.profiles(),
                    plain.events(gpu=0, limit=5),
                    plain.usage(),
                    plain.plan_each(askings, explain=True),  # type: ignore[arg-type] # a literal's type is wider
                ]

            expected = await asyncio.to_thread(ask)
        assert expected == [
            await speaking.status(),
            await speaking.profiles(),
            await speaking.events(gpu=0, limit=5),
            await speaking.usage(),
            await speaking.plan_each(askings, explain=True),  # type: ignore[arg-type] # a literal's type is wider
        ]
        plan = await speaking.plan(gpu_memory="4G", explain=True)
        assert isinstance(plan, Plan)
        assert plan.explanation
        assert isinstance(await speaking.plan(mig_profile="9g.99gb"), NoPlan)
        assert lease.devices[0].uuid in {each.uuid for gpu in (await speaking.status()).gpus for each in gpu.instances}


async def test_a_refusal_is_typed(speaking: AsyncClient) -> None:
    async with speaking.lease(mig_profile="7g.40gb", name="bob"):
        with pytest.raises(Refused) as refused:
            await speaking.acquire(mig_profile="1g.5gb")
    error = refused.value
    assert (error.reason, error.retryable) == ("no-capacity", True)
    assert error.message.startswith("cannot ")
    assert "bob" in {each.holder for each in error.blockers}


async def test_what_cannot_be_meant_and_no_agent_are_told_at_once(tmp_path: Path) -> None:
    async with AsyncClient(f"unix://{tmp_path}/none.sock", patience=1000) as client:
        with pytest.raises(UsageError):
            await client.acquire(gpu_memory="4")
        with pytest.raises(UsageError):
            await client.events(limit=-1)
        with pytest.raises(NoAgent) as error:
            await client.status()
    assert "there is no such socket" in error.value.message


async def test_waiting_tells_the_place_and_a_cancelled_task_leaves_the_queue(
    agent: Agent, speaking: AsyncClient
) -> None:
    places: asyncio.Queue[int] = asyncio.Queue()
    held = await speaking.acquire(mig_profile="7g.40gb")

    async def take() -> AsyncLease:
        return await speaking.acquire(mig_profile="7g.40gb", wait="5m", on_queued=places.put_nowait)

    async with asyncio.timeout(2 * GENEROUS_SECONDS):
        given_up = asyncio.create_task(take())
        assert await places.get() == 1
        given_up.cancel()
        with pytest.raises(asyncio.CancelledError):
            await given_up
        await asyncio.to_thread(eventually, lambda: not agent.ask("status")["queue"], "it leaves the queue")
        waiter = asyncio.create_task(take())
        assert await places.get() == 1
        await held.release()
        lease = await waiter
    assert lease.devices[0].reused


async def test_watching(speaking: AsyncClient) -> None:
    revision = (await speaking.status()).revision
    async with speaking.lease(gpu_memory="4G") as lease, asyncio.timeout(GENEROUS_SECONDS):
        events = speaking.watch(after_revision=revision)
        async for event in events:
            if event.kind == "lease-granted":
                assert event.lease == lease.id
                break
    with pytest.raises(UsageError):
        await anext(speaking.watch(after_revision=-1))


async def test_a_watch_ends_in_words_when_its_client_is_closed(agent: Agent) -> None:
    client = AsyncClient(agent.address)
    events = client.watch(after_revision=(await client.status()).revision)

    async def read() -> None:
        async for _ in events:
            seen.set()

    seen = asyncio.Event()
    reader = asyncio.create_task(read())
    async with asyncio.timeout(GENEROUS_SECONDS):
        await client.cordon(0)
        await seen.wait()
        await client.close()
        with pytest.raises(NoAgent):
            await reader


async def test_administration_finds_its_own_socket(speaking: AsyncClient) -> None:
    lease = await speaking.acquire(gpu_memory="4G")
    await speaking.release(lease.id)  # no token: the administrators' socket beside the users' one
    assert [each.profile for each in await speaking.reclaim()] == ["1g.5gb"]
    assert (await speaking.cordon(0, "a fan is broken")).state == "cordoned"
    assert (await speaking.uncordon("0")).state == "ready"
    assert not (await speaking.set_mig_mode(1, enable=False)).mig.current
    assert (await speaking.pause("a new driver")).driver_released
    assert (await speaking.resume()).paused == ()


@pytest.mark.parametrize("graceful", [True, False], ids=["stopped", "killed"])
async def test_a_held_lease_and_a_call_survive_a_restart_of_the_agent(agent: Agent, graceful: bool) -> None:
    lost: list[ClientError] = []

    def restart() -> None:
        if graceful:
            assert agent.stop() == 0
            agent.start()
        else:
            agent.restart_after_crash()

    async with AsyncClient(agent.address, patience=GENEROUS_SECONDS) as client:
        async with client.lease(gpu_memory="4G", on_lost=lost.append) as lease:
            restarting = asyncio.create_task(asyncio.to_thread(restart))
            (there,) = (await client.status()).leases
            await restarting
            assert there.id == lease.id
            assert [each.id for each in (await client.status()).leases] == [lease.id]
            assert lease.lost is None
        assert not (await client.status()).leases
    assert not lost


async def test_a_held_lease_that_somebody_else_ends_is_told(agent: Agent, speaking: AsyncClient) -> None:
    lost: asyncio.Queue[ClientError] = asyncio.Queue()
    async with speaking.lease(gpu_memory="4G", on_lost=lost.put_nowait) as lease:
        async with AsyncClient(agent.address) as other:
            await other.release(lease.id)
        error = await asyncio.wait_for(lost.get(), GENEROUS_SECONDS)
        assert isinstance(error, Refused)
        assert error.reason == "lease-ended"
        assert lease.lost is error


async def test_over_tcp_with_certificates(folder: Path) -> None:
    authority = Authority(folder, "clients")
    client = authority.issue("scheduler")
    tls = Tls(ca=authority.ca, cert=client.cert, key=client.key)
    with serving(folder, authority) as agent:
        async with AsyncClient(f"localhost:{port_of(agent)}", tls=tls) as speaking:
            async with speaking.lease(gpu_memory="4G"):
                assert len((await speaking.status()).leases) == 1
            assert not (await speaking.status()).leases
        async with AsyncClient(f"localhost:{port_of(agent)}") as bare:
            with pytest.raises(UsageError, match="without TLS"):
                await bare.status()


# ---------------------------------------------------------------- confirming


async def is_confirmed(agent: Agent, request_id: str) -> bool:
    async with AsyncClient(agent.address) as client:
        lease = await client.acquire(gpu_memory="4G", request_id=request_id, confirm=False)
        return lease.grant.confirm_by is None


async def test_a_lease_is_confirmed_at_once_or_when_its_holder_says_so(agent: Agent, speaking: AsyncClient) -> None:
    await speaking.acquire(gpu_memory="4G", request_id="at once")
    assert await is_confirmed(agent, "at once")
    lease = await speaking.acquire(gpu_memory="4G", request_id="later", confirm=False)
    assert not await is_confirmed(agent, "later")
    await lease.confirm()
    assert await is_confirmed(agent, "later")
    renewed = await speaking.acquire(gpu_memory="4G", request_id="renewed", confirm=False)
    await renewed.renew(None)
    assert await is_confirmed(agent, "renewed")
    await renewed.confirm()


async def test_confirming_outlives_an_agent_that_restarts(agent: Agent, speaking: AsyncClient) -> None:
    lease = await speaking.acquire(gpu_memory="4G", request_id="mine", confirm=False)
    await asyncio.to_thread(agent.kill)
    await asyncio.to_thread(agent.start)
    await lease.confirm()
    assert await is_confirmed(agent, "mine")


@pytest.mark.parametrize("own", [True, False], ids=["an id of the library's", "an id of the caller's"])
async def test_a_task_that_is_cancelled_while_its_lease_is_confirmed_gives_it_back_if_nobody_can_ask_again(
    agent: Agent, speaking: AsyncClient, own: bool
) -> None:
    """The agent may have taken it for confirmed by then, and its holder has never seen it."""
    lease = await speaking.acquire(gpu_memory="4G", confirm=False, request_id=None if own else "known")
    acquiring = lease._acquiring
    assert acquiring is not None
    assert agent.process is not None
    agent.process.send_signal(signal.SIGSTOP)
    confirming = asyncio.create_task(acquiring._finish(lease.grant))
    await asyncio.sleep(0.1)
    confirming.cancel()
    with pytest.raises(asyncio.CancelledError):
        await confirming
    agent.process.send_signal(signal.SIGCONT)
    await speaking.close()
    async with AsyncClient(agent.address) as other:
        assert [each.id for each in (await other.status()).leases] == ([] if own else [lease.id])


class BrokenStream:
    """An Acquire stream that ends while `received` is written: grpc.aio then makes up a status of its own."""

    async def write(self, _message: object) -> None:
        nothing = grpc.aio.Metadata()
        raise grpc.aio.AioRpcError(grpc.StatusCode.INTERNAL, nothing, nothing, "Internal error from Core")

    def cancel(self) -> bool:
        return True


async def test_a_stream_that_breaks_while_it_is_written_to_is_asked_for_again(
    agent: Agent, speaking: AsyncClient
) -> None:
    lease = await speaking.acquire(gpu_memory="4G", request_id="mine", confirm=False)
    acquiring: Any = lease._acquiring
    acquiring.close()
    acquiring._stream = BrokenStream()
    await lease.confirm()
    assert await is_confirmed(agent, "mine")

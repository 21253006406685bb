"""A lease is its client's once the client has said so: what the agent does about every other end of an Acquire."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from mig_agent.core.model import LeaseId
from mig_agent.frontends.grpc import call_limits
from mig_agent.frontends.grpc.handlers import SERVICE
from mig_agent.pb.migagent.v1 import partition_manager_pb2 as pb
from support.acquire import RECEIVED, asking, granted_on
from support.service import TIMEOUT, Service, ask, detail_of, service

GRACE = 60.0

Stream = grpc.aio.StreamStreamCall[pb.AcquireRequest, pb.AcquireResponse]


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Service]:
    async with service(tmp_path, "a100-40gb") as running:
        yield running


async def opened(served: Service, request: pb.Request) -> Stream:
    call: Stream = served.users.Acquire(timeout=TIMEOUT)
    await call.write(pb.AcquireRequest(request=request))
    return call


async def read(call: Stream) -> pb.AcquireResponse:
    answer = await call.read()
    assert isinstance(answer, pb.AcquireResponse), "the stream has ended"
    return answer


async def granted_to(call: Stream) -> pb.Granted:
    answer = await read(call)
    assert answer.HasField("granted")
    return answer.granted


async def refusal_of(call: Stream) -> pb.RefusalDetail:
    """What a stream ends with, whatever it brings before."""
    with pytest.raises(grpc.RpcError) as refused:
        await to_the_end(call)
    return detail_of(refused.value)


async def to_the_end(call: Any) -> None:
    while await call.read() is not grpc.aio.EOF:
        pass


async def rest_of_grace(served: Service) -> None:
    served.node.clock.advance(GRACE + 1)
    await asyncio.sleep(0)


# ---------------------------------------------------------------- how a call ends


async def test_received_confirms_the_lease_and_ends_the_call(served: Service) -> None:
    call = await opened(served, ask(memory="4G"))
    granted = await granted_to(call)
    assert granted.confirm_by == pytest.approx(served.node.clock.now() + GRACE)
    assert not granted.lease.HasField("expires_at")
    await call.write(RECEIVED)
    assert await call.read() is grpc.aio.EOF
    assert await call.code() is grpc.StatusCode.OK
    await rest_of_grace(served)
    assert granted.lease.id in served.node.leases


async def test_unconfirmed_lease_of_a_cancelled_call_ends(
    served: Service,
) -> None:
    """The answer has arrived, as far as any transport can tell; its application has never seen it."""
    call = await opened(served, ask(memory="4G"))
    await served.node.until(lambda: len(served.node.leases) == 1)
    await call.initial_metadata()
    call.cancel()
    assert served.node.leases
    await rest_of_grace(served)
    await served.node.until(lambda: not served.node.leases)


async def test_a_client_that_ends_its_half_gets_its_answer_and_ok_and_has_a_minute_to_confirm(served: Service) -> None:
    answers = [answer async for answer in served.users.Acquire(asking(ask(memory="4G")), timeout=TIMEOUT)]
    assert [answer.WhichOneof("update") for answer in answers] == ["granted"]
    await rest_of_grace(served)
    await served.node.until(lambda: not served.node.leases)


async def test_unconfirmed_stream_ends_with_a_message_when_its_lease_ends(served: Service) -> None:
    call = await opened(served, ask(memory="4G"))
    granted = await granted_to(call)
    await rest_of_grace(served)
    detail = await refusal_of(call)
    assert detail.reason == "lease-ended"
    assert detail.message.startswith(f"cannot keep lease {granted.lease.id}: ")
    assert "never confirmed" in detail.message
    assert not served.node.leases


async def test_renewing_confirms(served: Service) -> None:
    answers = [answer async for answer in served.users.Acquire(asking(ask(memory="4G")), timeout=TIMEOUT)]
    granted = answers[-1].granted
    renewed = await served.users.Renew(pb.RenewRequest(lease=granted.lease.id, token=granted.token), timeout=TIMEOUT)
    assert not renewed.lease.HasField("expires_at")
    await rest_of_grace(served)
    assert granted.lease.id in served.node.leases


async def test_asking_again_gives_the_whole_time_again_and_confirming_then_counts(served: Service) -> None:
    request = ask(memory="4G", request_id="again")
    first = await granted_to(await opened(served, request))
    served.node.clock.advance(GRACE - 1)
    call = await opened(served, request)
    second = await granted_to(call)
    assert second.lease.id == first.lease.id
    assert second.confirm_by == pytest.approx(first.confirm_by + GRACE - 1)
    served.node.clock.advance(GRACE - 1)
    await call.write(RECEIVED)
    assert await call.read() is grpc.aio.EOF
    await rest_of_grace(served)
    assert first.lease.id in served.node.leases
    third = await granted_to(await opened(served, request))
    assert not third.HasField("confirm_by")
    await rest_of_grace(served)
    assert first.lease.id in served.node.leases  # once confirmed is confirmed


async def test_confirming_an_ended_lease_is_refused(served: Service) -> None:
    call = await opened(served, ask(memory="4G"))
    granted = await granted_to(call)
    await served.admins.Release(pb.ReleaseRequest(lease=granted.lease.id), timeout=TIMEOUT)
    detail = await refusal_of(call)
    assert (detail.reason, detail.retryable) == ("lease-ended", False)


async def test_an_agent_that_stops_does_not_wait_for_a_client(served: Service) -> None:
    call = await opened(served, ask(memory="4G"))
    granted = await granted_to(call)
    for each in served.servicers:
        each.stop()
    assert (await refusal_of(call)).reason == "shutting-down"
    assert granted.lease.id in served.node.leases
    assert not served.servicers[0]._unconfirmed
    assert not served.servicers[0]._on_stop


async def test_a_lease_with_a_deadline_ends_at_whichever_comes_first(served: Service) -> None:
    call = await opened(served, ask(memory="4G", ttl_seconds=30))
    granted = await granted_to(call)
    assert granted.lease.expires_at == pytest.approx(served.node.clock.now() + 30)
    assert granted.confirm_by == pytest.approx(served.node.clock.now() + GRACE)
    await call.write(RECEIVED)
    assert await call.read() is grpc.aio.EOF
    served.node.clock.advance(31)
    await served.node.until(lambda: not served.node.leases)


async def test_a_held_lease_needs_no_confirmation(served: Service) -> None:
    call = served.users.Hold(pb.HoldRequest(request=ask(memory="4G")), timeout=TIMEOUT)
    answer = await call.read()
    assert isinstance(answer, pb.HoldResponse)
    assert not answer.granted.HasField("confirm_by")
    await rest_of_grace(served)
    assert LeaseId(answer.granted.lease.id) in served.node.leases
    call.cancel()


# ---------------------------------------------------------------- what cannot be meant


def messages(*said: pb.AcquireRequest) -> Iterator[pb.AcquireRequest]:
    return iter(said)


TWICE = pb.AcquireRequest(request=ask(memory="4G"))


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ((), "cannot serve a stream without a request"),
        ((RECEIVED,), "cannot confirm a lease that this stream has not brought"),
        # Alone: grpc.aio replaces the status of a stream that ends while it is written to (grpc/grpc#36066).
        ((pb.AcquireRequest(),), "cannot "),
    ],
    ids=["nothing", "received alone", "an empty request"],
)
async def test_a_stream_that_does_not_begin_with_a_request_is_refused(
    served: Service, said: tuple[pb.AcquireRequest, ...], words: str
) -> None:
    detail = await refusal_of(served.users.Acquire(messages(*said), timeout=TIMEOUT))
    assert detail.reason == "invalid-request"
    assert detail.message.startswith(words)
    assert not served.node.leases


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (RECEIVED, "cannot take the word for it"),
        (TWICE, "cannot serve a second request on one stream"),
        (pb.AcquireRequest(), "cannot read the second message"),
    ],
    ids=["received", "a second request", "an empty message"],
)
async def test_message_while_the_request_waits_is_refused_at_once(
    served: Service, more: pb.AcquireRequest, words: str
) -> None:
    await served.acquire(profile="7g.40gb")
    call = await opened(served, ask(memory="4G", wait_seconds=float("inf")))
    assert (await read(call)).HasField("queued")
    await call.write(more)
    detail = await refusal_of(call)
    assert detail.reason == "invalid-request"
    assert detail.message.startswith(words)
    await served.node.until(lambda: not served.node.manager.snapshot.queue)


async def test_received_before_granted_does_not_confirm(served: Service) -> None:
    await served.acquire(profile="7g.40gb")
    said = messages(pb.AcquireRequest(request=ask(memory="4G", wait_seconds=float("inf"))), RECEIVED)
    detail = await refusal_of(served.users.Acquire(said, timeout=TIMEOUT))
    assert detail.message.startswith("cannot take the word for it")
    assert len(served.node.leases) == 1


async def test_a_second_request_in_place_of_received_is_refused_and_does_not_confirm(served: Service) -> None:
    call = await opened(served, ask(memory="4G"))
    await granted_to(call)
    await call.write(TWICE)
    assert (await refusal_of(call)).message.startswith("cannot serve a second request")
    await rest_of_grace(served)
    await served.node.until(lambda: not served.node.leases)


async def test_bytes_that_are_no_message_in_place_of_received_are_refused_and_do_not_confirm(served: Service) -> None:
    async with grpc.aio.insecure_channel(served.address) as channel:
        make: Any = channel.stream_stream(f"/{SERVICE.full_name}/Acquire")
        call = make(timeout=TIMEOUT)
        await call.write(pb.AcquireRequest(request=ask(memory="4G")).SerializeToString())
        assert pb.AcquireResponse.FromString(await call.read()).HasField("granted")
        await call.write(b"\xff\xff\xff")
        with pytest.raises(grpc.RpcError) as refused:
            await to_the_end(call)
    assert detail_of(refused.value).message.startswith("cannot read the message of Acquire")
    await rest_of_grace(served)
    await served.node.until(lambda: not served.node.leases)


async def test_stream_without_a_request_ends_with_a_message(served: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_limits, "FIRST_MESSAGE_SECONDS", 0.05)
    detail = await refusal_of(served.users.Acquire(timeout=TIMEOUT))
    assert detail.message.startswith("cannot wait longer for a request")


async def test_clients_that_disconnect_at_any_moment_leak_no_lease(served: Service) -> None:
    """And nothing of theirs in the servicer."""

    async def leave(after: float) -> None:
        call = await opened(served, ask(memory="4G", wait_seconds=60))
        await asyncio.sleep(after)
        call.cancel()

    kept = await granted_on(served.users, ask(memory="4G"), TIMEOUT)
    for _ in range(5):
        await asyncio.gather(*(leave(number / 4000) for number in range(40)))
    await served.node.until(lambda: not served.node.manager.snapshot.queue)
    await served.node.until(lambda: not served.servicers[0]._unconfirmed)
    await rest_of_grace(served)
    await served.node.until(lambda: set(served.node.leases) == {kept.lease.id})
    assert not served.servicers[0]._on_stop

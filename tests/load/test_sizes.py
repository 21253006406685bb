"""The largest messages that the API takes, and larger ones: served or refused in words, and never long in the way."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.message import Message

from mig_agent.adapters.grpc_errors import MOST_DETAIL_BYTES, detail_of
from mig_agent.core.errors import Blocker, Reason, Refusal
from mig_agent.core.forecast import Basis, StartEstimate
from mig_agent.core.model import CallerId, Holder, RequestId, RequestKey, Want
from mig_agent.core.planning.wait_blockers import MOST_WAIT_BLOCKERS
from mig_agent.core.requests import LONGEST_REQUEST_ID, LONGEST_TEXT, MOST_ATTRIBUTES, MOST_GPUS_NAMED, MOST_WANTS
from mig_agent.engine.results import QueueEntry, QueuePlace
from mig_agent.frontends.grpc import encode, servicer
from mig_agent.frontends.grpc.servicer import MOST_ANSWER_BYTES, MOST_PLANS
from mig_agent.pb.migagent.v1 import partition_manager_pb2 as pb
from support.acquire import asking
from support.engine import ANYBODY
from support.service import TIMEOUT, Service, ask, service
from support.service import detail_of as detail_of_error

USUAL_LIMIT = 4 << 20
"""Of a message, in gRPC's libraries."""
FACE = "\N{GRINNING FACE}"
"""Four bytes, of which each becomes three where gRPC writes it into a header."""
MANY = 60
"""Requests that take some milliseconds each, so that others are answered long before all are."""
ATTRIBUTES = [f"+a{chr(ord('a') + number)}" for number in range(MOST_ATTRIBUTES)]


def largest() -> pb.Request:
    """A request with everything at its bound."""
    want = pb.Want(memory="4G", attributes=ATTRIBUTES, text=FACE * (LONGEST_TEXT // 4), isolation="any")
    return pb.Request(
        wants=[want] * MOST_WANTS,
        request_id=FACE * (LONGEST_REQUEST_ID // 4),
        holder=pb.Holder(tenant=FACE * (LONGEST_TEXT // 4), name=FACE * (LONGEST_TEXT // 4)),
        gpus=["0"] * MOST_GPUS_NAMED,
        isolation="any",
    )


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Service]:
    async with service(tmp_path, "h100-80gb:8") as running:
        yield running


async def refused(served: Service, request: pb.Request) -> grpc.RpcError:
    with pytest.raises(grpc.RpcError) as error:
        await anext(aiter(served.users.Acquire(asking(request), timeout=TIMEOUT)))
    return error.value


async def test_the_largest_request_is_answered_in_words(served: Service) -> None:
    detail = detail_of_error(await refused(served, largest()))
    assert detail.reason != Reason.INVALID_REQUEST
    assert detail.message.startswith("cannot ")


async def test_the_longest_names_do_not_burst_the_refusal_that_tells_them(served: Service) -> None:
    """Blockers are named in the trailer, and the message is written into a header as well."""
    names = pb.Holder(tenant=FACE * (LONGEST_TEXT // 4), name=FACE * (LONGEST_TEXT // 4))
    for _ in range(8):
        await served.acquire(profile="7g.80gb", holder=names)
    text = FACE * (LONGEST_TEXT // 4)
    request = pb.Request(wants=[pb.Want(memory="4G", text=text)] * 3, holder=names)
    error = await refused(served, request)
    detail = detail_of_error(error)
    assert detail.reason == "no-capacity"
    assert detail.blockers
    assert FACE in detail.message


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda request: request.wants.extend([request.wants[0]]), "65 devices"),
        (lambda request: request.wants.extend(list(request.wants) * 40), "2624 devices"),
        (lambda request: request.gpus.append("1"), "65 named GPUs"),
        (lambda request: request.wants[0].attributes.append("+zz"), "17 attributes"),
        (lambda request: setattr(request.wants[0], "text", FACE * 65), "260 bytes"),
        (lambda request: setattr(request.holder, "name", FACE * 65), "260 bytes"),
        (lambda request: setattr(request.holder, "tenant", "x" * 500_000), "500000 bytes"),
        (lambda request: setattr(request, "request_id", FACE * 33), "as a request id"),
        (lambda request: setattr(request.wants[0], "memory", "1" * 500_000), "characters long"),
        (lambda request: setattr(request.wants[0], "profile", "1" * 500_000), "as a profile"),
    ],
)
async def test_one_more_is_refused_in_words(
    served: Service, change: Callable[[pb.Request], object], words: str
) -> None:
    request = largest()
    change(request)
    error = await refused(served, request)
    detail = detail_of_error(error)
    assert detail.reason == "invalid-request"
    assert words in detail.message
    assert len(detail.message) < 400


async def test_a_full_queue_of_the_longest_names_fits_into_a_status(served: Service) -> None:
    node = served.node
    for _ in range(8):
        await served.acquire(profile="7g.80gb", holder=pb.Holder(name=FACE * 64, tenant=FACE * 64))
    many = node.settings.max_waiting
    wants = tuple(Want(profile="7g.80gb", text=FACE * 64) for _ in range(2))
    waiting = []
    for number in range(many):
        request = node.request("7g.80gb", request_id=f"{number:04}{FACE * 31}", wait_seconds=1e6, name=FACE * 64)
        waiting.append(node.start(node.manager.acquire(request, ANYBODY)))
        await asyncio.sleep(0)
    await node.until(lambda: len(node.manager.snapshot.queue) == many)
    status = await served.users.Status(pb.StatusRequest(), timeout=TIMEOUT)  # with gRPC's usual limit
    assert len(status.queue) == many
    assert status.ByteSize() < USUAL_LIMIT // 2
    blocker = Blocker(
        gpu_index=99,
        what="7g.80gb on slices 0-7",
        state="leased",
        lease="0" * 16,
        holder=FACE * 64,
        expires_at=1e9,
    )
    longest = QueueEntry(
        request=RequestKey(CallerId("name slurm"), RequestId(FACE * 32)),
        who=Holder(tenant=FACE * 64, name=FACE * 64),
        priority=0,
        since=0.0,
        wants=wants * (MOST_WANTS // 2),
        place=QueuePlace(
            position=1,
            at=0.0,
            estimate=StartEstimate(earliest=1.0, median=2e6, latest=3e6, basis=Basis.LEASES, leases=1000),
            blockers=(blocker,) * MOST_WAIT_BLOCKERS,
            limit=FACE * 256,
        ),
    )
    assert many * encode.queued_request(longest).ByteSize() < USUAL_LIMIT // 2
    for each in waiting:
        each.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)


def test_an_answer_with_many_long_events_keeps_the_latest() -> None:
    events = [pb.Event(message=f"{number} " + "x" * 20_000) for number in range(1000)]
    kept = encode.latest(events, MOST_ANSWER_BYTES)
    assert list(kept) == events[-len(kept) :]
    assert MOST_ANSWER_BYTES * 0.9 < pb.EventsResponse(events=kept).ByteSize() <= MOST_ANSWER_BYTES
    assert encode.latest(events[:3], MOST_ANSWER_BYTES) == events[:3]


@pytest.mark.parametrize("name", ["h", FACE], ids=["plain", "faces"])
def test_a_refusal_in_a_plan_stays_short(name: str) -> None:
    blockers = [
        Blocker(gpu_index=number, what=name * 500, state="leased", lease=name * 500, holder=name * 500)
        for number in range(1000)
    ]
    refusal = Refusal(reason=Reason.NO_CAPACITY, message=name * 9000, hint=name * 9000, blockers=tuple(blockers))
    detail = detail_of(refusal)
    assert MOST_DETAIL_BYTES * 0.9 < detail.ByteSize() <= MOST_DETAIL_BYTES
    assert len(detail.blockers) + detail.blockers_left_off == len(blockers)


def mixed(devices: int, seed: int = 1) -> list[pb.Want]:
    """Devices that are hard to place together."""
    draw = random.Random(seed)  # noqa: S311 -- not a secret
    kinds = ["1g.10gb", "2g.20gb", "3g.40gb", "1g.20gb"]
    return [pb.Want(profile=draw.choice(kinds)) for _ in range(devices)]


async def half_full(served: Service) -> None:
    for _ in range(28):
        await served.acquire(profile="1g.10gb")


async def test_the_largest_dry_run_fits_into_its_answer(served: Service) -> None:
    await half_full(served)
    requests = [ask(pb.Want(profile="1g.10gb"), pb.Want(profile="2g.20gb")) for _ in range(MOST_PLANS)]
    answer = await served.users.Plan(pb.PlanRequest(requests=requests, explain=True), timeout=10 * TIMEOUT)
    assert len(answer.outcomes) == MOST_PLANS
    assert answer.ByteSize() < USUAL_LIMIT


async def test_a_dry_run_whose_answer_is_too_large_is_refused_in_words(
    served: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = [ask(pb.Want(profile="1g.10gb"), pb.Want(profile="2g.20gb")) for _ in range(20)]
    usual = await served.users.Plan(pb.PlanRequest(requests=requests), timeout=TIMEOUT)
    monkeypatch.setattr(servicer, "MOST_ANSWER_BYTES", usual.ByteSize() + 8000)
    plain = await served.users.Plan(pb.PlanRequest(requests=requests, explain=True), timeout=TIMEOUT)
    assert plain.ByteSize() <= usual.ByteSize() + 8500
    assert plain.outcomes[0].explanation
    assert not plain.outcomes[-1].explanation
    with pytest.raises(grpc.RpcError) as error:
        await served.users.Plan(pb.PlanRequest(requests=requests * 4), timeout=TIMEOUT)
    detail = detail_of_error(error.value)
    assert "cannot answer 80 plans at once" in detail.message
    assert detail.hint == "send them in parts"


async def test_status_is_answered_while_a_long_dry_run_is_under_way(served: Service) -> None:
    await half_full(served)
    planning = asyncio.ensure_future(
        served.users.Plan(pb.PlanRequest(requests=[ask(*mixed(12, seed)) for seed in range(MANY)]), timeout=TIMEOUT)
    )
    await meanwhile(served, planning)
    assert len((await planning).outcomes) == MANY


async def test_status_is_answered_while_many_large_requests_come_in(served: Service) -> None:
    await half_full(served)
    asking = asyncio.gather(*(refused(served, ask(*mixed(12, seed), *mixed(40))) for seed in range(MANY)))
    await meanwhile(served, asking)
    assert len(await asking) == MANY


async def meanwhile(served: Service, work: asyncio.Future[Any]) -> None:
    """The status comes more than once before the work has come to its end."""
    for _ in range(2):
        await served.users.Status(pb.StatusRequest(), timeout=TIMEOUT)
        assert not work.done()


def test_messages_have_no_fields_that_grow_without_a_bound_that_was_thought_of() -> None:
    """A new repeated or text field of a request needs a bound, and its name here."""
    bounded = {
        "Want": {"memory", "profile", "attributes", "text", "isolation"},
        "Holder": {"tenant", "name"},
        "Request": {"wants", "request_id", "gpus", "isolation"},
    }
    for message, fields in bounded.items():
        descriptor = pb.DESCRIPTOR.message_types_by_name[message]
        growing = {field.name for field in descriptor.fields if field.is_repeated or field.type == field.TYPE_STRING}
        assert growing == fields, message
    assert issubclass(pb.Request, Message)

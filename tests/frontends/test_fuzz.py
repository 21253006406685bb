"""Whatever a caller sends is answered in words, and the agent goes on."""

from __future__ import annotations

import asyncio
import math
import tempfile
from pathlib import Path
from typing import Any

import grpc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mig_agent.core.errors import UsageError
from mig_agent.core.requests import validate
from mig_agent.engine.callers import Caller
from mig_agent.frontends.grpc.decode import request_from
from mig_agent.frontends.grpc.handlers import SERVICE
from mig_agent.pb.migagent.v1 import partition_manager_pb2 as pb
from support.service import TIMEOUT, Service, detail_of, service

texts = st.one_of(
    st.text(max_size=300),
    st.sampled_from(
        ["4G", "4", "", "1g.5gb", "1g.5gb+me", "+me", "whole", "nan", "-1", "1e9", "0", "GPU-", "\x00", "\n"]
    ),
)
numbers = st.floats() | st.sampled_from([0.25, 1.0, 0.0, -1.0, math.inf, math.nan])
wants = st.builds(
    lambda kind, more: pb.Want(**kind, **more),
    st.one_of(
        st.builds(lambda value: {"memory": value}, texts),
        st.builds(lambda value: {"memory_bytes": value}, st.integers(0, 2**64 - 1)),
        st.builds(lambda value: {"profile": value}, texts),
        st.builds(lambda value: {"gpu_fraction": value}, numbers),
        st.builds(lambda value: {"whole_gpu": value}, st.booleans()),
        st.just({}),
    ),
    st.fixed_dictionaries(
        {},
        optional={
            "min_compute_slices": st.integers(0, 2**32 - 1),
            "attributes": st.lists(texts, max_size=3),
            "text": texts,
        },
    ),
)
requests = st.builds(
    pb.Request,
    wants=st.lists(wants, max_size=4),
    request_id=texts,
    holder=st.builds(pb.Holder, tenant=texts, name=texts),
    gpus=st.lists(texts | st.sampled_from(["0", "1"]), max_size=3),
    priority=st.integers(-(2**31), 2**31 - 1),
    wait_seconds=st.none() | numbers,
    ttl_seconds=st.none() | numbers,
    pid=st.none() | st.integers(0, 2**32 - 1),
    if_revision=st.none() | st.integers(0, 2**64 - 1),
)


@given(requests)
@settings(max_examples=400)
def test_decoding_returns_a_valid_request_or_raises_usage_error(message: pb.Request) -> None:
    mistake = request = None
    try:
        request = request_from(message, Caller(name="alice", scheduler=True))
    except UsageError as error:
        mistake = error.message
    if request is not None:
        validate(request)
        assert request.request_id
        assert len(request.wants) == len(message.wants)
    if mistake is not None:
        assert mistake.startswith("cannot ")
        assert "\n" not in mistake
        assert len(mistake) < 400


@given(st.lists(requests, min_size=1, max_size=8))
@settings(max_examples=15)
def test_planner_answers_every_valid_request(messages: list[pb.Request]) -> None:
    """Through the socket, with the real planner behind it: a plan or a refusal in words, never an internal error."""

    async def run() -> None:
        with tempfile.TemporaryDirectory() as folder:
            async with service(Path(folder), "a30:1,a100-40gb:1") as served:
                for message in messages:
                    outcome = await planned(served, message)
                    assert all(line.isprintable() for line in outcome.explanation)
                    if outcome.HasField("refusal"):
                        assert outcome.refusal.message.startswith("cannot ")
                    else:
                        assert len(outcome.plan.devices) == len(message.wants)

    asyncio.run(run())


@pytest.mark.parametrize("method", [method.name for method in SERVICE.methods])
async def test_unparsable_bytes_are_refused_with_a_message(tmp_path: Path, method: str) -> None:
    async with service(tmp_path) as served, grpc.aio.insecure_channel(served.address) as channel:
        kind = SERVICE.methods_by_name[method]
        path = f"/{SERVICE.full_name}/{method}"
        make: Any = channel.unary_stream if kind.server_streaming else channel.unary_unary
        if kind.client_streaming:
            make = channel.stream_stream
        rubbish = b"\xff\xff\xff"
        with pytest.raises(grpc.RpcError) as refused:
            await answered(make(path)(iter([rubbish]) if kind.client_streaming else rubbish, timeout=TIMEOUT))
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert method in detail_of(refused.value).message
        assert (await served.users.Status(pb.StatusRequest(), timeout=TIMEOUT)).node


async def test_every_method_of_the_service_is_served(tmp_path: Path) -> None:
    """Called with an empty message, each answers, streams, or refuses with typed details."""
    async with service(tmp_path) as served:
        for method in SERVICE.methods:
            message = getattr(pb, method.input_type.name)()
            said = iter([message]) if method.client_streaming else message
            call = getattr(served.admins, method.name)(said, timeout=TIMEOUT)
            reason = ""
            try:
                await answered(call)
            except grpc.RpcError as error:
                reason = detail_of(error).reason
            assert reason in {"", "invalid-request", "unknown-lease", "unknown-request", "wrong-token"}, method.name


async def planned(served: Service, message: pb.Request) -> pb.PlanOutcome:
    """What Plan answers; a request that cannot be meant as a refusal like others."""
    try:
        answer = await served.users.Plan(pb.PlanRequest(requests=[message], explain=True), timeout=TIMEOUT)
    except grpc.RpcError as error:
        return pb.PlanOutcome(refusal=detail_of(error))
    (outcome,) = answer.outcomes
    return outcome


async def answered(call: Any) -> None:
    """Returns after the call's answer, or the first message of its stream."""
    if isinstance(call, (grpc.aio.UnaryStreamCall, grpc.aio.StreamStreamCall)):
        await asyncio.wait_for(anext(aiter(call)), TIMEOUT)
        call.cancel()
    else:
        await call

"""Health and reflection answer what they cannot read in words, and fill no log."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from io import StringIO
from pathlib import Path

import grpc
import pytest
import structlog
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from mig_agent.config import Settings
from mig_agent.daemon import logs
from mig_agent.daemon.log_limit import OncePerMinute
from mig_agent.frontends.grpc.call_limits import CallLimits
from support.agent import GENEROUS_SECONDS, Agent
from support.http2 import DATA, END_HEADERS, END_STREAM, HEADERS, RawClient, flood, frame, request_headers

TIMES = 300
RUBBISH = b"\xff" * 50
CHECK, WATCH = "/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch"
INFO = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
STATUS, ACQUIRE = (f"/migagent.v1.PartitionManager/{each}" for each in ("Status", "Acquire"))


@pytest.fixture
def agent(folder: Path) -> Iterator[Agent]:
    with Agent(folder, "a30") as running:
        yield running


@pytest.mark.parametrize("method", [CHECK, WATCH, INFO])
def test_unparsable_probes_are_refused_and_not_logged(agent: Agent, method: str) -> None:
    before = len(agent.log())
    with grpc.insecure_channel(agent.address) as channel:
        send: grpc.StreamStreamMultiCallable[bytes, bytes] = channel.stream_stream(method)
        for _ in range(TIMES):
            with pytest.raises(grpc.RpcError) as refused:
                list(send(iter([RUBBISH]), timeout=30))
            assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert "it is not what the API defines" in str(refused.value.details())
    assert len(agent.log()) - before < 1000


MANY = 100
"""Calls of each kind: many lines, if each cost one."""
METHODS = (CHECK, WATCH, INFO, STATUS, ACQUIRE, "/no/Such", "/none", "none", "/")
MESSAGES = {
    "none": b"",
    "cut": b"\0",
    "compressed": b"\1\0\0\0\2ab",
    "cut message": b"\0\0\0\0\1",
    "huge": b"\0\xff\xff\xff\xff",
    "flags": b"\7\0\0\0\0",
    "three": bytes(5) * 3,
    "rubbish": b"\0\0\0\0\2\xff\xff",
}


def test_calls_that_are_no_calls_cost_few_lines(agent: Agent) -> None:
    lines = {}
    for method in METHODS:
        for name, message in MESSAGES.items():

            def call(_count: int, stream: int, method: str = method, message: bytes = message) -> bytes:
                headers = frame(HEADERS, END_HEADERS, stream, request_headers(method))
                return headers + frame(DATA, END_STREAM, stream, message)

            before = agent.log().count("\n")
            assert flood(lambda: RawClient(agent.socket, acknowledges=True), 2, call, GENEROUS_SECONDS, MANY) >= MANY
            lines[method, name] = agent.log().count("\n") - before
    assert agent.ask("status")["node"] == "tested"
    assert sum(lines.values()) < len(lines) + 20, {case: number for case, number in lines.items() if number > 1}


def test_they_answer_as_the_libraries_own_do(agent: Agent) -> None:
    with grpc.insecure_channel(agent.address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        assert stub.Check(health_pb2.HealthCheckRequest(), timeout=30).status == 1
        with pytest.raises(grpc.RpcError) as refused:
            stub.Check(health_pb2.HealthCheckRequest(service="none"), timeout=30)
        assert refused.value.code() is grpc.StatusCode.NOT_FOUND
        assert next(iter(stub.Watch(health_pb2.HealthCheckRequest(), timeout=30))).status == 1
        listed = reflection_pb2.ServerReflectionRequest(list_services="")
        named = reflection_pb2.ServerReflectionRequest(file_containing_symbol="migagent.v1.PartitionManager")
        answers = list(
            reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(iter([listed, named]), timeout=30)
        )
        names = {each.name for each in answers[0].list_services_response.service}
        assert names == {
            "migagent.v1.PartitionManager",
            "grpc.health.v1.Health",
            "grpc.reflection.v1alpha.ServerReflection",
        }
        assert answers[1].file_descriptor_response.file_descriptor_proto


def test_probes_above_the_limit_are_refused_with_a_message(agent: Agent) -> None:
    with grpc.insecure_channel(agent.address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        watching = [stub.Watch(health_pb2.HealthCheckRequest(), timeout=60) for _ in range(500)]
        for each in watching:
            next(iter(each))
        with pytest.raises(grpc.RpcError) as refused:
            next(iter(stub.Watch(health_pb2.HealthCheckRequest(), timeout=30)))
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "500 calls of health and reflection are open" in str(refused.value.details())
        assert agent.ask("status")["node"] == "tested"


def test_a_library_logs_once_a_minute_from_each_place() -> None:
    now = 0.0
    limit = OncePerMinute(lambda: now)

    def passes(line: int) -> int | None:
        record = logging.LogRecord("grpc", logging.ERROR, "file", line, "%s", ("x",), None)
        return getattr(record, "left_out", None) if limit.filter(record) else None

    assert [passes(1), passes(1), passes(2), passes(1)] == [0, None, 0, None]
    now = 60.0
    assert [passes(1), passes(1), passes(2)] == [2, None, 0]


def test_the_log_tells_how_much_was_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(logs, "OncePerMinute", lambda: OncePerMinute(lambda: now))
    out = StringIO()
    try:
        logs.configure(Settings(log_format="json"), out)
        for _ in range(2):
            for _ in range(100):
                logging.getLogger("grpc._cython.cygrpc").error("a call failed")
            now += 61
    finally:
        structlog.reset_defaults()
        logging.getLogger().handlers.clear()
    lines = [json.loads(each) for each in out.getvalue().splitlines()]
    assert [each.get("left_out") for each in lines] == [None, 99]


def test_release_has_no_call_limit() -> None:
    limits = CallLimits(0)
    for method in ("Release", "Renew"):
        with limits.of(method, streams=False).slot():
            pass

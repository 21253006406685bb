"""Streams of one user leave room for those of others, whether a request came on them or not."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from mig_agent.frontends.grpc.call_limits import CallLimits
from mig_agent.pb.migagent.v1 import partition_manager_pb2 as pb
from support.acquire import granted
from support.agent import Agent, eventually
from support.people import ALICE, BOB, needs_root, person
from support.service import TIMEOUT

MOST = 4


@pytest.fixture
def agent(folder: Path) -> Iterator[Agent]:
    with Agent(folder, "a30", flags=["--socket-mode", "0666", "--max-calls", str(MOST)]) as running:
        folder.chmod(0o755)
        yield running


def wanted() -> pb.Request:
    return pb.Request(wants=[pb.Want(memory_bytes=4 << 30)], request_id=uuid.uuid4().hex)


@needs_root
def test_streams_without_a_request_do_not_use_up_the_call_limit(agent: Agent) -> None:
    over = threading.Event()

    def nothing() -> Iterator[pb.AcquireRequest]:
        over.wait()
        yield from ()

    with person(ALICE, agent.socket, agent.folder) as alice, person(BOB, agent.socket, agent.folder) as bob:
        silent: list[Any] = [alice.Acquire(nothing(), timeout=TIMEOUT) for _ in range(2 * MOST)]
        try:
            # Answered after them on the same connection, so they have been seen.
            assert alice.Status(pb.StatusRequest(), timeout=TIMEOUT).gpus
            assert granted(bob, wanted(), TIMEOUT).lease.id
            assert granted(alice, wanted(), TIMEOUT).lease.id
            assert not any(each.done() for each in silent)
        finally:
            over.set()
            for each in silent:
                each.cancel()


@needs_root
def test_one_user_has_half_of_the_streams(agent: Agent) -> None:
    with person(ALICE, agent.socket, agent.folder) as alice, person(BOB, agent.socket, agent.folder) as bob:
        watching = [alice.Watch(pb.WatchRequest(), timeout=TIMEOUT) for _ in range(MOST // 2)]
        for each in watching:
            next(iter(each))
        with pytest.raises(grpc.RpcError) as refused:
            granted(alice, wanted(), TIMEOUT)
        assert "2 requests and watches of one user are open" in str(refused.value.details())
        assert granted(bob, wanted(), TIMEOUT).lease.id
        watching[0].cancel()

        def again() -> bool:
            try:
                return bool(granted(alice, wanted(), TIMEOUT).lease.id)
            except grpc.RpcError:
                return False

        eventually(again, "there is room again")
        for each in watching:
            each.cancel()


def test_root_may_have_all() -> None:
    limit = CallLimits(MOST).of("Watch", streams=True)
    assert limit.remaining(0) == MOST
    assert limit.remaining(ALICE) == MOST // 2

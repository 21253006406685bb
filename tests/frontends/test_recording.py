"""Plans on the wire with what they depend on, for a bug report."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest

from mig_agent import __version__
from mig_agent.core.errors import Refusal
from mig_agent.core.planning.plan import Plan
from mig_agent.core.planning.recording import from_json, replay
from mig_agent.frontends.grpc.servicer import MOST_DEVICES_RECORDED
from mig_agent.pb.migagent.v1 import partition_manager_pb2 as pb
from support.service import TIMEOUT, Service, ask, service


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Service]:
    async with service(tmp_path, "a100-40gb:1,h100-80gb:1") as running:
        yield running


async def test_a_recording_has_the_node_and_the_plans(served: Service) -> None:
    await served.acquire(profile="7g.40gb", gpus=["0"])
    requests = [ask(memory="4G"), ask(profile="2g.10gb"), ask(profile="1g.10gb", gpus=["1"])]
    for each in requests:
        each.if_revision = 1  # what the node was then does not matter to a recording
    answer = await served.users.Plan(pb.PlanRequest(requests=requests, record=True), timeout=TIMEOUT)
    recording = from_json(answer.recording)
    assert (recording.version, recording.view.revision) == (__version__, answer.revision)
    assert [type(each.outcome) for each in recording.plans] == [Plan, Refusal, Plan]
    assert all(each.is_identical for each in replay(recording))
    assert not any(each.request_id or each.caller_id for each in recording.view.leases.values())
    assert answer.recording.isascii()


async def test_nothing_is_recorded_unless_it_is_asked_for(served: Service) -> None:
    answer = await served.users.Plan(pb.PlanRequest(requests=[ask(memory="4G")]), timeout=TIMEOUT)
    assert not answer.recording


async def test_a_recording_that_fits_into_no_message_is_refused_in_words(
    served: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mig_agent.frontends.grpc.servicer.MOST_ANSWER_BYTES", 4096)
    with pytest.raises(grpc.RpcError, match="cannot record 1 plan at once: that is more than one message takes"):
        await served.users.Plan(pb.PlanRequest(requests=[ask(memory="4G")], record=True), timeout=TIMEOUT)


async def test_so_many_devices_are_not_recorded_at_once(served: Service) -> None:
    requests = [ask(*[pb.Want(memory="4G")] * 64)] * (MOST_DEVICES_RECORDED // 64 + 1)
    with pytest.raises(grpc.RpcError, match="cannot record plans for 1088 devices at once: at most 1024"):
        await served.users.Plan(pb.PlanRequest(requests=requests, record=True), timeout=TIMEOUT)

"""Explanations on the wire: of dry runs, and of refusals."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest

from mig_agent.engine.manager import MOST_EXPLAINED_LINES
from mig_agent.frontends.grpc.servicer import MOST_PLANS
from mig_agent.pb.migagent.v1 import partition_manager_pb2 as pb
from support.service import TIMEOUT, Service, ask, detail_of, service


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Service]:
    async with service(tmp_path, "a100-40gb:1,h100-80gb:1") as running:
        yield running


async def test_a_plan_explains_itself_when_asked(served: Service) -> None:
    await served.acquire(profile="7g.40gb", gpus=["0"])
    requests = [ask(memory="4G"), ask(profile="2g.10gb"), ask(profile="9g.99gb")]
    quiet = await served.users.Plan(pb.PlanRequest(requests=requests), timeout=TIMEOUT)
    assert not any(each.explanation for each in quiet.outcomes)
    answer = await served.users.Plan(pb.PlanRequest(requests=requests, explain=True), timeout=TIMEOUT)
    fits, full, unknown = answer.outcomes
    assert "(chosen)" in fits.explanation[1]
    assert fits.plan == quiet.outcomes[0].plan
    assert fits.explanation[-1] == "  GPU 0: no place, slices 0-7 are leased to alice"
    assert full.refusal.reason == "no-capacity"
    assert full.explanation[0] == "2g.10gb:"
    assert "leased to alice" in full.explanation[1]
    assert unknown.refusal.reason == "unknown-profile"
    assert len(unknown.explanation) == 3


async def test_many_explained_plans_stay_within_one_message(served: Service) -> None:
    requests = [ask(*(pb.Want(memory=f"{1000 + number}M") for number in range(20)))] * MOST_PLANS
    answer = await served.users.Plan(pb.PlanRequest(requests=requests, explain=True), timeout=TIMEOUT)
    assert len(answer.outcomes) == MOST_PLANS
    assert all(each.explanation for each in answer.outcomes)
    assert sum(len(each.explanation) for each in answer.outcomes) <= 2 * MOST_EXPLAINED_LINES


async def test_a_refusal_carries_the_same_text(served: Service) -> None:
    await served.acquire(profile="7g.40gb", gpus=["0"])
    asked = ask(profile="2g.10gb")
    planned = await served.users.Plan(pb.PlanRequest(requests=[asked], explain=True), timeout=TIMEOUT)
    with pytest.raises(grpc.RpcError) as refused:
        await served.acquire(profile="2g.10gb")
    assert list(detail_of(refused.value).explanation) == list(planned.outcomes[0].explanation)


async def test_status_has_the_reservation_delay(served: Service) -> None:
    status = await served.users.Status(pb.StatusRequest(), timeout=TIMEOUT)
    assert status.reservation_after_seconds == 300

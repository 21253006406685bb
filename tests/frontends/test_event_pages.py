"""Past events in pages: no answer leaves out silently, and paging reads all of them."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from mig_agent.client import AsyncClient, to_json
from mig_agent.client.types import EventPage
from mig_agent.frontends.grpc import servicer
from mig_agent.pb.migagent.v1 import partition_manager_pb2 as pb
from support.service import service


@pytest.fixture(autouse=True)
def _small_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servicer, "MOST_EVENTS", 4)


async def test_an_answer_says_how_many_earlier_events_it_left_out(tmp_path: Path) -> None:
    async with service(tmp_path) as serving:
        for _ in range(3):
            await serving.node.release(await serving.node.acquire("4G"))
        everything = await serving.node.manager.history.events(0.0, None, 1000)
        assert len(everything) > 8
        newest = await serving.users.Events(pb.EventsRequest())
        assert len(newest.events) == 4
        assert newest.earlier == len(everything) - 4
        numbers = [each.number for each in newest.events]
        assert numbers == sorted(set(numbers))
        before = await serving.users.Events(pb.EventsRequest(before=numbers[0], limit=3))
        assert [each.number for each in before.events] == [numbers[0] - 3, numbers[0] - 2, numbers[0] - 1]
        assert before.earlier == len(everything) - 7
        beyond = await serving.users.Events(pb.EventsRequest(before=2**64 - 1, limit=1))
        assert beyond.events[0].number == numbers[-1]
        assert not (await serving.users.Events(pb.EventsRequest(since=math.inf))).earlier


async def test_the_client_reads_as_many_pages_as_are_wanted(tmp_path: Path) -> None:
    async with service(tmp_path) as serving, AsyncClient(serving.address) as client:
        leases = []
        for _ in range(3):
            lease = await serving.node.acquire("4G")
            leases.append(lease.lease.id)
            await serving.node.release(lease)
        everything = await serving.node.manager.history.events(0.0, None, 1000)
        revisions = [each.revision for each in everything]
        assert [each.revision for each in await client.events(limit=2**32 - 1)] == revisions
        page = await client.event_page(limit=6)
        assert [each.revision for each in page.events] == revisions[-6:]
        assert page.earlier == len(everything) - 6
        assert len(await client.events()) == 4, "what the agent gives at once"
        of_one = await client.events(lease=leases[1], limit=100)
        assert {each.lease for each in of_one} == {leases[1]}
        assert "lease-granted" in {each.kind for each in of_one}


def test_json_says_whether_it_was_cut() -> None:
    assert to_json.events(EventPage(events=(), earlier=3)) == {"events": [], "truncated": True, "earlier": 3}
    assert to_json.events(EventPage(events=(), earlier=0)) == {"events": [], "truncated": False, "earlier": 0}

"""What was done carries who called for it, in the events and in the log, and nothing else does."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
import structlog

from mig_agent.config import Settings
from mig_agent.core.errors import Reason, Refusal
from mig_agent.core.events import Event, EventKind
from mig_agent.core.model import Holder
from mig_agent.daemon import logs
from mig_agent.engine.callers import Caller
from mig_agent.engine.idempotency import digest_of
from support.engine import ADMIN, Node, engine

ALICE = Caller(name="alice", uid=1000, pid=4711)
SLURM = Caller(name="slurm", uid=64030, pid=99, scheduler=True)
AS_ALICE = {"by": "alice", "role": "user", "uid": 1000, "pid": 4711}
AS_ADMIN = {"by": "root", "role": "admin", "uid": 0}


def who(event: Event) -> dict[str, object]:
    return {name: event.data[name] for name in ("by", "role", "uid", "pid") if name in event.data}


async def recorded(node: Node, kind: EventKind) -> list[dict[str, object]]:
    await node.quiet()
    return [who(each) for each in await node.manager.history.events(0.0, None, 1000) if each.kind is kind]


async def test_each_change_of_a_lease_tells_who_called_for_it(tmp_path: Path) -> None:
    async with engine(tmp_path, "a100-40gb") as node:
        granted = await node.manager.acquire(node.request("4G"), ALICE)
        await node.manager.renew(granted.lease.id, granted.token, 60.0, SLURM)
        await node.manager.release(granted.lease.id, "", ALICE)
        assert await recorded(node, EventKind.LEASE_GRANTED) == [AS_ALICE]
        assert await recorded(node, EventKind.LEASE_RENEWED) == [
            {"by": "slurm", "role": "scheduler", "uid": 64030, "pid": 99}
        ]
        assert await recorded(node, EventKind.LEASE_ENDED) == [AS_ALICE]


async def test_what_happens_by_itself_names_nobody(tmp_path: Path) -> None:
    async with engine(tmp_path, "a100-40gb") as node:
        granted = await node.manager.acquire(node.request("4G", ttl_seconds=10.0), ALICE)
        node.manager.delivered(granted.lease.id)
        node.clock.advance(11)
        await node.until(lambda: not node.leases)
        assert await recorded(node, EventKind.LEASE_ENDED) == [{}]


async def test_what_administrators_do_tells_which_of_them(tmp_path: Path) -> None:
    async with engine(tmp_path, "a100-40gb") as node:
        await node.release(await node.acquire("4G"))
        await node.manager.cordon("0", on=True, reason="fan", caller=ADMIN)
        await node.manager.cordon("0", on=False, reason="", caller=ADMIN)
        assert len(await node.manager.reclaim((), ADMIN)) == 1
        await node.manager.set_mig_mode("0", enable=False, caller=ADMIN)
        for kind in (
            EventKind.GPU_CORDONED,
            EventKind.GPU_UNCORDONED,
            EventKind.INSTANCE_DESTROYED,
            EventKind.GPU_MODE_REQUESTED,
        ):
            assert await recorded(node, kind) == [AS_ADMIN], kind


async def test_an_administrators_call_that_fails_is_told_too(tmp_path: Path) -> None:
    async with engine(tmp_path, "a100-40gb") as node:
        refusal = Refusal(reason=Reason.IN_USE, message="cannot enable MIG mode on GPU 0: it is leased")
        node.manager.report_refusal("SetMigMode", ADMIN, refusal, "0")
        node.manager.report_refusal("Acquire", ALICE, refusal)  # the engine itself tells of these
        (event,) = node.told(EventKind.REQUEST_REFUSED)
        assert who(event) == AS_ADMIN
        assert event.data["method"] == "SetMigMode"


async def test_the_log_says_who_in_fields_of_their_own(tmp_path: Path) -> None:
    before = structlog.get_config()
    out = io.StringIO()
    try:
        logs.configure(Settings(log_format="json"), out)
        write = logs.EventLog()
        async with engine(tmp_path, "a100-40gb") as node:
            node.manager.observers.append(write)
            await node.manager.acquire(node.request("4G"), ALICE)
            write.flush()
    finally:
        structlog.configure(**before)
    lines = [json.loads(line) for line in out.getvalue().splitlines()]
    (granted,) = [each for each in lines if each.get("event_kind") == "lease-granted"]
    assert {name: granted[name] for name in AS_ALICE} == AS_ALICE
    assert not [each for each in lines if each.get("event_kind") == "instance-created" and "uid" in each]


@pytest.mark.parametrize("label", ["", " (training)"])
async def test_a_retry_is_the_same_though_the_users_name_was_not_known_at_first(tmp_path: Path, label: str) -> None:
    nameless = replace(ALICE, name="")
    async with engine(tmp_path, "a100-40gb") as node:
        first = node.request("4G", request_id="x", holder=Holder(tenant="uid 1000", name=f"uid 1000{label}"))
        second = replace(first, holder=Holder(tenant="alice", name=f"alice{label}"))
        granted = await node.manager.acquire(first, nameless)
        assert (await node.manager.acquire(second, ALICE)).token == granted.token
        others = [
            (second, replace(ALICE, uid=1001)),
            (replace(second, holder=Holder(tenant="alice", name="alice (other)")), ALICE),
            (replace(second, holder=Holder(tenant="bob", name=f"alice{label}")), ALICE),
        ]
        known = digest_of(first, nameless)
        assert all(digest_of(request, caller) != known for request, caller in others)

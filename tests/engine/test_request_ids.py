"""Request ids are each caller's own: who uses another's id gets nothing of the other's, and is not in its way."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mig_agent.core.errors import Reason, RefusedError
from mig_agent.core.model import Holder, Request
from mig_agent.core.owner import Pod
from mig_agent.engine import idempotency
from mig_agent.engine.callers import Caller
from support.engine import Node, engine

POD = Pod(namespace="team-a", name="train", uid="7f2c")
SLURM = Caller(name="slurm", scheduler=True)
KAI = Caller(name="kai", scheduler=True)
ALICE = Caller(name="alice", uid=1000, pid=17)
BOB = Caller(name="bob", uid=1001)
NUMBERED = Caller(name="uid 1000")
"""A certificate may have any name."""
CALLERS = (SLURM, KAI, ALICE, BOB, NUMBERED, Caller(name="kubelet"), Caller(name="kubelet", inside=True), Caller())


def asked(node: Node, want: str = "1g.5gb", **fields: Any) -> Request:
    return node.request(want, request_id="7f2c-1", **fields)


def for_pod(node: Node) -> Request:
    return asked(node, holder=Holder(tenant="namespace team-a"), pod=POD, ttl_seconds=60.0)


def reason(caught: pytest.ExceptionInfo[RefusedError]) -> Reason:
    return caught.value.refusal.reason


async def test_a_request_id_of_another_caller_does_not_block_the_scheduler(tmp_path: Path) -> None:
    async with engine(tmp_path, "a100-40gb") as node:
        intruder = await node.manager.acquire(asked(node), ALICE)
        mine = await node.manager.acquire(for_pod(node), SLURM)
        assert mine.lease.id != intruder.lease.id
        assert (await node.manager.acquire(for_pod(node), SLURM)).token == mine.token
        assert (await node.manager.acquire(asked(node), ALICE)).token == intruder.token


@pytest.mark.parametrize("ended", [False, True])
async def test_each_caller_has_its_own_lease_under_one_id(tmp_path: Path, *, ended: bool) -> None:
    """The very same request, also after a restart, and after the leases have ended."""
    async with engine(tmp_path, "h100-80gb:2") as node:
        first = {caller: await node.manager.acquire(asked(node, "1g.10gb"), caller) for caller in CALLERS}
        for granted in first.values():
            node.manager.delivered(granted.lease.id)
        assert len({granted.token for granted in first.values()}) == len(CALLERS)
        if ended:
            for caller, granted in first.items():
                await node.manager.release(granted.lease.id, granted.token, caller)
    async with engine(tmp_path) as node:
        for caller, granted in first.items():
            if ended:
                with pytest.raises(RefusedError) as caught:
                    await node.manager.acquire(asked(node, "1g.10gb"), caller)
                assert reason(caught) is Reason.LEASE_ENDED
                assert granted.lease.id in caught.value.refusal.message
            else:
                assert (await node.manager.acquire(asked(node, "1g.10gb"), caller)).token == granted.token
            with pytest.raises(RefusedError) as caught:
                await node.manager.acquire(asked(node, "2g.20gb"), caller)
            assert reason(caught) is Reason.REQUEST_ID_REUSED


async def test_callers_that_wait_under_one_id_wait_for_themselves(tmp_path: Path) -> None:
    async with engine(tmp_path, "a100-40gb") as node:
        whole = await node.acquire("7g.40gb")
        waiting = [
            node.start(node.manager.acquire(asked(node, wait_seconds=60.0, name=caller.name), caller))
            for caller in (ALICE, BOB)
        ]
        await node.quiet_but(*waiting)
        assert [each.who.name for each in node.manager.snapshot.queue] == ["alice", "bob"]
        waiting[0].cancel()
        await node.until(lambda: [each.who.name for each in node.manager.snapshot.queue] == ["bob"])
        await node.release(whole)
        assert (await waiting[1]).lease.holder.name == "bob"


async def test_the_same_caller_on_another_connection_gets_its_lease(tmp_path: Path) -> None:
    """Another process of the same user, also on the administrators' socket."""
    async with engine(tmp_path, "a100-40gb") as node:
        mine = await node.manager.acquire(asked(node), ALICE)
        for caller in (replace(ALICE, pid=18), replace(ALICE, admin=True)):
            assert (await node.manager.acquire(asked(node), caller)).token == mine.token
        promised = await node.manager.acquire(for_pod(node), SLURM)
        assert (await node.manager.acquire(for_pod(node), replace(SLURM, admin=True))).token == promised.token


async def test_a_held_lease_whose_client_went_away_is_known_by_its_caller(tmp_path: Path) -> None:
    async with engine(tmp_path, "a100-40gb") as node:
        held = node.start(node.manager.hold(asked(node), ALICE))
        other = await node.manager.acquire(asked(node), BOB)
        node.manager.delivered(other.lease.id)
        held.cancel()
        await node.quiet()
        node.clock.advance(3600.0)
        await node.until(lambda: set(node.leases) == {other.lease.id})


async def test_ids_of_very_many_leases_that_ended_are_their_callers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of those the ledger alone knows."""
    monkeypatch.setattr(idempotency, "MOST_ENDED_IN_MEMORY", 1)
    async with engine(tmp_path, "a100-40gb") as node:
        for caller in (SLURM, ALICE):
            granted = await node.manager.acquire(asked(node), caller)
            await node.manager.release(granted.lease.id, granted.token, caller)
        for _ in range(2):
            await node.release(await node.acquire("1g.5gb"))
        for caller in (SLURM, ALICE):
            with pytest.raises(RefusedError) as caught:
                await node.manager.acquire(asked(node), caller)
            assert reason(caught) is Reason.LEASE_ENDED
        await node.manager.acquire(asked(node), KAI)

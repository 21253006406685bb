"""Limits of users and tenants on a running engine: refused, or kept waiting without blocking others."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mig_agent.core.errors import Reason, Refusal, RefusedError
from mig_agent.core.events import EventKind
from mig_agent.core.limits import Limit, LimitValue, UsageLimits
from mig_agent.core.model import Holder
from mig_agent.core.owner import Pod
from mig_agent.engine.callers import Caller
from mig_agent.engine.results import Granted
from support.engine import CREATE, Node, engine, killed, start

ALICE = Caller(name="alice", uid=1000)
BOB = Caller(name="bob", uid=1001)
PLUGIN = Caller(name="device plugin", admin=True, inside=True)


def limits(group: str = "roles", name: str = "user", **values: float) -> UsageLimits:
    bounds = {
        Limit(each): LimitValue(value=value, text=f"{value}", setting=f"{name}.{each}")
        for each, value in values.items()
    }
    return UsageLimits(**{group: {name: bounds}})


async def acquire(node: Node, caller: Caller, *wants: str, **fields: Any) -> Granted:
    fields.setdefault("holder", Holder(name=caller.name, tenant=caller.name, uid=caller.uid))
    granted = await node.manager.acquire(node.request(*wants, **fields), caller)
    node.manager.delivered(granted.lease.id)
    return granted


async def refused(node: Node, caller: Caller, *wants: str, **fields: Any) -> Refusal:
    with pytest.raises(RefusedError) as caught:
        await acquire(node, caller, *wants, **fields)
    return caught.value.refusal


async def waits(node: Node, caller: Caller, *wants: str, **fields: Any) -> asyncio.Task[Granted]:
    before = len(node.manager.snapshot.queue)
    task = node.start(acquire(node, caller, *wants, **{"wait_seconds": 600.0, **fields}))
    await node.until(lambda: len(node.manager.snapshot.queue) > before or task.done())
    return task


async def test_a_user_at_its_limit_is_refused_and_others_are_not(tmp_path: Path) -> None:
    async with engine(tmp_path, "a100-40gb", limits=limits(leases=2)) as node:
        first = await acquire(node, ALICE, "1g.5gb")
        await acquire(node, ALICE, "1g.5gb")
        refusal = await refused(node, ALICE, "1g.5gb")
        assert refusal.reason is Reason.LIMIT_EXCEEDED
        assert "alice holds 2 of at most 2 leases (set by user.leases)" in refusal.message
        assert refusal.message in node.told(EventKind.REQUEST_REFUSED)[0].message
        await acquire(node, BOB, "1g.5gb")
        await node.manager.release(first.lease.id, first.token, ALICE)
        await acquire(node, ALICE, "1g.5gb")


async def test_requests_at_the_same_moment_do_not_pass_the_limit_together(tmp_path: Path) -> None:
    """A plan in progress counts, though its lease is not committed yet."""
    async with engine(tmp_path, "a100-40gb", limits=limits(leases=2)) as node:
        tasks = [node.start(acquire(node, ALICE, "1g.5gb")) for _ in range(5)]
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        assert sum(isinstance(each, Granted) for each in outcomes) == 2
        assert len(node.leases) == 2


async def test_what_waits_for_its_own_limit_blocks_no_request_behind_it(tmp_path: Path) -> None:
    """Not even past the reservation delay, nor with strict first come."""
    for strict in (False, True):
        folder = tmp_path / str(strict)
        folder.mkdir()
        changes: dict[str, Any] = {"reservation_after_seconds": 10.0, "strict_fifo": strict}
        async with engine(folder, "a100-40gb", limits=limits(leases=1), **changes) as node:
            held = await acquire(node, ALICE, "1g.5gb")
            waiting = await waits(node, ALICE, "4g.20gb")
            assert "alice holds 1 of at most 1 lease" in node.manager.snapshot.queue[0].place.limit
            node.clock.advance(60)
            assert (await acquire(node, BOB, "2g.10gb")).devices
            assert not waiting.done()
            await node.manager.release(held.lease.id, held.token, ALICE)
            assert (await waiting).devices[0].profile == "4g.20gb"


async def test_a_wait_for_a_limit_that_times_out_says_so(tmp_path: Path) -> None:
    async with engine(tmp_path, "a100-40gb", limits=limits(leases=1)) as node:
        await acquire(node, ALICE, "1g.5gb")
        task = await waits(node, ALICE, "1g.5gb", wait_seconds=60.0)
        node.clock.advance(60)
        with pytest.raises(RefusedError) as caught:
            await task
        assert caught.value.refusal.reason is Reason.WAITED_TOO_LONG
        assert "alice holds 1 of at most 1 lease" in caught.value.refusal.message


async def test_what_is_never_within_the_limits_does_not_wait(tmp_path: Path) -> None:
    async with engine(tmp_path, "a100-40gb", limits=limits(memory_slices=2, highest_priority=5)) as node:
        for wants, fields in ((("3g.20gb",), {}), (("1g.5gb",), {"priority": 6})):
            refusal = await refused(node, ALICE, *wants, wait_seconds=600.0, **fields)
            assert refusal.reason is Reason.OUTSIDE_LIMITS
        assert (await refused(node, ALICE, "9g.99gb")).reason is Reason.UNKNOWN_PROFILE


async def test_the_number_of_waiting_requests_is_limited(tmp_path: Path) -> None:
    async with engine(tmp_path, "a100-40gb", limits=limits(waiting=1)) as node:
        held = await acquire(node, BOB, "7g.40gb")
        one = await waits(node, ALICE, "1g.5gb")
        assert "1 waiting request of at most 1" in (await refused(node, ALICE, "1g.5gb", wait_seconds=60.0)).message
        other = await waits(node, BOB, "1g.5gb")
        await node.manager.release(held.lease.id, held.token, BOB)
        await one
        await other


async def test_leases_get_a_ttl_and_renewals_are_bounded(tmp_path: Path) -> None:
    async with engine(tmp_path, "a100-40gb", limits=limits(default_ttl=600, longest_ttl=3600)) as node:
        request = node.request("1g.5gb", holder=Holder(name="alice", tenant="alice", uid=1000))
        granted = await node.manager.acquire(request, ALICE)
        assert granted.lease.expires_at == node.clock.now() + 600
        assert (await node.manager.acquire(request, ALICE)).lease.id == granted.lease.id
        assert (await refused(node, ALICE, "1g.5gb", ttl_seconds=3601.0)).reason is Reason.OUTSIDE_LIMITS
        with pytest.raises(RefusedError, match="no deadline is longer than 3600"):
            await node.manager.renew(granted.lease.id, granted.token, None, ALICE)
        renewed = await node.manager.renew(granted.lease.id, granted.token, 3600.0, ALICE)
        assert renewed.expires_at == node.clock.now() + 3600
        root = Caller(name="root", uid=0, admin=True)
        assert (await node.manager.renew(granted.lease.id, "", None, root)).expires_at is None


async def test_pods_that_the_kubelet_admitted_count_and_are_never_refused(tmp_path: Path) -> None:
    tenant = "namespace team-a"
    scheduler = Caller(name="slurm", scheduler=True)
    async with engine(tmp_path, "a100-40gb", limits=limits("tenants", tenant, leases=1)) as node:
        holder = Holder(tenant=tenant, name="pod team-a/train-0")
        for _ in range(2):
            await acquire(node, PLUGIN, "1g.5gb", holder=holder)
        pod = Pod(namespace="team-a", name="train-1")
        refusal = await refused(node, scheduler, "1g.5gb", pod=pod, holder=replace(holder, name="pod team-a/train-1"))
        assert f"tenant {tenant} holds 2 of at most 1 lease" in refusal.message


async def test_limits_that_were_replaced_count_at_once_and_for_those_that_wait(tmp_path: Path) -> None:
    async with engine(tmp_path, "a100-40gb", limits=limits(leases=1)) as node:
        await acquire(node, ALICE, "1g.5gb")
        waiting = await waits(node, ALICE, "1g.5gb")
        node.manager.reconfigure(replace(node.manager.settings, limits=limits(leases=2)))
        await waiting
        assert (await refused(node, ALICE, "1g.5gb")).reason is Reason.LIMIT_EXCEEDED


async def test_what_is_held_is_counted_again_after_a_kill(tmp_path: Path) -> None:
    node = await start(tmp_path, "a100-40gb", limits=limits(leases=1))
    await acquire(node, ALICE, "1g.5gb")
    await killed(node)
    async with engine(tmp_path, limits=limits(leases=1)) as again:
        assert "alice holds 1 of at most 1 lease" in (await refused(again, ALICE, "1g.5gb")).message


async def test_a_dry_run_says_what_the_limits_do_not_allow(tmp_path: Path) -> None:
    async with engine(tmp_path, "a100-40gb", limits=limits(leases=0)) as node:
        request = node.request("1g.5gb", holder=Holder(tenant="alice"))
        outcomes = [each async for each, _ in node.manager.plan_in_turns([request], caller=ALICE)]
        assert isinstance(outcomes[0], Refusal)
        assert outcomes[0].reason is Reason.OUTSIDE_LIMITS


async def test_a_waiting_request_is_cancelled_by_its_caller_or_an_administrator(tmp_path: Path) -> None:
    root = Caller(name="root", uid=0, admin=True)
    async with engine(tmp_path, "a100-40gb") as node:
        await acquire(node, BOB, "7g.40gb")
        for caller, mine, words in ((ALICE, True, "cancelled by alice"), (root, False, "cancelled by root (an admin")):
            task = await waits(node, ALICE, "1g.5gb", request_id="abc-1")
            with pytest.raises(RefusedError) as missed:
                node.manager.cancel("abc-1", "", BOB)
            assert missed.value.refusal.reason is Reason.UNKNOWN_REQUEST
            cancelled = node.manager.cancel("" if mine else "abc", "make room", caller, mine=mine)
            assert [each.request_id for each in cancelled] == ["abc-1"]
            with pytest.raises(RefusedError) as caught:
                await task
            assert caught.value.refusal.reason is Reason.CANCEL_REQUESTED
            assert not caught.value.refusal.retryable
            assert words in caught.value.refusal.message
            assert caught.value.refusal.message.endswith(": make room")
        assert node.manager.snapshot.queue == ()
        assert node.manager.cancel("", "", ALICE, mine=True) == ()


async def test_a_beginning_that_fits_two_requests_cancels_none(tmp_path: Path) -> None:
    async with engine(tmp_path, "a100-40gb") as node:
        await acquire(node, BOB, "7g.40gb")
        tasks = [await waits(node, ALICE, "1g.5gb", request_id=f"abc-{number}") for number in (1, 2)]
        with pytest.raises(RefusedError, match="2 waiting requests match") as refused_one:
            node.manager.cancel("abc", "", ALICE)
        assert refused_one.value.refusal.hint == "write more of the id"
        assert len(node.manager.cancel("", "", ALICE, mine=True)) == 2
        await asyncio.gather(*tasks, return_exceptions=True)


async def test_an_administrator_cancels_one_of_two_requests_with_the_same_id(tmp_path: Path) -> None:
    """Request ids are their callers' own: the caller tells them apart."""
    root = Caller(name="root", uid=0, admin=True)
    async with engine(tmp_path, "a100-40gb") as node:
        await acquire(node, BOB, "7g.40gb")
        tasks = [await waits(node, caller, "1g.5gb", request_id="train") for caller in (ALICE, BOB)]
        with pytest.raises(RefusedError) as ambiguous:
            node.manager.cancel("train", "", root)
        refusal = ambiguous.value.refusal
        assert f"train of alice ({ALICE.caller_id})" in refusal.message
        assert f"train of bob ({BOB.caller_id})" in refusal.message
        assert refusal.hint == "say whose it is: `migctl cancel train --user NAME`"
        (cancelled,) = node.manager.cancel("train", "", root, of=BOB.caller_id)
        assert cancelled.request.caller_id == BOB.caller_id
        assert [each.request.caller_id for each in node.manager.snapshot.queue] == [ALICE.caller_id]
        with pytest.raises(RefusedError, match="no request with this id waits"):
            node.manager.cancel("train", "", root, of=BOB.caller_id)
        node.manager.cancel("train", "", ALICE)
        await asyncio.gather(*tasks, return_exceptions=True)


def within(node: Node) -> bool:
    """Whether all users hold what `leases=3` and `memory_slices=4` allow."""
    view = node.manager.snapshot.view
    for caller in (ALICE, BOB):
        held = [each for each in view.leases.values() if each.holder.name == caller.name]
        slices = sum(view.instances[each].slot.profile.memory_slices for lease in held for each in lease.instances)
        if len(held) > 3 or slices > 4:
            return False
    return True


def outcomes(tasks: list[asyncio.Task[Granted]]) -> list[Granted]:
    """Take what has ended from the tasks, and return the leases; all else was refused in words."""
    done = [each for each in tasks if each.done()]
    tasks[:] = [each for each in tasks if not each.done()]
    assert all(isinstance(each.exception(), RefusedError | None) for each in done)
    return [each.result() for each in done if each.exception() is None]


@pytest.mark.parametrize("seed", range(3))
async def test_no_user_ever_holds_more_than_its_limits(tmp_path: Path, seed: int) -> None:
    """Requests at the same time, waits, releases, cancellations, failing drivers and kills of the agent."""
    chance = random.Random(seed)  # noqa: S311 -- no secret
    most = limits(leases=3, memory_slices=4)
    node = await start(tmp_path, "a100-40gb:2", limits=most)
    tasks: list[asyncio.Task[Granted]] = []
    granted: list[Granted] = []
    for _ in range(30):
        caller = chance.choice((ALICE, BOB))
        step = chance.choices(("ask", "release", "cancel", "fail", "kill"), (5, 2, 1, 1, 1))[0]
        if step == "ask":
            wants = chance.choices(("1g.5gb", "2g.10gb"), k=chance.choice((1, 1, 2)))
            wait = chance.choice((None, 600.0))
            tasks += [node.start(acquire(node, caller, *wants, wait_seconds=wait)) for _ in range(2)]
        elif step == "release" and granted:
            one = granted.pop(chance.randrange(len(granted)))
            await node.manager.release(one.lease.id, one.token, ALICE)
        elif step == "cancel":
            node.manager.cancel("", "", caller, mine=True)
        elif step == "fail":
            node.simulator.fail(CREATE, 999)
        elif step == "kill":
            await killed(node)
            await asyncio.gather(*tasks, return_exceptions=True)
            tasks.clear()
            node = await start(tmp_path, limits=most)
        for _ in range(chance.randrange(20)):
            await asyncio.sleep(0.001)
            assert within(node)
        granted += outcomes(tasks)
    await node.manager.close()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert granted

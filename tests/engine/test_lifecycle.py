"""How leases end, and who may end them."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import pytest

from mig_agent.adapters.host import Host
from mig_agent.core.errors import Reason, RefusedError
from mig_agent.core.events import EventKind
from mig_agent.core.model import Holder, InstanceState, LeaseId
from mig_agent.engine.callers import Caller
from mig_agent.engine.lifecycle import StreamEnd
from mig_agent.engine.results import Granted
from support.engine import ADMIN, ANYBODY, Node, engine, killed, start


async def ended(node: Node) -> str:
    """Why the one lease that ended did."""
    await node.until(lambda: node.told(EventKind.LEASE_ENDED))
    event = node.told(EventKind.LEASE_ENDED)[0]
    return str(event.data["reason"])


async def waiting_process() -> asyncio.subprocess.Process:
    """A process that lives until it gets a line."""
    return await asyncio.create_subprocess_exec(sys.executable, "-c", "input()", stdin=asyncio.subprocess.PIPE)


async def test_a_lease_without_a_deadline_stays_active(tmp_path: Path) -> None:
    async with engine(tmp_path, "a100-40gb") as node:
        granted = await node.acquire("4G")
        node.clock.advance(30 * 24 * 3600)
        await node.look()
        assert granted.lease.id in node.leases


async def test_a_lease_ends_at_its_deadline(tmp_path: Path) -> None:
    async with engine(tmp_path, "a100-40gb") as node:
        granted = await node.acquire("4G", ttl_seconds=100.0)
        assert granted.lease.expires_at == granted.lease.created_at + 100
        node.clock.advance(99)
        await node.quiet()
        assert granted.lease.id in node.leases
        node.clock.advance(1)
        assert await ended(node) == "expired"
        assert node.layout() == "6:1g.5gb=idle"


async def test_a_renewed_lease_lives_longer(tmp_path: Path) -> None:
    async with engine(tmp_path, "a100-40gb") as node:
        granted = await node.acquire("4G", ttl_seconds=100.0)
        node.clock.advance(90)
        renewed = await node.manager.renew(granted.lease.id, granted.token, 100.0, ANYBODY)
        assert renewed.expires_at == node.clock.now() + 100
        node.clock.advance(90)
        await node.quiet()
        assert node.leases[granted.lease.id].expires_at == renewed.expires_at
        forever = await node.manager.renew(granted.lease.id, granted.token, None, ANYBODY)
        assert forever.expires_at is None
        node.clock.advance(1000)
        await node.quiet()
        assert granted.lease.id in node.leases


async def test_a_lease_ends_with_its_process(tmp_path: Path) -> None:
    async with engine(tmp_path, "a100-40gb") as node:
        process = await waiting_process()
        granted = await node.acquire("4G", pid=process.pid)
        await node.quiet()
        assert granted.lease.id in node.leases
        await process.communicate(b"\n")
        assert await ended(node) == "process-ended"


async def test_a_lease_cannot_be_bound_to_a_process_that_is_not_there(tmp_path: Path) -> None:
    async with engine(tmp_path, "a100-40gb") as node:
        process = await waiting_process()
        await process.communicate(b"\n")
        with pytest.raises(RefusedError) as refused:
            await node.acquire("4G", pid=process.pid)
        assert refused.value.refusal.reason is Reason.INVALID_REQUEST


async def test_a_process_that_ended_while_the_agent_was_down_is_noticed(tmp_path: Path) -> None:
    process = await waiting_process()
    async with engine(tmp_path, "a100-40gb") as node:
        await node.acquire("4G", pid=process.pid)
    await process.communicate(b"\n")
    async with engine(tmp_path) as node:
        await node.until(lambda: not node.leases)


async def test_a_lease_whose_answer_was_not_delivered_ends(tmp_path: Path) -> None:
    async with engine(tmp_path, "a100-40gb") as node:
        await node.manager.acquire(node.request("4G"), ANYBODY)
        node.clock.advance(59)
        await node.quiet()
        assert len(node.leases) == 1
        node.clock.advance(1)
        assert await ended(node) == "undelivered"


async def test_a_retry_saves_a_lease_that_was_not_delivered(tmp_path: Path) -> None:
    async with engine(tmp_path, "a100-40gb") as node:
        request = node.request("4G")
        first = await node.manager.acquire(request, ANYBODY)
        node.clock.advance(59)
        again = await node.manager.acquire(request, ANYBODY)
        node.manager.delivered(again.lease.id)
        node.clock.advance(3600)
        await node.quiet()
        assert list(node.leases) == [first.lease.id]


# Held leases


async def test_a_held_lease_ends_with_its_client(tmp_path: Path) -> None:
    async with engine(tmp_path, "a100-40gb") as node:
        granted = await node.manager.hold(node.request("4G"), ANYBODY)
        node.manager.delivered(granted.lease.id)
        assert node.leases[granted.lease.id].owner.ends_with_stream
        await node.manager.hold_ended(granted.lease.id, StreamEnd.CLOSED)
        assert not node.leases
        assert await ended(node) == "stream-ended"


async def test_a_held_lease_outlives_a_stream_that_the_agent_ended(tmp_path: Path) -> None:
    async with engine(tmp_path, "a100-40gb") as node:
        request = node.request("4G")
        granted = await node.manager.hold(request, ANYBODY)
        node.manager.delivered(granted.lease.id)
        await node.manager.hold_ended(granted.lease.id, StreamEnd.DROPPED)
        node.clock.advance(59)
        again = await node.manager.hold(request, ANYBODY)
        node.manager.delivered(again.lease.id)
        assert again.lease.id == granted.lease.id
        node.clock.advance(3600)
        await node.quiet()
        assert granted.lease.id in node.leases
        await node.manager.hold_ended(granted.lease.id, StreamEnd.DROPPED)
        node.clock.advance(60)
        assert await ended(node) == "stream-ended"


async def test_a_held_lease_survives_a_closed_connection_for_the_reconnect_grace(tmp_path: Path) -> None:
    process = await waiting_process()
    async with engine(tmp_path, "a100-40gb") as node:
        request = node.request("4G")
        granted = await node.manager.hold(request, ANYBODY)
        node.manager.delivered(granted.lease.id)
        await node.manager.hold_ended(granted.lease.id, StreamEnd.HUNG_UP, process.pid)
        node.clock.advance(4)
        again = await node.manager.hold(request, ANYBODY)
        node.manager.delivered(again.lease.id)
        node.clock.advance(3600)
        await node.quiet()
        assert granted.lease.id in node.leases
        await node.manager.hold_ended(granted.lease.id, StreamEnd.HUNG_UP, process.pid)
        await node.quiet()
        assert granted.lease.id in node.leases
        node.clock.advance(5)
        assert await ended(node) == "stream-ended"
        await process.communicate(b"\n")


async def test_a_held_lease_ends_with_the_process_of_its_client(tmp_path: Path) -> None:
    """`kill -9`, also when the kernel ends the connection before the process."""
    process = await waiting_process()
    async with engine(tmp_path, "a100-40gb") as node:
        granted = await node.manager.hold(node.request("4G"), ANYBODY)
        node.manager.delivered(granted.lease.id)
        await node.manager.hold_ended(granted.lease.id, StreamEnd.HUNG_UP, process.pid)
        await node.quiet()
        assert granted.lease.id in node.leases
        process.kill()
        assert await ended(node) == "stream-ended"
        other = await node.manager.hold(node.request("4G"), ANYBODY)
        node.manager.delivered(other.lease.id)
        await process.wait()
        await node.manager.hold_ended(other.lease.id, StreamEnd.HUNG_UP, process.pid)
        await node.until(lambda: not node.leases)


async def test_a_held_lease_that_is_attached_again_does_not_end_with_the_process_before(tmp_path: Path) -> None:
    process = await waiting_process()
    async with engine(tmp_path, "a100-40gb") as node:
        request = node.request("4G")
        granted = await node.manager.hold(request, ANYBODY)
        node.manager.delivered(granted.lease.id)
        await node.manager.hold_ended(granted.lease.id, StreamEnd.HUNG_UP, process.pid)
        await node.manager.hold(request, ANYBODY)
        node.manager.delivered(granted.lease.id)
        process.kill()
        await process.wait()
        await node.quiet()
        assert granted.lease.id in node.leases


async def test_a_held_lease_waits_a_minute_for_its_client_after_a_restart(tmp_path: Path) -> None:
    async with engine(tmp_path, "a100-40gb") as node:
        request = node.request("4G")
        granted = await node.manager.hold(request, ANYBODY)
        node.manager.delivered(granted.lease.id)
        other = await node.manager.hold(node.request("4G"), ANYBODY)
        node.manager.delivered(other.lease.id)
    async with engine(tmp_path, clock=node.clock) as after:
        again = await after.manager.hold(request, ANYBODY)
        after.manager.delivered(again.lease.id)
        assert again.lease.id == granted.lease.id
        node.clock.advance(61)
        await after.until(lambda: list(after.leases) == [granted.lease.id])


async def test_a_held_lease_stays_after_a_restart_while_the_process_of_its_client_lives(tmp_path: Path) -> None:
    """However long the agent was away: the job goes on all the while, and its client will attach again."""
    process = await waiting_process()
    async with engine(tmp_path, "a100-40gb") as node:
        request = node.request("4G", holder=Holder(name="alice", pid=process.pid))
        granted = await node.manager.hold(request, ANYBODY)
        node.manager.delivered(granted.lease.id)
    node.clock.advance(24 * 3600)
    async with engine(tmp_path, clock=node.clock) as after:
        node.clock.advance(3600)
        await after.quiet()
        again = await after.manager.hold(request, ANYBODY)
        assert again.lease.id == granted.lease.id
    async with engine(tmp_path, clock=node.clock) as once_more:
        node.clock.advance(3600)
        await once_more.quiet()
        assert list(once_more.leases) == [granted.lease.id]
        process.kill()
        assert await ended(once_more) == "stream-ended"
        await process.wait()


async def test_a_held_lease_does_not_stay_for_another_process_with_the_number_of_its_client(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with engine(tmp_path, "a100-40gb") as node:
        granted = await node.manager.hold(node.request("4G", holder=Holder(name="alice", pid=os.getpid())), ANYBODY)
        node.manager.delivered(granted.lease.id)
    monkeypatch.setattr(Host, "client_lives_since", lambda *_: False)
    async with engine(tmp_path, clock=node.clock) as after:
        node.clock.advance(59)
        await after.quiet()
        assert after.leases, "it might be the client of another process namespace, which attaches again"
        node.clock.advance(1)
        assert await ended(after) == "stream-ended"


async def test_a_held_lease_whose_process_lives_ends_at_its_deadline_after_a_restart(tmp_path: Path) -> None:
    async with engine(tmp_path, "a100-40gb") as node:
        holder = Holder(name="alice", pid=os.getpid())
        granted = await node.manager.hold(node.request("4G", holder=holder, ttl_seconds=600.0), ANYBODY)
        node.manager.delivered(granted.lease.id)
    async with engine(tmp_path, clock=node.clock) as after:
        node.clock.advance(600)
        assert await ended(after) == "expired"


# Who may


async def test_only_the_token_releases(tmp_path: Path) -> None:
    async with engine(tmp_path, "a100-40gb") as node:
        granted, other = await node.acquire("4G"), await node.acquire("4G")
        for token in ("", "wrong", other.token, granted.token + "0"):
            with pytest.raises(RefusedError) as refused:
                await node.manager.release(granted.lease.id, token, ANYBODY)
            assert refused.value.refusal.reason is Reason.WRONG_TOKEN
        assert len(node.leases) == 2
        await node.manager.release(granted.lease.id, granted.token, ANYBODY)
        assert list(node.leases) == [other.lease.id]


async def test_only_the_token_renews(tmp_path: Path) -> None:
    async with engine(tmp_path, "a100-40gb") as node:
        granted = await node.acquire("4G")
        with pytest.raises(RefusedError) as refused:
            await node.manager.renew(granted.lease.id, "wrong", 10.0, ANYBODY)
        assert refused.value.refusal.reason is Reason.WRONG_TOKEN


async def test_an_administrator_needs_no_token(tmp_path: Path) -> None:
    async with engine(tmp_path, "a100-40gb") as node:
        granted = await node.acquire("4G")
        await node.manager.release(granted.lease.id, "", ADMIN)
        assert not node.leases
        assert "released by root" in node.told(EventKind.LEASE_ENDED)[0].message


async def test_a_local_user_releases_their_own_lease_without_token(tmp_path: Path) -> None:
    async with engine(tmp_path, "a100-40gb") as node:
        granted = await node.manager.acquire(node.request("4G"), Caller(uid=1000))
        assert node.leases[granted.lease.id].holder.uid == 1000
        with pytest.raises(RefusedError):
            await node.manager.release(granted.lease.id, "", Caller(uid=1001))
        await node.manager.release(granted.lease.id, "", Caller(uid=1000))
        assert not node.leases


async def test_releasing_again_with_the_token_is_no_error(tmp_path: Path) -> None:
    async with engine(tmp_path, "a100-40gb") as node:
        granted = await node.acquire("4G")
        await asyncio.gather(node.release(granted), node.release(granted))
        await node.release(granted)
        assert len(node.told(EventKind.LEASE_ENDED)) == 1
        with pytest.raises(RefusedError) as refused:
            await node.manager.release(granted.lease.id, "wrong", ANYBODY)
        assert refused.value.refusal.reason is Reason.WRONG_TOKEN
        with pytest.raises(RefusedError) as refused:
            await node.manager.renew(granted.lease.id, granted.token, 5.0, ANYBODY)
        assert refused.value.refusal.reason is Reason.LEASE_ENDED


async def test_an_unknown_lease_is_refused(tmp_path: Path) -> None:
    async with engine(tmp_path, "a100-40gb") as node:
        for caller in (ANYBODY, ADMIN):
            with pytest.raises(RefusedError) as refused:
                await node.manager.release(LeaseId("nonsense"), "token", caller)
            assert refused.value.refusal.reason is Reason.UNKNOWN_LEASE


async def test_tokens_outlive_the_agent(tmp_path: Path) -> None:
    async with engine(tmp_path, "a100-40gb") as node:
        granted = await node.acquire("4G")
    async with engine(tmp_path) as after:
        await after.manager.release(granted.lease.id, granted.token, ANYBODY)
        assert after.instances()[0].state is InstanceState.IDLE


async def test_a_lease_without_a_process_for_an_hour_shows_as_unused(tmp_path: Path) -> None:
    async with engine(tmp_path, "a100-40gb") as node:
        used, unused = await node.acquire("4G"), await node.acquire("4G")
        assert node.manager.snapshot.unused == frozenset()
        node.simulator.occupy(node.where(used))
        node.clock.advance(3600)
        await node.look()
        assert node.manager.snapshot.unused == {unused.lease.id}


# ---------------------------------------------------------------- confirmed, across a restart


async def unconfirmed(node: Node) -> Granted:
    """A lease whose client has not said that it has it."""
    return await node.manager.acquire(node.request("4G"), ANYBODY)


async def test_a_lease_that_is_not_confirmed_ends_under_the_next_agent_too(tmp_path: Path) -> None:
    first = await start(tmp_path, "a100-40gb")
    left, confirmed, late = [await unconfirmed(first) for _ in range(3)]
    await first.manager.confirm(confirmed.lease.id)
    first.clock.advance(1)  # by now it is recorded of those that are not confirmed
    await first.manager.confirm(late.lease.id)
    await killed(first)
    second = await start(tmp_path, clock=first.clock)
    assert second.leases.keys() == {left.lease.id, confirmed.lease.id, late.lease.id}
    second.clock.advance(61)
    await second.until(lambda: left.lease.id not in second.leases)
    # Of this one it is recorded when the agent stops.
    stopped = await unconfirmed(second)
    await second.manager.close()
    third = await start(tmp_path, clock=second.clock)
    assert stopped.lease.id in third.leases
    third.clock.advance(61)
    await third.until(lambda: stopped.lease.id not in third.leases)
    assert third.leases.keys() == {confirmed.lease.id, late.lease.id}
    assert not third.manager._parts.lifecycle._noted
    await third.manager.close()


async def test_renewing_and_ending_take_back_what_was_recorded(tmp_path: Path) -> None:
    async with engine(tmp_path, "a100-40gb") as node:
        renewed, released = await unconfirmed(node), await unconfirmed(node)
        node.clock.advance(1)
        await node.manager.renew(renewed.lease.id, renewed.token, None, ANYBODY)
        await node.manager.release(released.lease.id, released.token, ANYBODY)
    again = await start(tmp_path, clock=node.clock)
    assert again.leases.keys() == {renewed.lease.id}
    assert not again.manager._parts.lifecycle._noted
    again.clock.advance(61)
    await asyncio.sleep(0)
    assert again.leases.keys() == {renewed.lease.id}
    await again.manager.close()

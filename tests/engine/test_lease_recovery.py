"""After the ledger was lost: a lease of before comes back for who has its token, and no other does."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from mig_agent.adapters.ledger.backup import back_up, restore
from mig_agent.adapters.ledger.lease_evidence import evidence_of, read_evidence
from mig_agent.adapters.ledger.store import LEDGER_FILE
from mig_agent.adapters.tokens import KEY_FILE
from mig_agent.core.errors import Reason, RefusedError
from mig_agent.core.events import EventKind
from mig_agent.core.model import Holder, InstanceState, LeaseId, Want
from mig_agent.core.owner import Pod
from mig_agent.engine.callers import Caller
from mig_agent.engine.results import Granted, Recovered
from support.engine import ADMIN, ANYBODY, Node, engine, killed, start
from support.owners import bound

WHOLE = Want(whole_gpu=True, text="a whole GPU")
ALICE = Caller(name="alice", uid=1001)
BOB = Caller(name="bob", uid=1002)
OF_ALICE = Holder(name="alice", tenant="alice", uid=1001)


def lose(folder: Path) -> None:
    """The ledger, as by a file system check."""
    (folder / LEDGER_FILE).write_bytes(b"")


def evidence(folder: Path) -> Path:
    return evidence_of(folder / LEDGER_FILE)


async def recover(node: Node, granted: Granted, caller: Caller = ANYBODY) -> Recovered:
    return await node.manager.recover(granted.lease.id, granted.token, caller)


async def refused(node: Node, granted: Granted, caller: Caller = ANYBODY, token: str = "") -> tuple[Reason, str]:
    """Why it does not come back; nothing is changed by it."""
    before = (node.leases, node.instances(), node.simulator.machine()["gpus"])
    with pytest.raises(RefusedError) as error:
        await node.manager.recover(granted.lease.id, token or granted.token, caller)
    await node.quiet()
    assert (node.leases, node.instances(), node.simulator.machine()["gpus"]) == before
    refusal = error.value.refusal
    assert refusal.message.startswith("cannot recover lease ")
    return refusal.reason, refusal.message


async def test_the_token_brings_the_lease_back_with_its_devices(tmp_path: Path) -> None:
    async with engine(tmp_path, "a100-40gb:2,h100-80gb") as node:
        two = await node.acquire("3g.20gb", "2g.10gb", holder=OF_ALICE, ttl_seconds=3600.0)
        other = await node.acquire("1g.5gb")
        expires_at = node.leases[two.lease.id].expires_at
    lose(tmp_path)
    async with engine(tmp_path) as after:
        assert after.manager.snapshot.recoverable == 2
        found = await recover(after, two, ALICE)
        assert found.anew
        lease = after.leases[two.lease.id]
        assert lease == found.lease
        assert (lease.holder, lease.expires_at, lease.created_at) == (OF_ALICE, expires_at, two.lease.created_at)
        mine = {each.uuid for each in after.instances(InstanceState.LEASED)}
        assert mine == {each.uuid for each in two.devices}
        assert [each.uuid for each in after.instances(InstanceState.FOREIGN)] == [other.devices[0].uuid]
        assert after.manager.snapshot.recoverable == 1
        # Again: nothing happens.
        assert await recover(after, two, ALICE) == Recovered(lease=lease, anew=False)
        assert [each.lease for each in after.told(EventKind.LEASE_RECOVERED)] == [two.lease.id]
    async with engine(tmp_path) as last:  # it is a lease like any other ...
        assert list(last.leases) == [two.lease.id]
        assert last.manager.snapshot.recoverable == 1  # ... and the other one may still come back
        await last.release(two)
        assert len(last.instances(InstanceState.IDLE)) == 2
        assert (await refused(last, two))[0] is Reason.LEASE_ENDED
        assert (await recover(last, other)).anew
        await last.manager.adopt((), (), ADMIN, everything=True)
        assert list(last.leases) == [other.lease.id]


async def test_whole_gpus_come_back(tmp_path: Path) -> None:
    async with engine(tmp_path, "h100-80gb:2", mig_mode=False) as node:
        granted = await node.acquire(WHOLE)
        ended = await node.acquire(WHOLE)
        await node.release(ended)
        later = await node.acquire(WHOLE)
        assert later.devices[0].uuid == ended.devices[0].uuid
    lose(tmp_path)
    async with engine(tmp_path) as after:
        assert (await refused(after, ended))[0] is Reason.UNKNOWN_LEASE
        await recover(after, granted)
        await recover(after, later)
        assert len(after.instances(InstanceState.LEASED)) == 2


async def test_a_held_lease_comes_back_as_an_ordinary_one(tmp_path: Path) -> None:
    node = await start(tmp_path, "a100-40gb")
    granted = await node.manager.hold(node.request("3g.20gb"), ANYBODY)
    node.manager.delivered(granted.lease.id)
    await killed(node)
    lose(tmp_path)
    async with engine(tmp_path) as after:
        found = await recover(after, granted)
        assert "held by a stream" in found.notes[0]
        after.clock.advance(3600)
        await after.quiet()
        assert list(after.leases) == [granted.lease.id]
        assert not after.leases[granted.lease.id].owner.ends_with_stream
        await after.release(granted)


async def test_who_may_recover(tmp_path: Path) -> None:
    async with engine(tmp_path, "a100-40gb") as node:
        granted = await node.acquire("3g.20gb", holder=OF_ALICE)
        another = await node.acquire("2g.10gb", holder=OF_ALICE)
    lose(tmp_path)
    async with engine(tmp_path) as after:
        reason, message = await refused(after, granted, ALICE, token=another.token)
        assert reason is Reason.WRONG_TOKEN
        assert "the token is not its token" in message
        assert (await refused(after, granted, ADMIN, token="f" * 64))[0] is Reason.WRONG_TOKEN
        assert (await refused(after, granted, BOB))[0] is Reason.NOT_PERMITTED
        assert (await recover(after, granted, ADMIN)).anew  # an administrator who was given the token
        assert after.leases[granted.lease.id].holder == OF_ALICE
        with pytest.raises(RefusedError, match="another user's"):
            await recover(after, granted, BOB)
        assert (await recover(after, another, Caller(name="by certificate"))).anew  # no uid is known there


async def test_with_another_key_tokens_are_void(tmp_path: Path) -> None:
    async with engine(tmp_path, "a100-40gb") as node:
        granted = await node.acquire("3g.20gb")
    lose(tmp_path)
    (tmp_path / KEY_FILE).unlink()
    async with engine(tmp_path) as after:
        with pytest.raises(RefusedError) as error:
            await recover(after, granted)
        assert error.value.refusal.reason is Reason.WRONG_TOKEN
        assert "token.key was lost" in error.value.refusal.hint


async def test_an_ended_lease_does_not_take_the_next_holders_instance(tmp_path: Path) -> None:
    async with engine(tmp_path, "a100-40gb") as node:
        ended = await node.acquire("3g.20gb", holder=OF_ALICE)
        await node.release(ended)
        now = await node.acquire("3g.20gb", name="bob")
        assert now.devices[0].uuid == ended.devices[0].uuid
    lose(tmp_path)
    async with engine(tmp_path) as after:
        assert (await refused(after, ended, ALICE))[0] is Reason.UNKNOWN_LEASE
        assert (await recover(after, now)).anew
        assert (await refused(after, ended, ALICE))[0] is Reason.UNKNOWN_LEASE


async def test_what_was_destroyed_meanwhile_does_not_come_back_even_under_its_uuid(tmp_path: Path) -> None:
    async with engine(tmp_path, "a100-40gb") as node:
        running = await node.acquire("3g.20gb")
        stopped = await node.acquire("1g.5gb")
        partly = await node.acquire("1g.5gb", "1g.5gb")
    lose(tmp_path)
    node.simulator.destroy_foreign(node.where(stopped))  # while no agent runs
    async with engine(tmp_path) as after:
        assert await refused(after, stopped) == (
            Reason.LEASE_ENDED,
            f"cannot recover lease {stopped.lease.id}: its device {stopped.devices[0].uuid} is gone",
        )
        after.simulator.destroy_foreign(after.where(running))  # while one runs, which has not looked yet
        assert "is gone" in (await refused_and_noticed(after, running))[1]
        after.simulator.destroy_foreign(after.where(partly, 1))
        assert "is gone" in (await refused_and_noticed(after, partly))[1]
        made, _ = after.simulator.create_foreign(0, "3g.20gb", start=running.devices[0].placement.start)  # type: ignore[union-attr] # it has one
        assert made == running.devices[0].gpu_instance_id
        await after.look()
        assert running.devices[0].uuid in {each.uuid for each in after.instances(InstanceState.FOREIGN)}
        assert "is gone" in (await refused(after, running))[1]
    async with engine(tmp_path) as last:  # nor after a restart
        assert "is gone" in (await refused(last, running))[1]
        assert "is gone" in (await refused(last, partly))[1]


async def refused_and_noticed(node: Node, granted: Granted) -> tuple[Reason, str]:
    with pytest.raises(RefusedError) as error:
        await recover(node, granted)
    assert granted.lease.id not in node.leases
    return error.value.refusal.reason, error.value.refusal.message


async def test_what_was_adopted_does_not_come_back(tmp_path: Path) -> None:
    async with engine(tmp_path, "a100-40gb") as node:
        first = await node.acquire("3g.20gb")
        second = await node.acquire("2g.10gb")
        third = await node.acquire("1g.5gb")
    lose(tmp_path)
    async with engine(tmp_path) as after:
        await after.manager.adopt((), (first.devices[0].uuid, third.devices[0].uuid), ADMIN)
        assert (await refused(after, first))[0] is Reason.LEASE_ENDED
        again = await after.acquire("3g.20gb", name="bob")
        assert again.devices[0].uuid == first.devices[0].uuid
        assert "was taken over meanwhile" in (await refused(after, first))[1]
        # Given up again: it is foreign under its UUID once more, and still not the first one's.
        await after.release(again)
        await after.manager.reclaim((), ADMIN)
        after.simulator.create_foreign(0, "3g.20gb", start=first.devices[0].placement.start)  # type: ignore[union-attr] # it has one
        await after.look()
        assert "was taken over meanwhile" in (await refused(after, first))[1]
    async with engine(tmp_path) as last:
        assert "was taken over meanwhile" in (await refused(last, first))[1]
        assert "was taken over meanwhile" in (await refused(last, third))[1]
        assert (await recover(last, second)).anew


async def test_twice_at_once_and_against_an_administrator(tmp_path: Path) -> None:
    async with engine(tmp_path, "a100-40gb:2") as node:
        granted = [await node.acquire("3g.20gb", gpus=(gpu,)) for gpu in ("0", "1")]
        wide = await node.acquire("2g.10gb", "2g.10gb", gpus=("0",))
    lose(tmp_path)
    async with engine(tmp_path) as after:
        both = await asyncio.gather(*(recover(after, granted[0]) for _ in range(8)))
        assert sorted(each.anew for each in both) == [False] * 7 + [True]
        assert len(after.told(EventKind.LEASE_RECOVERED)) == 1
        uuid = granted[1].devices[0].uuid
        found, adopted = await asyncio.gather(
            recover(after, granted[1]), after.manager.adopt((), (uuid,), ADMIN), return_exceptions=True
        )
        assert isinstance(found, Recovered) != bool(adopted)
        await recover(after, wide)
        states = {each.uuid: each.lease for each in after.instances() if each.state is InstanceState.LEASED}
        assert [states[each.uuid] for each in wide.devices] == [wide.lease.id] * 2


async def test_a_reboot_leaves_nothing_to_come_back(tmp_path: Path) -> None:
    async with engine(tmp_path, "h100-80gb:2", mig_mode=False) as node:
        early = await node.acquire(WHOLE)
        late = await node.acquire(WHOLE)
    lose(tmp_path)
    node.simulator.reboot()
    async with engine(tmp_path) as after:  # the ledger was lost with the power
        reason, message = await refused(after, early)
        assert reason is Reason.LEASE_ENDED
        assert "rebooted" in message
    node.simulator.reboot()
    async with engine(tmp_path) as last:
        assert last.manager.snapshot.doubt is None
        assert (await refused(last, late))[0] is Reason.LEASE_ENDED


async def test_a_deadline_goes_on(tmp_path: Path) -> None:
    async with engine(tmp_path, "a100-40gb") as node:
        granted = await node.acquire("3g.20gb", ttl_seconds=100.0)
        renewed = await node.acquire("2g.10gb", ttl_seconds=10.0)
        await node.manager.renew(renewed.lease.id, renewed.token, None, ANYBODY)
        clock = node.clock
    lose(tmp_path)
    async with engine(tmp_path, clock=clock) as after:
        await recover(after, granted)
        await recover(after, renewed)
        after.clock.advance(101)
        await after.until(lambda: list(after.leases) == [renewed.lease.id])
    lose(tmp_path)
    clock.advance(1)
    async with engine(tmp_path, clock=clock) as last:
        assert (await refused(last, granted))[0] is Reason.UNKNOWN_LEASE  # its end is known
        assert (await recover(last, renewed)).anew


async def test_of_a_deadline_that_has_passed(tmp_path: Path) -> None:
    async with engine(tmp_path, "a100-40gb") as node:
        granted = await node.acquire("3g.20gb", ttl_seconds=100.0)
        clock = node.clock
    lose(tmp_path)
    clock.advance(101)
    async with engine(tmp_path, clock=clock) as after:
        assert "its time is over" in (await refused(after, granted))[1]


async def test_a_second_damage_forgets_nothing_of_the_first(tmp_path: Path) -> None:
    async with engine(tmp_path, "a100-40gb:2") as node:
        first = await node.acquire("3g.20gb", gpus=("0",))
        kept = await node.acquire("2g.10gb", gpus=("0",))
    lose(tmp_path)
    async with engine(tmp_path) as node:
        await recover(node, kept)
        second = await node.acquire("3g.20gb", gpus=("1",))
        ended = await node.acquire("1g.5gb", gpus=("1",))
        await node.release(ended)
    lose(tmp_path)
    async with engine(tmp_path) as after:
        assert after.manager.snapshot.recoverable == 3
        for each in (first, second, kept):
            assert (await recover(after, each)).anew
        assert (await refused(after, ended))[0] is Reason.UNKNOWN_LEASE


async def test_after_a_restored_backup_what_was_leased_since_comes_back(tmp_path: Path) -> None:
    node = await start(tmp_path, "a100-40gb:2")
    before = await node.acquire("3g.20gb", gpus=("0",))
    stale = await node.acquire("3g.20gb", gpus=("1",))
    back_up(tmp_path / LEDGER_FILE, tmp_path / "backup")
    await node.release(stale)
    since = await node.acquire("3g.20gb", gpus=("1",))
    assert since.devices[0].uuid == stale.devices[0].uuid
    more = await node.acquire("2g.10gb", gpus=("0",))
    await killed(node)
    restore(tmp_path / LEDGER_FILE, tmp_path / "backup")
    async with engine(tmp_path) as after:
        assert set(after.leases) == {before.lease.id, stale.lease.id}
        assert not (await recover(after, before)).anew
        assert (await recover(after, more)).anew
        assert (await refused(after, since))[0] is Reason.IN_USE  # the backup says that it is another's
        await after.release(stale)
        assert (await recover(after, since)).anew
        assert set(after.leases) == {before.lease.id, more.lease.id, since.lease.id}


async def test_a_pods_lease_comes_back_with_what_is_left_of_it(tmp_path: Path) -> None:
    pod = Pod(namespace="team", name="train", uid="7f2c")
    async with engine(tmp_path, "a100-40gb:2", follows_pods=True) as node:
        holder = Holder(name="pod team/train", tenant="namespace team")
        granted = await node.acquire("3g.20gb", "1g.5gb", holder=holder, pod=pod)
        await node.manager.bind(granted.lease.id, bound(pod))
        node.simulator.destroy_foreign(node.where(granted, 1))
        await node.look()
        assert list(node.leases) == [granted.lease.id]
    lose(tmp_path)
    async with engine(tmp_path, follows_pods=True) as after:
        found = await recover(after, granted)
        assert "had been lost" in found.notes[0]
        assert after.leases[granted.lease.id].owner.is_bound
        assert [each.uuid for each in after.instances(InstanceState.LEASED)] == [granted.devices[0].uuid]
    async with engine(tmp_path, follows_pods=True) as last:
        assert list(last.leases) == [granted.lease.id]


async def test_a_request_that_was_asked_again_meanwhile_is_no_harm(tmp_path: Path) -> None:
    async with engine(tmp_path, "a100-40gb") as node:
        granted = await node.acquire("3g.20gb", request_id="mine")
    lose(tmp_path)
    async with engine(tmp_path) as after:
        new = await after.acquire("3g.20gb", request_id="mine")
        assert (await recover(after, granted)).anew
        assert set(after.leases) == {granted.lease.id, new.lease.id}


def gone(path: Path) -> None:
    path.unlink()


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-30])


def flipped_head(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[40] ^= 1
    path.write_bytes(data)


def folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize("damage", [gone, cut, flipped_head, folder])
async def test_without_its_evidence_no_lease_comes_back(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    async with engine(tmp_path, "a100-40gb") as node:
        granted = await node.acquire("3g.20gb")
    lose(tmp_path)
    damage(evidence(tmp_path))
    async with engine(tmp_path) as after:
        assert (await refused(after, granted))[0] is Reason.UNKNOWN_LEASE
        assert after.manager.snapshot.recoverable == 0
        # The one that takes its place serves again.
        new = await after.acquire("1g.5gb")
    found = read_evidence(evidence(tmp_path))
    assert found is not None
    assert [each.lease.id for each in found.live] == [new.lease.id]


async def test_an_older_copy_of_the_evidence_is_not_believed(tmp_path: Path) -> None:
    async with engine(tmp_path, "a100-40gb") as node:
        ended = await node.acquire("3g.20gb", name="alice")
        copy = evidence(tmp_path).read_bytes()
        await node.release(ended)
        await node.acquire("3g.20gb", name="bob")
    lose(tmp_path)
    evidence(tmp_path).write_bytes(copy)
    async with engine(tmp_path) as after:
        assert (await refused(after, ended))[0] is Reason.UNKNOWN_LEASE


async def test_an_unknown_lease_or_a_whole_ledger(tmp_path: Path) -> None:
    async with engine(tmp_path, "a100-40gb") as node:
        granted = await node.acquire("3g.20gb")
        assert not (await recover(node, granted)).anew
        await node.release(granted)
        assert (await refused(node, granted))[0] is Reason.LEASE_ENDED
        with pytest.raises(RefusedError, match="not its token"):
            await node.manager.recover(LeaseId("nothing"), granted.token, ADMIN)

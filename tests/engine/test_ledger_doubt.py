"""After the ledger was lost or restored: what it does not account for is nobody's to give or destroy."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from mig_agent.adapters.ledger.backup import back_up, restore
from mig_agent.adapters.ledger.commit_counter import SUFFIX
from mig_agent.adapters.ledger.store import LEDGER_FILE
from mig_agent.core.errors import Reason, RefusedError
from mig_agent.core.events import EventKind
from mig_agent.core.model import InstanceState, Want
from support.engine import ADMIN, ANYBODY, CREATE_COMPUTE, DESTROY, Node, engine, killed, start

WHOLE = Want(whole_gpu=True, text="a whole GPU")


def lose(folder: Path) -> None:
    """The ledger, as by a file system check."""
    (folder / LEDGER_FILE).write_bytes(b"")


def kept_as(node: Node) -> str:
    """Where the former ledger is; empty when nothing is in doubt."""
    doubt = node.manager.snapshot.doubt
    return "" if doubt is None else doubt.kept_as


async def refused(node: Node, *wants: str | Want, **fields: object) -> Reason:
    with pytest.raises(RefusedError) as error:
        await node.acquire(*wants, **fields)
    return error.value.refusal.reason


async def test_instances_of_a_lost_ledger_are_neither_leased_nor_destroyed(tmp_path: Path) -> None:
    node = await start(tmp_path, "a100-40gb:2")
    await node.acquire("3g.20gb", gpus=("0",))
    await node.release(await node.acquire("2g.10gb", gpus=("0",)))
    node.simulator.hang(CREATE_COMPUTE, gpu=1)
    making = node.start(node.acquire("3g.20gb", gpus=("1",)))
    await node.stuck(1)
    making.cancel()
    node.simulator.clear()
    await killed(node)
    lose(tmp_path)
    async with engine(tmp_path, foreign="adopt") as after:
        there = after.simulator.machine()["gpus"]
        assert {each.state for each in after.instances()} == {InstanceState.FOREIGN}
        assert len(after.instances()) == sum(len(each["instances"]) for each in there) == 3
        for asked in ("3g.20gb", "7g.40gb"):
            await refused(after, asked, gpus=("0",))
        await after.look()
        await after.manager.reclaim((), ADMIN)
        assert {each.state for each in after.instances()} == {InstanceState.FOREIGN}
        assert after.simulator.machine()["gpus"] == there
        assert after.simulator.calls(DESTROY) == 0
        (told,) = [
            each for each in await after.manager.history.events(0.0, None, 100) if each.kind == "ledger-quarantined"
        ]
        assert f"{LEDGER_FILE}.damaged-1" in told.message
        assert "its file is empty" in told.message


async def test_a_whole_gpu_that_may_be_leased_is_not_leased_again(tmp_path: Path) -> None:
    async with engine(tmp_path, "h100-80gb", mig_mode=False) as node:
        await node.acquire(WHOLE)
    lose(tmp_path)
    async with engine(tmp_path) as after:
        await refused(after, WHOLE)
        await after.look()
        await refused(after, WHOLE)
        with pytest.raises(RefusedError):
            await after.manager.set_mig_mode("0", True, ADMIN)
        (whole,) = after.instances()
        assert [each.state for each in await after.manager.adopt((), (whole.uuid,), ADMIN)] == [InstanceState.IDLE]
        await after.acquire(WHOLE)


async def test_it_goes_on_over_restarts_until_an_administrator_settles_it(tmp_path: Path) -> None:
    async with engine(tmp_path, "a100-40gb:2,h100-80gb") as node:
        first = await node.acquire("3g.20gb", gpus=("0",))
        await node.acquire("2g.10gb", gpus=("1",))
    lose(tmp_path)
    async with engine(tmp_path) as after:
        new = await after.acquire("1g.5gb", gpus=("0",))
        await after.release(new)
    async with engine(tmp_path, foreign="adopt") as again:
        assert kept_as(again).endswith("damaged-1")
        assert len(again.instances(InstanceState.FOREIGN)) == 2
        assert len(again.instances(InstanceState.IDLE)) == 1  # made since
        by_uuid = await again.manager.adopt((), (first.devices[0].uuid,), ADMIN)
        assert [each.uuid for each in by_uuid] == [first.devices[0].uuid]
        assert kept_as(again)
        assert (await again.acquire("3g.20gb")).devices[0].uuid == first.devices[0].uuid
        with pytest.raises(RefusedError, match="no foreign instance"):
            await again.manager.adopt((), ("MIG-unknown",), ADMIN)
        assert len(await again.manager.adopt((), (), ADMIN, everything=True)) == 1
        assert not kept_as(again)
        await again.quiet()
        assert EventKind.LEDGER_RECOVERED in again.kinds()
    async with engine(tmp_path) as last:
        assert last.manager.snapshot.doubt is None
        assert not last.instances(InstanceState.FOREIGN)
        assert len(last.leases) == 1


async def test_what_is_adopted_in_use_is_blocked_until_it_is_not(tmp_path: Path) -> None:
    async with engine(tmp_path, "a100-40gb") as node:
        granted = await node.acquire("3g.20gb")
        pid = node.simulator.occupy(node.where(granted))
    lose(tmp_path)
    async with engine(tmp_path) as after:
        (adopted,) = await after.manager.adopt(("0",), (), ADMIN)
        assert adopted.state is InstanceState.BLOCKED
        after.simulator.vacate(pid)
        after.clock.advance(120)
        await after.until(lambda: after.instances(InstanceState.IDLE))


async def test_a_reboot_settles_it(tmp_path: Path) -> None:
    async with engine(tmp_path, "a100-40gb") as node:
        await node.acquire("3g.20gb")
    lose(tmp_path)
    async with engine(tmp_path) as after:
        assert after.manager.snapshot.doubt is not None
        simulator = after.simulator
    simulator.reboot()
    async with engine(tmp_path) as last:
        assert last.manager.snapshot.doubt is None
        assert last.instances() == []


async def test_no_generation_is_used_twice(tmp_path: Path) -> None:
    async with engine(tmp_path, "a100-40gb") as node:
        granted = await node.acquire("1g.5gb")
        revision = node.manager.snapshot.view.revision
    lose(tmp_path)
    async with engine(tmp_path) as after:
        assert (await after.acquire("1g.5gb")).lease.instances[0] > granted.lease.instances[0]
        assert after.manager.snapshot.view.revision > revision


# An older ledger that is put back knowingly


async def test_what_a_restored_ledger_calls_idle_may_be_leased_since(tmp_path: Path) -> None:
    node = await start(tmp_path, "a100-40gb:2,h100-80gb")
    kept = await node.acquire("3g.20gb", gpus=("0",), request_id="kept")
    idle = await node.acquire("2g.10gb", gpus=("0",))
    await node.release(idle)
    ended = await node.acquire("3g.20gb", gpus=("1",))
    assert back_up(tmp_path / LEDGER_FILE, tmp_path / "backup") == 2
    later = await node.acquire("2g.10gb", gpus=("0",))  # the idle one
    assert later.devices[0].uuid == idle.devices[0].uuid
    await node.release(ended)
    taken_over = await node.acquire("3g.20gb", gpus=("1",))
    assert taken_over.devices[0].uuid == ended.devices[0].uuid
    await node.acquire("1g.5gb", gpus=("1",))
    await killed(node)

    standing, aside = restore(tmp_path / LEDGER_FILE, tmp_path / "backup")
    assert (standing, aside.name) == (2, f"{LEDGER_FILE}.replaced-1")
    async with engine(tmp_path, foreign="adopt") as after:
        doubt = after.manager.snapshot.doubt
        assert doubt is not None
        assert doubt.restored
        assert set(after.leases) == {kept.lease.id, ended.lease.id}
        assert sorted(each.uuid for each in after.instances(InstanceState.LEASED)) == sorted(
            [kept.devices[0].uuid, ended.devices[0].uuid]
        )
        assert len(after.instances(InstanceState.FOREIGN)) == 2
        # One that had ended since: its instance is another's by now, whatever becomes of the lease.
        await after.release(ended)
        assert len(after.instances(InstanceState.FOREIGN)) == 3
        await refused(after, "3g.20gb", gpus=("1",))
        await after.manager.reclaim((), ADMIN)
        assert len(after.instances(InstanceState.FOREIGN)) == 3
        new = await after.acquire("1g.5gb", gpus=("0",))
        await after.release(new)
        assert [each.uuid for each in after.instances(InstanceState.IDLE)] == [new.devices[0].uuid]
        # The same answer to the same request, as before.
        again = await after.manager.acquire(after.request("3g.20gb", gpus=("0",), request_id="kept"), ANYBODY)
        assert (again.lease.id, again.token) == (kept.lease.id, kept.token)
    async with engine(tmp_path) as last:  # it stays so over a restart
        assert len(last.instances(InstanceState.FOREIGN)) == 3
        assert list(last.leases) == [kept.lease.id]
        assert len(await last.manager.adopt((), (), ADMIN, everything=True)) == 3
        await last.release(kept)
        assert not last.instances(InstanceState.FOREIGN)


async def test_a_half_made_instance_of_a_restored_ledger_is_not_destroyed(tmp_path: Path) -> None:
    """What it knows as leased may have been destroyed since, and is being made anew by somebody else."""
    node = await start(tmp_path, "a100-40gb")
    granted = await node.acquire("3g.20gb")
    back_up(tmp_path / LEDGER_FILE, tmp_path / "backup")
    await killed(node)
    restore(tmp_path / LEDGER_FILE, tmp_path / "backup")
    node.simulator.destroy_foreign(node.where(granted))
    again, _ = node.simulator.create_foreign(0, "3g.20gb", start=4, with_compute=False)
    assert again == granted.devices[0].gpu_instance_id
    async with engine(tmp_path) as after:
        assert [each.state for each in after.instances()] == [InstanceState.FOREIGN]
        assert not after.leases
        assert after.simulator.calls(DESTROY) == 0


async def test_a_copy_that_was_put_back_by_hand_is_no_restored_ledger(tmp_path: Path) -> None:
    async with engine(tmp_path, "a100-40gb") as node:
        await node.acquire("3g.20gb")
    shutil.copy(tmp_path / LEDGER_FILE, tmp_path / "copy")
    async with engine(tmp_path) as node:
        await node.acquire("2g.10gb")
    shutil.copy(tmp_path / "copy", tmp_path / LEDGER_FILE)
    async with engine(tmp_path) as after:
        assert not after.leases
        assert {each.state for each in after.instances()} == {InstanceState.FOREIGN}
        doubt = after.manager.snapshot.doubt
        assert doubt is not None
        assert "commits are missing" in doubt.why
    # But it can be restored, knowingly, from where it is kept.
    assert (tmp_path / f"{LEDGER_FILE}.damaged-1{SUFFIX}").exists()
    assert restore(tmp_path / LEDGER_FILE, tmp_path / f"{LEDGER_FILE}.damaged-1")[0] == 1
    async with engine(tmp_path) as last:
        assert len(last.leases) == 1
        assert len(last.instances(InstanceState.FOREIGN)) == 1

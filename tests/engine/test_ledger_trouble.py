"""A ledger that cannot be written: nothing is given that is not recorded, and what stands stays."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from mig_agent.adapters.ledger import store as ledger_module
from mig_agent.adapters.ledger.store import LEDGER_FILE
from mig_agent.core.errors import Reason, RefusedError
from mig_agent.core.events import EventKind
from mig_agent.core.model import InstanceState
from support.engine import ADMIN, ANYBODY, Node, engine, killed, start


@contextmanager
def full_disk(node: Node, words: str = "database or disk is full") -> Iterator[None]:
    """Commits fail as on a full disk, or another that cannot be written."""
    original = node.ledger._commit

    def fails(batch: object) -> None:  # noqa: ARG001 -- as the ledger calls it
        raise sqlite3.OperationalError(words)

    node.ledger._commit = fails  # type: ignore[method-assign] # what the disk would do
    try:
        yield
    finally:
        node.ledger._commit = original  # type: ignore[method-assign] # as a full disk would have it


@pytest.mark.parametrize(
    "words", ["database or disk is full", "attempt to write a readonly database", "disk I/O error", "locking protocol"]
)
async def test_no_unrecorded_lease_is_granted(tmp_path: Path, words: str) -> None:
    async with engine(tmp_path, "a100-40gb") as node:
        idle = await node.acquire("1g.5gb")
        await node.release(idle)
        kept = await node.acquire("2g.10gb")
        with full_disk(node, words):
            for asked in ("1g.5gb", "3g.20gb"):
                with pytest.raises(RefusedError) as refused:
                    await node.acquire(asked)
                assert refused.value.refusal.reason is Reason.LEDGER_FAILED
                assert words in refused.value.refusal.message
            assert list(node.leases) == [kept.lease.id]
            assert words in node.manager.snapshot.ledger_error
            assert node.manager.published.ledger_error == node.manager.snapshot.ledger_error
            assert node.simulator.machine()["gpus"][0]["instances"][2:] == []
            assert node.kinds().count(EventKind.LEDGER_FAILED) == 1
        assert (await node.acquire("1g.5gb")).devices[0].reused
        assert node.manager.snapshot.ledger_error == node.manager.published.ledger_error == ""
        await node.quiet()
        assert node.kinds().count(EventKind.LEDGER_RECOVERED) == 1


async def test_a_release_that_cannot_be_recorded_is_refused(tmp_path: Path) -> None:
    async with engine(tmp_path, "a100-40gb") as node:
        granted = await node.acquire("1g.5gb")
        with full_disk(node):
            with pytest.raises(RefusedError) as refused:
                await node.release(granted)
            assert refused.value.refusal.reason is Reason.LEDGER_FAILED
            with pytest.raises(RefusedError):
                await node.manager.renew(granted.lease.id, granted.token, 5.0, ANYBODY)
            with pytest.raises(RefusedError):
                await node.manager.cordon("0", True, "", ADMIN)
            assert granted.lease.id in node.leases
        await node.release(granted)
        assert not node.leases


async def test_a_deadline_that_could_not_be_recorded_is_kept_later(tmp_path: Path) -> None:
    async with engine(tmp_path, "a100-40gb") as node:
        await node.acquire("1g.5gb", ttl_seconds=100.0)
        with full_disk(node):
            node.clock.advance(100)
            await node.quiet()
            assert len(node.leases) == 1
        node.clock.advance(5)
        await node.until(lambda: not node.leases)


@pytest.mark.parametrize("commits", range(4))
async def test_the_disk_fills_up_in_the_middle_of_a_request(tmp_path: Path, commits: int) -> None:
    """Each commit of a request that destroys and creates fails in turn, then the agent is killed and comes back."""
    node = await start(tmp_path, "a100-40gb")
    await node.release(await node.acquire("1g.5gb"))
    original = node.ledger._commit
    left = [commits]

    def fails_in_the_end(batch: object) -> None:
        if left[0] == 0:
            raise sqlite3.OperationalError("database or disk is full")
        left[0] -= 1
        original(batch)  # type: ignore[arg-type] # handed on as it came

    node.ledger._commit = fails_in_the_end  # type: ignore[method-assign] # what the disk would do
    if commits < 3:  # two intents and the lease
        answered = None
        with pytest.raises(RefusedError) as refused:
            await node.acquire("7g.40gb")
        assert refused.value.refusal.reason is Reason.LEDGER_FAILED
    else:
        answered = await node.acquire("7g.40gb")
    await killed(node)
    async with engine(tmp_path) as after:
        there = after.simulator.machine()["gpus"][0]["instances"]
        assert len(there) == len(after.instances())
        assert list(after.leases) == ([answered.lease.id] if answered else [])
        assert all(each.state in {InstanceState.IDLE, InstanceState.LEASED} for each in after.instances())


async def test_what_was_made_while_the_ledger_failed_is_recorded_with_its_next_lease(tmp_path: Path) -> None:
    node = await start(tmp_path, "a100-40gb")
    original = node.ledger._commit
    left = [1]  # the intent is recorded, the lease is not

    def fails_in_the_end(batch: object) -> None:
        if left[0] == 0:
            raise sqlite3.OperationalError("database or disk is full")
        left[0] -= 1
        original(batch)  # type: ignore[arg-type] # handed on as it came

    node.ledger._commit = fails_in_the_end  # type: ignore[method-assign] # what the disk would do
    with pytest.raises(RefusedError):
        await node.acquire("1g.5gb")
    await node.until(lambda: node.instances(InstanceState.IDLE))
    node.ledger._commit = original  # type: ignore[method-assign] # as a full disk would have it
    granted = await node.acquire("1g.5gb")
    assert granted.devices[0].reused
    await killed(node)
    async with engine(tmp_path) as after:
        assert list(after.leases) == [granted.lease.id]
        assert after.instances()[0].uuid == granted.devices[0].uuid


@pytest.mark.parametrize("what", ["", "-wal", "-commits", "replaced", "all"])
async def test_a_ledger_that_is_removed_under_the_agent_is_rewritten(tmp_path: Path, what: str) -> None:
    node = await start(tmp_path, "a100-40gb")
    before = await node.acquire("1g.5gb")
    path = tmp_path / LEDGER_FILE
    if what == "replaced":
        other = tmp_path / "other"
        other.write_bytes(b"somebody's")
        other.rename(path)
    else:
        for ending in ("", "-wal", "-shm", "-commits") if what == "all" else (what,):
            path.with_name(path.name + ending).unlink()
    unnoticed = await node.acquire("1g.5gb")
    node.clock.advance(2)
    await node.until(lambda: node.told(EventKind.LEDGER_FAILED))
    (told,) = node.told(EventKind.LEDGER_FAILED)
    assert "was replaced" in told.message if what == "replaced" else "was removed" in told.message
    after = await node.acquire("1g.5gb")
    assert node.manager.snapshot.ledger_error == ""
    node.clock.advance(2)
    await node.quiet()
    assert len(node.told(EventKind.LEDGER_FAILED)) == 1
    await killed(node)
    async with engine(tmp_path) as again:
        assert again.manager.snapshot.doubt is None
        assert set(again.leases) == {each.lease.id for each in (before, unnoticed, after)}
    if what == "replaced":
        assert (tmp_path / f"{LEDGER_FILE}.replaced-1").read_bytes() == b"somebody's"


async def test_no_lease_is_granted_if_the_ledger_cannot_be_rewritten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = await start(tmp_path, "a100-40gb")
    before = await node.acquire("1g.5gb")

    def fails(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(ledger_module, "replace_ledger", fails)
        (tmp_path / LEDGER_FILE).unlink()
        node.clock.advance(2)
        await node.until(lambda: node.manager.snapshot.ledger_error)
        with pytest.raises(RefusedError) as refused:
            await node.acquire("1g.5gb")
        assert refused.value.refusal.reason is Reason.LEDGER_FAILED
    after = await node.acquire("1g.5gb")
    await killed(node)
    async with engine(tmp_path) as again:
        assert set(again.leases) == {before.lease.id, after.lease.id}


async def test_a_failed_commit_is_not_taken_for_a_ledger_that_was_removed(tmp_path: Path) -> None:
    """It closes the file, and with it SQLite removes the log."""
    async with engine(tmp_path, "a100-40gb") as node:
        await node.acquire("1g.5gb")
        with full_disk(node):
            with pytest.raises(RefusedError):
                await node.acquire("1g.5gb")
            for _ in range(3):
                node.clock.advance(2)
                await node.quiet()
        await node.acquire("1g.5gb")
        await node.quiet()
        assert not any("removed" in each.message for each in node.told(EventKind.LEDGER_FAILED))

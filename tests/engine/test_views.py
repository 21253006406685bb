"""The node as everybody sees it: built on the event loop, finished, and the only thing for other threads."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from mig_agent.core.errors import RefusedError
from mig_agent.core.model import Gpu, InstanceState, Want
from mig_agent.engine import state as state_module
from mig_agent.engine.context import EngineSettings
from mig_agent.engine.manager import Manager
from mig_agent.engine.results import Published
from mig_agent.engine.state import CheckedState, GpuRecord, State
from support.engine import ADMIN, engine


async def test_the_engine_is_not_used_on_another_thread(tmp_path: Path) -> None:
    async with engine(tmp_path, "a100-40gb") as node:
        manager, state = node.manager, node.manager._context.state
        for use in (
            lambda: manager.snapshot,
            lambda: manager.plan((node.request("4G"),)),
            lambda: manager.on_view.append(lambda: None),
            lambda: state.working_view,
            lambda: state.gpus,
            lambda: state.touch(node.gpu().uuid),
            lambda: setattr(state, "revision", 0),
        ):
            with pytest.raises(AssertionError, match="belongs to the event loop, and is used on thread"):
                await asyncio.to_thread(use)


async def test_the_view_is_for_any_thread(tmp_path: Path) -> None:
    async with engine(tmp_path, "a100-40gb") as node:
        granted = await node.acquire("4G")
        view = await asyncio.to_thread(lambda: node.manager.view)
        assert view is node.manager.view is node.manager.published.view is node.manager.snapshot.view
        state = node.manager._context.state
        assert view is await asyncio.to_thread(lambda: state.view)
        assert list(view.leases) == [granted.lease.id]


async def test_the_check_is_off_by_default(tmp_path: Path) -> None:
    assert not EngineSettings().check_threads
    async with engine(tmp_path, "a100-40gb", check_threads=False) as node:
        assert type(node.manager) is Manager
        assert type(node.manager._context.state) is State


async def test_only_changed_gpus_are_rebuilt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with engine(tmp_path, "a100-40gb:2,h100-80gb:1") as node:
        await node.quiet()
        built: list[int] = []
        frozen = state_module._frozen

        def counted(record: GpuRecord, *rest: object) -> Gpu:
            built.append(record.index)
            return frozen(record, *rest)  # type: ignore[arg-type] # as it was called

        monkeypatch.setattr(state_module, "_frozen", counted)
        before = node.manager.view
        granted = await node.acquire("4G", gpus=("1",))
        after = node.manager.view
        assert after.revision > before.revision
        assert [one is other for one, other in zip(before.gpus, after.gpus, strict=True)] == [True, False, True]
        assert set(built) == {1}
        built.clear()
        await node.release(granted)
        assert built == [1], "for one change of one GPU"
        assert node.manager.view.leases == {}
        leases = node.manager.view.leases
        await node.manager.cordon("0", on=True, reason="", caller=ADMIN)
        assert node.manager.view.leases is leases, "which nothing has changed"
        await node.quiet()
        assert built == [1, 0]


async def test_one_batch_of_the_ledger_builds_one_view(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with engine(tmp_path, "a100-40gb:1") as node:
        first, second = await node.acquire("1g.5gb"), await node.acquire("1g.5gb")
        state, journal = node.manager._context.state, node.manager._context.journal
        revisions: list[int] = []
        publish = CheckedState.publish

        def counted(self: CheckedState, revision: int) -> None:
            revisions.append(revision)
            publish(self, revision)

        batches: list[int] = []
        settle = journal._settle

        def counted_batch(batch: object, error: object) -> None:
            batches.append(1)
            settle(batch, error)  # type: ignore[arg-type] # as it was called

        monkeypatch.setattr(CheckedState, "publish", counted)
        monkeypatch.setattr(journal, "_settle", counted_batch)
        await asyncio.gather(node.release(first), node.release(second))
        await node.quiet()
        assert len(revisions) == len(batches)
        assert revisions[-1] == state.revision == node.manager.view.revision


async def test_a_view_does_not_change(tmp_path: Path) -> None:
    async with engine(tmp_path, "a100-40gb:1") as node:
        granted = await node.acquire("4G")
        view = node.manager.view
        seen = (view.gpus, dict(view.leases), view.revision)
        await node.release(granted)
        await node.acquire("7g.40gb")
        assert (view.gpus, dict(view.leases), view.revision) == seen


async def test_an_unrecorded_change_is_published_at_once(tmp_path: Path) -> None:
    """Before the ledger knows: a caller that was refused for it sees why."""
    async with engine(tmp_path, "h100-80gb", mig_mode=False) as node:
        node.simulator.occupy("0", name="python train.py")
        with pytest.raises(RefusedError):
            await node.acquire(Want(whole_gpu=True))
        assert [each.state for each in node.manager.view.gpus[0].instances] == [InstanceState.BLOCKED]
        assert node.manager.published.view is node.manager.view


async def test_a_gpu_with_a_new_index_is_published(tmp_path: Path) -> None:
    async with engine(tmp_path, "a100-40gb:1,h100-80gb:1") as node:
        state, journal = node.manager._context.state, node.manager._context.journal
        a100, h100 = (each.uuid for each in node.manager.view.gpus)
        state.renumber(a100, 7)
        journal.republish()
        await node.quiet()
        assert [(each.index, each.uuid) for each in node.manager.view.gpus] == [(1, h100), (7, a100)]


async def test_a_changed_device_node_or_layout_is_published(tmp_path: Path) -> None:
    async with engine(tmp_path, "a100-40gb:1") as node:
        parts = node.manager._parts
        record = node.manager._context.state.gpus[node.gpu().uuid]
        observed = await asyncio.to_thread(node.driver.observe_gpu, record.uuid)
        parts.reconciler.take_facts(record, replace(observed, minor=5))
        assert node.gpu().minor == 5
        revision = node.manager.view.revision
        await node.quiet()
        assert node.manager.view.revision > revision
        # A bad reading of the layout, which a second one after a grave finding puts right.
        record.layout = replace(record.layout, memory_slices=4)
        state = node.manager._context.state
        state.touch(record.uuid)
        node.manager._context.journal.republish()
        assert node.gpu().layout.memory_slices == 4
        granted = await node.acquire("4G")
        node.simulator.destroy_foreign(node.where(granted))
        await node.look()
        await node.quiet()
        assert node.gpu().layout.memory_slices == 8


async def test_published_facts_are_readable_on_any_thread(tmp_path: Path) -> None:
    async with engine(tmp_path, "a100-40gb:1") as node:

        async def shown() -> Published:
            return await asyncio.to_thread(lambda: node.manager.published)

        first = await node.acquire("7g.40gb", name="alice")
        waiting = [node.start(node.acquire("7g.40gb", wait_seconds=1e6)) for _ in range(3)]
        await node.until(lambda: len(node.manager.snapshot.queue) == 3)
        assert (await shown()).queue_length == 3
        waiting.pop().cancel()
        await node.until(lambda: len(node.manager.snapshot.queue) == 2)
        assert (await shown()).queue_length == 2
        node.clock.advance(30)
        await node.release(first)
        second = await waiting[0]
        assert (await shown()).queue_length == 1
        assert (await shown()).reservation_after_seconds == node.manager.snapshot.reservation_after_seconds
        await node.manager.pause("", ADMIN, lasting=True)
        assert (await shown()).paused == node.manager.snapshot.paused != ()
        await node.manager.resume("", ADMIN, lasting=True)
        assert (await shown()).paused == ()
        node.clock.advance(3600)
        await node.look()
        assert (await shown()).unused == node.manager.snapshot.unused == {second.lease.id}
        await node.release(second)
        await waiting[1]
        assert (await shown()).queue_length == 0

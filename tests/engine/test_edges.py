"""What stands between two states, and must not be taken for either."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from mig_agent.adapters.filelock import LockedError
from mig_agent.core.errors import RefusedError
from mig_agent.simulator import Code
from support.engine import CREATE_COMPUTE, DESTROY, Node, engine
from support.simulated import machine


async def test_a_half_made_instance_is_never_leased(tmp_path: Path) -> None:
    async with engine(tmp_path, "a100-40gb") as node:
        node.simulator.fail(CREATE_COMPUTE, Code.UNKNOWN)
        stuck = node.simulator.fail(DESTROY, Code.UNKNOWN, times=None)
        with pytest.raises(RefusedError):
            await node.acquire("7g.40gb")
        node.clock.advance(1.1)  # no process is on it, so it is blocked no more
        await node.quiet()
        with pytest.raises(RefusedError):
            await node.acquire("7g.40gb")
        node.simulator.clear(stuck)
        node.clock.advance(120.0)
        await node.quiet()
        granted = await node.acquire("7g.40gb")
        assert granted.devices[0].uuid
        assert not granted.devices[0].reused
        await node.look()
        assert list(node.leases) == [granted.lease.id]


async def test_a_new_request_does_not_overtake_when_capacity_is_freed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with engine(tmp_path, "a100-40gb") as node:
        first = await node.acquire("7g.40gb")
        early = node.start(node.acquire("7g.40gb", name="early", wait_seconds=600.0))
        await node.until(lambda: len(node.manager.snapshot.queue) == 1)
        journal = node.manager._context.journal
        settle = journal._settle
        late: list[asyncio.Task[Any]] = []

        def settle_after_a_newcomer(entries: Sequence[Any], error: Any) -> None:
            if late:
                settle(entries, error)
            else:
                late.append(node.start(node.acquire("7g.40gb", name="late")))
                asyncio.get_running_loop().call_soon(settle, entries, error)

        monkeypatch.setattr(journal, "_settle", settle_after_a_newcomer)
        await node.release(first)
        await node.until(early.done)
        with pytest.raises(RefusedError):
            await late[0]
        assert [lease.holder.name for lease in node.leases.values()] == ["early"]


async def test_the_queue_is_scanned_in_pieces_and_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mig_agent.engine.queueing._PIECE_SECONDS", -1.0)  # one request in each turn
    async with engine(tmp_path, "a100-40gb") as node:
        held = await node.acquire("7g.40gb")
        waiting = []
        for number in range(12):
            wants = ["7g.40gb"] if number % 2 else ["3g.20gb", "3g.20gb"]
            waiting.append(node.start(node.acquire(*wants, wait_seconds=600.0)))
            await node.until(partial(_waiting, node, number + 1))
        for each in waiting:
            assert not each.done()
            await node.release(held)
            await node.until(each.done)
            held = each.result()


def _waiting(node: Node, count: int) -> bool:
    return len(node.manager.snapshot.queue) == count


async def test_a_request_that_leaves_the_queue_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with engine(tmp_path, "a100-40gb") as node:
        counted: list[str] = []
        monkeypatch.setattr(
            node.manager._context.telemetry,
            "acquired",
            lambda _seconds, outcome: counted.append(outcome),
        )
        await node.acquire("7g.40gb")
        leaves = node.start(node.acquire("7g.40gb", wait_seconds=600.0))
        await node.until(lambda: len(node.manager.snapshot.queue) == 1)
        leaves.cancel()
        await node.until(lambda: not len(node.manager.snapshot.queue))
        assert counted == ["created", "cancelled"]


@pytest.mark.parametrize("code", [Code.NOT_FOUND, Code.INVALID_ARGUMENT])
async def test_a_driver_that_lists_no_mig_devices_takes_no_name_away(tmp_path: Path, code: Code) -> None:
    async with engine(tmp_path, "a100-40gb") as node:
        granted = await node.acquire("1g.5gb", request_id="mine")
        node.simulator.fail("nvmlDeviceGetMigDeviceHandleByIndex", code, times=None)
        await node.look()
        again = await node.acquire("1g.5gb", request_id="mine")
        assert again.devices[0].uuid == granted.devices[0].uuid


async def test_a_gpu_locked_by_another_agent_is_managed_when_that_one_ends(tmp_path: Path) -> None:
    simulator = machine(tmp_path, "a100-40gb:2")
    simulator.fail("nvmlDeviceGetMemoryInfo", Code.UNKNOWN, gpu=1, times=None)
    elsewhere = [True]

    def claim(index: int, _uuid: str) -> None:
        if index == 1 and elsewhere[0]:
            raise LockedError("cannot use GPU 1: the agent with pid 1 uses it already")

    async with engine(tmp_path, claim=claim) as node:
        node.simulator.clear()
        for _ in range(3):
            await node.look()
        await node.quiet()
        told = [event.message for event in node.happened if "uses it already" in event.message]
        assert len(told) == 1
        elsewhere[0] = False
        await node.look()
        assert [gpu.index for gpu in node.manager.snapshot.view.gpus] == [0, 1]

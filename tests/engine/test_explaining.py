"""What a refusal explains, and that only an answer costs an explanation."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from mig_agent.core.errors import RefusedError
from mig_agent.core.planning.explain import explanation
from mig_agent.engine import queueing
from support.engine import Node, engine


@pytest.fixture
def explained(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """One entry for each time that an explanation was worked out."""
    times: list[str] = []

    def counted(*arguments: object, **named: object) -> tuple[str, ...]:
        times.append("")
        return explanation(*arguments, **named)  # type: ignore[arg-type] # as it was called

    monkeypatch.setattr(queueing, "explanation", counted)
    return times


async def refused(node: Node, *wants: str, **fields: object) -> tuple[str, ...]:
    with pytest.raises(RefusedError) as error:
        await node.acquire(*wants, **fields)
    return error.value.refusal.explanation


async def test_a_refusal_names_the_blockers_of_each_gpu_and_their_holders(tmp_path: Path) -> None:
    async with engine(tmp_path, "a100-40gb:2") as node:
        await node.acquire("7g.40gb", name="bob", gpus=("0",))
        await node.acquire("3g.20gb", name="carol", gpus=("1",))
        assert await refused(node, "7g.40gb") == (
            "7g.40gb:",
            "  GPU 0: no place, slices 0-7 are leased to bob",
            f"  GPU 1: no place, slices {node.instances(gpu=1)[0].slot.placement} are leased to carol",
        )


async def test_an_answered_request_is_not_explained(tmp_path: Path, explained: list[str]) -> None:
    async with engine(tmp_path, "a100-40gb") as node:
        await node.release(await node.acquire("4G"))
        await node.acquire("4G")
        assert not explained


async def test_a_waiting_request_is_explained_once_when_its_wait_times_out(
    tmp_path: Path, explained: list[str]
) -> None:
    async with engine(tmp_path, "a100-40gb") as node:
        small = [await node.acquire("1g.5gb", name="bob") for _ in range(7)]
        large = node.start(node.acquire("7g.40gb", wait_seconds=600.0))
        await node.until(lambda: node.manager.snapshot.queue)
        for each in small[1:]:
            await node.release(each)
        assert not explained
        node.clock.advance(601)
        with pytest.raises(RefusedError) as error:
            await large
        assert len(explained) == 1
        assert "leased to bob" in error.value.refusal.explanation[1]


async def test_a_request_behind_a_reservation_is_refused_with_that_reason(tmp_path: Path) -> None:
    async with engine(tmp_path, "a100-40gb", reservation_after_seconds=10.0) as node:
        await node.acquire("3g.20gb")
        large = node.start(node.acquire("7g.40gb", wait_seconds=600.0, name="alice (train)"))
        await node.until(lambda: node.manager.snapshot.queue)
        assert not node.manager.snapshot.queue[0].reserved
        node.clock.advance(11)
        assert node.manager.snapshot.queue[0].reserved == (0,)
        assert await refused(node, "1g.5gb") == (
            "1g.5gb:",
            "  GPU 0: no place, it is reserved for the waiting request of alice (train)",
        )
        large.cancel()
        await asyncio.wait([large])

"""Whose idle instance serves whom, on the hardware and over restarts."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from mig_agent.adapters.tokens import KEY_FILE
from mig_agent.core.errors import RefusedError
from mig_agent.core.events import EventKind
from mig_agent.core.model import InstanceState
from support.engine import Node, engine

IDLE, BLOCKED = InstanceState.IDLE, InstanceState.BLOCKED


async def take_and_give_back(node: Node, tenant: str, profile: str = "7g.40gb") -> bool:
    """Whether an idle instance served."""
    granted = await node.acquire(profile, tenant=tenant)
    await node.release(granted)
    return granted.devices[0].reused


async def test_the_same_tenant_gets_it_again_and_another_a_new_one(tmp_path: Path) -> None:
    async with engine(tmp_path, "a100-40gb", reuse="same-tenant") as node:
        assert [await take_and_give_back(node, each) for each in ("a", "a", "b", "b", "a", "", "", "a")] == [
            *(False, True),
            *(False, True),
            False,
            *(False, False),  # who is not known to be the same is not
            False,
        ]
        assert node.creations() == 6
        destroyed = node.told(EventKind.INSTANCE_DESTROYED)
        assert len(destroyed) == 5


async def test_with_any_every_tenant_gets_it(tmp_path: Path) -> None:
    async with engine(tmp_path, "a100-40gb") as node:
        assert [await take_and_give_back(node, each) for each in ("a", "b", "")] == [False, True, True]


async def test_with_never_no_tenant_gets_it(tmp_path: Path) -> None:
    async with engine(tmp_path, "a100-40gb", reuse="never") as node:
        assert [await take_and_give_back(node, each) for each in ("a", "a", "b")] == [False, False, False]
        assert node.creations() == 3


@pytest.mark.parametrize("reuse", ["any", "same-tenant"])
async def test_the_last_tenant_is_known_after_a_restart(tmp_path: Path, reuse: str) -> None:
    """Under `any` it changes hands without being made anew: who had it last is recorded all the same."""
    async with engine(tmp_path, "a100-40gb", reuse=reuse) as node:
        await take_and_give_back(node, "a")
        await take_and_give_back(node, "b")
    async with engine(tmp_path, reuse="same-tenant") as node:
        (idle,) = node.instances(IDLE)
        assert idle.last_tenant == "b"
        assert await take_and_give_back(node, "b")
        assert not await take_and_give_back(node, "a")


def forget_everything(folder: Path) -> None:
    """As a state folder that is made anew: with the key of the tokens there, the agent takes the ledger for lost."""
    for each in (*folder.glob("ledger*"), folder / KEY_FILE):
        each.unlink()


async def test_an_adopted_instance_has_no_tenant(tmp_path: Path) -> None:
    async with engine(tmp_path, "a100-40gb") as node:
        await take_and_give_back(node, "")
    await asyncio.to_thread(forget_everything, tmp_path)
    async with engine(tmp_path, reuse="same-tenant", foreign="adopt") as node:
        assert [each.last_tenant for each in node.instances(IDLE)] == [""]
        assert not await take_and_give_back(node, "")


async def test_an_instance_used_without_a_lease_has_no_tenant(tmp_path: Path) -> None:
    async with engine(tmp_path, "a100-40gb", reuse="same-tenant") as node:
        granted = await node.acquire("7g.40gb", tenant="a")
        where = node.where(granted)
        await node.release(granted)
        process = node.simulator.occupy(where)
        node.clock.advance(1)
        with pytest.raises(RefusedError, match="held by"):
            await node.acquire("7g.40gb", tenant="a")
        assert [each.last_tenant for each in node.instances(BLOCKED)] == [""]
        node.simulator.vacate(process)
        node.clock.advance(60)
        await node.until(lambda: node.instances(IDLE))
        assert not await take_and_give_back(node, "a")

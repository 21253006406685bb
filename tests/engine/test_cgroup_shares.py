"""Shares that need a process: who gets one, who takes MPS in place of it, and who is refused."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from mig_agent.adapters.shares.cgroup import CgroupEnforcer
from mig_agent.core.errors import Reason, RefusedError
from mig_agent.core.model import Holder, Want
from mig_agent.core.shares import Enforcement, Fractions
from mig_agent.engine.results import Granted
from support.engine import Node, engine
from support.nvmlfaults import LIMITS, codes_of
from support.shares import FileEnforcer

L40S = "l40s,driver=615.71"


@contextlib.asynccontextmanager
async def sharing(folder: Path, there: str = L40S, **changes: Any) -> AsyncIterator[Node]:
    """Cgroups first, and a stand-in for MPS, which needs no process."""
    mps = FileEnforcer(folder / "shares")
    async with engine(
        folder, there, enforcers=lambda driver, host: (CgroupEnforcer(driver, host, "a"), mps), **changes
    ) as node:
        yield node


@pytest.fixture
def child() -> Iterator[int]:
    """A process that this one, which plays the client's, has started."""
    with subprocess.Popen(["sleep", "1000"]) as process:
        yield process.pid
        process.kill()


async def take(node: Node, pid: int | None, *, client: int | None = None) -> Granted:
    holder = Holder(name="alice", uid=os.getuid(), pid=os.getpid() if client is None else client)
    return await node.acquire("4G", holder=holder, **({} if pid is None else {"pid": pid}))


def way(granted: Granted) -> Enforcement | None:
    return granted.devices[0].enforced_by


async def test_a_process_that_its_client_started_is_handed_over(tmp_path: Path, child: int) -> None:
    async with sharing(tmp_path) as node:
        granted = await take(node, child)
        assert way(granted) is Enforcement.CGROUP
        assert set(granted.environment) == {"CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES"}
        cgroup = node.host.root / f"sys/fs/cgroup/mig-agent-a/{granted.devices[0].generation}"
        assert (cgroup / "cgroup.procs").read_text() == f"{child}\n"
        await node.release(granted)
        await node.quiet()
        assert not cgroup.exists()
        assert not node.simulator.leaked_guarantees()


async def test_the_others_take_a_way_that_needs_none(tmp_path: Path, child: int) -> None:
    """No process, the client's own, one that the client did not start, and one of another user."""
    async with sharing(tmp_path) as node:
        assert way(await take(node, None)) is Enforcement.MPS
        assert way(await take(node, os.getpid())) is Enforcement.MPS
        assert way(await take(node, os.getppid())) is Enforcement.MPS
        assert way(await take(node, child, client=child)) is Enforcement.MPS
        holder = Holder(name="bob", uid=os.getuid() + 1, pid=os.getpid())
        assert way(await node.acquire("4G", holder=holder, pid=child)) is Enforcement.MPS
        assert not list((node.host.root / "sys/fs/cgroup").glob("mig-agent-a/*/"))


async def test_they_are_refused_in_words_where_there_is_no_other_way(tmp_path: Path, child: int) -> None:
    async with sharing(tmp_path, fractions=Fractions.CGROUP) as node:
        with pytest.raises(RefusedError) as caught:
            await take(node, None)
        refusal = caught.value.refusal
        assert refusal.reason is Reason.NOT_SUPPORTED
        assert refusal.message == (
            "cannot place 4G: the memory limit of a share of GPU 0 holds for a process that is handed over, "
            "and there is none"
        )
        assert refusal.hint == "`migctl run` hands its command over; --num-gpus 1 takes a whole GPU"
        assert way(await take(node, child)) is Enforcement.CGROUP


async def test_an_older_driver_takes_the_next_way_for_all(tmp_path: Path, child: int) -> None:
    async with sharing(tmp_path, "l40s") as node:
        assert way(await take(node, child)) is Enforcement.MPS


@pytest.mark.parametrize("call", sorted(LIMITS))
async def test_without_its_limit_no_share_is_granted(tmp_path: Path, child: int, call: str) -> None:
    async with sharing(tmp_path, fractions=Fractions.CGROUP) as node:
        for code in codes_of(call):
            node.simulator.fail(call, code, times=None)
            with pytest.raises(RefusedError, match="cannot"):
                await take(node, child)
            assert not node.leases
            node.simulator.clear()
            for _ in range(2):
                await node.look()
                await node.quiet()
            assert not list((node.host.root / "sys/fs/cgroup").glob("mig-agent-a/*/"))
            assert not node.simulator.leaked_guarantees()
        assert way(await take(node, child)) is Enforcement.CGROUP


async def test_a_process_that_ends_before_its_share_begins_costs_nothing(tmp_path: Path, child: int) -> None:
    async with sharing(tmp_path, fractions=Fractions.CGROUP) as node:
        whole = await node.acquire(Want(whole_gpu=True, text="whole"))
        waiting = node.start(take_later(node, child))
        await node.until(lambda: bool(node.manager.snapshot.queue))
        os.kill(child, 9)
        await node.release(whole)
        with pytest.raises(RefusedError, match=f"process {child} has ended"):
            await asyncio.wait_for(waiting, 30)
        await node.quiet()
        assert [each.kind.name for each in node.instances()] == ["whole"]
        assert not list((node.host.root / "sys/fs/cgroup").glob("mig-agent-a/*/"))


async def take_later(node: Node, pid: int) -> Granted:
    holder = Holder(name="alice", uid=os.getuid(), pid=os.getpid())
    return await node.acquire("4G", holder=holder, pid=pid, wait_seconds=1000.0)

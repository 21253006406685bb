"""A real process, killed before and after every commit and every changing call, and what is found then."""

from __future__ import annotations

import json
import shutil
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from mig_agent.adapters.ledger.store import LEDGER_FILE
from mig_agent.adapters.nvml.calls import CHANGING
from mig_agent.core.accounting import By
from mig_agent.core.errors import Reason, RefusedError
from mig_agent.core.model import InstanceState
from mig_agent.simulator import STATE_FILE, Simulator
from support.clock import VirtualClock
from support.crashing import ANSWERS, GPUS, CrashServer, crash_server
from support.engine import ADMIN, ANYBODY, Node, engine
from support.simulated import machine

KILLED = -9
MOST = 60
NOT_IN_THE_STORY = {"nvmlDeviceSetMigMode", "nvmlDeviceSetMemoryLimits_v1"}
POINTS = ["commit", "device-node", *sorted(CHANGING - NOT_IN_THE_STORY)]


@pytest.fixture(scope="module")
def server() -> Iterator[CrashServer]:
    with crash_server() as running:
        yield running


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("point", POINTS)
async def test_killed_at_every_point(tmp_path: Path, server: CrashServer, point: str, when: str) -> None:
    for count in range(1, MOST):
        folder = tmp_path / str(count)
        machine(folder, GPUS)
        code = server.run(folder, f"{when}-{point}", count)
        await check(folder)
        shutil.rmtree(folder)
        if code == 0:
            break
        assert code == KILLED
    assert 1 < count < MOST


def notes(folder: Path) -> Iterator[dict[str, Any]]:
    if (folder / ANSWERS).exists():
        for line in (folder / ANSWERS).read_text().splitlines():
            yield json.loads(line)


async def check(folder: Path) -> None:
    """What the next agent finds, and what clients get who ask it again."""
    answered: dict[str, dict[str, Any]] = {}
    begun: dict[str, list[str]] = {}
    releasing = ""
    for note in notes(folder):
        if "begun" in note:
            begun[note["begun"]] = note["wants"]
        elif "answered" in note:
            answered[note["answered"]] = note
        elif "releasing" in note:
            releasing = note["releasing"]
        elif "released" in note:
            del answered[note["released"]]
            begun.pop(note["released"])
            releasing = ""
    in_doubt = set(begun) - set(answered)
    async with engine(folder, clock=VirtualClock(time.time())) as node:
        check_hardware(node, folder)
        await check_accounting(node, folder)
        known = {each["lease"]: name for name, each in answered.items()}
        standing = {node.leases[lease].request_id for lease in node.leases}
        assert {name for name in answered if name != releasing} <= standing <= {*answered, *in_doubt}
        assert len(in_doubt) <= 1
        await node.manager.cordon("1", False, "", ANYBODY)
        for name in (*answered, *in_doubt):
            request = node.request(*begun[name], request_id=name)
            try:
                again = await node.manager.acquire(request, ANYBODY)
            except RefusedError as refused:
                if (name, refused.refusal.reason) != (releasing, Reason.LEASE_ENDED):
                    raise
                continue
            node.manager.delivered(again.lease.id)
            if name in answered:
                devices = [[each.gpu_index, each.gpu_instance_id, each.uuid] for each in again.devices]
                assert (again.lease.id, again.token) == (answered[name]["lease"], answered[name]["token"])
                assert devices == answered[name]["devices"]
                assert again.lease.id in known
        check_hardware(node, folder)


async def check_accounting(node: Node, folder: Path) -> None:
    """Each lease that ended has its records, no other has; and what was leased is what the ledger's leases say."""
    with closing(sqlite3.connect(f"file:{folder / LEDGER_FILE}?mode=ro", uri=True)) as ledger:
        leases = ledger.execute("SELECT id, created_at, ended_at, json_array_length(devices) FROM lease").fetchall()
        records = ledger.execute(
            "SELECT lease, granted_at, ended_at, count(*) FROM accounting GROUP BY lease"
        ).fetchall()
        total = ledger.execute("SELECT coalesce(sum(mib_ms), 0) FROM tenant_total").fetchone()[0]
        recorded = ledger.execute("SELECT coalesce(sum(memory_mib * seconds), 0) FROM accounting").fetchone()[0]
    assert sorted(records) == sorted(each for each in leases if each[2] is not None)
    assert recorded == pytest.approx(total / 1000, abs=100.0)
    now = node.clock.now()
    active = sum(
        instance.slot.profile.memory_mib * (now - node.leases[instance.lease].created_at)
        for instance in node.instances(InstanceState.LEASED)
        if instance.lease is not None
    )
    found = await node.manager.history.account(0.0, None, By.TENANT, ADMIN)
    assert found.total.memory_mib_seconds == pytest.approx(recorded + active, abs=1.0)
    assert found.total.leases == len(leases)


def check_hardware(node: Node, folder: Path) -> None:
    """Nothing is half made, nothing is busy without an owner, nothing was given twice."""
    there = {
        (index, instance["id"]): instance["compute"]
        for index, gpu in enumerate(Simulator(folder / STATE_FILE).machine()["gpus"])
        for instance in gpu["instances"]
    }
    assert all(len(compute) == 1 for compute in there.values())
    view = node.manager.snapshot.view
    indices = {gpu.uuid: gpu.index for gpu in view.gpus}
    seen = {(indices[each.slot.gpu], each.gpu_instance_id): each for each in view.instances.values()}
    assert set(seen) == set(there)
    assert {each.state for each in seen.values()} <= {InstanceState.IDLE, InstanceState.LEASED}
    held = [generation for lease in view.leases.values() for generation in lease.instances]
    assert len(held) == len(set(held))
    assert set(held) == {each.generation for each in seen.values() if each.state is InstanceState.LEASED}

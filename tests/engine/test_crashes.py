"""A real process, killed before and after every commit and every changing call, and what is found then."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mig_agent.adapters.nvml.calls import CHANGING
from mig_agent.core.errors import Reason, RefusedError
from mig_agent.core.model import InstanceState
from mig_agent.simulator import STATE_FILE, Simulator
from support.clock import VirtualClock
from support.crashing import ANSWERS, GPUS, CrashServer, crash_server
from support.engine import ANYBODY, Node, engine
from support.simulated import machine

KILLED = -9
MOST = 60
NOT_IN_THE_STORY = {"nvmlDeviceSetMigMode"}
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

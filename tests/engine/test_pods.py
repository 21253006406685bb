"""Leases of pods: they end when the kubelet says so, and with nothing else that a client does or leaves undone."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path
from typing import Any

import pytest

from mig_agent.adapters.ledger.store import Ledger
from mig_agent.core.errors import Reason, RefusedError, UsageError
from mig_agent.core.events import EventKind
from mig_agent.core.model import Holder, InstanceState, Request
from mig_agent.core.owner import KubeletDevice, Pod
from mig_agent.core.requests import profile_want
from mig_agent.engine.callers import Caller
from mig_agent.engine.results import Granted
from support.engine import ADMIN, CREATE, Node, engine, killed, start
from support.owners import devices_of

KUBELET = Caller(name="kubelet", admin=True)
ONE = profile_want("1g.5gb")


def of_pod(node: Node, *profiles: str, pod: str = "train-7f2c", uid: str = "6b8f", **fields: Any) -> Request:
    devices = tuple(
        KubeletDevice(resource=f"nvidia.com/mig-{profile}", id=f"mig-agent-{number}")
        for number, profile in enumerate(profiles)
    )
    of = Pod(namespace="team-a", name=pod, uid=uid)
    return node.request(
        *profiles,
        holder=Holder(tenant="team-a"),
        pod=of,
        kubelet_devices=devices,
        caller_id=KUBELET.caller_id,
        **fields,
    )


async def leased(node: Node, *profiles: str, **fields: Any) -> Granted:
    return await node.manager.acquire(of_pod(node, *profiles, **fields), KUBELET)


async def test_it_has_no_grace_period_and_is_never_unused(tmp_path: Path) -> None:
    async with engine(tmp_path, "a100-40gb:1") as node:
        pods = await leased(node, "1g.5gb", "2g.10gb")
        other = await node.acquire("1g.5gb")
        node.clock.advance(100_000)
        await node.look()
        assert set(node.leases) == {pods.lease.id, other.lease.id}
        assert node.manager.snapshot.unused == {other.lease.id}


async def test_it_is_not_held_by_a_stream(tmp_path: Path) -> None:
    async with engine(tmp_path, "a100-40gb:1") as node:
        with pytest.raises(UsageError, match="cannot hold a lease for pod team-a/train-7f2c by a stream"):
            await node.manager.hold(of_pod(node, "1g.5gb"), KUBELET)
        assert not node.leases


async def test_it_is_named_by_its_pod(tmp_path: Path) -> None:
    async with engine(tmp_path, "a100-40gb:1") as node:
        granted = await leased(node, "1g.5gb")
        assert granted.lease.holder.name == str(granted.lease.holder) == "pod team-a/train-7f2c"
        assert devices_of(granted.lease) == (KubeletDevice(resource="nvidia.com/mig-1g.5gb", id="mig-agent-0"),)
        (told,) = node.told(EventKind.LEASE_GRANTED)
        assert told.message.startswith("pod team-a/train-7f2c got lease ")
        with pytest.raises(RefusedError, match="pod team-a/train-7f2c"):
            await node.acquire("7g.40gb")


async def test_it_survives_a_restart_with_all_its_fields(tmp_path: Path) -> None:
    node = await start(tmp_path, "a100-40gb:1")
    granted = await leased(node, "1g.5gb", "2g.10gb", request_id="pod-6b8f")
    await killed(node)
    async with engine(tmp_path, clock=node.clock) as again:
        assert again.leases == {granted.lease.id: granted.lease}
        again.clock.advance(100_000)
        await again.quiet()
        repeated = await leased(again, "1g.5gb", "2g.10gb", request_id="pod-6b8f")
        assert (repeated.lease, repeated.devices) == (granted.lease, granted.devices)


async def test_it_ends_for_its_pod_and_leaves_its_instances_idle(tmp_path: Path) -> None:
    async with engine(tmp_path, "a100-40gb:1") as node:
        granted = await leased(node, "1g.5gb", "2g.10gb")
        await node.manager.owner_ended(granted.lease.id, "the kubelet lists its pod no more")
        await node.manager.owner_ended(granted.lease.id, "again: that is no error")
        assert not node.leases
        assert len(node.instances(InstanceState.IDLE)) == 2
        (ended,) = node.told(EventKind.LEASE_ENDED)
        assert ended.message.endswith("of pod team-a/train-7f2c ended: the kubelet lists its pod no more")
        assert ended.data["reason"] == "pod-ended"
        assert (await leased(node, "1g.5gb", pod="next")).devices[0].reused


async def test_its_end_can_be_recorded_while_the_agent_is_paused(tmp_path: Path) -> None:
    async with engine(tmp_path, "a100-40gb:1") as node:
        granted = await leased(node, "1g.5gb")
        await node.manager.pause("", ADMIN, lasting=True)
        await node.manager.owner_ended(granted.lease.id, "its pod has ended")
        assert not node.leases
        await node.manager.resume("", ADMIN, lasting=True)
        assert node.layout().endswith("=idle")


async def test_an_end_that_cannot_be_recorded_is_refused_and_the_lease_stays_active(tmp_path: Path) -> None:
    def full(*_: object) -> None:
        raise OverflowError("database or disk is full")

    async with engine(tmp_path, "a100-40gb:1") as node:
        granted = await leased(node, "1g.5gb")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Ledger, "_commit", full)
            with pytest.raises(RefusedError) as refused:
                await node.manager.owner_ended(granted.lease.id, "its pod has ended")
        assert refused.value.refusal.reason is Reason.LEDGER_FAILED
        assert set(node.leases) == {granted.lease.id}
        await node.manager.owner_ended(granted.lease.id, "its pod has ended")
        assert not node.leases


async def test_another_pod_or_other_devices_are_another_request(tmp_path: Path) -> None:
    async with engine(tmp_path, "a100-40gb:1") as node:
        granted = await leased(node, "1g.5gb", request_id="same")
        assert (await leased(node, "1g.5gb", request_id="same")).lease == granted.lease
        for others in ({"uid": "other"}, {"pod": "other"}):
            with pytest.raises(RefusedError) as refused:
                await leased(node, "1g.5gb", request_id="same", **others)
            assert refused.value.refusal.reason is Reason.REQUEST_ID_REUSED


# What may be counted on


async def test_the_count_follows_leases_and_pending_wants(tmp_path: Path) -> None:
    async with engine(tmp_path, "a100-40gb:1") as node:
        creatable = node.manager.count_creatable
        assert (creatable(ONE), creatable(ONE, [ONE, ONE]), creatable(ONE, [profile_want("7g.40gb")])) == (7, 5, 0)
        first = await leased(node, "1g.5gb")
        assert creatable(ONE) == 6
        await node.manager.owner_ended(first.lease.id, "over")
        assert (creatable(ONE), creatable(profile_want("7g.40gb"))) == (7, 1)
        await node.manager.cordon("0", on=True, reason="", caller=ADMIN)
        assert creatable(ONE) == 0
        await node.manager.cordon("0", on=False, reason="", caller=ADMIN)
        assert creatable(ONE) == 7


async def test_a_request_is_counted_once_while_it_is_served(tmp_path: Path) -> None:
    async with engine(tmp_path, "a100-40gb:1") as node:
        node.simulator.hang(CREATE)
        asked = node.start(leased(node, "1g.5gb", request_id="one"))
        await node.stuck()
        assert node.manager.has_slots(of_pod(node, request_id="one").key)
        assert node.manager.count_creatable(ONE) == 6
        node.simulator.clear()
        granted = await asked
        assert node.manager.has_slots(granted.lease.request_key)
        full = await leased(node, "3g.20gb", request_id="full")
        waits = node.start(leased(node, "7g.40gb", request_id="waits", wait_seconds=math.inf))
        await node.until(lambda: node.manager.snapshot.queue)
        assert not node.manager.has_slots(of_pod(node, request_id="waits").key)
        assert not node.manager.has_slots(of_pod(node, request_id="unknown").key)
        await node.manager.owner_ended(full.lease.id, "over")
        await node.manager.owner_ended(granted.lease.id, "over")
        assert node.manager.has_slots((await waits).lease.request_key)
        await node.manager.owner_ended((await waits).lease.id, "over")
        assert not node.manager.has_slots((await waits).lease.request_key)


async def test_reserved_gpus_are_not_counted(tmp_path: Path) -> None:
    async with engine(tmp_path, "a100-40gb:2", reservation_after_seconds=10.0) as node:
        for gpu in ("0", "1"):
            await node.acquire("1g.5gb", gpus=(gpu,))
        waits = node.start(leased(node, "7g.40gb", wait_seconds=math.inf))
        await node.until(lambda: node.manager.snapshot.queue)
        assert node.manager.count_creatable(ONE) == 12
        node.clock.advance(11)
        assert node.manager.count_creatable(ONE) == 6
        waits.cancel()
        await asyncio.wait([waits])
        assert node.manager.count_creatable(ONE) == 12


async def test_each_change_is_notified_once(tmp_path: Path) -> None:
    async with engine(tmp_path, "a100-40gb:1") as node:
        counts: list[int] = []
        node.manager.on_view.append(lambda: counts.append(node.manager.count_creatable(ONE)))

        async def last(expected: int) -> None:
            await node.until(lambda: counts and counts[-1] == expected)
            counts.clear()

        granted = await leased(node, "1g.5gb")
        await last(6)
        await node.manager.owner_ended(granted.lease.id, "over")
        await last(7)
        await node.manager.pause("", ADMIN, lasting=True)
        await last(0)
        await node.manager.resume("", ADMIN, lasting=True)
        await last(7)
        await node.manager.cordon("0", on=True, reason="", caller=ADMIN)
        await last(0)


async def test_capacity_freed_without_a_record_is_notified_too(tmp_path: Path) -> None:
    """A plan takes its places before anything is written down; when it comes to nothing they are free again."""
    async with engine(tmp_path, "a100-40gb:1") as node:
        granted = await leased(node, "1g.5gb")
        await node.manager.owner_ended(granted.lease.id, "over")
        counts: list[int] = []
        node.manager.on_view.append(lambda: counts.append(node.manager.count_creatable(ONE)))
        execution = node.manager._parts.queue._executor
        asked = node.start(leased(node, "7g.40gb"))
        await node.until(lambda: execution.context.driver_use._inside)
        asked.cancel()
        await asyncio.wait([asked])
        await node.quiet()
        await node.until(lambda: counts and counts[-1] == 7)


@pytest.mark.parametrize("renew", [False, True], ids=["release", "renew"])
async def test_it_is_not_ended_while_its_pod_runs(tmp_path: Path, renew: bool) -> None:
    """Else the next request would get an instance that a container still has."""
    async with engine(tmp_path, "a100-40gb:1", follows_pods=True) as node:
        granted = await leased(node, "1g.5gb")
        lease, token = granted.lease.id, granted.token
        change = node.manager.renew(lease, token, 1.0, ADMIN) if renew else node.manager.release(lease, token, ADMIN)
        with pytest.raises(RefusedError) as refused:
            await change
        refusal = refused.value.refusal
        assert refusal.reason is Reason.IN_USE
        assert refusal.message.startswith(f"cannot touch lease {lease}: pod team-a/train-7f2c has it")
        assert refusal.hint == "kubectl delete pod train-7f2c -n team-a"
        assert set(node.leases) == {lease}
        await node.manager.owner_ended(lease, "its pod has ended")
        assert not node.leases


async def test_an_administrator_ends_it_if_pods_are_not_followed(tmp_path: Path) -> None:
    """Of a node that is no longer one of Kubernetes, or after the agent was told so."""
    async with engine(tmp_path, "a100-40gb:1") as node:
        granted = await leased(node, "1g.5gb")
        await node.manager.release(granted.lease.id, "", ADMIN)
        assert not node.leases

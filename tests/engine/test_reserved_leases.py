"""Leases that are taken for pods: released, renewed and lapsing until the pod comes, and its own from then on."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from mig_agent.adapters.ledger.store import Ledger
from mig_agent.core.errors import Reason, RefusedError
from mig_agent.core.events import EventKind
from mig_agent.core.model import Holder, InstanceState, LeaseId
from mig_agent.core.owner import KubeletDevice, Pod, PodOwner
from mig_agent.engine.callers import Caller
from mig_agent.engine.results import Granted
from support.engine import ADMIN, ANYBODY, CREATE, Node, engine, killed, start
from support.owners import bound, devices_of, pod_of

SCHEDULER = Caller(name="volcano", scheduler=True)
POD = Pod(namespace="team-a", name="train-7f2c", uid="6b8f")
ONE = KubeletDevice(resource="nvidia.com/mig-1g.5gb", id="mig-agent-0")
TWO = KubeletDevice(resource="nvidia.com/mig-2g.10gb", id="mig-agent-0")


async def promise(node: Node, *wants: str, pod: Pod = POD, delivered: bool = True, **fields: Any) -> Granted:
    holder = Holder(tenant="namespace team-a")
    request = node.request(*(wants or ("1g.5gb",)), holder=holder, pod=pod, **{"ttl_seconds": 60.0, **fields})
    granted = await node.manager.acquire(request, SCHEDULER)
    if delivered:
        node.manager.delivered(granted.lease.id)
    return granted


async def refused(call: Any) -> Reason:
    with pytest.raises(RefusedError) as caught:
        await call
    assert caught.value.refusal.message.startswith("cannot ")
    return caught.value.refusal.reason


# Until the pod has come


async def test_it_is_reserved_until_its_pod_is_bound(tmp_path: Path) -> None:
    async with engine(tmp_path, "a100-40gb:1", follows_pods=True) as node:
        granted = await promise(node)
        assert granted.lease.owner.is_reserved
        assert str(granted.lease.holder) == "pod team-a/train-7f2c"
        came = await node.manager.bind(granted.lease.id, bound(POD))
        assert (came.owner.is_bound, came.owner.is_reserved, came.expires_at) == (True, False, None)
        assert node.leases == {came.id: came}
        (told,) = node.told(EventKind.LEASE_BOUND)
        assert told.message == f"pod team-a/train-7f2c has come for lease {came.id}"


async def test_it_ends_at_its_deadline_and_its_instance_is_idle(tmp_path: Path) -> None:
    async with engine(tmp_path, "a100-40gb:1", follows_pods=True) as node:
        granted = await promise(node)
        node.clock.advance(59.0)
        await node.quiet()
        assert set(node.leases) == {granted.lease.id}
        node.clock.advance(1.5)
        await node.until(lambda: not node.leases)
        (idle,) = node.instances()
        assert idle.state is InstanceState.IDLE
        assert await refused(node.manager.bind(granted.lease.id, bound(POD))) is Reason.LEASE_ENDED


async def test_its_holder_renews_and_releases_it_by_its_token(tmp_path: Path) -> None:
    async with engine(tmp_path, "a100-40gb:1", follows_pods=True) as node:
        granted = await promise(node)
        id_, token = granted.lease.id, granted.token
        assert await refused(node.manager.renew(id_, "wrong", 60.0, SCHEDULER)) is Reason.WRONG_TOKEN
        await node.manager.renew(id_, token, 600.0, SCHEDULER)
        node.clock.advance(100.0)
        await node.quiet()
        assert set(node.leases) == {id_}
        confirmed = await node.manager.renew(id_, token, None, SCHEDULER)
        assert (confirmed.expires_at, confirmed.owner.is_reserved) == (None, True)
        await node.manager.release(id_, token, SCHEDULER)
        assert not node.leases


async def test_an_unconfirmed_reservation_ends(tmp_path: Path) -> None:
    async with engine(tmp_path, "a100-40gb:1", follows_pods=True) as node:
        await promise(node, delivered=False, ttl_seconds=None)
        node.clock.advance(61.0)
        await node.until(lambda: not node.leases)


async def test_a_pod_that_is_bound_before_the_confirmation_keeps_it(tmp_path: Path) -> None:
    async with engine(tmp_path, "a100-40gb:1", follows_pods=True) as node:
        granted = await promise(node, delivered=False)
        await node.manager.bind(granted.lease.id, bound(POD))
        node.clock.advance(100_000.0)
        await node.quiet()
        assert set(node.leases) == {granted.lease.id}


async def test_a_scheduler_that_was_killed_gets_the_same_lease_and_token(tmp_path: Path) -> None:
    async with engine(tmp_path, "a100-40gb:1", follows_pods=True) as node:
        granted = await promise(node, request_id=POD.uid)
        again = await promise(node, request_id=POD.uid)
        assert (again.lease, again.token, again.devices) == (granted.lease, granted.token, granted.devices)
        await node.manager.bind(granted.lease.id, bound(POD, (ONE,)))
        later = await promise(node, request_id=POD.uid)
        assert (later.lease.id, later.token, later.devices) == (granted.lease.id, granted.token, granted.devices)
        assert later.lease.owner.is_bound
        assert await refused(promise(node, "2g.10gb", request_id=POD.uid)) is Reason.REQUEST_ID_REUSED


# From then on


@pytest.mark.parametrize("devices", [None, (ONE,)])
async def test_a_bound_lease_ends_with_its_pod_alone(tmp_path: Path, devices: tuple[KubeletDevice, ...] | None) -> None:
    async with engine(tmp_path, "a100-40gb:1", follows_pods=True) as node:
        granted = await promise(node)
        id_, token = granted.lease.id, granted.token
        if devices is None:
            await node.manager.bind(id_, bound(POD))
        else:
            await node.manager.bind(id_, bound(POD, devices))
        for caller in (SCHEDULER, ADMIN):
            assert await refused(node.manager.release(id_, token, caller)) is Reason.IN_USE
            assert await refused(node.manager.renew(id_, token, 1.0, caller)) is Reason.IN_USE
        node.clock.advance(100_000.0)
        await node.quiet()
        assert set(node.leases) == {id_}
        assert not node.manager.snapshot.unused
        await node.manager.owner_ended(id_, "its pod has ended")
        assert not node.leases


async def test_kubelet_devices_are_assigned_to_its_instances(tmp_path: Path) -> None:
    async with engine(tmp_path, "a100-40gb:1", follows_pods=True) as node:
        granted = await promise(node, "1g.5gb", "2g.10gb")
        handed = await node.manager.bind(granted.lease.id, bound(POD, (ONE, TWO)))
        assert devices_of(handed) == (ONE, TWO)
        assert (handed.owner.is_bound, handed.expires_at, handed.instances) == (True, None, granted.lease.instances)
        again = await node.manager.bind(granted.lease.id, bound(POD, (ONE, TWO)))
        assert again == handed
        assert await node.manager.bind(granted.lease.id, bound(POD)) == handed
        assert len(node.told(EventKind.LEASE_BOUND)) == 1
        assert await refused(node.manager.bind(granted.lease.id, bound(POD, (TWO, ONE)))) is Reason.IN_USE


async def test_a_bound_lease_can_still_get_kubelet_devices(tmp_path: Path) -> None:
    async with engine(tmp_path, "a100-40gb:1", follows_pods=True) as node:
        granted = await promise(node)
        await node.manager.bind(granted.lease.id, bound(POD))
        handed = await node.manager.bind(granted.lease.id, bound(POD, (ONE,)))
        assert node.leases == {handed.id: handed}


async def test_a_uid_that_was_not_known_is_recorded(tmp_path: Path) -> None:
    node = await start(tmp_path, "a100-40gb:1", follows_pods=True)
    granted = await promise(node, pod=Pod(namespace="team-a", name="train-7f2c"))
    came = await node.manager.bind(granted.lease.id, bound(POD))
    assert pod_of(came) == POD
    await killed(node)
    async with engine(tmp_path, clock=node.clock, follows_pods=True) as again:
        assert again.leases == {came.id: came}


@pytest.mark.parametrize(
    "other",
    [
        Pod(namespace="team-a", name="train-7f2c", uid="another"),
        Pod(namespace="team-a", name="other", uid="6b8f"),
        Pod(namespace="team-b", name="train-7f2c", uid="6b8f"),
    ],
)
async def test_another_pod_never_gets_it(tmp_path: Path, other: Pod) -> None:
    async with engine(tmp_path, "a100-40gb:1", follows_pods=True) as node:
        granted = await promise(node)
        assert await refused(node.manager.bind(granted.lease.id, bound(other))) is Reason.IN_USE
        assert await refused(node.manager.bind(granted.lease.id, bound(other, (ONE,)))) is Reason.IN_USE
        assert node.leases == {granted.lease.id: granted.lease}


async def test_a_lease_that_is_not_for_a_pod_is_not_bound(tmp_path: Path) -> None:
    async with engine(tmp_path, "a100-40gb:1", follows_pods=True) as node:
        granted = await node.acquire("1g.5gb")
        assert await refused(node.manager.bind(granted.lease.id, bound(POD))) is Reason.IN_USE
        assert await refused(node.manager.bind(LeaseId("never"), bound(POD))) is Reason.LEASE_ENDED


async def test_as_many_kubelet_devices_as_instances_are_assigned(tmp_path: Path) -> None:
    async with engine(tmp_path, "a100-40gb:1", follows_pods=True) as node:
        granted = await promise(node)
        assert await refused(node.manager.bind(granted.lease.id, bound(POD, (ONE, TWO)))) is Reason.INVALID_REQUEST
        assert node.leases[granted.lease.id].owner.is_reserved


# At the same moment


async def test_a_release_and_a_binding_at_once_have_one_winner(tmp_path: Path) -> None:
    """Whichever is recorded first; the other one is told so, and nothing is half done."""
    async with engine(tmp_path, "a100-40gb:1", follows_pods=True) as node:
        for pod_first in (True, False):
            granted = await promise(node)
            id_, token = granted.lease.id, granted.token
            came = node.manager.bind(id_, bound(POD, (ONE,)))
            released = node.manager.release(id_, token, SCHEDULER)
            both = (came, released) if pod_first else (released, came)
            outcomes = await asyncio.gather(*both, return_exceptions=True)
            assert not isinstance(outcomes[0], BaseException)
            assert isinstance(outcomes[1], RefusedError)
            if pod_first:
                assert outcomes[1].refusal.reason is Reason.IN_USE
                assert devices_of(node.leases[id_]) == (ONE,)
                await node.manager.owner_ended(id_, "over")
            else:
                assert outcomes[1].refusal.reason is Reason.LEASE_ENDED
            assert not node.leases


async def test_a_deadline_during_the_binding_ends_nothing(tmp_path: Path) -> None:
    async with engine(tmp_path, "a100-40gb:1", follows_pods=True) as node:
        granted = await promise(node)
        came = node.start(node.manager.bind(granted.lease.id, bound(POD)))
        renewed = node.start(node.manager.renew(granted.lease.id, granted.token, 30.0, SCHEDULER))
        await asyncio.sleep(0)
        node.clock.advance(61.0)
        assert (await came).owner.is_bound
        assert await refused(renewed) is Reason.IN_USE
        node.clock.advance(100_000.0)
        await node.quiet()
        assert node.leases[granted.lease.id].expires_at is None


@pytest.mark.parametrize("ttl", [None, 30.0])
async def test_a_deadline_during_the_confirmation_ends_nothing(tmp_path: Path, ttl: float | None) -> None:
    """A scheduler binds on that answer, and the pod then uses the instance."""
    async with engine(tmp_path, "a100-40gb:1", follows_pods=True) as node:
        granted = await promise(node)
        node.clock.advance(50.0)
        renewed = node.start(node.manager.renew(granted.lease.id, granted.token, ttl, SCHEDULER))
        await asyncio.sleep(0)
        node.clock.advance(11.0)
        lease = await renewed
        await node.quiet()
        assert node.leases == {granted.lease.id: lease}


async def test_a_confirmation_is_committed_though_its_caller_disconnects(tmp_path: Path) -> None:
    async with engine(tmp_path, "a100-40gb:1", follows_pods=True) as node:
        granted = await promise(node)
        renewed = node.start(node.manager.renew(granted.lease.id, granted.token, None, SCHEDULER))
        await asyncio.sleep(0)
        renewed.cancel()
        node.clock.advance(61.0)
        await asyncio.wait((renewed,))
        await node.quiet()
        assert node.leases[granted.lease.id].expires_at is None


async def test_a_repeated_request_while_it_ends_is_refused(tmp_path: Path) -> None:
    async with engine(tmp_path, "a100-40gb:1", follows_pods=True) as node:
        granted = await promise(node, request_id="one")
        node.clock.advance(61.0)
        again = node.start(promise(node, request_id="one"))
        assert await refused(again) is Reason.LEASE_ENDED
        assert granted.lease.id not in node.leases


async def test_two_bindings_at_once_are_one(tmp_path: Path) -> None:
    async with engine(tmp_path, "a100-40gb:1", follows_pods=True) as node:
        granted = await promise(node)
        id_ = granted.lease.id
        bare, handed, again = await asyncio.gather(
            node.manager.bind(id_, bound(POD)),
            node.manager.bind(id_, bound(POD, (ONE,))),
            node.manager.bind(id_, bound(POD)),
        )
        assert (devices_of(bare), devices_of(handed), devices_of(again)) == ((), (ONE,), (ONE,))
        assert node.leases[id_] == handed


async def test_a_cancelled_binding_is_committed(tmp_path: Path) -> None:
    async with engine(tmp_path, "a100-40gb:1", follows_pods=True) as node:
        granted = await promise(node)
        came = node.start(node.manager.bind(granted.lease.id, bound(POD, (ONE,))))
        await asyncio.sleep(0)
        came.cancel()
        await asyncio.wait((came,))
        await node.until(lambda: devices_of(node.leases[granted.lease.id]) == (ONE,))


# Where it cannot be recorded, and after a crash


async def test_a_binding_that_cannot_be_recorded_is_refused_and_it_stays_reserved(tmp_path: Path) -> None:
    def full(*_: object) -> None:
        raise OverflowError("database or disk is full")

    async with engine(tmp_path, "a100-40gb:1", follows_pods=True) as node:
        granted = await promise(node)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Ledger, "_commit", full)
            assert await refused(node.manager.bind(granted.lease.id, bound(POD, (ONE,)))) is Reason.LEDGER_FAILED
        assert node.leases == {granted.lease.id: granted.lease}
        await node.manager.bind(granted.lease.id, bound(POD, (ONE,)))
        assert devices_of(node.leases[granted.lease.id]) == (ONE,)


async def test_a_reservation_survives_a_restart_with_its_deadline(tmp_path: Path) -> None:
    node = await start(tmp_path, "a100-40gb:1", follows_pods=True)
    granted = await promise(node)
    handed = await node.manager.bind((await promise(node, "2g.10gb")).lease.id, bound(POD, (TWO,)))
    await killed(node)
    async with engine(tmp_path, clock=node.clock, follows_pods=True) as again:
        assert again.leases == {granted.lease.id: granted.lease, handed.id: handed}
        await again.manager.renew(granted.lease.id, granted.token, 60.0, SCHEDULER)
        again.clock.advance(61.0)
        await again.until(lambda: len(again.leases) == 1)
        assert again.leases == {handed.id: handed}


async def test_a_reboot_ends_it_and_refuses_its_pod(tmp_path: Path) -> None:
    node = await start(tmp_path, "a100-40gb:1", follows_pods=True)
    granted = await promise(node)
    await killed(node)
    node.simulator.reboot()
    async with engine(tmp_path, clock=node.clock, follows_pods=True) as again:
        assert not again.leases
        assert await refused(again.manager.bind(granted.lease.id, bound(POD))) is Reason.LEASE_ENDED


async def test_pods_are_bound_while_paused(tmp_path: Path) -> None:
    async with engine(tmp_path, "a100-40gb:1", follows_pods=True) as node:
        granted = await promise(node)
        await node.manager.pause("", ADMIN, lasting=True)
        assert (await node.manager.bind(granted.lease.id, bound(POD, (ONE,)))).owner.is_bound


async def test_without_kubernetes_the_end_of_a_pod_is_unknown(tmp_path: Path) -> None:
    async with engine(tmp_path, "a100-40gb:1") as node:
        granted = await promise(node)
        await node.manager.bind(granted.lease.id, bound(POD))
        await node.manager.renew(granted.lease.id, granted.token, 30.0, ANYBODY)
        node.clock.advance(31.0)
        await node.until(lambda: not node.leases)


# What is being made


async def test_plans_for_a_pod_are_pending_until_it_is_leased(tmp_path: Path) -> None:
    async with engine(tmp_path, "a100-40gb:1") as node:
        node.simulator.hang(CREATE)
        asked = node.start(promise(node, "1g.5gb"))
        other = node.start(node.acquire("1g.5gb"))
        await node.stuck()
        ((owner, (slot,)),) = node.manager.reserving()
        assert (owner, slot.profile.name) == (PodOwner(pod=POD), "1g.5gb")
        node.simulator.clear()
        granted = await asked
        assert node.manager.reserving() == ()
        await other
        assert node.leases[granted.lease.id].owner.is_reserved

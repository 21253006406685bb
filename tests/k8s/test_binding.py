"""A pod gets what was taken for it, and nobody else does; what fits none of its devices ends in words."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from mig_agent.adapters.ledger.store import LEDGER_FILE, Ledger
from mig_agent.core.errors import Reason, RefusedError
from mig_agent.core.events import EventKind
from mig_agent.core.model import Holder, Lease
from mig_agent.core.owner import KubeletDevice, Pod
from mig_agent.engine.callers import Caller
from mig_agent.engine.results import Granted
from mig_agent.frontends.kubernetes.device_plugin.prestart import KUBELET
from mig_agent.simulator import Code
from support.engine import CREATE, killed
from support.ledgers import rewritten
from support.owners import bound, devices_of, pod_of
from support.plugged import MIDDLE, SMALL, Plugged, devices, plugged

SCHEDULER = Caller(name="volcano", scheduler=True)
MEMORY = "mig-agent.io/memory-10g"


def pod(name: str = "train", uid: str | None = None) -> Pod:
    """Return a pod as `Words.put` makes them."""
    return Pod(namespace="team-a", name=name, uid=f"uid-{name}" if uid is None else uid)


async def promise(at: Plugged, *wants: str, of: Pod | None = None, **fields: Any) -> Granted:
    holder = Holder(tenant="namespace team-a")
    request = at.node.request(
        *(wants or ("1g.10gb",)), holder=holder, pod=of or pod(), **{"ttl_seconds": 60.0, **fields}
    )
    granted = await at.node.manager.acquire(request, SCHEDULER)
    at.node.manager.delivered(granted.lease.id)
    return granted


def standing(at: Plugged) -> dict[str, tuple[KubeletDevice, ...]]:
    return {lease.id: devices_of(lease) for lease in at.node.leases.values()}


def events(at: Plugged, word: str = "PromiseNotUsed") -> list[str]:
    return [words for _, reason, words in at.words.told if reason == word]


async def test_the_pod_gets_the_lease_that_was_taken_for_it(tmp_path: Path) -> None:
    async with plugged(tmp_path) as at:
        granted = await promise(at)
        await at.admit("train", *devices(5))
        await at.start(*devices(5))
        (lease,) = at.node.leases.values()
        assert (lease.id, devices_of(lease)) == (granted.lease.id, devices(5))
        assert (lease.owner.is_bound, lease.expires_at) == (True, None)
        assert pod_of(lease) == pod()
        assert at.node.creations() == 1
        assert at.folder.names() == ("mig-1g.10gb-5",)
        at.node.clock.advance(100_000.0)
        await at.start(*devices(5))
        assert standing(at) == {granted.lease.id: devices(5)}, "a restart of its container keeps it"
        at.words.drop("train")
        await at.following.poll()
        assert not at.node.leases


async def test_reserved_lease_bound_before_is_still_given_its_devices(tmp_path: Path) -> None:
    async with plugged(tmp_path) as at:
        granted = await promise(at)
        await at.node.manager.bind(granted.lease.id, bound(pod()))
        await at.admit("train", *devices(0))
        await at.start(*devices(0))
        assert standing(at) == {granted.lease.id: devices(0)}


@pytest.mark.parametrize(
    "other", [pod("other"), pod(uid="of-the-one-before"), Pod(namespace="team-b", name="train", uid="uid-train")]
)
async def test_another_pod_gets_an_instance_of_its_own(tmp_path: Path, other: Pod) -> None:
    async with plugged(tmp_path) as at:
        granted = await promise(at, of=other)
        await at.admit("train", *devices(0))
        await at.start(*devices(0))
        assert standing(at)[granted.lease.id] == (), "it is still the other's"
        assert at.lease(devices(0)[0]).id != granted.lease.id
        assert not events(at)


async def test_devices_of_several_containers_are_one_reservation(tmp_path: Path) -> None:
    async with plugged(tmp_path) as at:
        granted = await promise(at, "3g.40gb", "1g.10gb", "1g.10gb")
        small, middle = devices(0, 1), devices(0, resource=MIDDLE)
        await at.admit("train", small[0], *middle)
        await at.admit("train", small[1], container="second")
        await at.start(small[1])
        (lease,) = at.node.leases.values()
        assert lease.id == granted.lease.id
        assert devices_of(lease)[0] == middle[0]
        assert set(devices_of(lease)) == {*small, *middle}
        await asyncio.gather(at.start(*middle), at.start(small[0]))
        assert at.node.creations() == 3
        assert len(at.node.told(EventKind.LEASE_BOUND)) == 1


async def test_devices_without_a_reservation_are_leased_in_addition(tmp_path: Path) -> None:
    async with plugged(tmp_path) as at:
        granted = await promise(at)
        small, middle = devices(0), devices(0, resource=MIDDLE)
        await at.admit("train", *small, *middle)
        await asyncio.gather(at.start(*small), at.start(*middle))
        assert standing(at)[granted.lease.id] == small
        assert at.holder(middle[0]) == "train"
        assert len(at.node.leases) == 2


async def test_an_amount_of_memory_is_served_by_any_profile_that_has_it(tmp_path: Path) -> None:
    async with plugged(tmp_path) as at:
        granted = await promise(at, "2g.20gb")
        asked = devices(0, resource=MEMORY)
        await at.admit("train", *asked)
        await at.start(*asked)
        assert standing(at) == {granted.lease.id: asked}
        (instance,) = at.node.instances()
        assert instance.slot.profile.name == "2g.20gb"


async def test_init_container_starts_with_the_device_that_it_passes_on(tmp_path: Path) -> None:
    """The kubelet lists no plain init container: its checkpoint alone tells whose the device is."""
    async with plugged(tmp_path) as at:
        granted = await promise(at)
        await at.admit("train", *devices(2), container="prepare")
        at.words.pods["train"] = {"main": ()}
        await at.start(*devices(2))
        assert standing(at) == {granted.lease.id: devices(2)}
        at.words.put("train", *devices(2))
        await at.start(*devices(2))
        assert standing(at) == {granted.lease.id: devices(2)}
        assert at.node.creations() == 1


# What does not fit


async def test_reservation_that_fits_no_device_ends_with_an_event_on_the_pod(tmp_path: Path) -> None:
    async with plugged(tmp_path) as at:
        granted = await promise(at, "3g.40gb")
        await at.admit("train", *devices(0))
        await at.start(*devices(0))
        assert granted.lease.id not in standing(at)
        assert at.holder(devices(0)[0]) == "train"
        (ended,) = at.node.told(EventKind.LEASE_ENDED)
        assert ended.message.endswith(f"it fits no device of its pod: the pod lacks {SMALL}")
        what = f"lease {granted.lease.id} that was taken for it fits none of its devices and has ended"
        assert events(at) == [f"{what}: the pod lacks {SMALL}"]


async def test_one_without_a_uid_may_be_for_the_next_pod_of_that_name_and_stays(tmp_path: Path) -> None:
    async with plugged(tmp_path) as at:
        await at.admit("train", *devices(0))
        await at.start(*devices(0))
        granted = await promise(at, of=pod(uid=""))
        await at.start(*devices(0))  # its container has begun anew
        assert standing(at)[granted.lease.id] == ()
        at.words.drop("train")
        await at.following.poll()
        await at.admit("train", *devices(1), uid="of-the-next")
        await at.start(*devices(1))
        assert standing(at) == {granted.lease.id: devices(1)}
        assert pod_of(at.node.leases[granted.lease.id]) == pod(uid="of-the-next")
        assert not events(at)


async def test_second_reservation_for_the_same_device_ends(tmp_path: Path) -> None:
    async with plugged(tmp_path) as at:
        first = await promise(at)
        at.node.clock.advance(1.0)
        second = await promise(at)
        await at.admit("train", *devices(0))
        await at.start(*devices(0))
        assert standing(at) == {first.lease.id: devices(0)}
        (words,) = events(at)
        assert second.lease.id in words
        assert words.endswith("the pod has all that it asks for")


async def test_two_reservations_serve_two_devices(tmp_path: Path) -> None:
    async with plugged(tmp_path) as at:
        first, second = await promise(at), await promise(at, "2g.20gb")
        small, memory = devices(0), devices(0, resource=MEMORY)
        await at.admit("train", *small, *memory)
        await at.start(*memory)
        assert standing(at) == {first.lease.id: small, second.lease.id: memory}
        assert not events(at)


async def test_expired_reservation_is_replaced(tmp_path: Path) -> None:
    async with plugged(tmp_path) as at:
        granted = await promise(at)
        await at.admit("train", *devices(0))
        at.node.clock.advance(61.0)
        await at.node.until(lambda: not at.node.leases)
        await at.start(*devices(0))
        assert granted.lease.id not in standing(at)
        assert at.node.creations() == 1, "of the idle instance"


async def test_reservation_that_expires_while_binding_is_bound_or_replaced(tmp_path: Path) -> None:
    async with plugged(tmp_path) as at:
        for number in range(20):
            name = f"train-{number}"
            granted = await promise(at, of=pod(name))
            await at.admit(name, *devices(number))
            starting = at.begin(devices(number))
            for _ in range(number):
                await asyncio.sleep(0)
            at.node.clock.advance(61.0)
            await starting
            assert list(standing(at).values()) == [devices(number)]
            at.node.clock.advance(1_000.0)
            await at.node.quiet()
            (lease,) = at.node.leases.values()
            assert devices_of(lease) == devices(number)
            assert pod_of(lease) == pod_of(granted.lease)
            at.words.drop(name)
            await at.following.poll()
            assert not at.node.leases


# Whose it is


async def test_uid_comes_from_the_api_server_if_the_checkpoint_has_none(tmp_path: Path) -> None:
    async with plugged(tmp_path) as at:
        granted = await promise(at)
        former = await promise(at, of=pod(uid="of-the-one-before"))
        await at.admit("train", *devices(0))
        at.words.recorded = ()
        await at.start(*devices(0))
        assert standing(at) == {granted.lease.id: devices(0), former.lease.id: ()}
        assert pod_of(at.node.leases[granted.lease.id]) == pod()


async def test_start_is_refused_with_a_message_while_the_uid_is_unknown(tmp_path: Path) -> None:
    async with plugged(tmp_path) as at:
        granted = await promise(at)
        await at.admit("train", *devices(0))
        at.words.recorded = ()
        at.words.does_not_answer = True
        with pytest.raises(RefusedError) as refused:
            await at.start(*devices(0))
        assert refused.value.refusal.message.startswith("cannot tell whether pod team-a/train is the one for which ")
        assert standing(at) == {granted.lease.id: ()}
        at.words.does_not_answer = False
        await at.start(*devices(0))
        assert standing(at) == {granted.lease.id: devices(0)}


async def test_without_an_api_server_only_certain_reservations_are_bound(tmp_path: Path) -> None:
    async with plugged(tmp_path, has_api=False) as at:
        granted = await promise(at)
        nameless = await promise(at, of=pod("other", uid=""))
        await at.admit("train", *devices(0))
        await at.start(*devices(0))
        assert standing(at)[granted.lease.id] == devices(0)
        await at.admit("other", *devices(1))
        at.words.recorded = tuple(each for each in at.words.recorded if each.pod_uid == "uid-train")
        await at.start(*devices(1))
        assert standing(at)[nameless.lease.id] == devices(1), "a promise without a UID is any pod's of that name"


# Beside a request that waits


async def test_later_reservation_replaces_a_waiting_request(tmp_path: Path) -> None:
    async with plugged(tmp_path) as at:
        full = [await at.node.acquire("1g.10gb") for _ in range(7)]
        await at.admit("train", *devices(0))
        with pytest.raises(RefusedError):
            await at.start(*devices(0), seconds=0.05)
        taking = at.node.start(promise(at, priority=1, wait_seconds=30.0))
        await at.node.until(lambda: len(at.node.manager.snapshot.queue) == 2)
        await at.node.release(full[0])
        granted = await taking
        assert [each.priority for each in at.node.manager.snapshot.queue] == [0], "the kubelet's is still waiting"
        await at.start(*devices(0))
        assert standing(at)[granted.lease.id] == devices(0)
        assert not at.node.manager.snapshot.queue
        assert not at.table.acquisitions


async def test_request_in_progress_is_cancelled_for_a_reservation(tmp_path: Path) -> None:
    """The driver hangs in its creation; what was taken for the pod is there already."""
    async with plugged(tmp_path, "h100-80gb:2") as at:
        await at.admit("train", *devices(0))
        at.node.simulator.hang(CREATE)
        slow = at.begin(devices(0))
        await at.node.stuck()
        ready: list[Lease] = []

        async def take() -> None:
            ready.append((await promise(at, gpus=("1",))).lease)

        at.node.simulator.clear()
        await asyncio.gather(take(), slow)
        await at.start(*devices(0))
        mine = [each for each in at.node.leases.values() if devices_of(each)]
        assert [devices_of(each) for each in mine] == [devices(0)]
        assert not [each for each in at.node.leases.values() if not devices_of(each)], "the other one has ended"


# Trouble


async def test_what_cannot_be_recorded_is_refused_and_tried_again(tmp_path: Path) -> None:
    def full(*_: object) -> None:
        raise OverflowError("database or disk is full")

    async with plugged(tmp_path) as at:
        granted = await promise(at)
        await at.admit("train", *devices(0))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Ledger, "_commit", full)
            with pytest.raises(RefusedError) as refused:
                await at.start(*devices(0))
        assert refused.value.refusal.reason is Reason.LEDGER_FAILED
        assert standing(at) == {granted.lease.id: ()}
        await at.start(*devices(0))
        assert standing(at) == {granted.lease.id: devices(0)}


async def test_the_same_container_started_twice_at_once_gets_one(tmp_path: Path) -> None:
    async with plugged(tmp_path) as at:
        granted = await promise(at, "1g.10gb", "3g.40gb")
        small, middle = devices(0), devices(0, resource=MIDDLE)
        await at.admit("train", *small, *middle)
        await asyncio.gather(*(at.start(*each) for each in (small, middle, small, middle)))
        assert standing(at) == {granted.lease.id: (*small, *middle)}
        assert not events(at)


async def test_lost_instance_is_replaced(tmp_path: Path) -> None:
    async with plugged(tmp_path) as at:
        granted = await promise(at)
        await at.node.manager.bind(granted.lease.id, bound(pod()))
        at.node.simulator.destroy_foreign(at.node.where(granted))
        await at.node.look()
        await at.admit("train", *devices(0))
        await at.start(*devices(0))
        assert granted.lease.id not in standing(at)
        assert list(standing(at).values()) == [devices(0)]


async def test_what_is_on_a_gpu_that_is_silent_since_the_start_ends_for_that_reason(tmp_path: Path) -> None:
    """The request would fit. Its pod is not kept waiting for a GPU that may never answer again."""
    async with plugged(tmp_path, "h100-80gb:2") as at:
        granted = await promise(at, gpus=("1",))
        other = await promise(at, gpus=("1",), of=pod("other"))
        at.node.simulator.fail("nvmlDeviceGetMigMode", Code.UNKNOWN, times=None, gpu=1)
    async with plugged(tmp_path, "") as at:
        assert list(at.node.manager.snapshot.missing) == [1]
        assert set(standing(at)) == {granted.lease.id, other.lease.id}, "it stands, as any other"
        assert at.node.manager.snapshot.silent == {granted.lease.id, other.lease.id}
        await at.admit("train", *devices(0))
        await at.start(*devices(0))
        assert standing(at) == {other.lease.id: (), at.lease(devices(0)[0]).id: devices(0)}
        (told,) = events(at)
        assert told == (
            f"lease {granted.lease.id} that was taken for it has ended, and it gets another device: "
            "the GPU that it is on does not answer"
        )
        at.node.simulator.clear()
        await at.node.look()
        assert at.node.manager.snapshot.silent == frozenset()
        await at.admit("other", *devices(1))
        await at.start(*devices(1))
        assert standing(at)[other.lease.id] == devices(1)
        assert len(events(at)) == 1


async def test_an_agent_that_is_paused_ends_nothing_that_it_cannot_see(tmp_path: Path) -> None:
    async with plugged(tmp_path, "h100-80gb:2") as at:
        granted = await promise(at, gpus=("1",))
    with rewritten(tmp_path / LEDGER_FILE) as connection:
        connection.execute("UPDATE gpu SET text = 'of another version' WHERE uuid = ?", (granted.devices[0].gpu,))
    async with plugged(tmp_path, "", paused=("the driver is replaced",), opened=False) as at:
        assert at.node.manager.snapshot.silent == {granted.lease.id}
        assert not await at.starting._binder.bind(pod(), devices(0))
        assert standing(at) == {granted.lease.id: ()}


async def test_binding_survives_a_crash(tmp_path: Path) -> None:
    """Killed between the record and the file: the kubelet asks again, and the file is written then."""
    async with plugged(tmp_path) as at:
        granted = await promise(at)
        await at.node.manager.bind(granted.lease.id, bound(pod(), devices(0)))
        await killed(at.node)
    async with plugged(tmp_path, "") as again:
        await again.admit("train", *devices(0))
        await again.start(*devices(0))
        assert standing(again) == {granted.lease.id: devices(0)}
        assert again.folder.names() == ("mig-1g.10gb-0",)
        assert again.node.creations() == 1


async def test_pod_without_a_reservation_is_served_as_usual(tmp_path: Path) -> None:
    """A pod for which nothing was taken is served as any other."""
    async with plugged(tmp_path) as at:
        await at.admit("train", *devices(0))
        await at.start(*devices(0))
        (told,) = at.node.told(EventKind.LEASE_GRANTED)
        assert told.data["by"] == KUBELET.name
        assert not at.node.told(EventKind.LEASE_BOUND)

"""Reserved devices are counted once, for what their pod asks for, and are never given twice."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import permutations

from hypothesis import given
from hypothesis import strategies as st

from mig_agent.core.model import GpuUuid, Layout, Lease, LeaseId, NodeView, Slot, Want
from mig_agent.core.owner import KubeletDevice, Pod, PodOwner
from mig_agent.core.planning.profiles import serves
from mig_agent.frontends.kubernetes.reservations import (
    count_reserved,
    count_unreserved,
    leases_for,
    match_slots,
    requests_unknown,
    reserved_slots,
)
from mig_agent.frontends.kubernetes.resources import Naming, resources_of
from support.nodes import A100_40, H100, Has, Machine, node, nodes
from support.owners import bound, pod_of

SMALL, MIDDLE, LARGE = "nvidia.com/mig-1g.10gb", "nvidia.com/mig-2g.20gb", "nvidia.com/mig-3g.40gb"
MEMORY, MORE = "mig-agent.io/memory-10g", "mig-agent.io/memory-20g"
POD = Pod(namespace="team-a", name="train", uid="6b8f")
ONE, TWO, THREE = Has("1g.10gb", 0, "leased", "p"), Has("2g.20gb", 2, "leased", "p"), Has("3g.40gb", 4, "leased", "p")


def wants_of(view: NodeView) -> dict[str, Want]:
    return {each.name: each.want for each in resources_of(view, Naming())}


def layouts_of(view: NodeView) -> dict[GpuUuid, Layout]:
    return {gpu.uuid: gpu.layout for gpu in view.gpus}


def taken(*machines: Machine, pods: Sequence[Pod] = (POD,)) -> NodeView:
    """A node whose leases are taken for these pods in turn; the last one has all others."""
    view = node(*machines)
    leases = {
        each.id: replace(each, owner=PodOwner(pod=pods[min(number, len(pods) - 1)]), created_at=float(number))
        for number, each in enumerate(view.leases.values())
    }
    return replace(view, leases=leases)


def count(view: NodeView, asks: Mapping[str, int] | None) -> dict[str, int]:
    return dict(count_reserved(reserved_slots(view), view, wants_of(view), lambda _: asks))


def together(view: NodeView) -> NodeView:
    """The same with all in one lease."""
    leases = list(view.leases.values())
    one = replace(leases[0], instances=tuple(each for lease in leases for each in lease.instances))
    gpus = tuple(
        replace(gpu, instances=tuple(replace(each, lease=one.id) for each in gpu.instances)) for gpu in view.gpus
    )
    return replace(view, gpus=gpus, leases={one.id: one})


# What serves what


def test_an_instance_stands_for_its_profile_or_for_an_amount_that_it_has() -> None:
    view = taken(Machine(H100, (TWO,)))
    assert count(view, {MIDDLE: 1}) == {MIDDLE: 1}
    assert count(view, {MORE: 1}) == {MORE: 1}
    assert count(view, {MEMORY: 1}) == {MEMORY: 1}, "larger than asked for serves, too"
    for other in (SMALL, LARGE, "mig-agent.io/memory-40g", "nvidia.com/gpu", "example.com/licence"):
        assert count(view, {other: 1}) == {}


def test_of_an_attribute_profile_only_its_name_is_served() -> None:
    view = taken(Machine(H100, (Has("1g.10gb+me", 0, "leased", "p"),)))
    assert count(view, {SMALL: 1, MEMORY: 1}) == {}
    assert count(view, {"nvidia.com/mig-1g.10gb.me": 1}) == {"nvidia.com/mig-1g.10gb.me": 1}


def test_slot_serves_one_device_and_its_own_profile_first() -> None:
    view = taken(Machine(H100, (ONE, TWO, THREE)))
    assert count(view, {SMALL: 2}) == {SMALL: 1}
    assert count(view, {MORE: 1, MIDDLE: 1}) == {MORE: 1, MIDDLE: 1}
    assert count(view, {MEMORY: 3}) == {MEMORY: 3}
    assert count(view, {MEMORY: 9}) == {MEMORY: 3}
    assert count(view, {LARGE: 1, MEMORY: 1, SMALL: 1}) == {LARGE: 1, MEMORY: 1, SMALL: 1}


def test_slot_moves_for_another_that_serves_nothing_else() -> None:
    """The first comes first, and takes the amount when the second needs the exact one."""
    view = node(Machine(A100_40, (Has("2g.10gb", 0, "leased", "a"), Has("1g.5gb", 2, "leased", "b"))))
    two, one = (each.slot for gpu in view.gpus for each in gpu.instances)
    wants = [Want(memory_bytes=4 * 10**9), Want(memory_bytes=9 * 10**9)]
    assert match_slots([[one], [two]], wants, layouts_of(view)) == ((0,), (1,))
    assert match_slots([[two], [one]], wants, layouts_of(view)) == ((1,), (0,))
    assert match_slots([[two], [one]], wants[:1], layouts_of(view)) == ((0,), None), "who comes first"
    assert match_slots([[two, one], [two]], wants, layouts_of(view)) == ((1, 0), None)


def test_lease_of_several_devices_matches_whole_or_not_at_all() -> None:
    view = together(taken(Machine(H100, (ONE, TWO))))
    assert count(view, {SMALL: 1, MIDDLE: 1}) == {SMALL: 1, MIDDLE: 1}
    assert count(view, {SMALL: 1}) == {}
    assert count(view, {SMALL: 2, LARGE: 1}) == {}


# Whose it is


def test_slots_of_a_pod_with_unknown_requests_count_for_every_resource() -> None:
    view = taken(Machine(H100, (TWO,)))
    assert count(view, None) == dict.fromkeys((MIDDLE, "mig-agent.io/memory-5g", MEMORY, MORE), 1)
    assert count_reserved(reserved_slots(view), view, wants_of(view), requests_unknown) == count(view, None)
    assert count(view, {}) == {}, "one that asks for nothing here is known"


def test_pods_are_counted_apart() -> None:
    other = replace(POD, uid="another")
    view = taken(Machine(H100, (ONE, TWO)), pods=(POD, other))
    asks = {POD: {SMALL: 1}, other: {MIDDLE: 1}}
    assert count_reserved(reserved_slots(view), view, wants_of(view), asks.get) == {SMALL: 1, MIDDLE: 1}
    asks = {POD: {MIDDLE: 1}, other: {SMALL: 1}}
    assert count_reserved(reserved_slots(view), view, wants_of(view), asks.get) == {}, "one pod's is not another's"


def test_a_pod_without_a_uid_is_the_one_of_its_name() -> None:
    view = taken(Machine(H100, (ONE, Has("1g.10gb", 1, "leased", "p"))), pods=(POD, replace(POD, uid="")))
    assert count(view, {SMALL: 1}) == {SMALL: 1}, "its requests count once"
    assert len(leases_for(view, POD)) == 2
    assert len(leases_for(view, replace(POD, uid="another"))) == 1
    assert leases_for(view, replace(POD, name="other")) == ()


def test_devices_that_the_pod_has_are_not_counted_again() -> None:
    view = taken(Machine(H100, (ONE, Has("1g.10gb", 1, "leased", "p"))))
    (first, *_) = view.leases.values()
    device = KubeletDevice(resource=SMALL, id="mig-agent-0")
    handed = replace(view, leases={**view.leases, first.id: replace(first, owner=bound(pod_of(first), (device,)))})
    assert count(handed, {SMALL: 1}) == {}
    assert count(handed, {SMALL: 2}) == {SMALL: 1}
    assert len(reserved_slots(handed)) == len(leases_for(handed, POD)) == 1


def test_lease_that_lost_a_device_reserves_nothing() -> None:
    view = together(taken(Machine(H100, (ONE, TWO))))
    (gpu,) = view.gpus
    lost = replace(view, gpus=(replace(gpu, instances=gpu.instances[:1]),))
    assert reserved_slots(lost) == ()
    assert count(lost, None) == {}


def test_leases_of_other_owners_are_no_reservations() -> None:
    view = node(Machine(H100, (ONE, Has("1g.10gb", 1, "idle"))))
    assert reserved_slots(view) == ()


# Beside what the kubelet has allocated


def ids(resource: str, *numbers: int) -> tuple[KubeletDevice, ...]:
    return tuple(KubeletDevice(resource=resource, id=f"mig-agent-{each}") for each in numbers)


def test_pending_device_uses_a_reservation_and_is_counted_once() -> None:
    counts = count_unreserved({SMALL: 2, MEMORY: 1}, (*ids(SMALL, 0), *ids(MIDDLE, 0)), ())
    assert counts.promised == {SMALL: 1, MEMORY: 1}
    assert counts.unserved == ids(MIDDLE, 0), "room is kept for what has none"
    assert count_unreserved({SMALL: 1}, ids(SMALL, 0, 1), ()).unserved == ids(SMALL, 1)


def test_device_whose_pod_has_no_fitting_reservation_uses_none() -> None:
    counts = count_unreserved({SMALL: 1}, ids(SMALL, 0, 1), ids(SMALL, 0))
    assert counts.promised == {}
    assert counts.unserved == ids(SMALL, 0)


@given(
    promises=st.dictionaries(st.sampled_from([SMALL, MIDDLE]), st.integers(0, 4)),
    waiting=st.lists(st.tuples(st.sampled_from([SMALL, MIDDLE]), st.integers(0, 5)), unique=True),
    judged=st.sets(st.tuples(st.sampled_from([SMALL, MIDDLE]), st.integers(0, 5))),
)
def test_reservations_and_unserved_devices_add_up(
    promises: dict[str, int], waiting: list[tuple[str, int]], judged: set[tuple[str, int]]
) -> None:
    """Each promise is either still open, or taken by one device; each device takes one, or needs room."""
    unserved = tuple(device for resource, number in waiting for device in ids(resource, number))
    counts = count_unreserved(promises, unserved, {device for each in judged for device in ids(each[0], each[1])})
    took = Counter(each.resource for each in unserved) - Counter(each.resource for each in counts.unserved)
    for resource in (SMALL, MIDDLE):
        assert counts.promised.get(resource, 0) + took[resource] == promises.get(resource, 0)
    assert set(counts.unserved) <= set(unserved)


# Any node, any pods

asking = st.dictionaries(st.sampled_from([SMALL, MIDDLE, LARGE, MEMORY, MORE]), st.integers(0, 3))


@given(view=nodes(layouts=(H100, A100_40), most=2, states=("leased",)), asks=st.lists(asking, min_size=3, max_size=3))
def test_no_instance_is_counted_twice_and_no_pod_gets_more_than_it_asks_for(
    view: NodeView, asks: list[dict[str, int]]
) -> None:
    pods = [Pod(namespace="team-a", name=f"pod-{number}", uid=str(number)) for number in range(3)]
    leases = {
        each.id: replace(each, owner=PodOwner(pod=pods[number % 3])) for number, each in enumerate(view.leases.values())
    }
    view = replace(view, leases=leases)
    wants = wants_of(view)
    known = dict(zip(pods, asks, strict=True))
    counts = count_reserved(reserved_slots(view), view, wants, known.get)
    assert sum(counts.values()) <= sum(len(each.instances) for each in leases.values())
    assert not Counter(counts) - sum((Counter(each) for each in asks), Counter())
    assert set(counts) <= set(wants)
    for pod in pods:  # one pod's are its own
        alone = {pod: known[pod], **{other: {} for other in pods if other != pod}}
        own = count_reserved(reserved_slots(view), view, wants, alone.get)
        assert sum(own.values()) <= sum(len(each.instances) for each in leases_for(view, pod))
        assert not Counter(own) - Counter(known[pod])
        counts = dict(Counter(counts) - Counter(own))
    assert counts == {}, "and together they are the whole"


@given(
    view=nodes(layouts=(H100,), most=1, states=("leased",)),
    sizes=st.lists(st.integers(1, 2), max_size=4),
    asks=st.lists(st.sampled_from([SMALL, MIDDLE, LARGE, MEMORY, MORE]), max_size=4),
)
def test_groups_match_whole_in_order_and_as_many_as_possible(view: NodeView, sizes: list[int], asks: list[str]) -> None:
    slots = [each.slot for gpu in view.gpus for each in gpu.instances]
    groups = [[slots.pop() for _ in range(size)] for size in sizes if len(slots) >= size]
    wants = [wants_of(view)[name] for name in asks]
    layouts = layouts_of(view)
    found = match_slots(groups, wants, layouts)
    used = [place for fit in found for place in fit or ()]
    assert len(used) == len(set(used)), "a device is served once"
    served: list[Slot] = []
    for group, fit in zip(groups, found, strict=True):
        assert (fit is not None) == _possible([*served, *group], wants, layouts), "nobody is left out for nothing"
        if fit is not None:
            served += group
            assert all(
                serves(slot.profile, wants[place], layouts[slot.gpu]) for slot, place in zip(group, fit, strict=True)
            )


def _possible(slots: Sequence[Slot], wants: Sequence[Want], layouts: Mapping[GpuUuid, Layout]) -> bool:
    """Return whether a match exists, by trying all."""
    return any(
        all(serves(slot.profile, want, layouts[slot.gpu]) for slot, want in zip(slots, order, strict=True))
        for order in permutations(wants, len(slots))
    )


def test_leases_keep_their_ids() -> None:
    """The oldest first, whatever order the view has them in."""
    view = taken(Machine(H100, (ONE, TWO, THREE)))
    mixed: dict[LeaseId, Lease] = dict(reversed(list(view.leases.items())))
    assert [each.id for each in leases_for(replace(view, leases=mixed), POD)] == list(view.leases)

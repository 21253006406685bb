"""What a node publishes for DRA: names and sizes within the API server's limits, counters, order, and the writes."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from placement_bench.allocator import Allocator, PoolInvalidError

from mig_agent.core.dra.counters import consumption, counters_of, scarce_engines
from mig_agent.core.dra.devices import PartitionableDevice, devices_of, slots_by_name
from mig_agent.core.dra.names import ENGINE_COUNTERS, device_name, pool_name
from mig_agent.core.dra.objects import NodeReference, dropped_counters, read_slice, slice_object
from mig_agent.core.dra.pool import MOST_COUNTER_SETS, MOST_DEVICES, ResourceSlice, slices_of
from mig_agent.core.dra.relisting import PublishedSlice, relist
from mig_agent.core.model import GpuState, GpuUuid, Layout, NodeView, Request, Want
from mig_agent.core.planning.placement import tables_for
from mig_agent.core.planning.plan import Plan
from mig_agent.core.planning.planner import plan
from support.nodes import A30, A100_40, A100_80, H100, LAYOUTS, RTX_PRO, Has, Machine, node, nodes, whole

UUID = GpuUuid("GPU-8F0c2d1e-1111-2222-3333-444455556666")
NODE = NodeReference("n1", "uid-of-n1")
LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
GIB = 1 << 30


def published(view: NodeView, allocated: frozenset[str] = frozenset()) -> Allocator:
    """The scheduler's view of a node that has just published its slices."""
    found = Allocator()
    found.apply(relist((), slices_of(view, allocated)))
    return found


def has_profile(name: str, device: PartitionableDevice) -> bool:
    return device.profile == name


def counters(parts: tuple[ResourceSlice, ...]) -> dict[str, dict[str, int]]:
    """What is published of each GPU's counters, by counter set."""
    return {each.name: dict(each.available) for part in parts for each in part.counter_sets}


def devices(parts: tuple[ResourceSlice, ...]) -> list[PartitionableDevice]:
    return [device for part in parts for device in part.devices]


# ------------------------------------------------------------ names and limits


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.model)
def test_names_are_labels_of_the_gpus_uuid_and_differ(layout: Layout) -> None:
    slots = [(p, place) for p in layout.profiles for place in p.placements]
    names = slots_by_name(UUID, layout)
    assert len(names) == len(slots)
    for name in names:
        assert LABEL.fullmatch(name)
        assert name.startswith("gpu-8f0c2d1e-1111-2222-3333-444455556666-")
    assert all(LABEL.fullmatch(name) for name in counters_of(layout))


def test_a_pool_never_has_the_bare_name_of_the_node() -> None:
    assert pool_name("n1") == "mig-agent.io/n1"


@pytest.mark.parametrize("count", [1, 8, 9, 16])
@pytest.mark.parametrize("layout", [A100_80, RTX_PRO, A30], ids=lambda layout: layout.model)
def test_slices_stay_within_the_limits_of_the_api_server(layout: Layout, count: int) -> None:
    parts = slices_of(node(*[Machine(layout)] * count), frozenset())
    for part in parts:
        assert len(part.devices) <= MOST_DEVICES
        assert len(part.counter_sets) <= MOST_COUNTER_SETS
        assert bool(part.devices) != bool(part.counter_sets)
    assert len({part.name for part in parts}) == len(parts)
    assert len(devices(parts)) == count * sum(len(p.placements) for p in layout.profiles)
    assert all(len(each) <= 32 for each in counters(parts).values())
    sizes = [each.size for each in devices(tuple(sorted(parts, key=lambda part: part.name)))]
    assert sizes == sorted(sizes), "the smallest first, over all slices"


def test_eight_gpus_take_five_slices() -> None:
    assert len(slices_of(node(*[Machine(A100_80)] * 8), frozenset())) == 5


@given(nodes())
def test_a_slice_is_read_as_it_was_written(view: NodeView) -> None:
    for part in slices_of(view, frozenset()):
        written = PublishedSlice(content=part, generation=3, slice_count=7)
        assert read_slice(slice_object(written, NODE)) == written


def test_a_device_carries_nvidias_names_and_its_placement() -> None:
    (device,) = (each for each in devices_of(UUID, A100_40) if each.name.endswith("3g-20gb-4"))
    part = ResourceSlice(name="s", devices=(device,))
    (found,) = slice_object(PublishedSlice(content=part, generation=1, slice_count=1), NODE)["spec"]["devices"]
    assert found["attributes"] == {
        "type": {"string": "mig"},
        "profile": {"string": "3g.20gb"},
        "parentUUID": {"string": UUID},
        "productName": {"string": "NVIDIA A100-SXM4-40GB"},
        "computeSlices": {"int": 3},
        "placementStart": {"int": 4},
        "placementSize": {"int": 4},
    }
    assert found["capacity"]["memory"] == {"value": "19968Mi"}
    assert found["consumesCounters"] == [
        {
            "counterSet": "gpu-8f0c2d1e-1111-2222-3333-444455556666",
            "counters": {f"memory-slice-{number}": {"value": "1"} for number in range(4, 8)},
        }
    ]


def test_memory_is_read_in_any_unit_of_the_api_server() -> None:
    """It writes 40960Mi as 40Gi."""
    (device, *_) = devices_of(UUID, A100_40)
    written = PublishedSlice(
        content=ResourceSlice(name="s", devices=(replace(device, memory_mib=40960),)), generation=1, slice_count=1
    )
    answer = slice_object(written, NODE)
    answer["spec"]["devices"][0]["capacity"]["memory"]["value"] = "40Gi"
    assert read_slice(answer) == written


def test_dropped_counters_are_noticed() -> None:
    parts = slices_of(node(Machine(A100_40)), frozenset())
    for part in parts:
        written = PublishedSlice(content=part, generation=1, slice_count=2)
        assert not dropped_counters(written, read_slice(slice_object(written, NODE)))
        answer = slice_object(written, NODE)
        answer["spec"].pop("sharedCounters", None)
        for each in answer["spec"].get("devices", ()):
            del each["consumesCounters"]  # type: ignore[misc]  # as a server does with its gate off
        assert dropped_counters(written, read_slice(answer))


# ------------------------------------------------------------ counters


@pytest.mark.parametrize(
    ("layout", "engines"), [(A100_40, ["ofa-engines"]), (H100, ["ofa-engines"])], ids=["A100", "H100"]
)
def test_only_engines_that_can_become_scarce_have_counters(layout: Layout, engines: list[str]) -> None:
    assert [ENGINE_COUNTERS[each] for each in scarce_engines(layout)] == engines


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.model)
@given(data=st.data())
def test_counters_allow_exactly_what_the_planner_allows(layout: Layout, data: st.DataObject) -> None:
    windows = [(profile, place) for profile in layout.profiles for place in profile.placements]
    chosen = data.draw(st.lists(st.sampled_from(range(len(windows))), unique=True, max_size=8))
    tables = tables_for(layout)
    apart = all(not windows[a][1].mask & windows[b][1].mask for a, b in combinations(chosen, 2))
    engines = sum(tables.engines_of(windows[each][0]) for each in chosen)
    left = dict(counters_of(layout))
    for each in chosen:
        for name, amount in consumption(layout, *windows[each]).items():
            left[name] -= amount
    assert (min(left.values()) >= 0) == (apart and tables.engines_fit(engines))


def test_slices_held_outside_dra_have_no_counter_left() -> None:
    view = node(
        Machine(A100_40, (Has("3g.20gb", 4, "leased", "alice"), Has("1g.5gb", 0, "idle"), Has("1g.5gb", 1, "foreign")))
    )
    (left,) = counters(slices_of(view, frozenset())).values()
    assert [left[f"memory-slice-{number}"] for number in range(8)] == [1, 0, 1, 1, 0, 0, 0, 0]
    assert left["ofa-engines"] == 1


def test_an_engine_held_outside_dra_has_no_counter_left() -> None:
    view = node(Machine(A100_40, (Has("1g.5gb+me", 0, "leased", "alice"),)))
    (left,) = counters(slices_of(view, frozenset())).values()
    assert left["ofa-engines"] == 0


def test_an_allocated_slot_keeps_its_counters_whoever_is_in_it() -> None:
    """One negative counter stops the whole pool: also where a foreign instance took the slot first."""
    view = node(Machine(A100_40, (Has("3g.20gb", 0, "foreign"),)))
    (name,) = (each for each in slots_by_name(view.gpus[0].uuid, A100_40) if each.endswith("-1g-5gb-1"))
    (left,) = counters(slices_of(view, frozenset({name}))).values()
    assert [left[f"memory-slice-{number}"] for number in range(8)] == [0, 1, 0, 0, 1, 1, 1, 1]


def test_an_engine_of_an_allocated_slot_is_counted_once() -> None:
    """The scheduler subtracts what an allocated device takes, also where its instance is leased already."""
    view = node(Machine(RTX_PRO, (Has("1g.24gb+me", 0, "leased", "alice"),)))
    name = device_name(view.gpus[0].instances[0].slot)
    (unknown,) = counters(slices_of(view, frozenset())).values()
    (known,) = counters(slices_of(view, frozenset({name}))).values()
    total = counters_of(RTX_PRO)["jpeg-engines"]
    assert known["jpeg-engines"] == total
    assert unknown["jpeg-engines"] < total


@pytest.mark.parametrize("state", [GpuState.CORDONED, GpuState.LOST])
def test_nothing_new_is_left_on_a_gpu_that_is_not_used(state: GpuState) -> None:
    view = node(Machine(A100_40, state=state), Machine(A100_40))
    first, second = counters(slices_of(view, frozenset())).values()
    assert set(first.values()) == {0}
    assert set(second.values()) == {1}
    third, _ = counters(slices_of(view, frozenset(), reserved=frozenset({view.gpus[1].uuid}))).values()
    assert third == first


def test_a_whole_gpu_is_a_device_until_it_is_leased_or_shared() -> None:
    view = node(whole(), whole("leased", "alice"))
    parts = slices_of(view, frozenset())
    assert [(each.type, each.profile, each.memory_mib) for each in devices(parts)] == [("gpu", "whole", 23028)] * 2
    assert [each["memory-slice-0"] for each in counters(parts).values()] == [1, 0]


# ------------------------------------------------------------ order


@pytest.mark.parametrize(
    ("gibibytes", "profile"), [(4, "1g.5gb"), (8, "1g.10gb"), (15, "3g.20gb"), (30, "7g.40gb"), (45, "7g.80gb")]
)
@pytest.mark.parametrize("models", [(A100_40, H100), (H100, A100_40)], ids=["A100 first", "H100 first"])
def test_a_claim_by_memory_gets_the_smallest_slot(models: tuple[Layout, ...], gibibytes: int, profile: str) -> None:
    view = node(*(Machine(each) for each in models))
    found = published(view).allocate(lambda device: device.memory_mib << 20 >= gibibytes * GIB)
    assert found is not None
    assert found.profile == profile
    assert (found.product_name == A100_40.model) == (gibibytes < 45)


@given(nodes())
def test_the_first_device_that_fits_is_the_planners_choice(view: NodeView) -> None:
    """Requests by profile, with nothing allocated."""
    for profile in {each.name for gpu in view.gpus for each in gpu.layout.profiles}:
        chosen = plan(view, Request(wants=(Want(profile=profile),)))
        found = published(view).allocate(partial(has_profile, profile))
        assert (found is None) == (not isinstance(chosen, Plan))
        models = {gpu.layout for gpu in view.gpus}
        if found is not None and isinstance(chosen, Plan) and len(models) == 1:
            assert found.name == device_name(chosen.devices[0].slot)


# ------------------------------------------------------------ relisting


def test_nothing_is_written_where_nothing_changed() -> None:
    view = node(Machine(A100_40, (Has("1g.5gb", 3, "leased", "alice"),)), Machine(H100))
    scheduler = published(view)
    again = relist(scheduler.published, slices_of(view, frozenset()))
    assert not again.writes
    assert not again.deletions


def test_a_lease_outside_dra_changes_the_counters_in_place() -> None:
    empty = node(*[Machine(A100_40)] * 8)
    held = node(Machine(A100_40, (Has("7g.40gb", 0, "leased", "alice"),)), *[Machine(A100_40)] * 7)
    scheduler = published(empty)
    change = relist(scheduler.published, slices_of(held, frozenset()))
    assert change.writes[0].content.counter_sets
    assert {(each.generation, each.slice_count) for each in change.writes} == {(1, 5)}
    assert not change.deletions


@given(nodes(), nodes(), st.integers(0, 8))
def test_a_listing_that_stopped_half_way_is_finished_by_the_next(before: NodeView, after: NodeView, done: int) -> None:
    scheduler = published(before)
    change = relist(scheduler.published, slices_of(after, frozenset()))
    scheduler.apply(replace(change, writes=change.writes[:done], deletions=()))
    rest = relist(scheduler.published, slices_of(after, frozenset()))
    scheduler.apply(rest)
    wanted = slices_of(after, frozenset())
    assert {each.content.name: each.content for each in scheduler.published} == {each.name: each for each in wanted}
    assert not relist(scheduler.published, wanted).writes


def test_a_device_that_a_claim_has_stays_when_its_gpu_is_gone() -> None:
    both = node(Machine(A100_40), Machine(H100))
    scheduler = published(both)
    taken = scheduler.allocate(lambda device: device.product_name == A100_40.model)
    assert taken is not None
    without = replace(both, gpus=both.gpus[1:])
    parts = slices_of(without, scheduler.names, [each.content for each in scheduler.published])
    scheduler.apply(relist(scheduler.published, parts))
    assert taken in devices(parts)
    assert scheduler.allocate(lambda device: device.product_name == A100_40.model) is None
    assert scheduler.allocate(lambda device: device.product_name == H100.model) is not None


def test_counters_below_an_allocation_made_meanwhile_are_mended_by_the_next_listing() -> None:
    """The scheduler allocates while the agent leases the same slot to somebody else, before it knows."""
    empty = node(Machine(A100_40))
    scheduler = published(empty)
    taken = scheduler.allocate(lambda device: device.profile == "7g.40gb")
    assert taken is not None
    held = node(Machine(A100_40, (Has("7g.40gb", 0, "leased", "alice"),)))
    scheduler.apply(relist(scheduler.published, slices_of(held, frozenset())))
    with pytest.raises(PoolInvalidError):
        scheduler.allocate(lambda _device: True)
    scheduler.apply(relist(scheduler.published, slices_of(held, scheduler.names)))
    assert scheduler.allocate(lambda _device: True) is None

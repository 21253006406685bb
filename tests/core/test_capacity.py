"""How many more devices fit: against the planner itself, and against every way of placing them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mig_agent.core.model import (
    Generation,
    Gpu,
    GpuState,
    GpuUuid,
    Instance,
    InstanceState,
    Layout,
    NodeView,
    Placement,
    Want,
)
from mig_agent.core.planning.capacity import RemainingCapacity, creatable, servable
from mig_agent.core.planning.plan import DEFAULT_POLICY, CreateInstance, Plan, Policy, Reuse, ReuseInstance
from mig_agent.core.planning.planner import plan
from mig_agent.core.planning.profiles import smallest_profile
from support.nodes import (
    A30,
    A100_40,
    A100_80,
    H100,
    LAYOUTS,
    Has,
    Machine,
    layout_of,
    memory,
    node,
    nodes,
    profile,
    request,
    wants_for,
    whole,
)

WHOLE_ONLY = Want(whole_gpu=True, profile="whole", text="whole")


def applied(view: NodeView, outcome: Plan) -> NodeView:
    """The node when the plan was carried out, for somebody who keeps what it gives."""
    gone = {victim.instance.generation for device in outcome.devices for victim in device.victims}
    leased = {device.serve.instance.generation for device in outcome.devices if isinstance(device.serve, ReuseInstance)}
    gpus = []
    last = max((each.generation for each in view.instances.values()), default=0)
    for gpu in view.gpus:
        there = [
            replace(each, state=InstanceState.LEASED) if each.generation in leased else each
            for each in gpu.instances
            if each.generation not in gone
        ]
        for device in outcome.devices:
            if device.gpu == gpu.uuid and isinstance(device.serve, CreateInstance):
                last = Generation(last + 1)
                there.append(Instance(slot=device.serve.slot, generation=last, state=InstanceState.LEASED))
        gpus.append(replace(gpu, instances=tuple(sorted(there, key=lambda each: each.slot.placement))))
    return replace(view, gpus=tuple(gpus))


def served_one_by_one(view: NodeView, want: Want, policy: Policy = DEFAULT_POLICY) -> int:
    """How often the planner finds a place, each after the one before."""
    count = 0
    while isinstance(outcome := plan(view, request(want), policy), Plan):
        view = applied(view, outcome)
        count += 1
    return count


def every_way(gpu: Gpu, want: Want) -> int:
    """The most windows of the profile that lie side by side on what nobody holds, all subsets tried."""
    if gpu.state not in {GpuState.READY, GpuState.WHOLE}:
        return 0
    served = smallest_profile(want, gpu.layout)
    if served is None:
        return 0
    if served.kind.takes_whole_gpu:
        return sum(each.state is InstanceState.IDLE for each in gpu.instances)
    free = [place.mask for place in served.placements if not place.mask & gpu.held_mask]
    taken = [each.slot.profile.engines.as_tuple() for each in gpu.instances if each.state is not InstanceState.IDLE]
    totals = gpu.layout.engines.as_tuple()
    for count in range(len(free), 0, -1):
        rows = [*taken, *[served.engines.as_tuple()] * count]
        sums = [sum(column) for column in zip(*rows, strict=True)]
        if any(total and have > total for have, total in zip(sums, totals, strict=True)):
            continue
        if any(sum(map(int.bit_count, some)) == _union(some).bit_count() for some in combinations(free, count)):
            return count
    return 0


def _union(masks: Sequence[int]) -> int:
    union = 0
    for mask in masks:
        union |= mask
    return union


@given(view=nodes(), want=wants_for())
def test_it_is_how_often_the_planner_finds_a_place(view: NodeView, want: Want) -> None:
    assert creatable(view, want) == served_one_by_one(view, want)


@given(view=nodes(), want=wants_for(), reuse=st.sampled_from(Reuse))
def test_capacity_does_not_depend_on_the_reuse_policy(view: NodeView, want: Want, reuse: Reuse) -> None:
    policy = Policy(reuse=reuse, tenant="alice")
    assert creatable(view, want, policy) == served_one_by_one(view, want, policy) == creatable(view, want)


@given(view=nodes(), want=wants_for())
def test_no_other_way_of_placing_gives_more(view: NodeView, want: Want) -> None:
    assert creatable(view, want) == sum(every_way(gpu, want) for gpu in view.gpus)


@given(view=nodes(most=2), want=wants_for(), before=st.lists(wants_for(), max_size=4))
def test_those_on_their_way_take_their_places_first(view: NodeView, want: Want, before: list[Want]) -> None:
    """As the planner would, where it can serve them one after the other."""
    after = view
    for each in before:
        outcome = plan(after, request(each))
        if not isinstance(outcome, Plan):
            break
        after = applied(after, outcome)
    else:
        assert creatable(view, want, before=before) == served_one_by_one(after, want)
    assert creatable(view, want, before=before) <= creatable(view, want)


@given(view=nodes(most=2), wants=st.lists(wants_for(), min_size=2, max_size=4))
def test_what_fits_together_is_counted_on(view: NodeView, wants: list[Want]) -> None:
    """All that the planner can serve in one request have a place when the rest is counted, wherever that is."""
    outcome = plan(view, request(*wants))
    if isinstance(outcome, Plan):
        assert RemainingCapacity(view, DEFAULT_POLICY, wants).placed == len(wants)


def test_what_fits_together_may_take_fewer_slices_of_another_model() -> None:
    """Slices of two models are no common measure: only how many wants have a place can be compared."""
    view = node(Machine(H100), Machine(layout_of("B200")))
    wants = [profile("1g.10gb"), profile("1g.10gb"), profile("1g.20gb"), Want(memory_bytes=23_756_537_856)]
    outcome = plan(view, request(*wants))
    assert isinstance(outcome, Plan)
    room = RemainingCapacity(view, DEFAULT_POLICY, wants)
    assert room.placed == len(wants)
    counted = sum(board.held.bit_count() for board in room._occupancies)
    assert counted < sum(device.slot.placement.size for device in outcome.devices)


@st.composite
def odd_layouts(draw: st.DrawFn) -> Layout:
    """With windows of one profile that overlap, as no GPU model has them."""
    slices = draw(st.integers(2, 9))
    profiles = []
    for number, base in enumerate(draw(st.lists(st.sampled_from(H100.profiles), min_size=1, max_size=3, unique=True))):
        size = draw(st.integers(1, slices))
        starts = draw(st.sets(st.integers(0, slices - size), min_size=1))
        placements = tuple(Placement(start, size) for start in sorted(starts))
        profiles.append(replace(base, id=number, memory_slices=size, placements=placements))
    return replace(H100, model="odd", memory_slices=slices, profiles=tuple(profiles))


@given(layout=odd_layouts(), data=st.data())
def test_overlapping_windows_are_counted_by_the_most_that_fit(layout: Layout, data: st.DataObject) -> None:
    has = []
    held = 0
    for served in layout.profiles:
        for place in served.placements:
            if not place.mask & held and data.draw(st.booleans()):
                held |= place.mask
                has.append(Has(served.name, place.start, data.draw(st.sampled_from(["idle", "leased", "foreign"]))))
    view = node(Machine(layout, has))
    for served in layout.profiles:
        want = profile(served.name)
        assert creatable(view, want) == every_way(view.gpus[0], want)
        assert servable(view, want) == every_way(node(Machine(layout)).gpus[0], want)


def test_no_model_has_windows_of_a_profile_that_overlap() -> None:
    """So that whatever places the planner takes, it serves as many as fit."""
    for layout in LAYOUTS:
        for served in layout.profiles:
            masks = [place.mask for place in served.placements]
            assert sum(map(int.bit_count, masks)) == _union(masks).bit_count(), (layout.model, served.name)


def test_seven_fill_a_gpu_and_idle_ones_are_capacity() -> None:
    seven = profile("1g.10gb")
    assert creatable(node(Machine(H100)), seven) == 7
    assert creatable(node(Machine(H100, [Has("3g.40gb", 0), Has("1g.10gb", 4, "leased")])), seven) == 6
    assert creatable(node(Machine(H100, [Has("3g.40gb", 0, "leased")])), seven) == 3
    assert creatable(node(Machine(H100, [Has("1g.10gb", 6)])), profile("7g.80gb")) == 1
    assert creatable(node(Machine(H100, [Has("1g.10gb", 6, "leased")])), profile("7g.80gb")) == 0


@pytest.mark.parametrize("state", ["foreign", "blocked", "creating", "destroying"])
def test_whatever_is_not_idle_is_in_the_way(state: str) -> None:
    assert creatable(node(Machine(A100_40, [Has("1g.5gb", 0, state)])), profile("1g.5gb")) == 6


def test_an_attribute_profile_is_counted_by_its_engines() -> None:
    assert creatable(node(Machine(H100), Machine(H100)), profile("1g.10gb+me")) == 2
    assert creatable(node(Machine(H100, [Has("1g.10gb+me", 3, "leased")])), profile("1g.10gb+me")) == 0
    assert creatable(node(Machine(H100, [Has("1g.10gb+me", 3)])), profile("1g.10gb+me")) == 1


def test_a_memory_class_counts_the_smallest_profile_of_each_model() -> None:
    view = node(Machine(A100_40), Machine(A100_80, [Has("7g.80gb", 0, "leased")]), Machine(A30))
    assert creatable(view, memory("5G")) == 7 + 0 + 4
    assert servable(view, memory("5G")) == 7 + 7 + 4
    assert servable(view, memory("9G")) == 4 + 7 + 2
    assert servable(view, memory("79G")) == 1
    assert servable(view, memory("200G")) == 0


def test_gpus_that_are_cordoned_or_lost_give_nothing_but_may_again() -> None:
    cordoned, lost = Machine(H100, state=GpuState.CORDONED), Machine(H100, state=GpuState.LOST)
    view = node(cordoned, lost, Machine(H100))
    assert creatable(view, profile("1g.10gb")) == 7
    assert servable(view, profile("1g.10gb")) == 21
    assert creatable(view, profile("1g.10gb"), reserved=frozenset({GpuUuid(view.gpus[2].uuid)})) == 0


def test_whole_gpus_are_counted_where_they_are_there() -> None:
    view = node(whole(), whole("leased", "alice"), Machine(H100), Machine(H100, [Has("1g.10gb", 0, "leased")]))
    assert creatable(view, WHOLE_ONLY) == 1
    assert servable(view, WHOLE_ONLY) == 2
    assert creatable(view, Want(whole_gpu=True)) == 2
    assert servable(view, Want(whole_gpu=True)) == 4


def test_one_on_its_way_that_does_not_fit_takes_nothing() -> None:
    view = node(Machine(H100, [Has("1g.10gb", 0, "leased")]))
    assert creatable(view, profile("1g.10gb"), before=[profile("7g.80gb")]) == 6
    assert creatable(view, profile("1g.10gb"), before=[profile("7g.80gb"), profile("3g.40gb")]) == 3


def test_those_that_fit_together_all_take_their_places() -> None:
    """One by one, the small one would take a part of the only GPU that the large one fits."""
    view = node(Machine(A100_40), Machine(A30))
    before = [memory("4.5Gi"), profile("7g.40gb")]
    assert creatable(view, profile("1g.6gb")) == 4
    assert creatable(view, profile("1g.6gb"), before=before) == 3
    assert creatable(view, profile("1g.5gb"), before=before) == 0


def test_remaining_capacity_answers_for_many_kinds() -> None:
    view = node(Machine(H100, [Has("2g.20gb", 0, "leased")]), Machine(A30))
    room = RemainingCapacity(view, DEFAULT_POLICY, [memory("40G")])
    wants = [profile(each.name) for layout in (H100, A30) for each in layout.profiles]
    assert [room.creatable(want) for want in wants] == [creatable(view, want, before=[memory("40G")]) for want in wants]

"""Plans: what they may and may not contain, and that none better or other was overlooked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mig_agent.core.errors import Reason, Refusal
from mig_agent.core.model import (
    Gpu,
    GpuState,
    GpuUuid,
    Instance,
    InstanceState,
    Layout,
    NodeView,
    Profile,
    Slot,
    Want,
)
from mig_agent.core.planning.plan import CreateInstance, DestroyInstance, Plan, Policy, ReuseInstance
from mig_agent.core.planning.planner import plan
from mig_agent.core.planning.profiles import smallest_profile
from support.nodes import (
    A30,
    A100_40,
    A100_80,
    H100,
    LAYOUTS,
    RTX_PRO,
    WHOLE,
    Has,
    Machine,
    machines,
    memory,
    node,
    nodes,
    profile,
    request,
    wants_for,
    whole,
)

POLICY = Policy()


def planned(view: NodeView, *wants: Want, policy: Policy = POLICY, gpus: Sequence[str] = ()) -> Plan:
    outcome = plan(view, request(*wants, gpus=gpus), policy, 0.0)
    assert isinstance(outcome, Plan), outcome
    return outcome


def refused(view: NodeView, *wants: Want, gpus: Sequence[str] = ()) -> Refusal:
    outcome = plan(view, request(*wants, gpus=gpus), POLICY, 0.0)
    assert isinstance(outcome, Refusal), outcome
    return outcome


def place(found: Plan, number: int = 0) -> tuple[str, str, int]:
    """GPU, profile and start of one device."""
    slot = found.devices[number].slot
    return (slot.gpu[-1], slot.profile.name, slot.placement.start)


def check(view: NodeView, wants: Sequence[Want], found: Plan) -> None:
    """Whatever the plan, it must be one that the hardware would carry out and that takes nothing from anybody."""
    assert len(found.devices) == len(wants)
    gpus = dict(view.by_uuid)
    destroyed = [step.instance for step in found.steps if isinstance(step, DestroyInstance)]
    reused = [step.instance for step in found.steps if isinstance(step, ReuseInstance)]
    touched = [each.generation for each in (*destroyed, *reused)]
    assert len(set(touched)) == len(touched), "a step is named twice"
    for instance in (*destroyed, *reused):
        assert instance.state is InstanceState.IDLE
        assert view.instances[instance.generation] is instance
    for want, device in zip(wants, found.devices, strict=True):
        gpu = gpus[device.gpu]
        assert gpu.state in {GpuState.READY, GpuState.WHOLE}
        assert device.slot.gpu == gpu.uuid
        assert device.slot.profile == smallest_profile(want, gpu.layout)
        assert device.slot.placement in device.slot.profile.placements
        if isinstance(device.serve, ReuseInstance):
            assert not device.victims
        for victim in device.victims:
            assert victim.instance.slot.gpu == gpu.uuid
    for gpu in view.gpus:
        check_gpu(gpu, found, destroyed)


def check_gpu(gpu: Gpu, found: Plan, destroyed: Sequence[Instance]) -> None:
    """The GPU after the plan: no slice and no engine is given twice, and nothing was destroyed needlessly."""
    created = [
        each.serve.slot for each in found.devices if each.gpu == gpu.uuid and isinstance(each.serve, CreateInstance)
    ]
    gone = [each for each in destroyed if each.slot.gpu == gpu.uuid]
    staying = [each.slot for each in gpu.instances if each not in gone]
    mask = 0
    for slot in (*staying, *created):
        assert not mask & slot.placement.mask, "slices are given twice"
        mask |= slot.placement.mask
    engines = [
        sum(counts) for counts in zip(*(s.profile.engines.as_tuple() for s in (*staying, *created)), strict=True)
    ]
    if created:
        totals = gpu.layout.engines.as_tuple()
        assert all(not total or count <= total for count, total in zip(engines, totals, strict=True))
    for victim in gone:
        on_slices = any(victim.slot.placement.mask & slot.placement.mask for slot in created)
        more = [count + own for count, own in zip(engines, victim.slot.profile.engines.as_tuple(), strict=True)]
        on_engines = any(count > total for count, total in zip(more, gpu.layout.engines.as_tuple(), strict=True))
        assert on_slices or on_engines, "a victim stands in nobody's way"


# The definition of the policy once more, slowly and without any table


def capacity(layout: Layout, mask: int) -> int:
    plain = [each for each in layout.profiles if not each.attributes]
    return sum(p.size for each in plain for p in each.placements if not p.mask & mask)


def held(gpu: Gpu) -> tuple[int, list[int]]:
    mask, engines = 0, [0] * 6
    for each in gpu.instances:
        if each.state is not InstanceState.IDLE:
            mask |= each.slot.placement.mask
            engines = [a + b for a, b in zip(engines, each.slot.profile.engines.as_tuple(), strict=True)]
    return mask, engines


def costs(gpu: Gpu, wanted: Profile, creation_cost: float) -> list[float]:
    """The cost of every place on one GPU, where no engine plays a part."""
    mask, engines = held(gpu)
    idle = [each for each in gpu.instances if each.state is InstanceState.IDLE]
    after = [a + b for a, b in zip(engines, wanted.engines.as_tuple(), strict=True)]
    fits = all(count <= total for count, total in zip(after, gpu.layout.engines.as_tuple(), strict=True))
    found = []
    for window in wanted.placements:
        if window.mask & mask:
            continue
        same = any(each.slot.profile == wanted and each.slot.placement == window for each in idle)
        if not fits and not same:
            continue
        victims = 0 if same else sum(bool(each.slot.placement.mask & window.mask) for each in idle)
        cost = float(capacity(gpu.layout, mask) - capacity(gpu.layout, mask | window.mask))
        cost += 0.0 if same else creation_cost * (1 + 0.1 * victims)
        cost += 1e-3 * (gpu.layout.memory_slices - (mask | window.mask).bit_count())
        found.append(cost)
    return found


PLAIN = tuple(replace(layout, profiles=tuple(p for p in layout.profiles if not p.attributes)) for layout in LAYOUTS)


@given(view=nodes(PLAIN), want=wants_for(PLAIN), creation_cost=st.sampled_from((0.0, 1.0, 2.0, 8.0)))
def test_one_device_goes_to_the_cheapest_place(view: NodeView, want: Want, creation_cost: float) -> None:
    """Least waste, then least cost, by the formula of the policy computed anew (without the order of the driver)."""
    outcome = plan(view, request(want), Policy(creation_cost=creation_cost))
    options: list[tuple[float, float]] = []
    for gpu in view.gpus:
        wanted = smallest_profile(want, gpu.layout)
        if wanted is None:
            continue
        waste = 0.0
        if want.memory_bytes is not None:
            waste = wanted.memory_mib - want.memory_bytes / 2**20
        if want.fraction is not None:
            waste = max(0.0, wanted.memory_slices / gpu.layout.memory_slices - want.fraction) * gpu.layout.memory_mib
        options += [(waste, cost) for cost in costs(gpu, wanted, creation_cost)]
    if not options:
        assert isinstance(outcome, Refusal)
        return
    assert isinstance(outcome, Plan)
    check(view, [want], outcome)
    waste, cost = min(options)
    assert outcome.score == pytest.approx(waste + 1e-3 * cost, abs=1e-6)
    # And the parts that it is told with.
    (device,) = outcome.devices
    created = isinstance(device.serve, CreateInstance)
    assert outcome.wasted_mib == pytest.approx(waste, abs=1e-6)
    assert outcome.creation_cost == pytest.approx(creation_cost * (1 + 0.1 * len(device.victims)) if created else 0.0)
    assert outcome.capacity_lost == pytest.approx(cost - outcome.creation_cost, abs=1e-3)


@given(view=nodes(), want=wants_for())
def test_one_device_of_any_kind_is_served_rightly_or_not_at_all(view: NodeView, want: Want) -> None:
    outcome = plan(view, request(want))
    possible = any(
        costs(gpu, wanted, 0.0) for gpu in view.gpus if (wanted := smallest_profile(want, gpu.layout)) is not None
    )
    assert isinstance(outcome, Plan) == possible
    if isinstance(outcome, Plan):
        check(view, [want], outcome)


def fits_by_brute_force(view: NodeView, wants: Sequence[Want]) -> bool:
    """Every placement of every device on every GPU is tried."""
    start = {gpu.uuid: held(gpu) for gpu in view.gpus}

    def descend(number: int, state: dict[GpuUuid, tuple[int, list[int]]]) -> bool:
        if number == len(wants):
            return True
        for gpu in view.gpus:
            wanted = smallest_profile(wants[number], gpu.layout)
            if wanted is None:
                continue
            mask, engines = state[gpu.uuid]
            after = [a + b for a, b in zip(engines, wanted.engines.as_tuple(), strict=True)]
            if any(count > total for count, total in zip(after, gpu.layout.engines.as_tuple(), strict=True)):
                continue
            for window in wanted.placements:
                free = not window.mask & mask
                if free and descend(number + 1, {**state, gpu.uuid: (mask | window.mask, after)}):
                    return True
        return False

    return descend(0, start)


SOME = (A30, A100_40, H100, RTX_PRO)


@settings(max_examples=300)
@given(view=nodes(SOME, most=2), wants=st.lists(wants_for(SOME), min_size=2, max_size=4))
def test_several_devices_fit_exactly_when_brute_force_finds_a_way(view: NodeView, wants: list[Want]) -> None:
    outcome = plan(view, request(*wants))
    assert isinstance(outcome, Plan) == fits_by_brute_force(view, wants)
    if isinstance(outcome, Plan):
        check(view, wants, outcome)


@given(view=nodes(most=6), wants=st.lists(wants_for(), min_size=2, max_size=12), limit=st.sampled_from((0, 1000)))
def test_plans_for_several_devices_hold_together(view: NodeView, wants: list[Want], limit: int) -> None:
    outcome = plan(view, request(*wants), Policy(search_limit=limit))
    if isinstance(outcome, Plan):
        check(view, wants, outcome)
    else:
        assert outcome.message.startswith("cannot ")


@given(view=nodes(SOME, most=3), wants=st.lists(wants_for(SOME), min_size=1, max_size=6))
def test_the_bound_on_the_search_limits_nothing_but_the_cost(view: NodeView, wants: list[Want]) -> None:
    bounded = plan(view, request(*wants), Policy(search_limit=0))
    searched = plan(view, request(*wants), Policy(search_limit=2000))
    assert isinstance(bounded, Plan) == isinstance(searched, Plan)
    if isinstance(bounded, Plan) and isinstance(searched, Plan):
        assert searched.score <= bounded.score + 1e-9


@given(view=nodes(), wants=st.lists(wants_for(), min_size=1, max_size=4), data=st.data())
def test_what_fits_also_fits_when_something_ends(view: NodeView, wants: list[Want], data: st.DataObject) -> None:
    if not isinstance(plan(view, request(*wants)), Plan):
        return
    freed = tuple(
        replace(gpu, instances=tuple(each for each in gpu.instances if data.draw(st.booleans()))) for gpu in view.gpus
    )
    assert isinstance(plan(replace(view, gpus=freed), request(*wants)), Plan)


@given(view=nodes(), wants=st.lists(wants_for(), min_size=1, max_size=4))
def test_idle_instances_never_keep_anything_out(view: NodeView, wants: list[Want]) -> None:
    without_idle = tuple(
        replace(gpu, instances=tuple(each for each in gpu.instances if each.state is not InstanceState.IDLE))
        for gpu in view.gpus
    )
    bare = plan(replace(view, gpus=without_idle), request(*wants))
    assert isinstance(plan(view, request(*wants)), Plan) == isinstance(bare, Plan)


@given(view=nodes(), wants=st.lists(wants_for(), min_size=1, max_size=4))
def test_the_same_question_gets_the_same_answer(view: NodeView, wants: list[Want]) -> None:
    first = plan(view, request(*wants))
    fresh = replace(view, gpus=tuple(replace(gpu) for gpu in view.gpus))
    assert plan(view, request(*wants)) == first
    assert plan(fresh, request(*wants)) == first


@given(view=nodes(most=3), wants=st.lists(wants_for(), min_size=1, max_size=3), data=st.data())
def test_reserved_gpus_and_excluded_slots_are_left_alone(
    view: NodeView, wants: list[Want], data: st.DataObject
) -> None:
    reserved = frozenset(gpu.uuid for gpu in view.gpus if data.draw(st.booleans()))
    slots = [
        Slot(gpu.uuid, each, spot) for gpu in view.gpus for each in gpu.layout.profiles for spot in each.placements
    ]
    exclude = frozenset(data.draw(st.lists(st.sampled_from(slots), max_size=12)))
    outcome = plan(view, request(*wants), reserved=reserved, exclude=exclude)
    if isinstance(outcome, Plan):
        check(view, wants, outcome)
        assert not {device.gpu for device in outcome.devices} & reserved
        assert not {device.slot for device in outcome.devices} & exclude
    else:
        assert outcome.message.startswith("cannot ")


@settings(max_examples=60)
@given(machine=machines(SOME), wants=st.lists(wants_for(SOME), min_size=1, max_size=3), data=st.data())
def test_exclusion_is_exact_as_well(machine: Machine, wants: list[Want], data: st.DataObject) -> None:
    """Excluding slots equals a layout that lacks them, where nothing idle stands there."""
    view = node(replace(machine, has=[has for has in machine.has if has.state != "idle"]))
    gpu = view.gpus[0]
    gone = {
        (each.id, spot)
        for each in gpu.layout.profiles
        for spot in each.placements
        if len(each.placements) > 1 and data.draw(st.integers(0, 3)) == 0
    }
    exclude = frozenset(Slot(gpu.uuid, gpu.layout.by_id[number], spot) for number, spot in gone)
    outcome = plan(view, request(*wants), exclude=exclude)

    def descend(number: int, mask: int, engines: list[int]) -> bool:
        if number == len(wants):
            return True
        wanted = smallest_profile(wants[number], gpu.layout)
        if wanted is None:
            return False
        after = [a + b for a, b in zip(engines, wanted.engines.as_tuple(), strict=True)]
        if any(count > total for count, total in zip(after, gpu.layout.engines.as_tuple(), strict=True)):
            return False
        return any(
            descend(number + 1, mask | spot.mask, after)
            for spot in wanted.placements
            if not spot.mask & mask and (wanted.id, spot) not in gone
        )

    assert isinstance(outcome, Plan) == descend(0, *held(gpu))


# The policy in cases that can be told


def test_an_empty_gpu_gets_the_drivers_own_choice() -> None:
    assert place(planned(node(Machine(H100)), memory("4G"))) == ("0", "1g.10gb", 6)
    assert place(planned(node(Machine(H100)), profile("2g.20gb"))) == ("0", "2g.20gb", 4)
    assert place(planned(node(Machine(A30)), memory("4G"))) == ("0", "1g.6gb", 0)
    assert place(planned(node(Machine(RTX_PRO)), memory("4G"))) == ("0", "1g.24gb", 0)


def test_the_request_that_the_driver_itself_fails_is_placed() -> None:
    """`19,19,14,9`, asked for at once: the driver's own places leave no room for the last."""
    wants = [profile(name) for name in ("1g.5gb", "1g.5gb", "2g.10gb", "3g.20gb")]
    view = node(Machine(A100_40))
    check(view, wants, planned(view, *wants))


def test_an_idle_match_is_reused() -> None:
    found = planned(node(Machine(H100, [Has("1g.10gb", 6)])), memory("4G"))
    assert isinstance(found.devices[0].serve, ReuseInstance)
    assert found.steps == (found.devices[0].serve,)
    assert "reuse 1g.10gb on slice 6" in found.steps[0].describe()


def test_an_idle_larger_instance_is_never_given_for_less() -> None:
    found = planned(node(Machine(H100, [Has("3g.40gb", 4)])), memory("4G"))
    assert isinstance(found.devices[0].serve, CreateInstance)
    assert found.devices[0].slot.profile.name == "1g.10gb"


def test_victims_follow_from_the_place() -> None:
    view = node(Machine(H100, [Has("1g.10gb", 0), Has("1g.10gb", 4), Has("1g.10gb", 5), Has("2g.20gb", 2, "leased")]))
    found = planned(view, profile("3g.40gb"))
    assert place(found) == ("0", "3g.40gb", 4)
    assert [each.instance.slot.placement.start for each in found.devices[0].victims] == [4, 5]
    assert [type(step) for step in found.steps] == [DestroyInstance, DestroyInstance, CreateInstance]


def test_a_whole_mig_gpu_takes_the_idle_ones_and_leaves_the_running_workload() -> None:
    view = node(
        Machine(H100, [Has("1g.10gb", 0, "leased", "alice")]), Machine(H100, [Has("1g.10gb", 0), Has("2g.20gb", 4)])
    )
    found = planned(view, profile("7g.80gb"))
    assert place(found) == ("1", "7g.80gb", 0)
    assert len(found.devices[0].victims) == 2


def test_reuse_is_weighed_against_capacity_and_not_taken_at_any_price() -> None:
    """The idle 1g in the middle of an empty half costs more than creating one beside what is held."""
    view = node(Machine(H100, [Has("1g.10gb", 0), Has("1g.10gb", 6, "leased")]))
    assert isinstance(planned(view, memory("4G"), policy=Policy(creation_cost=50.0)).devices[0].serve, ReuseInstance)
    cheap = planned(view, memory("4G"), policy=Policy(creation_cost=0.0))
    assert isinstance(cheap.devices[0].serve, CreateInstance)
    assert cheap.devices[0].slot.placement.start in {4, 5}


def test_the_fuller_gpu_is_chosen() -> None:
    view = node(Machine(H100), Machine(H100, [Has("3g.40gb", 4, "leased")]), Machine(H100))
    assert place(planned(view, profile("3g.40gb"))) == ("1", "3g.40gb", 0)


def test_of_equal_victims_the_one_idle_for_longest_goes() -> None:
    def view(first: float, second: float) -> NodeView:
        return node(Machine(H100, [Has("7g.80gb", 0, since=first)]), Machine(H100, [Has("7g.80gb", 0, since=second)]))

    assert place(planned(view(10.0, 20.0), memory("4G")))[0] == "0"
    assert place(planned(view(20.0, 10.0), memory("4G")))[0] == "1"


def test_over_several_models_the_least_waste_wins() -> None:
    view = node(Machine(H100), Machine(A100_40))
    assert place(planned(view, memory("4G")))[:2] == ("1", "1g.5gb")
    assert place(planned(view, memory("9.7Gi")))[:2] == ("0", "1g.10gb")
    full = node(Machine(H100), Machine(A100_40, [Has("7g.40gb", 0, "leased")]))
    assert place(planned(full, memory("4G")))[:2] == ("0", "1g.10gb")


def test_scores_can_be_compared_between_nodes() -> None:
    wasteful = planned(node(Machine(H100)), memory("4G")).score
    fitting = planned(node(Machine(A100_40)), memory("4G")).score
    reusing = planned(node(Machine(A100_40, [Has("1g.5gb", 6)])), memory("4G")).score
    assert reusing < fitting < wasteful


def test_gpus_can_be_named_by_index_and_by_uuid() -> None:
    view = node(Machine(H100), Machine(H100), Machine(H100))
    assert place(planned(view, memory("4G"), gpus=["2"]))[0] == "2"
    assert place(planned(view, memory("4G"), gpus=[view.gpus[1].uuid]))[0] == "1"
    assert place(planned(view, memory("4G"), gpus=[view.gpus[1].uuid.upper()]))[0] == "1"


def test_whole_gpus_without_mig_mode_go_first() -> None:
    view = node(Machine(H100), whole(), whole("leased", "bob"), whole())
    found = planned(view, WHOLE, WHOLE)
    assert {place(found, number)[:2] for number in (0, 1)} == {("1", "whole"), ("3", "whole")}
    assert all(isinstance(device.serve, ReuseInstance) for device in found.devices)
    three = planned(node(Machine(H100), whole(), whole()), WHOLE, WHOLE, WHOLE)
    assert {place(three, number)[:2] for number in range(3)} == {("0", "7g.80gb"), ("1", "whole"), ("2", "whole")}


def test_a_whole_gpu_cannot_be_created() -> None:
    """Its instance is always there while the GPU is handed out whole; without it there is nothing to give."""
    broken = replace(whole(), has=())
    assert refused(node(broken), WHOLE).retryable


def test_memory_never_takes_a_whole_gpu() -> None:
    assert refused(node(whole()), memory("4G")).reason is Reason.NO_MIG_GPU


def test_whole_gpus_with_mig_mode_destroy_what_is_idle() -> None:
    found = planned(node(Machine(A30, [Has("1g.6gb", 0), Has("2g.12gb", 2)])), WHOLE)
    assert place(found) == ("0", "4g.24gb", 0)
    assert len(found.devices[0].victims) == 2


@pytest.mark.parametrize("state", [GpuState.CORDONED, GpuState.LOST])
def test_gpus_out_of_service_get_nothing_new(state: GpuState) -> None:
    view = node(Machine(H100, state=state), Machine(H100, [Has("7g.80gb", 0, "leased")]))
    assert isinstance(plan(view, request(memory("4G"))), Refusal)
    assert place(planned(node(Machine(A100_40, state=state), Machine(H100)), memory("4G")))[0] == "1"


@pytest.mark.parametrize("state", ["leased", "foreign", "blocked", "creating", "destroying"])
def test_whatever_is_not_idle_is_in_the_way(state: str) -> None:
    view = node(Machine(H100, [Has("4g.40gb", 0, state)]))
    assert refused(view, profile("4g.40gb")).reason is Reason.NO_CAPACITY
    assert place(planned(view, profile("3g.40gb"))) == ("0", "3g.40gb", 4)


def test_an_idle_instance_does_not_keep_the_media_engines_from_another() -> None:
    view = node(Machine(A30, [Has("1g.6gb+me", 1), Has("1g.6gb", 0, "leased", "alice")]))
    found = planned(view, profile("2g.12gb+me"))
    assert place(found) == ("0", "2g.12gb+me", 2)
    assert [each.instance.slot.profile.name for each in found.devices[0].victims] == ["1g.6gb+me"]


def test_a_leased_instance_does() -> None:
    view = node(Machine(A100_40, [Has("1g.5gb+me", 6, "leased", "alice")]))
    refusal = refused(view, profile("1g.5gb+me"))
    assert refusal.reason is Reason.NO_CAPACITY
    assert "the engines that it needs are taken, as slice 6 is leased to alice" in refusal.message
    assert [each.what for each in refusal.blockers] == ["1g.5gb+me on slice 6"]


# Several devices


def test_unlike_devices_are_planned_together() -> None:
    view = node(Machine(A100_40))
    found = planned(view, profile("2g.10gb"), memory("4G"), profile("3g.20gb"))
    check(view, [profile("2g.10gb"), memory("4G"), profile("3g.20gb")], found)
    assert [device.slot.profile.name for device in found.devices] == ["2g.10gb", "1g.5gb", "3g.20gb"]


def test_devices_that_can_be_reused_are_reused() -> None:
    view = node(Machine(H100, [Has("1g.10gb", 6), Has("1g.10gb", 5)]))
    found = planned(view, memory("4G"), memory("4G"))
    assert all(isinstance(device.serve, ReuseInstance) for device in found.devices)


def test_a_victim_in_the_way_of_two_is_named_once() -> None:
    view = node(Machine(A100_40, [Has("3g.20gb", 4), Has("4g.20gb", 0, "leased")]))
    found = planned(view, profile("2g.10gb"), profile("1g.5gb"))
    assert sum(isinstance(step, DestroyInstance) for step in found.steps) == 1
    assert isinstance(found.steps[0], DestroyInstance)


PARVA = {
    "S1": ((3, 2, 1, 0, 0), 2),
    "S2": ((3, 7, 1, 0, 0), 3),
    "S3": ((8, 5, 5, 0, 0), 5),
    "S4": ((11, 8, 7, 0, 0), 7),
    "S5": ((28, 13, 12, 0, 0), 13),
    "S6": ((40, 4, 14, 2, 2), 16),
}


@pytest.mark.parametrize("deployment", PARVA)
def test_parvagpus_deployments_take_the_fewest_gpus(deployment: str) -> None:
    counts, fewest = PARVA[deployment]
    names = ("1g.10gb", "2g.20gb", "3g.40gb", "4g.40gb", "7g.80gb")
    wants = [profile(name) for name, count in zip(names, counts, strict=True) for _ in range(count)]
    # On a large node the plan takes no more GPUs than needed, and one GPU less is refused.
    found = planned(node(*[Machine(A100_80)] * 20), *wants)
    assert len({device.gpu for device in found.devices}) == fewest
    assert isinstance(plan(node(*[Machine(A100_80)] * (fewest - 1)), request(*wants)), Refusal)


def test_mixed_models_and_many_devices_are_decided_in_moments() -> None:
    """A search without its bounds takes minutes for this (a test of termination, not of speed)."""
    view = node(*[Machine(layout) for layout in LAYOUTS])
    texts = (
        "3Gi",
        "5500Mi",
        "9.2Gi",
        "9.7Gi",
        "10.5Gi",
        "11Gi",
        "12Gi",
        "16Gi",
        "20Gi",
        "21Gi",
        "22Gi",
        "23Gi",
        "30Gi",
    )
    wants = [memory(texts[number % len(texts)]) for number in range(48)]
    outcome = plan(view, request(*wants))
    if isinstance(outcome, Plan):
        check(view, wants, outcome)

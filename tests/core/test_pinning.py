"""Wants that name a slot: the plan gives exactly this one, or a refusal says why not."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from mig_agent.core.errors import Reason, Refusal, UsageError
from mig_agent.core.model import (
    Generation,
    Gpu,
    GpuState,
    GpuUuid,
    Instance,
    InstanceState,
    NodeView,
    Placement,
    Slot,
    Want,
)
from mig_agent.core.planning.explain import explanation
from mig_agent.core.planning.feasibility import fewest_gpus
from mig_agent.core.planning.plan import CreateInstance, Plan, ReuseInstance
from mig_agent.core.planning.planner import plan
from mig_agent.core.requests import validate_want
from support.nodes import A30, A100_40, H100, Has, Machine, memory, node, nodes, profile, request, wants_for, whole

LAYOUTS = (A30, A100_40, H100)


def slot(gpu: Gpu, name: str, start: int) -> Slot:
    found = gpu.layout.by_name[name]
    return Slot(gpu.uuid, found, Placement(start, found.memory_slices))


def pinned(view: NodeView, name: str, start: int, gpu: int = 0) -> Want:
    return Want(slot=slot(view.gpus[gpu], name, start))


def outcome(view: NodeView, *wants: Want, gpus: Sequence[str] = ()) -> Plan | Refusal:
    return plan(view, request(*wants, gpus=gpus))


def refused(view: NodeView, *wants: Want, gpus: Sequence[str] = ()) -> Refusal:
    found = outcome(view, *wants, gpus=gpus)
    assert isinstance(found, Refusal), found
    return found


@st.composite
def nodes_with_slots(draw: st.DrawFn) -> tuple[NodeView, Slot]:
    view = draw(nodes(LAYOUTS, most=3))
    gpu = draw(st.sampled_from(view.gpus))
    each = draw(st.sampled_from(gpu.layout.profiles))
    return view, Slot(gpu.uuid, each, draw(st.sampled_from(each.placements)))


def is_free(view: NodeView, wanted: Slot) -> bool:
    gpu = view.by_uuid[wanted.gpu]
    held = [each.slot for each in gpu.instances if each.state is not InstanceState.IDLE]
    return engines_fit(gpu, [*held, wanted]) and not gpu.held_mask & wanted.placement.mask


def engines_fit(gpu: Gpu, slots: Iterable[Slot]) -> bool:
    needed = map(sum, zip(*(each.profile.engines.as_tuple() for each in slots), strict=True))
    return all(taken <= most for taken, most in zip(needed, gpu.layout.engines.as_tuple(), strict=True))


def with_lease(view: NodeView, wanted: Slot) -> NodeView:
    """The node when the slot is leased."""
    made = Instance(slot=wanted, generation=Generation(10_000), state=InstanceState.LEASED)
    gpus = []
    for gpu in view.gpus:
        if gpu.uuid == wanted.gpu:
            left = [each for each in gpu.instances if not each.slot.placement.mask & wanted.placement.mask]
            # An idle instance elsewhere may have to go for its engines: which one is the planner's choice.
            assume(engines_fit(gpu, [*(each.slot for each in left), wanted]))
            instances = tuple(sorted((*left, made), key=lambda each: each.slot.placement))
            gpus.append(replace(gpu, instances=instances))
        else:
            gpus.append(gpu)
    return replace(view, gpus=tuple(gpus))


@given(nodes_with_slots())
def test_a_free_slot_is_given_and_a_taken_one_is_refused(at: tuple[NodeView, Slot]) -> None:
    view, wanted = at
    found = outcome(view, Want(slot=wanted))
    if is_free(view, wanted):
        assert isinstance(found, Plan)
        assert [each.slot for each in found.devices] == [wanted]
        assert found.wasted_mib == 0
    else:
        assert isinstance(found, Refusal)
        assert found.reason is Reason.NO_CAPACITY
        assert {each.gpu_index for each in found.blockers} == {view.by_uuid[wanted.gpu].index}


@given(nodes_with_slots(), st.lists(wants_for(LAYOUTS), min_size=1, max_size=3), st.randoms(use_true_random=False))
def test_beside_others_it_is_given_exactly_where_they_fit_around_it(
    at: tuple[NodeView, Slot], others: list[Want], chance: random.Random
) -> None:
    view, wanted = at
    wants = [Want(slot=wanted), *others]
    chance.shuffle(wants)
    found = outcome(view, *wants)
    fits = is_free(view, wanted) and isinstance(outcome(with_lease(view, wanted), *others), Plan)
    assert isinstance(found, Plan) == fits
    if isinstance(found, Plan):
        assert found.devices[[each.slot is not None for each in wants].index(True)].slot == wanted
        for gpu in view.gpus:
            masks = [each.slot.placement.mask for each in found.devices if each.gpu == gpu.uuid]
            assert sum(map(int.bit_count, masks)) == sum(masks).bit_count(), "none overlap"
            assert not sum(masks) & gpu.held_mask


@given(nodes_with_slots())
def test_the_gpu_to_reserve_is_the_one_of_the_slot(at: tuple[NodeView, Slot]) -> None:
    view, wanted = at
    for wants in ((Want(slot=wanted),), (Want(slot=wanted), Want(slot=wanted))):
        assert fewest_gpus(view.gpus, wants) <= {wanted.gpu}
    if all(each.state is not InstanceState.FOREIGN for each in view.by_uuid[wanted.gpu].instances):
        assert fewest_gpus(view.gpus, (Want(slot=wanted),)) == {wanted.gpu}


def test_an_idle_instance_is_reused_and_what_is_in_the_way_destroyed() -> None:
    view = node(Machine(H100, [Has("1g.10gb", 0), Has("3g.40gb", 4)]))
    found = outcome(view, pinned(view, "1g.10gb", 0), pinned(view, "1g.10gb", 4))
    assert isinstance(found, Plan)
    first, second = found.devices
    assert isinstance(first.serve, ReuseInstance)
    assert isinstance(second.serve, CreateInstance)
    assert [each.instance.slot.profile.name for each in second.victims] == ["3g.40gb"]


def test_a_slot_that_a_cheaper_place_exists_for_is_given_all_the_same() -> None:
    view = node(Machine(H100), Machine(H100, [Has("1g.10gb", 0)]))
    found = outcome(view, pinned(view, "1g.10gb", 3))
    assert isinstance(found, Plan)
    assert str(found.devices[0].slot) == "1g.10gb on slice 3"


def test_a_whole_gpu_can_be_named() -> None:
    view = node(whole("leased", "alice"), whole())
    assert isinstance(outcome(view, pinned(view, "whole", 0, 1)), Plan)
    assert "leased to alice" in refused(view, pinned(view, "whole", 0, 0)).message


def test_who_has_it_is_named() -> None:
    view = node(Machine(H100, [Has("2g.20gb", 2, "leased", "alice")]), Machine(H100))
    refusal = refused(view, pinned(view, "1g.10gb", 3))
    assert refusal.reason is Reason.NO_CAPACITY
    assert refusal.retryable
    assert refusal.message == (
        f"cannot place 1g.10gb on slice 3 of GPU {view.gpus[0].uuid} on GPU 0: slices 2-3 are leased to alice"
    )
    assert [each.holder for each in refusal.blockers] == ["alice"]


def test_what_can_never_be_given_is_told_so() -> None:
    view = node(Machine(H100), Machine(A30))
    one = pinned(view, "1g.10gb", 3)
    elsewhere = refused(view, one, gpus=["1"])
    assert (elsewhere.reason, elsewhere.retryable) == (Reason.INVALID_REQUEST, False)
    assert "the request is for GPU 1 alone" in elsewhere.message
    assert one.slot is not None
    unknown = refused(view, Want(slot=replace(one.slot, gpu=GpuUuid("GPU-none"))))
    assert unknown.reason is Reason.UNKNOWN_GPU
    between = refused(view, pinned(view, "3g.40gb", 1))
    assert between.reason is Reason.UNKNOWN_PROFILE
    assert "GPU 0 offers 3g.40gb on slices 0-3, 4-7" in between.message
    other_model = refused(view, Want(slot=replace(one.slot, gpu=view.gpus[1].uuid)))
    assert "GPU 1 has no such profile" in other_model.message
    twice = refused(view, one, one)
    assert twice.reason is Reason.TOO_MANY_DEVICES


def test_a_gpu_that_is_out_of_reach_is_the_reason() -> None:
    view = node(Machine(H100, state=GpuState.CORDONED, reason="fan"), Machine(H100))
    assert refused(view, pinned(view, "1g.10gb", 3)).reason is Reason.GPU_UNAVAILABLE
    free = node(Machine(H100), Machine(H100))
    want = pinned(free, "1g.10gb", 3)
    assert want.slot is not None
    kept = plan(free, request(want), reserved=frozenset({free.gpus[0].uuid}))
    assert isinstance(kept, Refusal)
    assert "GPU 0 is kept for a request that has waited long" in kept.message
    failed = plan(free, request(want), exclude=frozenset({want.slot}))
    assert isinstance(failed, Refusal)
    assert failed.reason is Reason.DRIVER_FAILED
    assert isinstance(plan(free, request(want), exclude=frozenset({slot(free.gpus[0], "1g.10gb", 2)})), Plan)


def test_it_is_explained() -> None:
    view = node(Machine(H100), Machine(H100))
    heading, *lines = explanation(view, request(pinned(view, "1g.10gb", 3)))
    assert heading == f"1g.10gb on slice 3 of GPU {view.gpus[0].uuid}:"
    assert [line.split(":")[0] for line in lines] == ["  GPU 0", "  GPU 1"]
    assert "the slot is on another GPU" in lines[1]


@pytest.mark.parametrize("more", [memory("4G"), profile("1g.10gb")])
def test_a_slot_is_all_that_a_want_says(more: Want) -> None:
    view = node(Machine(H100))
    validate_want(pinned(view, "1g.10gb", 3))
    with pytest.raises(UsageError, match="more than one of"):
        validate_want(replace(more, slot=slot(view.gpus[0], "1g.10gb", 3)))

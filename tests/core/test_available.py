"""What fits now, and which free slices nothing fits on, against every way of placing an instance."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given

from mig_agent.core.model import Gpu, GpuState, InstanceState, NodeView, Want, slices_in
from mig_agent.core.planning.capacity import available, creatable
from mig_agent.core.planning.feasibility import unusable_mask
from support.nodes import A100_40, A100_80, H100, Has, Machine, node, nodes, whole


def full() -> Machine:
    """A GPU with seven instances of one slice each."""
    return Machine(A100_80, tuple(Has("1g.10gb", start, "leased", "alice") for start in range(7)))


def test_the_last_slice_of_a_full_gpu_is_unusable() -> None:
    """Seven 1g instances leave slice 7 of 8, which every profile that reaches it shares with others."""
    view = node(full(), Machine(A100_80))
    assert slices_in(unusable_mask(view.gpus[0])) == (7,)
    assert slices_in(unusable_mask(view.gpus[1])) == ()


def test_idle_instances_make_nothing_unusable() -> None:
    gpu = node(full()).gpus[0]
    idle = replace(gpu, instances=tuple(replace(each, state=InstanceState.IDLE) for each in gpu.instances))
    assert unusable_mask(idle) == 0


def test_whole_gpus_have_no_unusable_slices() -> None:
    view = node(whole())
    assert unusable_mask(view.gpus[0]) == 0


def usable_by_trying(gpu: Gpu) -> int:
    """The slices on which some instance could be created now, each placement tried."""
    taken = [each.slot.profile.engines.as_tuple() for each in gpu.instances if each.state is not InstanceState.IDLE]
    totals = gpu.layout.engines.as_tuple()
    mask = 0
    for profile in gpu.layout.profiles:
        if not profile.kind.is_created:
            continue
        sums = [sum(column) for column in zip(*taken, profile.engines.as_tuple(), strict=True)]
        if any(total and have > total for have, total in zip(sums, totals, strict=True)):
            continue
        for placement in profile.placements:
            if not placement.mask & gpu.held_mask:
                mask |= placement.mask
    return mask


@given(view=nodes())
def test_a_slice_is_unusable_if_nothing_can_be_created_on_it(view: NodeView) -> None:
    for gpu in view.gpus:
        free = (1 << gpu.layout.memory_slices) - 1
        for each in gpu.instances:
            free &= ~each.slot.placement.mask
        assert unusable_mask(gpu) == free & ~usable_by_trying(gpu)
        assert unusable_mask(gpu) & usable_by_trying(gpu) == 0


@given(view=nodes())
def test_what_fits_now_is_what_could_be_leased(view: NodeView) -> None:
    for each in available(view):
        want = Want(whole_gpu=True) if each.profile == "whole" else Want(profile=each.profile)
        if each.profile != "whole":
            assert each.count == creatable(view, want)


def test_what_fits_is_summed_over_gpus_the_smallest_first() -> None:
    view = node(full(), Machine(H100), Machine(A100_40))
    counts = {each.profile: each.count for each in available(view)}
    assert counts["1g.10gb"] == 7 + 4
    assert counts["1g.5gb"] == 7
    assert next(iter(counts)) == "1g.5gb"
    assert counts["7g.80gb"] == 1
    assert not any("+" in each for each in counts), "a profile with attributes takes the place of a plain one"


def test_reserved_and_cordoned_gpus_do_not_count() -> None:
    view = node(Machine(H100))
    (gpu,) = view.gpus
    none = dict.fromkeys((each.profile for each in available(view)), 0)
    assert {each.profile: each.count for each in available(view, reserved=frozenset({gpu.uuid}))} == none
    cordoned = replace(view, gpus=(replace(gpu, state=GpuState.CORDONED),))
    assert {each.profile: each.count for each in available(cordoned)} == none
    assert available(replace(view, gpus=(replace(gpu, state=GpuState.LOST),))) == ()

"""The driver's own choice of a placement and of ids: the goldens of the MIG User Guide and of captures."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pynvml
import pytest

from mig_agent.simulator import MODELS, GpuSpec, Simulator, create_machine
from support.simulated import put_under_pynvml

Simulate = Callable[..., Simulator]


def create(gpu: object, profile_id: int) -> tuple[int, int, int]:
    """Start, size and id of a new instance where the driver puts it."""
    info = pynvml.nvmlGpuInstanceGetInfo(pynvml.nvmlDeviceCreateGpuInstance(gpu, profile_id))
    assert info.profileId == profile_id
    return info.placement.start, info.placement.size, info.id


@pytest.mark.parametrize(
    ("key", "profile_ids", "starts"),
    [
        ("a100-40gb", [9, 19, 14, 19], [4, 0, 2, 1]),
        ("a100-40gb", [14, 19, 19, 19, 19, 19], [4, 6, 0, 1, 2, 3]),
        ("a100-40gb", [19] * 7, [6, 4, 5, 0, 1, 2, 3]),
        ("h100-80gb", [19] * 7, [6, 4, 5, 0, 1, 2, 3]),
        ("h100-80gb", [9, 9], [4, 0]),
        ("h100-80gb", [5, 9], [0, 4]),
        ("h100-80gb", [15] * 4, [6, 4, 0, 2]),
        ("a30", [14] * 4, [0, 1, 2, 3]),
    ],
)
def test_where_the_driver_puts_instances(
    simulate: Simulate, key: str, profile_ids: list[int], starts: list[int]
) -> None:
    simulate(key)
    gpu = pynvml.nvmlDeviceGetHandleByIndex(0)
    assert [create(gpu, profile_id)[0] for profile_id in profile_ids] == starts


@pytest.mark.parametrize("key", ["a100-40gb", "h100-80gb"])
def test_the_drivers_choice_paints_itself_into_a_corner(simulate: Simulate, key: str) -> None:
    """`nvidia-smi mig -cgi 19,19,14,9` fails on the last though all four fit on the GPU."""
    simulate(key)
    gpu = pynvml.nvmlDeviceGetHandleByIndex(0)
    assert [create(gpu, profile_id)[0] for profile_id in (19, 19, 14)] == [6, 4, 0]
    with pytest.raises(pynvml.NVMLError_InsufficientResources):
        create(gpu, 9)


def test_ids_follow_the_placement_directly(simulate: Simulate) -> None:
    simulate("h100-80gb:2")
    first, second = (pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(2))
    assert [create(first, 19)[2] for _ in range(7)] == [13, 11, 12, 7, 8, 9, 10]
    assert [create(second, 9), create(second, 14), create(second, 15)] == [(4, 4, 2), (0, 2, 3), (2, 2, 4)]


def test_ids_of_boards_that_count_from_the_middle(tmp_path: Path) -> None:
    specs = [GpuSpec(model="h100-80gb", halves_swapped=True)]
    put_under_pynvml(create_machine(tmp_path / "gpus.json", specs, create_seconds=0, destroy_seconds=0))
    gpu = pynvml.nvmlDeviceGetHandleByIndex(0)
    found = {start: id_ for start, _, id_ in (create(gpu, 19) for _ in range(7))}
    assert {start: found[start] for start in (4, 5, 6, 0)} == {4: 7, 5: 8, 6: 9, 0: 11}


@pytest.mark.parametrize(("key", "eighth"), [("a30", 14), ("rtx-pro-6000", 14)])
def test_quarters_of_a_gpu_have_ids_from_three(simulate: Simulate, key: str, eighth: int) -> None:
    simulate(key)
    gpu = pynvml.nvmlDeviceGetHandleByIndex(0)
    assert sorted(create(gpu, eighth)[2] for _ in range(4)) == [3, 4, 5, 6]


def test_ids_are_used_again(simulate: Simulate) -> None:
    simulate("a100-40gb")
    gpu = pynvml.nvmlDeviceGetHandleByIndex(0)
    first = pynvml.nvmlDeviceCreateGpuInstance(gpu, 19)
    id_ = pynvml.nvmlGpuInstanceGetInfo(first).id
    pynvml.nvmlGpuInstanceDestroy(first)
    assert create(gpu, 19)[2] == id_


def create_if_it_fits(gpu: object, profile_id: int) -> object | None:
    try:
        instance: object = pynvml.nvmlDeviceCreateGpuInstance(gpu, profile_id)
    except pynvml.NVMLError_InsufficientResources:
        return None
    return instance


@pytest.mark.parametrize("key", [key for key, model in MODELS.items() if model.can_mig])
def test_remaining_capacity_is_what_can_be_made(simulate: Simulate, key: str) -> None:
    simulate(key)
    gpu = pynvml.nvmlDeviceGetHandleByIndex(0)
    for profile in MODELS[key].profiles:
        promised = pynvml.nvmlDeviceGetGpuInstanceRemainingCapacity(gpu, profile.id)
        made = []
        while (instance := create_if_it_fits(gpu, profile.id)) is not None:
            made.append(instance)
        assert len(made) == promised > 0, profile.name
        assert pynvml.nvmlDeviceGetGpuInstanceRemainingCapacity(gpu, profile.id) == 0
        for instance in made:
            pynvml.nvmlGpuInstanceDestroy(instance)


def test_two_halves_leave_nothing_for_any_profile(simulate: Simulate) -> None:
    simulate("a100-40gb")
    gpu = pynvml.nvmlDeviceGetHandleByIndex(0)
    create(gpu, 9)
    create(gpu, 9)
    for profile in MODELS["a100-40gb"].profiles:
        assert pynvml.nvmlDeviceGetGpuInstanceRemainingCapacity(gpu, profile.id) == 0, profile.name


@pytest.mark.parametrize(
    ("key", "first", "refused", "allowed"),
    [
        # At most one instance with media engines of its own.
        ("h100-80gb", "1g.10gb+me", {"1g.10gb+me", "7g.80gb"}, {"1g.10gb", "2g.20gb", "3g.40gb", "4g.40gb"}),
        ("a30", "1g.6gb+me", {"1g.6gb+me", "2g.12gb+me"}, {"1g.6gb", "2g.12gb"}),
        # An instance with all media engines leaves room only for those without.
        (
            "rtx-pro-6000",
            "1g.24gb+me.all",
            {"1g.24gb", "1g.24gb+me", "1g.24gb+gfx", "2g.48gb"},
            {"1g.24gb-me", "2g.48gb-me"},
        ),
    ],
)
def test_engines_limit_what_fits_beside_what(
    simulate: Simulate, key: str, first: str, refused: set[str], allowed: set[str]
) -> None:
    simulate(key)
    gpu = pynvml.nvmlDeviceGetHandleByIndex(0)
    ids = {profile.name: profile.id for profile in MODELS[key].profiles}
    create(gpu, ids[first])
    for name in refused:
        assert pynvml.nvmlDeviceGetGpuInstanceRemainingCapacity(gpu, ids[name]) == 0, name
    for name in allowed:
        assert pynvml.nvmlDeviceGetGpuInstanceRemainingCapacity(gpu, ids[name]) > 0, name


def test_compute_instances_are_placed_by_the_same_rule(simulate: Simulate) -> None:
    simulate("a100-40gb")
    instance = pynvml.nvmlDeviceCreateGpuInstance(pynvml.nvmlDeviceGetHandleByIndex(0), 5)
    made = [pynvml.nvmlComputeInstanceGetInfo(pynvml.nvmlGpuInstanceCreateComputeInstance(instance, 0)) for _ in "123"]
    assert [info.id for info in made] == [0, 1, 2]
    assert len({info.placement.start for info in made}) == 3
    assert pynvml.nvmlGpuInstanceGetComputeInstanceRemainingCapacity(instance, 0) == 1
    assert pynvml.nvmlGpuInstanceGetComputeInstanceRemainingCapacity(instance, 1) == 0

"""Which GPUs a selection names."""

from __future__ import annotations

import pytest

from mig_agent.core.errors import ConfigError
from mig_agent.core.model import GpuUuid
from mig_agent.daemon.hardware import selected_gpus

THERE = {0: GpuUuid("GPU-aaaa-1"), 1: GpuUuid("GPU-aabb-2"), 3: GpuUuid("GPU-cccc-3")}


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["0"], [0]),
        (["3", "0"], [0, 3]),
        (["GPU-aabb-2"], [1]),
        (["GPU-c"], [3]),  # CUDA takes the beginning of a UUID, too
        (["1", "GPU-aabb-2"], [1]),
    ],
)
def test_by_index_by_uuid_and_by_the_beginning_of_one(names: list[str], expected: list[int]) -> None:
    assert list(selected_gpus(THERE, names)) == expected


@pytest.mark.parametrize(
    ("name", "words"),
    [("2", "there is no such GPU"), ("GPU-dddd", "there is no such GPU"), ("GPU-aa", "several GPUs begin so")],
)
def test_what_names_none_or_several_is_refused_with_what_is_there(name: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        selected_gpus(THERE, [name])
    assert "3 (GPU-cccc-3)" in caught.value.hint


def test_where_there_is_no_gpu_at_all() -> None:
    with pytest.raises(ConfigError, match="there is no such GPU") as caught:
        selected_gpus({}, ["0"])
    assert "none" in caught.value.hint

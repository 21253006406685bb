"""Whatever is asked of a simulated GPU in whatever order, it stays a GPU."""

from __future__ import annotations

import ctypes
import tempfile
from pathlib import Path

import pynvml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mig_agent.simulator import MODELS
from mig_agent.simulator.models import GpuModel
from mig_agent.simulator.state import Gpu
from support.simulated import machine, put_under_pynvml

WITH_MIG = sorted(key for key, model in MODELS.items() if model.can_mig)


@st.composite
def histories(draw: st.DrawFn) -> tuple[GpuModel, list[tuple[int, int]]]:
    """A model, and steps: profile id and start to create (-1: the driver chooses), or -1 and n to destroy the n-th."""
    model = MODELS[draw(st.sampled_from(WITH_MIG))]
    create = st.tuples(st.sampled_from(sorted(model.by_id)), st.integers(-1, model.memory_slices))
    destroy = st.tuples(st.just(-1), st.integers(0, 6))
    return model, draw(st.lists(create | create | destroy, min_size=5, max_size=25))


def check(model: GpuModel, gpu: Gpu) -> None:
    taken = 0
    engines = [0] * len(model.engine_totals)
    for instance in gpu["instances"]:
        profile = model.by_id[instance["profile"]]
        assert (instance["start"], instance["size"]) in {(w.start, w.size) for w in profile.windows}
        mask = ((1 << instance["size"]) - 1) << instance["start"]
        assert not taken & mask
        taken |= mask
        engines = [have + take for have, take in zip(engines, profile.engines, strict=True)]
    assert all(used <= total for used, total in zip(engines, model.engine_totals, strict=True))
    ids = [instance["id"] for instance in gpu["instances"]]
    assert len(set(ids)) == len(ids)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(histories())
def test_instances_never_overlap_nor_share_what_there_is_once(history: tuple[GpuModel, list[tuple[int, int]]]) -> None:
    model, steps = history
    with tempfile.TemporaryDirectory() as folder:
        simulator = machine(Path(folder), model.key)
        put_under_pynvml(simulator)
        handle = pynvml.nvmlDeviceGetHandleByIndex(0)
        for profile_id, number in steps:
            before = simulator.machine()["gpus"][0]
            try:
                if profile_id < 0:
                    ids = [each["id"] for each in before["instances"]]
                    if number < len(ids):
                        pynvml.nvmlGpuInstanceDestroy(pynvml.nvmlDeviceGetGpuInstanceById(handle, ids[number]))
                elif number < 0:
                    promised = pynvml.nvmlDeviceGetGpuInstanceRemainingCapacity(handle, profile_id)
                    try:
                        pynvml.nvmlDeviceCreateGpuInstance(handle, profile_id)
                        assert promised > 0
                    except pynvml.NVMLError_InsufficientResources:
                        assert promised == 0
                else:
                    size = model.by_id[profile_id].windows[0].size
                    place = pynvml.c_nvmlGpuInstancePlacement_t(number, size)
                    pynvml.nvmlDeviceCreateGpuInstanceWithPlacement(handle, profile_id, ctypes.byref(place))
            except (pynvml.NVMLError_InvalidArgument, pynvml.NVMLError_InsufficientResources):
                assert simulator.machine()["gpus"][0] == before
            check(model, simulator.machine()["gpus"][0])

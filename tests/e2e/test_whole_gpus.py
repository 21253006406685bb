"""A GPU without MIG mode beside one with it: pods get it whole, as `nvidia.com/gpu`, where that is switched on."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from mig_agent.simulator import STATE_FILE, Simulator
from support.cluster import installed
from support.cluster.pods import MEMORY, PROFILE, is_unschedulable
from support.cluster.space import Space

WHOLE = "nvidia.com/gpu"
ONE = {WHOLE: 1}
A30 = 1
"""The second GPU of the node."""


@pytest.fixture
def without_mig(space: Space) -> Iterator[Space]:
    """The A30 has no MIG mode, and the agent serves it all the same."""
    simulator = Simulator(space.cluster.layout.private("/var/lib") / "mig-agent" / STATE_FILE)
    simulator.set_mig_mode(A30, on=False)
    simulator.reset_gpu(A30)
    try:
        installed.install_again(space.cluster, resources={"wholeGpu": WHOLE})
        yield space
    finally:
        space.cluster.api.delete(f"{space.path}/pods", gracePeriodSeconds="1")
        space.until(lambda _: not space.status().leases, "no lease is left", may_fail=True)
        simulator.set_mig_mode(A30, on=True)
        simulator.reset_gpu(A30)
        installed.install_again(space.cluster)
        space.until(lambda _: space.allocatable(f"{PROFILE}1g.6gb") == 4, "it is as it was", may_fail=True)


def test_a_gpu_without_mig_mode_is_given_whole(without_mig: Space) -> None:
    space = without_mig
    space.until_allocatable(WHOLE, 1)
    space.until_allocatable(f"{PROFILE}1g.10gb", 7)
    space.until_allocatable(f"{PROFILE}1g.6gb", 0)  # the A30's profiles
    space.until_allocatable(f"{MEMORY}20g", 4)  # amounts of memory are the H100's: none of them gets a whole GPU
    (gpu,) = [each for each in space.status().gpus if each.state == "whole"]

    (device,) = space.running("a", ONE)
    assert (device.uuid, device.profile) == (gpu.uuid, "whole")
    seen = space.environment("a")
    assert seen["CUDA_VISIBLE_DEVICES"] == gpu.uuid
    assert seen["NVIDIA_VISIBLE_DEVICES"] == "void"
    space.until_allocatable(WHOLE, 1)  # what it has counts

    space.pod("b", ONE)
    space.until(lambda pods: is_unschedulable(pods["b"]), "there is no other")
    (slice_,) = space.running("c", {f"{PROFILE}1g.10gb": 1})
    assert slice_.gpu != gpu.uuid
    space.delete("a")
    space.until_running("b")
    assert space.visible("b") == [gpu.uuid]
    installed.replace_agent(space.cluster)
    assert space.lease("b").devices[0].uuid == gpu.uuid, "whatever becomes of the agent"

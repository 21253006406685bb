"""The backends of devices over simulated GPUs, through the real pynvml; shares are those of `engine/test_shares.py`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from mig_agent.adapters.device_backends import NO_USER, DeviceAccess, device_backends, joined
from mig_agent.adapters.host import Host
from mig_agent.adapters.nvml import Driver
from mig_agent.core.errors import DriverError, DriverErrorKind
from mig_agent.core.model import DEVICE_KINDS, Generation, Instance, InstanceState, Slot, whole_gpu_layout
from mig_agent.simulator import open_library
from support.simulated import machine


def test_each_kind_of_device(tmp_path: Path) -> None:
    simulator = machine(tmp_path, "a100-40gb:1,t4")
    driver = Driver.open(open_library(simulator.state_file))
    backends = device_backends(driver, Host(simulator.host_root, simulated=True))
    assert backends.keys() == set(DEVICE_KINDS.values())
    on, t4 = driver.observe().gpus
    assert on.layout is not None

    smallest = on.layout.by_name["1g.5gb"]
    slot = Slot(on.uuid, smallest, smallest.placements[0])
    mig = backends[smallest.kind]
    intended = Instance(slot=slot, generation=Generation(1), state=InstanceState.CREATING)
    made = mig.create(intended, NO_USER)
    mig.make_nodes(slot, made, on.minor)
    instance = replace(
        intended,
        state=InstanceState.IDLE,
        gpu_instance_id=made.gpu_instance_id,
        compute_instance_id=made.compute_instance_id,
        uuid=made.uuid,
    )
    assert made.gpu_instance_id is not None
    assert mig.placements(on.uuid) == {made.gpu_instance_id: slot.placement}
    assert mig.check_free(instance) == ()
    assert mig.holders(instance, on.minor) == ()
    assert mig.access(instance, on.minor) == DeviceAccess(
        gpu_minor=on.minor,
        gpu_instance_id=made.gpu_instance_id,
        compute_instance_id=made.compute_instance_id,
        environment={"CUDA_VISIBLE_DEVICES": made.uuid, "NVIDIA_VISIBLE_DEVICES": made.uuid},
    )
    with pytest.raises(DriverError, match="half made"):
        mig.check_free(replace(instance, compute_instance_id=None))

    whole = whole_gpu_layout(t4.model, t4.memory_mib).profiles[0]
    all_of_it = Instance(
        slot=Slot(t4.uuid, whole, whole.placements[0]),
        generation=Generation(2),
        state=InstanceState.IDLE,
        uuid=t4.uuid,
    )
    gpus = backends[whole.kind]
    assert all_of_it.is_complete
    assert gpus.placements(t4.uuid) == {}
    assert gpus.check_free(all_of_it) == ()
    assert gpus.holders(all_of_it, t4.minor) == ()
    pid = simulator.occupy("1")
    assert [each.pid for each in gpus.check_free(all_of_it)] == [pid]
    assert gpus.usage(all_of_it).memory_total_mib == t4.memory_mib
    assert gpus.access(all_of_it, t4.minor).gpu_instance_id is None
    for change in (lambda: gpus.create(all_of_it, NO_USER), lambda: gpus.destroy(all_of_it)):
        with pytest.raises(DriverError) as refused:
            change()
        assert refused.value.kind is DriverErrorKind.NOT_SUPPORTED

    both = joined(backends[each.kind].environment(each) for each in (instance, all_of_it))
    assert both["CUDA_VISIBLE_DEVICES"] == f"{made.uuid},{t4.uuid}"
    mig.destroy(instance)
    assert mig.placements(on.uuid) == {}

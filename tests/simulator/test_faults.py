"""What can be made to go wrong."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable

import pynvml
import pytest

from mig_agent.simulator import Code, Simulator, SimulatorError
from support.simulated import put_under_pynvml

Simulate = Callable[..., Simulator]


def first_mig_uuid() -> str:
    gpu = pynvml.nvmlDeviceGetHandleByIndex(0)
    return str(pynvml.nvmlDeviceGetUUID(pynvml.nvmlDeviceGetMigDeviceHandleByIndex(gpu, 0)))


def test_the_nth_call_fails_once(simulate: Simulate) -> None:
    simulator = simulate("a100-40gb")
    gpu = pynvml.nvmlDeviceGetHandleByIndex(0)
    simulator.fail("nvmlDeviceCreateGpuInstance", Code.IN_USE, nth=2)
    pynvml.nvmlDeviceCreateGpuInstance(gpu, 19)
    with pytest.raises(pynvml.NVMLError_InUse):
        pynvml.nvmlDeviceCreateGpuInstance(gpu, 19)
    pynvml.nvmlDeviceCreateGpuInstance(gpu, 19)
    assert len(simulator.machine()["gpus"][0]["instances"]) == 2
    assert simulator.machine()["faults"] == []


def test_a_fault_may_last_and_keep_to_one_gpu(simulate: Simulate) -> None:
    simulator = simulate("a100-40gb:2")
    first, second = (pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(2))
    # Without the version that C adds to the name.
    fault = simulator.fail("nvmlDeviceGetComputeRunningProcesses", Code.UNKNOWN, times=None, gpu=1)
    for _ in range(3):
        with pytest.raises(pynvml.NVMLError_Unknown):
            pynvml.nvmlDeviceGetComputeRunningProcesses(second)
    assert pynvml.nvmlDeviceGetComputeRunningProcesses(first) == []
    simulator.clear(fault)
    assert pynvml.nvmlDeviceGetComputeRunningProcesses(second) == []
    with pytest.raises(SimulatorError, match="cannot clear fault"):
        simulator.clear(fault)


def test_a_hanging_call_comes_back_when_the_fault_is_cleared(simulate: Simulate) -> None:
    simulator = simulate("a100-40gb:2")
    fault = simulator.hang("nvmlDeviceGetMinorNumber", gpu=0)
    minors: list[int] = []
    hanging = threading.Thread(
        target=lambda: minors.append(pynvml.nvmlDeviceGetMinorNumber(pynvml.nvmlDeviceGetHandleByIndex(0))),
        daemon=True,
    )
    hanging.start()
    # Other calls, on this GPU and on others, go on; so does whoever changes something.
    assert pynvml.nvmlDeviceGetMinorNumber(pynvml.nvmlDeviceGetHandleByIndex(1)) == 1
    pynvml.nvmlDeviceCreateGpuInstance(pynvml.nvmlDeviceGetHandleByIndex(0), 19)
    assert hanging.is_alive()
    assert minors == []
    simulator.clear(fault)
    hanging.join(30)
    assert minors == [0]


def test_a_lost_gpu_answers_nothing_and_the_others_do(simulate: Simulate) -> None:
    simulator = simulate("a100-40gb:2")
    gpu = pynvml.nvmlDeviceGetHandleByIndex(0)
    instance = pynvml.nvmlDeviceCreateGpuInstance(gpu, 19)
    simulator.lose_gpu(0)
    assert pynvml.nvmlDeviceGetCount() == 2
    calls: list[Callable[[], object]] = [
        lambda: pynvml.nvmlDeviceGetHandleByIndex(0),
        lambda: pynvml.nvmlDeviceGetUUID(gpu),
        lambda: pynvml.nvmlGpuInstanceGetInfo(instance),
        lambda: pynvml.nvmlGpuInstanceDestroy(instance),
    ]
    for call in calls:
        with pytest.raises(pynvml.NVMLError_GpuIsLost):
            call()
    assert pynvml.nvmlDeviceGetMinorNumber(pynvml.nvmlDeviceGetHandleByIndex(1)) == 1
    simulator.reset_gpu(0)
    assert pynvml.nvmlDeviceGetMigMode(gpu) == [1, 1]


def test_destroying_may_leave_a_remnant(simulate: Simulate) -> None:
    simulator = simulate("a100-40gb")
    gpu = pynvml.nvmlDeviceGetHandleByIndex(0)
    instance = pynvml.nvmlDeviceCreateGpuInstance(gpu, 19)
    simulator.leave_remnant()
    pynvml.nvmlGpuInstanceDestroy(instance)
    assert pynvml.nvmlGpuInstanceGetInfo(instance).profileId == 19
    pynvml.nvmlGpuInstanceDestroy(instance)
    with pytest.raises(pynvml.NVMLError_InvalidArgument):
        pynvml.nvmlGpuInstanceGetInfo(instance)


def test_deleted_mig_devices_may_stay_listed_until_the_library_starts_again(simulate: Simulate) -> None:
    simulator = simulate("a100-40gb")
    simulator.create_foreign(0, "1g.5gb")
    uuid = first_mig_uuid()
    simulator.list_stale()
    simulator.destroy_foreign("0/13")
    assert first_mig_uuid() == uuid
    with pytest.raises(pynvml.NVMLError_NotFound):
        pynvml.nvmlDeviceGetGpuInstanceById(pynvml.nvmlDeviceGetHandleByIndex(0), 13)
    put_under_pynvml(simulator)
    with pytest.raises(pynvml.NVMLError_NotFound):
        first_mig_uuid()


@pytest.mark.parametrize("gpu_instance_only", [False, True])
def test_a_holder_is_seen_only_in_proc(simulate: Simulate, gpu_instance_only: bool) -> None:
    simulator = simulate("a100-40gb")
    simulator.create_foreign(0, "1g.5gb")
    gpu = pynvml.nvmlDeviceGetHandleByIndex(0)
    pid = simulator.hold("0/13", gpu_instance_only=gpu_instance_only)
    assert pynvml.nvmlDeviceGetComputeRunningProcesses(gpu) == []
    instance = pynvml.nvmlDeviceGetGpuInstanceById(gpu, 13)
    compute = pynvml.nvmlGpuInstanceGetComputeInstanceById(instance, 0)
    if gpu_instance_only:
        pynvml.nvmlComputeInstanceDestroy(compute)
        refused: Callable[[], object] = lambda: pynvml.nvmlGpuInstanceDestroy(instance)  # noqa: E731 -- one of two
    else:
        refused = lambda: pynvml.nvmlComputeInstanceDestroy(compute)  # noqa: E731 -- one of two
    with pytest.raises(pynvml.NVMLError_InUse):
        refused()
    links = {str(link.readlink()) for link in (simulator.host_root / f"proc/{pid}/fd").iterdir()}
    assert "/dev/nvidia-caps/nvidia-cap120" in links  # 3 + 9 * 13
    simulator.vacate(pid)
    refused()
    assert not (simulator.host_root / f"proc/{pid}").exists()


def test_an_event_tells_of_changes_by_anybody(simulate: Simulate) -> None:
    simulator = simulate("a100-40gb:2,t4")
    first, second, without = (pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(3))
    assert pynvml.nvmlDeviceGetSupportedEventTypes(first) == pynvml.nvmlEventMigConfigChange
    events = pynvml.nvmlEventSetCreate()
    for gpu in (first, second):
        pynvml.nvmlDeviceRegisterEvents(gpu, pynvml.nvmlEventMigConfigChange, events)
    with pytest.raises(pynvml.NVMLError_NotSupported):
        pynvml.nvmlDeviceRegisterEvents(without, pynvml.nvmlEventMigConfigChange, events)
    with pytest.raises(pynvml.NVMLError_Timeout):
        pynvml.nvmlEventSetWait_v2(events, 1)
    simulator.create_foreign(1, "1g.5gb")
    data = pynvml.nvmlEventSetWait_v2(events, 30_000)
    assert data.eventType == pynvml.nvmlEventMigConfigChange
    assert ctypes.cast(data.device, ctypes.c_void_p).value == ctypes.cast(second, ctypes.c_void_p).value
    with pytest.raises(pynvml.NVMLError_Timeout):
        pynvml.nvmlEventSetWait_v2(events, 1)
    pynvml.nvmlEventSetFree(events)
    with pytest.raises(pynvml.NVMLError_InvalidArgument):
        pynvml.nvmlEventSetWait_v2(events, 1)

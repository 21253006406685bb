"""The NVML adapter over simulated GPUs, through the real pynvml."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pynvml
import pytest

from mig_agent.adapters.nvml import Driver, session
from mig_agent.adapters.nvml.calls import ProfileAnswer
from mig_agent.adapters.nvml.inventory import profile_name
from mig_agent.core.errors import DriverError, DriverErrorKind
from mig_agent.core.model import GpuUuid, MigMode, Placement, Slot
from mig_agent.core.observation import ObservedGpu
from mig_agent.simulator import MODELS, Code, GpuSpec, Simulator, create_machine, open_library
from support.agent import eventually
from support.simulated import machine

WITH_MIG = [key for key, model in MODELS.items() if model.can_mig]
CREATE = "nvmlDeviceCreateGpuInstanceWithPlacement"


class Bench:
    """A driver over a simulated machine."""

    def __init__(self, simulator: Simulator) -> None:
        self.simulator = simulator
        self.driver = Driver.open(open_library(simulator.state_file))

    def gpu(self, index: int = 0) -> ObservedGpu:
        return self.driver.observe().gpus[index]

    def slot(self, profile: str, start: int, *, gpu: int = 0) -> Slot:
        observed = self.gpu(gpu)
        assert observed.layout is not None
        found = observed.layout.by_name[profile]
        return Slot(observed.uuid, found, Placement(start, found.memory_slices))


@pytest.fixture
def bench(tmp_path: Path) -> Callable[..., Bench]:
    def make(gpus: str, *, mig_mode: bool = True, driver_version: str = "580.95.05") -> Bench:
        return Bench(machine(tmp_path, gpus, mig_mode=mig_mode, driver_version=driver_version))

    return make


MakeBench = Callable[..., Bench]


@pytest.mark.parametrize("key", WITH_MIG)
def test_a_layout_is_what_the_driver_says(bench: MakeBench, key: str) -> None:
    model = MODELS[key]
    layout = bench(key).gpu().layout
    assert layout is not None
    assert (layout.model, layout.memory_mib) == (model.name, model.memory_mib)
    assert layout.memory_slices == model.memory_slices
    assert layout.engines.as_tuple() == model.engine_totals
    assert set(layout.by_name) == {profile.name for profile in model.profiles}
    for row in model.profiles:
        profile = layout.by_id[row.id]
        assert (profile.name, profile.memory_mib, profile.compute_slices) == (row.name, row.memory_mib, row.slices)
        assert profile.engines.as_tuple() == row.engines
        assert [(p.start, p.size) for p in profile.placements] == [(w.start, w.size) for w in row.windows]
        assert profile.memory_slices == row.windows[0].size
        assert bool(profile.attributes) is not row.is_plain


def test_attributes_are_read_from_the_name(bench: MakeBench) -> None:
    layout = bench("rtx-pro-6000").gpu().layout
    assert layout is not None
    found = {name: set(profile.attributes) for name, profile in layout.by_name.items() if name.startswith("1g")}
    assert found == {
        "1g.24gb": set(),
        "1g.24gb+me": {"+me"},
        "1g.24gb+gfx": {"+gfx"},
        "1g.24gb+me.all": {"+me.all"},
        "1g.24gb-me": {"-me"},
    }


def test_gpus_of_one_model_share_a_layout(bench: MakeBench) -> None:
    gpus = bench("h100-80gb:2,a100-40gb").driver.observe().gpus
    assert gpus[0].layout is gpus[1].layout
    assert gpus[0].layout != gpus[2].layout


def test_names_where_the_driver_gives_none(tmp_path: Path) -> None:
    """An old driver has no second version of the profile's structure; every name follows from figures then."""
    for key in WITH_MIG:
        simulator = machine(tmp_path / key, key)
        driver = Driver.open(open_library(simulator.state_file, without=["nvmlDeviceGetGpuInstanceProfileInfoV"]))
        layout = driver.observe().gpus[0].layout
        assert layout is not None
        # Half-recorded tables (memory inferred as a share of the whole) have names that no rule gives back.
        if key not in {"gh200-96gb", "h100-96gb", "gh200-144gb", "b200-180gb"}:
            assert {profile.name for profile in layout.profiles} == {row.name for row in MODELS[key].profiles}


@pytest.mark.parametrize(
    ("total_mib", "memory_mib", "slices", "name"),
    [
        (143771, 71168, 3, "3g.71gb"),
        (143771, 16384, 1, "1g.18gb"),
        (183359, 22528, 1, "1g.23gb"),
        (40960, 4864, 1, "1g.5gb"),
    ],
)
def test_a_name_rounds_half_away_from_zero(total_mib: int, memory_mib: int, slices: int, name: str) -> None:
    answer = ProfileAnswer(
        id=0,
        name="",
        slices=slices,
        memory_mib=memory_mib,
        multiprocessors=0,
        copy_engines=0,
        decoders=0,
        encoders=0,
        jpeg=0,
        ofa=0,
    )
    assert profile_name(0, answer, total_mib) == name


def test_gpus_without_mig_are_told_as_such(bench: MakeBench) -> None:
    there = bench("t4,a100-40gb:1:off,h100-80gb")
    t4, off, on = there.driver.observe().gpus
    assert t4.mode == MigMode(capable=False)
    assert t4.layout is None
    assert off.mode == MigMode(capable=True)
    assert off.layout is not None
    assert on.mode == MigMode(capable=True, current=True, pending=True)
    pid = there.simulator.occupy("0")
    assert there.gpu(0).processes == (pid,)
    usage = there.driver.usage(t4.uuid)
    assert (usage.memory_used_mib, usage.memory_total_mib) == (1024, 15360)
    assert [each.pid for each in usage.processes or ()] == [pid]
    assert usage.utilization_percent is not None


def test_an_old_driver_without_mig_mode_lists_no_profiles(bench: MakeBench) -> None:
    there = bench("a100-40gb:1", mig_mode=False, driver_version="535.183.01")
    assert there.gpu().layout is None
    there.simulator.set_mig_mode(0, on=True)
    there.simulator.reset_gpu(0)
    assert there.gpu().layout is not None


# Creating


@pytest.mark.parametrize("key", WITH_MIG)
def test_every_profile_is_created_in_each_of_its_places(bench: MakeBench, key: str) -> None:
    """With the compute instance that fills it, whatever the number of its slices; and is gone afterwards."""
    there = bench(key)
    for row in MODELS[key].profiles:
        for window in row.windows:
            slot = there.slot(row.name, window.start)
            made = there.driver.create(slot)
            assert (made.profile_id, made.placement) == (row.id, slot.placement)
            assert made.compute_instances == (0,)
            assert made.uuid.startswith("MIG-")
            assert there.gpu().instances == (made,)
            assert there.driver.usage(slot.gpu, made.gpu_instance_id).memory_total_mib == row.memory_mib
            there.driver.destroy(slot, made.gpu_instance_id)
            assert there.gpu().instances == ()


def test_the_placement_is_read_and_not_derived_from_the_id(tmp_path: Path) -> None:
    specs = [GpuSpec(model="h100-80gb", halves_swapped=True)]
    there = Bench(create_machine(tmp_path / "gpus.json", specs, create_seconds=0, destroy_seconds=0))
    made = [there.driver.create(there.slot("1g.10gb", start)) for start in (4, 0)]
    assert [each.gpu_instance_id for each in made] == [7, 11]
    assert [each.placement.start for each in there.gpu().instances] == [0, 4]
    assert [each.uuid for each in there.gpu().instances] == [made[1].uuid, made[0].uuid]


def test_an_occupied_slot_is_refused(bench: MakeBench) -> None:
    there = bench("a100-40gb")
    there.driver.create(there.slot("2g.10gb", 2))
    with pytest.raises(DriverError) as refused:
        there.driver.create(there.slot("1g.5gb", 3))
    assert refused.value.kind is DriverErrorKind.INSUFFICIENT_RESOURCES
    assert (refused.value.call, refused.value.gpu_index) == (CREATE, 0)
    assert str(refused.value).startswith("cannot complete nvmlDeviceCreateGpuInstanceWithPlacement on GPU 0")


def test_a_profile_that_no_compute_instance_fills(bench: MakeBench) -> None:
    there = bench("a100-40gb")
    slot = there.slot("1g.5gb", 0)
    strange = replace(slot, profile=replace(slot.profile, compute_slices=5))
    with pytest.raises(DriverError, match="no compute instance has 5 slices"):
        there.driver.create(strange)
    assert there.gpu().instances == ()


@pytest.mark.parametrize(
    "call",
    [
        "nvmlGpuInstanceGetInfo",
        "nvmlGpuInstanceGetComputeInstanceProfileInfo",
        "nvmlGpuInstanceCreateComputeInstance",
        "nvmlGpuInstanceGetComputeInstances",
        "nvmlDeviceGetMaxMigDeviceCount",
        "nvmlDeviceGetUUID",
    ],
)
def test_what_was_begun_is_undone_when_a_later_call_fails(bench: MakeBench, call: str) -> None:
    there = bench("a100-40gb")
    slot = there.slot("2g.10gb", 0)
    there.simulator.fail(call, Code.UNKNOWN)
    with pytest.raises(DriverError) as failed:
        there.driver.create(slot)
    assert failed.value.kind is DriverErrorKind.UNKNOWN
    assert failed.value.call == call
    assert there.gpu().instances == ()
    assert there.driver.create(slot).placement == slot.placement


def test_what_cannot_be_undone_is_said(bench: MakeBench) -> None:
    there = bench("a100-40gb")
    slot = there.slot("2g.10gb", 0)
    there.simulator.fail("nvmlGpuInstanceCreateComputeInstance", Code.INSUFFICIENT_RESOURCES)
    there.simulator.fail("nvmlGpuInstanceDestroy", Code.IN_USE)
    with pytest.raises(DriverError, match=r"could not be removed.*nvmlGpuInstanceDestroy") as failed:
        there.driver.create(slot)
    assert failed.value.kind is DriverErrorKind.INSUFFICIENT_RESOURCES
    (half,) = there.gpu().instances
    assert (half.compute_instances, half.uuid) == ((), "")
    there.driver.destroy(slot, half.gpu_instance_id)
    assert there.gpu().instances == ()


# Destroying


def test_what_is_gone_already_need_not_be_destroyed(bench: MakeBench) -> None:
    there = bench("a100-40gb")
    slot = there.slot("1g.5gb", 6)
    there.driver.destroy(slot, 13)
    assert there.simulator.calls("nvmlGpuInstanceDestroy") == 0


def test_an_interrupted_destruction_goes_on(bench: MakeBench) -> None:
    there = bench("a100-40gb")
    slot = there.slot("1g.5gb", 6)
    made = there.driver.create(slot)
    there.simulator.fail("nvmlGpuInstanceDestroy", Code.IN_USE)
    with pytest.raises(DriverError) as refused:
        there.driver.destroy(slot, made.gpu_instance_id)
    assert refused.value.kind is DriverErrorKind.IN_USE
    assert there.gpu().instances[0].compute_instances == ()
    there.driver.destroy(slot, made.gpu_instance_id)
    assert there.gpu().instances == ()


def test_an_instance_in_use_is_not_touched(bench: MakeBench) -> None:
    there = bench("a100-40gb")
    slot = there.slot("1g.5gb", 6)
    made = there.driver.create(slot)
    pid = there.simulator.occupy(made.uuid, used_mib=700)
    assert there.gpu().instances[0].processes == (pid,)
    (process,) = there.driver.processes(slot.gpu, made.gpu_instance_id)
    assert (process.pid, process.used_mib) == (pid, 700)
    with pytest.raises(DriverError) as refused:
        there.driver.destroy(slot, made.gpu_instance_id)
    assert refused.value.kind is DriverErrorKind.IN_USE
    assert refused.value.holders == (f"pid {pid}",)
    assert there.simulator.calls("nvmlComputeInstanceDestroy") == 0


def test_a_holder_without_a_process_is_in_use(bench: MakeBench) -> None:
    there = bench("a100-40gb")
    slot = there.slot("1g.5gb", 6)
    made = there.driver.create(slot)
    there.simulator.hold(made.uuid)
    with pytest.raises(DriverError) as refused:
        there.driver.destroy(slot, made.gpu_instance_id)
    assert refused.value.kind is DriverErrorKind.IN_USE
    assert there.gpu().instances == (made,)


def test_another_instance_with_the_same_id_is_left_alone(bench: MakeBench) -> None:
    """Ids are used again: an id that was remembered may belong to somebody else by now."""
    there = bench("a100-40gb")
    slot = there.slot("2g.10gb", 4)
    made = there.driver.create(slot)
    there.driver.destroy(slot, made.gpu_instance_id)
    there.simulator.create_foreign(0, "1g.10gb", start=4)
    (foreign,) = there.gpu().instances
    assert foreign.gpu_instance_id == made.gpu_instance_id
    with pytest.raises(DriverError) as refused:
        there.driver.destroy(slot, made.gpu_instance_id)
    assert refused.value.kind is DriverErrorKind.NOT_FOUND
    assert there.gpu().instances == (foreign,)


def test_a_destruction_that_leaves_a_remnant_is_an_error(bench: MakeBench) -> None:
    there = bench("a100-40gb")
    slot = there.slot("1g.5gb", 6)
    made = there.driver.create(slot)
    there.simulator.leave_remnant()
    with pytest.raises(DriverError, match="still listed") as failed:
        there.driver.destroy(slot, made.gpu_instance_id)
    assert failed.value.kind is DriverErrorKind.READ_BACK
    there.driver.destroy(slot, made.gpu_instance_id)
    assert there.gpu().instances == ()


def test_compute_instances_of_others_inside_go_too(bench: MakeBench) -> None:
    there = bench("a100-40gb")
    slot = there.slot("3g.20gb", 4)
    made = there.driver.create(slot)
    nvml = there.driver._nvml
    handle = nvml.gpu_instance(nvml.gpu(0), made.gpu_instance_id, 0)
    (whole,) = nvml.compute_instances(handle, 2, 0)
    nvml.destroy_compute_instance(whole, 0)
    for _ in range(3):
        nvml.create_compute_instance(handle, 0, 0)
    assert there.gpu().instances[0].compute_instances == (0, 1, 2)
    there.driver.destroy(slot, made.gpu_instance_id)
    assert there.gpu().instances == ()


# Seeing


def test_an_instance_is_verified_before_it_is_used_again(bench: MakeBench) -> None:
    there = bench("a100-40gb")
    slot = there.slot("1g.5gb", 6)
    made = there.driver.create(slot)
    ids = (slot.gpu, made.gpu_instance_id, 0)
    assert there.driver.verify(*ids, made.uuid) == ()
    pid = there.simulator.occupy(made.uuid, used_mib=3)
    assert [(each.pid, each.used_mib) for each in there.driver.verify(*ids, made.uuid)] == [(pid, 3)]
    there.simulator.vacate(pid)
    other = there.driver.create(there.slot("1g.5gb", 0))
    with pytest.raises(DriverError) as changed:
        there.driver.verify(*ids, other.uuid)
    assert changed.value.kind is DriverErrorKind.NOT_FOUND
    there.driver.destroy(slot, made.gpu_instance_id)
    with pytest.raises(DriverError) as gone:
        there.driver.verify(*ids, made.uuid)
    assert gone.value.kind is DriverErrorKind.NOT_FOUND


def test_instances_are_sorted_and_foreign_ones_seen(bench: MakeBench) -> None:
    there = bench("a100-40gb")
    there.driver.create(there.slot("1g.5gb", 6))
    there.simulator.create_foreign(0, "1g.5gb", start=0, with_compute=False)
    there.simulator.create_foreign(0, "2g.10gb", start=2)
    found = there.gpu().instances
    assert [(each.placement.start, each.compute_instances) for each in found] == [(0, ()), (2, (0,)), (6, (0,))]
    assert found[0].uuid == ""
    assert len({each.uuid for each in found}) == 3


def test_more_instances_than_the_driver_counts(bench: MakeBench) -> None:
    """An A30's instanceCount is too small: a buffer of that size would be overrun."""
    there = bench("a30")
    for start in range(4):
        there.driver.create(there.slot("1g.6gb", start))
    assert [each.placement.start for each in there.gpu().instances] == [0, 1, 2, 3]


def test_a_deleted_mig_device_that_stays_listed_is_not_taken_for_a_live_one(bench: MakeBench) -> None:
    there = bench("a100-40gb")
    slot = there.slot("1g.5gb", 6)
    there.simulator.list_stale()
    made = there.driver.create(slot)
    there.driver.destroy(slot, made.gpu_instance_id)
    assert there.gpu().instances == ()
    assert there.driver.processes(slot.gpu, made.gpu_instance_id) == ()
    other = there.driver.create(there.slot("1g.5gb", 0))
    assert other.uuid != made.uuid
    assert there.driver.create(slot).uuid == made.uuid


def test_the_ghost_of_its_forerunner_does_not_hide_a_live_mig_device(bench: MakeBench) -> None:
    """Both are listed with the same ids: one answers, the other does not."""
    there = bench("a100-40gb")
    there.simulator.list_stale()
    other, slot = there.slot("1g.5gb", 0), there.slot("1g.5gb", 6)
    first, made = there.driver.create(other), there.driver.create(slot)
    there.driver.destroy(slot, made.gpu_instance_id)
    there.driver.destroy(other, first.gpu_instance_id)
    again = there.driver.create(slot)
    pid = there.simulator.occupy(again.uuid, used_mib=5)
    assert [each.pid for each in there.driver.processes(slot.gpu, again.gpu_instance_id)] == [pid]
    assert there.driver.usage(slot.gpu, again.gpu_instance_id).memory_total_mib == 4864
    assert there.gpu().instances[0].processes == (pid,)


def test_a_lost_gpu_does_not_hide_the_others(bench: MakeBench) -> None:
    there = bench("a100-40gb:3")
    uuids = [gpu.uuid for gpu in there.driver.observe().gpus]
    there.simulator.lose_gpu(1)
    seen = there.driver.observe()
    assert [gpu.uuid for gpu in seen.gpus] == [uuids[0], uuids[2]]
    assert seen.failed[1].kind is DriverErrorKind.GPU_LOST
    with pytest.raises(DriverError) as lost:
        there.driver.observe_gpu(uuids[1])
    assert (lost.value.kind, lost.value.gpu_index) == (DriverErrorKind.GPU_LOST, 1)
    afresh = Bench(there.simulator)
    assert [gpu.index for gpu in afresh.driver.observe().gpus] == [0, 2]
    there.simulator.reset_gpu(1)
    assert there.driver.observe_gpu(uuids[1]).index == 1


def test_an_unknown_gpu(bench: MakeBench) -> None:
    with pytest.raises(DriverError) as unknown:
        bench("a100-40gb").driver.observe_gpu(GpuUuid("GPU-none"))
    assert unknown.value.kind is DriverErrorKind.NOT_FOUND


def test_usage_that_the_driver_does_not_tell_is_none(bench: MakeBench) -> None:
    there = bench("a100-40gb")
    slot = there.slot("1g.5gb", 0)
    made = there.driver.create(slot)
    there.simulator.occupy(made.uuid, used_mib=None)
    assert there.driver.processes(slot.gpu, made.gpu_instance_id)[0].used_mib is None
    usage = there.driver.usage(slot.gpu, made.gpu_instance_id)
    assert usage.utilization_percent is None
    assert usage.memory_total_mib == 4864
    there.simulator.fail("nvmlDeviceGetMemoryInfo", Code.NOT_SUPPORTED)
    assert there.driver.usage(slot.gpu, made.gpu_instance_id).memory_used_mib is None
    assert there.driver.usage(slot.gpu, 12).memory_used_mib is None


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (Code.UNINITIALIZED, DriverErrorKind.LIBRARY),
        (Code.INVALID_ARGUMENT, DriverErrorKind.INVALID_ARGUMENT),
        (Code.NOT_SUPPORTED, DriverErrorKind.NOT_SUPPORTED),
        (Code.NO_PERMISSION, DriverErrorKind.NO_PERMISSION),
        (Code.NOT_FOUND, DriverErrorKind.NOT_FOUND),
        (Code.TIMEOUT, DriverErrorKind.TIMEOUT),
        (Code.GPU_IS_LOST, DriverErrorKind.GPU_LOST),
        (Code.RESET_REQUIRED, DriverErrorKind.RESET_REQUIRED),
        (Code.IN_USE, DriverErrorKind.IN_USE),
        (Code.INSUFFICIENT_RESOURCES, DriverErrorKind.INSUFFICIENT_RESOURCES),
        (Code.UNKNOWN, DriverErrorKind.UNKNOWN),
        (Code.MEMORY, DriverErrorKind.UNKNOWN),
        (4711, DriverErrorKind.UNKNOWN),
    ],
)
def test_every_code_becomes_an_error_of_our_own(bench: MakeBench, code: int, kind: DriverErrorKind) -> None:
    there = bench("a100-40gb")
    slot = there.slot("1g.5gb", 0)
    there.simulator.fail(CREATE, code)
    with pytest.raises(DriverError) as failed:
        there.driver.create(slot)
    assert (failed.value.kind, failed.value.call, failed.value.gpu_index) == (kind, CREATE, 0)
    assert failed.value.detail


# MIG mode


def test_switching_mig_mode_at_once(bench: MakeBench) -> None:
    there = bench("h100-80gb", mig_mode=False)
    gpu = there.gpu().uuid
    change = there.driver.set_mig_mode(gpu, on=True)
    assert (change.problem, change.mode) == (None, MigMode(capable=True, current=True, pending=True))
    there.driver.create(there.slot("7g.80gb", 0))
    assert there.driver.set_mig_mode(gpu, on=False).problem is DriverErrorKind.IN_USE


def test_switching_mig_mode_with_a_reset(bench: MakeBench) -> None:
    there = bench("a100-40gb", mig_mode=False)
    gpu = there.gpu().uuid
    change = there.driver.set_mig_mode(gpu, on=True)
    assert change.problem is DriverErrorKind.RESET_REQUIRED
    assert change.mode == MigMode(capable=True, current=False, pending=True)


def test_switching_a_gpu_that_has_no_mig(bench: MakeBench) -> None:
    there = bench("t4")
    gpu = there.gpu().uuid
    with pytest.raises(DriverError) as refused:
        there.driver.set_mig_mode(gpu, on=True)
    assert refused.value.kind is DriverErrorKind.NOT_SUPPORTED


# Around


def test_changes_by_others_are_heard(bench: MakeBench) -> None:
    there = bench("a100-40gb,t4")
    listener = there.driver.listen()
    assert listener is not None
    assert listener.wait(0) is False
    there.simulator.create_foreign(0, "1g.5gb")
    assert listener.wait(30) is True
    listener.close()
    assert Bench(machine(there.simulator.state_file.parent / "other", "t4")).driver.listen() is None


def test_every_call_is_told_to_whoever_measures(bench: MakeBench) -> None:
    there = bench("a100-40gb")
    heard: list[tuple[str, float, DriverErrorKind | None]] = []
    driver = Driver.open(open_library(there.simulator.state_file), on_call=lambda *call: heard.append(call))
    slot = there.slot("1g.5gb", 0)
    driver.create(slot)
    with pytest.raises(DriverError):
        driver.create(slot)
    creations = [(kind, seconds >= 0) for name, seconds, kind in heard if name == CREATE]
    assert creations == [(None, True), (DriverErrorKind.INSUFFICIENT_RESOURCES, True)]
    assert driver.version == "580.95.05"


def test_reading_in_many_threads_while_instances_come_and_go(bench: MakeBench) -> None:
    """A reader sees a state that was there, or an error of our own; never a mixture, never a crash."""
    there = bench("a100-40gb")
    slot = there.slot("2g.10gb", 0)
    expected = (slot.profile.id, slot.placement)
    stop = threading.Event()
    strange: list[object] = []

    def read() -> None:
        while not stop.is_set():
            try:
                found = there.driver.observe_gpu(slot.gpu).instances
            except DriverError:
                continue
            except Exception as error:  # noqa: BLE001 -- whatever it is, it is the finding
                strange.append(error)
                return
            strange.extend(each for each in found if (each.profile_id, each.placement) != expected)

    readers = [threading.Thread(target=read) for _ in range(3)]
    for reader in readers:
        reader.start()
    for _ in range(10):
        made = there.driver.create(slot)
        there.driver.destroy(slot, made.gpu_instance_id)
    stop.set()
    for reader in readers:
        reader.join(30)
    assert strange == []


def test_without_a_driver_the_error_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pynvml, "nvmlLib", None)

    def no_library(name: str) -> object:
        raise OSError(name)

    monkeypatch.setattr(pynvml, "CDLL", no_library)
    with pytest.raises(DriverError) as missing:
        Driver.open()
    assert missing.value.kind is DriverErrorKind.LIBRARY


# Sessions


def test_nothing_is_called_while_no_session_is_open(bench: MakeBench) -> None:
    there = bench("a100-40gb")
    before = there.gpu()
    there.driver.close()
    there.driver.close()  # no error
    for call in (there.driver.count, there.driver.observe, there.driver.listen):
        with pytest.raises(DriverError, match="no session with the driver is open") as closed:
            call()
        assert closed.value.kind is DriverErrorKind.LIBRARY
    there.driver.reopen()
    there.driver.reopen()
    assert there.gpu() == before


def test_a_driver_that_was_not_opened_asks_nothing(tmp_path: Path) -> None:
    heard: list[str] = []
    library = open_library(machine(tmp_path, "a100-40gb:2").state_file)
    driver = Driver.closed(library, on_call=lambda name, _seconds, _error: heard.append(name))
    assert (driver.version, heard) == ("", [])
    driver.reopen()
    assert driver.version == "580.95.05"
    assert driver.count() == 2
    driver.close()
    assert heard[-1] == "nvmlShutdown"


def test_what_was_known_of_the_gpus_is_read_anew_after_reopening(bench: MakeBench) -> None:
    there = bench("h100-80gb", mig_mode=False)
    assert there.gpu().mode == MigMode(capable=True, current=False, pending=False)
    there.driver.close()
    there.simulator.reboot()
    heard: list[str] = []
    there.driver._nvml._on_call = lambda name, _seconds, _error: heard.append(name)
    there.driver.reopen()
    there.gpu()
    assert {"nvmlDeviceGetHandleByIndex", "nvmlDeviceGetUUID", "nvmlDeviceGetName"} <= set(heard)


def test_a_session_ends_only_when_no_call_is_under_way(bench: MakeBench, monkeypatch: pytest.MonkeyPatch) -> None:
    there = bench("a100-40gb")
    there.simulator.hang("nvmlDeviceGetCount")
    counter = threading.Thread(target=there.driver.count)
    counter.start()
    eventually(lambda: there.driver._nvml._session._in_flight == 1, "the call is under way")
    monkeypatch.setattr(session, "_CLOSING_SECONDS", 0.01)
    with pytest.raises(DriverError, match="calls under way have not come back: 1") as held:
        there.driver.close()
    assert held.value.kind is DriverErrorKind.TIMEOUT
    assert there.driver.observe_at(0).index == 0  # the session goes on
    monkeypatch.setattr(session, "_CLOSING_SECONDS", 30.0)
    closer = threading.Thread(target=there.driver.close)
    closer.start()
    there.simulator.clear()
    for thread in (counter, closer):
        thread.join(30)
        assert not thread.is_alive()
    assert not there.driver._nvml._session.is_open


@pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")
def test_the_library_of_another_driver_is_loaded_after_reopening(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when the driver is replaced while the agent is paused: the old library must not stay mapped."""
    monkeypatch.setattr(pynvml, "nvmlLib", None)
    monkeypatch.setattr(pynvml, "CDLL", lambda _name: ctypes.CDLL(str(tmp_path / "libnvidia-ml.so.1")))
    driver = Driver.closed()
    for version in ("580.95.05", "590.10"):
        install(tmp_path, version)
        driver.reopen()
        assert driver.version == version
        assert str(tmp_path) in Path("/proc/self/maps").read_text(encoding="utf-8")
        driver.close()
        assert str(tmp_path) not in Path("/proc/self/maps").read_text(encoding="utf-8")
    (tmp_path / "libnvidia-ml.so.1").unlink()
    with pytest.raises(DriverError) as missing:
        driver.reopen()
    assert missing.value.kind is DriverErrorKind.LIBRARY


def install(folder: Path, version: str) -> None:
    """A library with the few calls that a session begins and ends with, in the place of the one before."""
    source = f"""
    #include <string.h>
    int nvmlInitWithFlags(unsigned int flags) {{ return 0; }}
    int nvmlShutdown(void) {{ return 0; }}
    int nvmlSystemGetDriverVersion(char *text, unsigned int size) {{ strncpy(text, "{version}", size); return 0; }}
    """
    made = folder / "made.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-x", "c", "-", "-o", str(made)], input=source, text=True, check=True)
    made.rename(folder / "libnvidia-ml.so.1")

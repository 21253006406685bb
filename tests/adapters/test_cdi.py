"""CDI files: what is in them, and that a runtime never sees half of one."""

from __future__ import annotations

import contextlib
import json
import os
import stat
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from mig_agent.adapters.cdi import CdiError, CdiFolder
from mig_agent.adapters.device_backends import DeviceAccess
from mig_agent.adapters.driver_libraries import DriverLibraries, Edits
from mig_agent.adapters.failpoints import FAILPOINTS
from mig_agent.adapters.host import Host
from mig_agent.core.errors import DriverError
from mig_agent.simulator import Simulator
from support.cdi import KIND, mig_device, simulated, valid

NAME = "mig-1g.5gb-0"
VARIABLES = {"CUDA_VISIBLE_DEVICES": "MIG-a,MIG-b", "NVIDIA_VISIBLE_DEVICES": "void"}


class Found(DriverLibraries):
    """Libraries that were found already."""

    def __init__(self, edits: Edits) -> None:
        self.edits = edits
        self.asked = 0

    def find(self) -> Edits:
        self.asked += 1
        return self.edits


LIBRARIES = Edits(
    mounts=({"hostPath": "/usr/lib/libcuda.so.580", "containerPath": "/usr/lib/libcuda.so.580", "options": ["ro"]},),
    hooks=({"hookName": "createContainer", "path": "/usr/bin/nvidia-cdi-hook", "args": ["nvidia-cdi-hook", "x"]},),
    variables=("NVIDIA_CTK=1",),
)


@pytest.fixture
def world(tmp_path: Path) -> tuple[Simulator, Host]:
    return simulated(tmp_path)


@pytest.fixture
def simulator(world: tuple[Simulator, Host]) -> Simulator:
    return world[0]


@pytest.fixture
def folder(world: tuple[Simulator, Host], tmp_path: Path) -> CdiFolder:
    return CdiFolder(tmp_path / "run/cdi", KIND, world[1], simulated=True)


@pytest.fixture(params=[0o022, 0o077, 0o777, 0o000])
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def path_of(folder: CdiFolder, name: str = NAME) -> Path:
    return folder.folder / f"mig-agent.io-mig_{name}.json"


def test_a_mig_device(simulator: Simulator, folder: CdiFolder) -> None:
    folder.write(NAME, [mig_device(simulator)], VARIABLES)
    spec = valid(path_of(folder))
    assert (spec["cdiVersion"], spec["kind"]) == ("0.5.0", KIND)
    assert "containerEdits" not in spec or spec["containerEdits"] == {}
    (device,) = spec["devices"]
    assert device["name"] == NAME
    assert folder.qualified(NAME) == f"{KIND}={NAME}"
    edits = device["containerEdits"]
    assert edits["env"] == ["CUDA_VISIBLE_DEVICES=MIG-a,MIG-b", "NVIDIA_VISIBLE_DEVICES=void"]
    # GPU 0's first 1g.5gb is GPU instance 13: 3 + 9 * 13, and its compute instance behind it.
    assert {node["path"]: (node["major"], node["minor"], node["fileMode"]) for node in edits["deviceNodes"]} == {
        "/dev/nvidia0": (195, 0, 0o666),
        "/dev/nvidia-caps/nvidia-cap120": (240, 120, 0o444),
        "/dev/nvidia-caps/nvidia-cap121": (240, 121, 0o444),
        "/dev/nvidiactl": (195, 255, 0o666),
        "/dev/nvidia-uvm": (236, 0, 0o666),
        "/dev/nvidia-uvm-tools": (236, 1, 0o666),
    }


def test_the_nodes_of_capabilities_are_made_on_the_host_too(simulator: Simulator, folder: CdiFolder) -> None:
    folder.write(NAME, [mig_device(simulator)], {})
    assert (simulator.host_root / "dev/nvidia-caps/nvidia-cap120").exists()


def test_a_whole_gpu_has_no_capabilities(folder: CdiFolder) -> None:
    folder.write("gpu-0", [DeviceAccess(gpu_minor=1, environment={})], VARIABLES)
    paths = [node["path"] for node in valid(path_of(folder, "gpu-0"))["devices"][0]["containerEdits"]["deviceNodes"]]
    assert paths == ["/dev/nvidia1", "/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools"]


def test_devices_of_one_file_share_the_drivers_nodes(simulator: Simulator, folder: CdiFolder) -> None:
    folder.write(NAME, [mig_device(simulator), mig_device(simulator), mig_device(simulator, 1)], {})
    edits = valid(path_of(folder))["devices"][0]["containerEdits"]
    paths = [node["path"] for node in edits["deviceNodes"]]
    assert len(paths) == len(set(paths)) == 2 + 6 + 3
    assert "env" not in edits


def test_modeset_only_where_there_is_one(simulator: Simulator, folder: CdiFolder) -> None:
    (simulator.host_root / "dev/nvidia-modeset").touch()
    (simulator.host_root / "dev/nvidia-uvm-tools").unlink()
    folder.write(NAME, [mig_device(simulator)], {})
    nodes = valid(path_of(folder))["devices"][0]["containerEdits"]["deviceNodes"]
    paths = {node["path"]: node["minor"] for node in nodes}
    assert paths["/dev/nvidia-modeset"] == 254
    assert "/dev/nvidia-uvm-tools" not in paths


def test_without_unified_memory_nothing_is_written(simulator: Simulator, folder: CdiFolder) -> None:
    """CUDA would fail in the container with words that name nothing."""
    (simulator.host_root / "dev/nvidia-uvm").unlink()
    with pytest.raises(DriverError, match=r"/dev/nvidia-uvm.*nvidia-modprobe -u"):
        folder.write(NAME, [mig_device(simulator)], {})
    assert folder.names() == ()


def test_an_instance_that_is_gone(folder: CdiFolder) -> None:
    gone = DeviceAccess(gpu_minor=7, gpu_instance_id=1, compute_instance_id=0, environment={})
    with pytest.raises(DriverError):
        folder.write(NAME, [gone], {})
    assert folder.names() == ()


def test_real_device_nodes_are_looked_at(tmp_path: Path) -> None:
    """Not on a simulated machine the numbers come from the nodes, and what is no device is none."""
    (tmp_path / "dev").mkdir()
    for name in ("nvidia0", "nvidiactl", "nvidia-uvm-tools"):
        (tmp_path / "dev" / name).symlink_to("/dev/null")
    (tmp_path / "dev/nvidia-uvm").symlink_to("/dev/zero")
    (tmp_path / "dev/nvidia-modeset").touch()
    folder = CdiFolder(tmp_path / "cdi", KIND, Host(tmp_path), simulated=False)
    folder.write("gpu-0", [DeviceAccess(gpu_minor=0, environment={})], {})
    nodes = valid(path_of(folder, "gpu-0"))["devices"][0]["containerEdits"]["deviceNodes"]
    assert [(node["path"], node["major"], node["minor"]) for node in nodes] == [
        ("/dev/nvidia0", 1, 3),
        ("/dev/nvidiactl", 1, 3),
        ("/dev/nvidia-uvm", 1, 5),
        ("/dev/nvidia-uvm-tools", 1, 3),
    ]
    (tmp_path / "dev/nvidiactl").unlink()
    with pytest.raises(DriverError, match="/dev/nvidiactl"):
        folder.write("gpu-0", [DeviceAccess(gpu_minor=0, environment={})], {})


# Libraries


def test_a_container_waits_whose_libraries_cannot_be_looked_for_now(
    world: tuple[Simulator, Host], tmp_path: Path
) -> None:
    program = tmp_path / "usr/bin/nvidia-ctk"
    program.parent.mkdir(parents=True)
    program.touch()
    libraries = DriverLibraries(world[1], print, machine=tmp_path)
    libraries.driver_released = True
    folder = CdiFolder(tmp_path / "cdi", KIND, world[1], simulated=True, libraries=libraries)
    with pytest.raises(CdiError, match=r"^cannot give a container the driver's libraries now: the agent is paused"):
        folder.write("mig-1g.5gb-0", [mig_device(world[0])], VARIABLES)
    assert folder.names() == ()


def test_the_drivers_libraries_are_for_the_whole_file(world: tuple[Simulator, Host], tmp_path: Path) -> None:
    libraries = Found(LIBRARIES)
    folder = CdiFolder(tmp_path / "cdi", KIND, world[1], simulated=True, libraries=libraries)
    folder.prepare()
    assert libraries.asked == 0
    folder.warm_up()
    assert libraries.asked == 1
    folder.write(NAME, [mig_device(world[0])], VARIABLES)
    spec = valid(path_of(folder))
    assert spec["cdiVersion"] == "0.5.0"
    assert spec["containerEdits"]["mounts"] == [dict(LIBRARIES.mounts[0])]
    assert spec["containerEdits"]["hooks"] == [dict(LIBRARIES.hooks[0])]
    assert spec["containerEdits"]["env"] == ["NVIDIA_CTK=1"]
    folder.write("mig-1g.5gb-1", [mig_device(world[0])], VARIABLES, with_libraries=False)
    assert valid(path_of(folder, "mig-1g.5gb-1"))["containerEdits"] == {}
    assert libraries.asked == 2


# Files


def test_names(simulator: Simulator, folder: CdiFolder) -> None:
    assert folder.names() == ()
    folder.prepare()
    assert folder.names() == ()
    names = ["mig-1g.5gb-10", "mig-1g.5gb.me-0", "memory-5g-2"]
    device = mig_device(simulator)
    for name in names:
        folder.write(name, [device], {})
    (folder.folder / "nvidia.yaml").touch()
    (folder.folder / "mig-agent.io-migrate_x.json").touch()
    (folder.folder / "mig-agent.io-mig_.json").touch()
    (folder.folder / "mig-agent.io-mig_x.json.bak").touch()
    (folder.folder / "xmig-agent.io-mig_x.json").touch()
    assert folder.names() == tuple(sorted(names))
    folder.remove(names[0])
    assert folder.names() == tuple(sorted(names[1:]))
    assert len(list(folder.folder.iterdir())) == 5 + 2


def test_names_of_two_kinds_do_not_mix(world: tuple[Simulator, Host], tmp_path: Path) -> None:
    first = CdiFolder(tmp_path / "cdi", KIND, world[1], simulated=True)
    second = CdiFolder(tmp_path / "cdi", f"{KIND}-other", world[1], simulated=True)
    first.write(NAME, [mig_device(world[0])], {})
    assert second.names() == ()
    second.remove(NAME)
    assert first.names() == (NAME,)


@pytest.mark.parametrize("name", ["", ".", "../x", "a/b", "-a", "a-", "a b", "ä", "a\n", "x" * 201])
def test_names_that_are_none(simulator: Simulator, folder: CdiFolder, name: str) -> None:
    with pytest.raises(CdiError, match="cannot name"):
        folder.write(name, [mig_device(simulator)], {})
    with pytest.raises(CdiError, match="cannot name"):
        folder.remove(name)


def test_removing_what_is_not_there(folder: CdiFolder) -> None:
    folder.remove(NAME)
    folder.prepare()
    folder.remove(NAME)


def test_a_damaged_file_is_listed_replaced_and_removed(simulator: Simulator, folder: CdiFolder) -> None:
    folder.prepare()
    path_of(folder).write_bytes(b'{"cdiVersion": \xff')
    path_of(folder, "other").write_bytes(b"")
    assert folder.names() == (NAME, "other")
    folder.write(NAME, [mig_device(simulator)], {})
    valid(path_of(folder))
    folder.remove("other")
    assert folder.names() == (NAME,)


def test_what_a_cut_off_write_left_is_listed_and_goes(simulator: Simulator, folder: CdiFolder) -> None:
    folder.prepare()
    for name in (NAME, "other"):
        (folder.folder / f".mig-agent.io-mig_{name}.tmp").write_text('{"cdi')
    assert folder.names() == (NAME, "other")
    folder.write(NAME, [mig_device(simulator)], {})
    folder.remove("other")
    assert [each.name for each in folder.folder.iterdir()] == [path_of(folder).name]


def test_a_file_that_says_the_same_is_left_alone(simulator: Simulator, folder: CdiFolder) -> None:
    """The runtime reads the folder again at each change."""
    device = mig_device(simulator)
    folder.write(NAME, [device], VARIABLES)
    before = path_of(folder).stat().st_ino
    folder.write(NAME, [device], VARIABLES)
    assert path_of(folder).stat().st_ino == before
    folder.write(NAME, [device], VARIABLES | {"CUDA_VISIBLE_DEVICES": "MIG-c"})
    assert path_of(folder).stat().st_ino != before


def test_modes_do_not_depend_on_the_umask(simulator: Simulator, folder: CdiFolder, umask: int) -> None:
    device = mig_device(simulator) if umask != 0o777 else DeviceAccess(gpu_minor=0, environment={})
    folder.folder.parent.mkdir(mode=0o755)
    folder.folder.parent.chmod(0o755)
    folder.write(NAME, [device], {})
    assert stat.S_IMODE(path_of(folder).stat().st_mode) == 0o644
    assert stat.S_IMODE(folder.folder.stat().st_mode) == 0o755


def test_a_folder_that_cannot_be_made_or_written(simulator: Simulator, folder: CdiFolder) -> None:
    folder.folder.parent.write_text("a file where the folder should be")
    with pytest.raises(CdiError, match="cannot make the folder"):
        folder.prepare()
    folder.folder.parent.unlink()
    folder.folder.mkdir(parents=True)
    path_of(folder).mkdir()
    with pytest.raises(CdiError, match="cannot write the CDI file"):
        folder.write(NAME, [mig_device(simulator)], {})
    with pytest.raises(CdiError, match="cannot remove the CDI file"):
        folder.remove(NAME)


def test_a_link_in_the_place_of_the_file_leads_nowhere(simulator: Simulator, folder: CdiFolder, tmp_path: Path) -> None:
    folder.prepare()
    target = tmp_path / "target"
    target.write_text("somebody's")
    path_of(folder).symlink_to(target)
    (folder.folder / f".mig-agent.io-mig_{NAME}.tmp").symlink_to(target)
    folder.write(NAME, [mig_device(simulator)], {})
    assert target.read_text() == "somebody's"
    assert not path_of(folder).is_symlink()


def test_every_change_is_behind_a_door(
    simulator: Simulator, folder: CdiFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    reached: list[str] = []
    device = mig_device(simulator)
    Host(simulator.host_root, simulated=True).make_caps_nodes(0, 13, 0)
    monkeypatch.setattr(FAILPOINTS, "listener", reached.append)
    folder.write(NAME, [device], {})
    folder.write(NAME, [device], {})
    folder.remove(NAME)
    folder.remove(NAME)
    doors = ["cdi-folder", "cdi-file", "cdi-removal"]
    assert reached == [f"{when}-{door}" for door in doors for when in ("before", "after")]


def test_a_reader_never_sees_half_a_file(simulator: Simulator, folder: CdiFolder) -> None:
    """Two write, one of them removes, and every file that a reader opens is a whole one."""
    devices = [mig_device(simulator) for _ in range(3)]

    def write(number: int) -> None:
        for turn in range(60):
            folder.write(NAME, devices[: 1 + turn % 3], {"WHO": f"{number}-{turn}"})
            if number == 0 and turn % 5 == 0:
                folder.remove(NAME)

    folder.prepare()
    seen = 0
    with ThreadPoolExecutor() as pool:
        writers = [pool.submit(write, number) for number in range(2)]
        while not all(each.done() for each in writers) or not seen:
            for path in folder.folder.glob("*.json"):
                with contextlib.suppress(FileNotFoundError):
                    seen += bool(json.loads(path.read_bytes())["devices"])
        for each in writers:
            each.result()
    valid(path_of(folder))

"""The machine around the GPUs: a simulated one, and the one that the tests run on."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from mig_agent.adapters.host import Host
from mig_agent.core.errors import DriverError, DriverErrorKind
from mig_agent.simulator import Simulator
from support.simulated import machine

CONTAINER = "0123456789abcdef" * 4


@pytest.fixture
def simulator(tmp_path: Path) -> Simulator:
    return machine(tmp_path, "a100-40gb:2")


@pytest.fixture
def host(simulator: Simulator) -> Host:
    return Host(simulator.host_root, simulated=True)


def test_the_boot_id_changes_with_a_boot(simulator: Simulator, host: Host) -> None:
    before = host.boot_id()
    assert before == simulator.machine()["boot_id"]
    simulator.reboot()
    assert host.boot_id() == simulator.machine()["boot_id"] != before


def test_a_simulated_process(simulator: Simulator, host: Host) -> None:
    simulator.create_foreign(0, "1g.5gb")
    pid = simulator.occupy("0/13", name="/usr/bin/python train.py --lr 1", container=CONTAINER)
    process = host.process(pid)
    assert process is not None
    assert (process.command, process.container) == ("/usr/bin/python train.py --lr 1", CONTAINER)
    assert str(process) == f"/usr/bin/python train.py --lr 1 (pid {pid}, container 0123456789ab)"
    assert host.describe_process(pid) == str(process)
    simulator.vacate(pid)
    assert host.process(pid) is None
    assert host.describe_process(pid) == f"pid {pid}"


def test_the_title_of_a_process_hides_nothing(simulator: Simulator, host: Host) -> None:
    """Whoever owns the process wrote it."""
    simulator.create_foreign(0, "1g.5gb")
    pid = simulator.occupy("0/13", name="train\u202egnp \x1b[2J \x9b")
    assert host.describe_process(pid) == f"train\\u202egnp \\u001b[2J \\u009b (pid {pid})"


def test_who_holds_an_instance(simulator: Simulator, host: Host) -> None:
    """Through the GPU instance's node or a compute instance's; nobody else's."""
    simulator.create_foreign(0, "1g.5gb")
    simulator.create_foreign(0, "1g.5gb")
    simulator.create_foreign(1, "1g.5gb")
    here = simulator.hold("0/13", name="dcgm-exporter -f metrics")
    also = simulator.hold("0/13", name="nv-hostengine", gpu_instance_only=True)
    simulator.hold("0/11")
    simulator.hold("1/13")
    assert [(each.pid, each.command) for each in host.holders(0, 13)] == [
        (here, "dcgm-exporter -f metrics"),
        (also, "nv-hostengine"),
    ]
    assert host.holders(0, 7) == ()
    assert len(host.holders(0)) == 3


def test_nodes_are_made_once(simulator: Simulator, host: Host) -> None:
    gpu_instance, _ = simulator.create_foreign(1, "2g.10gb")
    first, second = host.make_caps_nodes(1, gpu_instance, 0)
    # GI = 3 + 135 * GPU + 9 * GI, and the compute instance next to it: all captures agree, and the file says so.
    assert (first.minor, second.minor) == (3 + 135 + 9 * 5, 3 + 135 + 9 * 5 + 1)
    assert first.path == f"/dev/nvidia-caps/nvidia-cap{first.minor}"
    assert first.major == 240
    for node in (first, second):
        assert (simulator.host_root / node.path[1:]).is_file()
    assert host.make_caps_nodes(1, gpu_instance, 0) == (first, second) == host.caps_nodes(1, gpu_instance, 0)
    simulator.reboot()
    assert not (simulator.host_root / first.path[1:]).exists()


def test_the_driver_writes_where_the_minor_numbers_are(simulator: Simulator, host: Host) -> None:
    gpu_instance, _ = simulator.create_foreign(0, "2g.10gb")
    access = simulator.host_root / f"proc/driver/nvidia/capabilities/gpu0/mig/gi{gpu_instance}/ci0/access"
    assert f"DeviceFileMinor: {host.caps_nodes(0, gpu_instance, 0)[1].minor}\n" in access.read_text()
    simulator.destroy_foreign(f"0/{gpu_instance}")
    assert not access.parent.exists()


def test_an_instance_that_the_driver_does_not_know(host: Host) -> None:
    with pytest.raises(DriverError, match="no minor number for gpu7/gi1/access") as unknown:
        host.caps_nodes(7, 1, 0)
    assert unknown.value.kind is DriverErrorKind.NOT_FOUND


def test_a_machine_without_the_driver(tmp_path: Path) -> None:
    host = Host(tmp_path)
    assert host.process(1) is None
    assert host.holders(0, 1) == ()
    with pytest.raises(DriverError):
        host.caps_nodes(0, 1, 0)


def test_without_root_no_device_node_is_made(simulator: Simulator, monkeypatch: pytest.MonkeyPatch) -> None:
    def mknod(path: Path, _mode: int, _device: int) -> None:
        raise PermissionError(1, "Operation not permitted", path)

    monkeypatch.setattr(os, "mknod", mknod)
    simulator.create_foreign(0, "1g.5gb")
    with pytest.raises(DriverError, match="Operation not permitted") as denied:
        Host(simulator.host_root).make_caps_nodes(0, 13, 0)
    assert denied.value.kind is DriverErrorKind.NO_PERMISSION


def test_a_device_node_gets_the_number_that_the_driver_names(
    simulator: Simulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the kernel lets us; containers mostly do not, so the call itself is looked at."""
    made: list[tuple[str, int, int]] = []

    def mknod(path: Path, mode: int, device: int) -> None:
        made.append((Path(path).name, mode, device))
        Path(path).touch()

    monkeypatch.setattr(os, "mknod", mknod)
    gpu_instance, _ = simulator.create_foreign(0, "1g.5gb")
    first, second = Host(simulator.host_root).make_caps_nodes(0, gpu_instance, 0)
    mode = stat.S_IFCHR | 0o444
    assert made == [
        (f"nvidia-cap{first.minor}", mode, os.makedev(240, first.minor)),
        (f"nvidia-cap{second.minor}", mode, os.makedev(240, second.minor)),
    ]


def test_the_real_machine() -> None:
    host = Host()
    command = [sys.executable, "-c", "print(flush=True); input()", "a word"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()  # before that the kernel may not have set up its command line
        process = host.process(child.pid)
        assert process is not None
        assert process.command.endswith("input() a word")
        assert process.started > 0
        child.communicate(b"\n", timeout=60)
        assert host.process(child.pid) is None
    assert len(host.boot_id()) == 36


def test_an_open_file_of_a_real_process_is_found(tmp_path: Path) -> None:
    """The scan over /proc/*/fd itself, on a file that stands for a device."""
    node = tmp_path / "node"
    node.touch()
    with node.open():
        assert str(node) in set(Host()._open_files(os.getpid()))


@pytest.mark.parametrize(
    ("devices", "has"),
    [
        ({"0000:17:00.0": ("0x10de", "0x030200")}, True),
        ({"0000:00:00.0": ("0x8086", "0x060000"), "0000:01:00.0": ("0x10de", "0x030000")}, True),
        ({"0000:01:00.0": ("0x1a03", "0x030000"), "0000:05:00.0": ("0x10de", "0x068000")}, False),
        ({}, False),
        (None, False),
    ],
    ids=["no output", "with an output", "another's, and an NVSwitch", "nothing", "no PCI at all"],
)
def test_whether_there_is_a_gpu_of_nvidias(
    tmp_path: Path, devices: dict[str, tuple[str, str]] | None, *, has: bool
) -> None:
    bus = tmp_path / "sys/bus" / ("usb" if devices is None else "pci/devices")
    bus.mkdir(parents=True)
    for name, (vendor, kind) in (devices or {}).items():
        (bus / name).mkdir()
        (bus / name / "vendor").write_text(f"{vendor}\n")
        (bus / name / "class").write_text(f"{kind}\n")
    assert Host(tmp_path).has_nvidia_gpu() is has


def test_where_nobody_can_tell_there_may_be_a_gpu(tmp_path: Path) -> None:
    assert Host(tmp_path).has_nvidia_gpu()

"""The files that driver and kernel show in /proc and /dev, as plain files under a folder."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from mig_agent.simulator.state import Gpu, Machine, Process

_CAPS_MAJOR = 240
_GPU_MAJOR = 195
_IDS_PER_GPU = 15
_COMPUTE_IDS = 8
_CAPS_DEVICE = "/dev/nvidia-caps/nvidia-cap"
_FIRST_FD = 3


def gpu_instance_minor(gpu_minor: int, gpu_instance: int) -> int:
    """Return the minor number of a GPU instance's capability; those of its compute instances follow it."""
    return 3 + 135 * gpu_minor + 9 * gpu_instance


class Summary(NamedTuple):
    """What the files show of a machine."""

    boot_id: str
    changes: list[int]
    open_devices: list[tuple[Process, list[str]]]


def summarise(machine: Machine) -> Summary:
    """Return what the files must show."""
    return Summary(machine["boot_id"], [gpu["changes"] for gpu in machine["gpus"]], list(_open_devices(machine)))


class HostRoot:
    """Updates the files from the machine's state. Called with the state's lock held.

    It does not make the nodes in dev/nvidia-caps, which the driver does not make either.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self._proc = root / "proc"
        self._capabilities = root / "proc/driver/nvidia/capabilities"

    def create(self, machine: Machine) -> None:
        """Write the files that exist from boot on."""
        for folder in (
            "proc/sys/kernel/random",
            "proc/driver/nvidia-caps",
            "proc/driver/nvidia/gpus",
            "dev/nvidia-caps",
        ):
            (self.root / folder).mkdir(parents=True, exist_ok=True)
        (self._proc / "devices").write_text(
            f"Character devices:\n  1 mem\n{_GPU_MAJOR} nvidia\n{_GPU_MAJOR} nvidiactl\n236 nvidia-uvm\n"
            f"{_CAPS_MAJOR} nvidia-caps\n\nBlock devices:\n  7 loop\n"
        )
        minors = ["config 1", "monitor 2"]
        for gpu in machine["gpus"]:
            minors += _minor_lines(gpu["minor"])
        (self._proc / "driver/nvidia-caps/mig-minors").write_text("".join(f"{line}\n" for line in minors))
        _write_capability(self._capabilities / "mig/config", 1)
        _write_capability(self._capabilities / "mig/monitor", 2)
        nodes = [f"nvidia{gpu['minor']}" for gpu in machine["gpus"]]
        for node in (*nodes, "nvidiactl", "nvidia-uvm", "nvidia-uvm-tools"):
            (self.root / "dev" / node).touch()
        self.sync(machine)

    def sync(self, machine: Machine, since: Summary | None = None) -> None:
        """Update capabilities, processes and the boot id; with `since` only what changed after it."""
        now = summarise(machine)
        if since is None or since.boot_id != now.boot_id:
            self._sync_boot(now.boot_id)
        for index, gpu in enumerate(machine["gpus"]):
            if since is None or since.changes[index] != now.changes[index]:
                self._sync_capabilities(gpu)
        if since is None or since.open_devices != now.open_devices:
            self._sync_processes(now.open_devices)

    def _sync_boot(self, boot_id: str) -> None:
        path = self._proc / "sys/kernel/random/boot_id"
        if not path.exists() or path.read_text().strip() != boot_id:
            path.write_text(f"{boot_id}\n")
            for node in (self.root / "dev/nvidia-caps").iterdir():
                node.unlink()

    def _sync_capabilities(self, gpu: Gpu) -> None:
        folder = self._capabilities / f"gpu{gpu['minor']}/mig"
        if not folder.is_dir():
            folder.mkdir(parents=True)
        wanted = {f"gi{each['id']}": each for each in gpu["instances"]}
        for name in os.listdir(folder):  # noqa: PTH208 -- only the names are wanted
            if name not in wanted:
                shutil.rmtree(folder / name)
        for name, instance in wanted.items():
            minor = gpu_instance_minor(gpu["minor"], instance["id"])
            _write_capability(folder / name / "access", minor)
            compute = {f"ci{each['id']}": each["id"] for each in instance["compute"]}
            for old in os.listdir(folder / name):  # noqa: PTH208 -- only the names are wanted
                if old.startswith("ci") and old not in compute:
                    shutil.rmtree(folder / name / old)
            for new, id_ in compute.items():
                _write_capability(folder / name / new / "access", minor + 1 + id_)

    def _sync_processes(self, open_devices: list[tuple[Process, list[str]]]) -> None:
        wanted: dict[int, tuple[Process, list[str]]] = {}
        for process, devices in open_devices:
            known = wanted.setdefault(process["pid"], (process, []))
            known[1].extend(device for device in devices if device not in known[1])
        for name in os.listdir(self._proc):  # noqa: PTH208 -- only the names are wanted
            if name.isdigit() and int(name) not in wanted:
                shutil.rmtree(self._proc / name)
        for pid, (process, devices) in wanted.items():
            folder = self._proc / str(pid)
            if not folder.exists():
                _write_process(folder, process)
            fds = folder / "fd"
            links = {str(_FIRST_FD + n): device for n, device in enumerate(devices)}
            for name in os.listdir(fds):  # noqa: PTH208 -- only the names are wanted
                if name not in links or str((fds / name).readlink()) != links[name]:
                    (fds / name).unlink()
            for name, device in links.items():
                with contextlib.suppress(FileExistsError):
                    (fds / name).symlink_to(device)


def _minor_lines(gpu_minor: int) -> Iterator[str]:
    for gpu_instance in range(_IDS_PER_GPU):
        minor = gpu_instance_minor(gpu_minor, gpu_instance)
        yield f"gpu{gpu_minor}/gi{gpu_instance}/access {minor}"
        for compute in range(_COMPUTE_IDS):
            yield f"gpu{gpu_minor}/gi{gpu_instance}/ci{compute}/access {minor + 1 + compute}"


def _write_capability(path: Path, minor: int) -> None:
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"DeviceFileMinor: {minor}\nDeviceFileMode: 292\nDeviceFileModify: 1\n")


def _open_devices(machine: Machine) -> Iterator[tuple[Process, list[str]]]:
    for gpu in machine["gpus"]:
        own = ["/dev/nvidiactl", "/dev/nvidia-uvm", f"/dev/nvidia{gpu['minor']}"]
        for process in gpu["processes"]:
            yield process, own
        for instance in gpu["instances"]:
            minor = gpu_instance_minor(gpu["minor"], instance["id"])
            for process in instance["holders"]:
                yield process, [*own, f"{_CAPS_DEVICE}{minor}"]
            for compute in instance["compute"]:
                caps = [f"{_CAPS_DEVICE}{minor}", f"{_CAPS_DEVICE}{minor + 1 + compute['id']}"]
                for process in (*compute["processes"], *compute["holders"]):
                    yield process, [*own, *caps]


def _write_process(folder: Path, process: Process) -> None:
    (folder / "fd").mkdir(parents=True)
    words = process["name"].split()
    program = words[0].rsplit("/", 1)[-1][:15] if words else "?"
    (folder / "comm").write_text(f"{program}\n")
    (folder / "cmdline").write_bytes(b"".join(word.encode() + b"\0" for word in words))
    started = process["started"] or 100_000 + process["pid"]
    # Of /proc/PID/stat only the pid, the program, the state and the start time (field 22) are real.
    (folder / "stat").write_text(f"{process['pid']} ({program}) S 1{' 0' * 17} {started} 0 0\n")
    container = process["container"]
    path = f"/kubepods.slice/kubepods-pod0.slice/cri-containerd-{container}.scope" if container else "/user.slice"
    path = process.get("cgroup", path)
    (folder / "cgroup").write_text(f"0::{path}\n")

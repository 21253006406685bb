"""The machine around the GPUs: its boot id, its processes, and the device nodes of MIG capabilities.

Everything is read under a root, so that a mounted host (`/host`) or a simulated one can replace `/`.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import stat
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from mig_agent.adapters import processes
from mig_agent.adapters.failpoints import FAILPOINTS
from mig_agent.core.errors import DriverError, DriverErrorKind
from mig_agent.core.texts import visible

_CAPS_FOLDER = "dev/nvidia-caps"
_CONTAINER_ID = re.compile(r"[0-9a-f]{64}")
_SHOWN_OF_CONTAINER_ID = 12
_SHOWN_OF_COMMAND = 60
_MODPROBE = "nvidia-modprobe"
_MODPROBE_SECONDS = 10.0
_NODE_MODE = 0o444
_BUSES = "sys/bus"
_NVIDIA = "0x10de"
_DISPLAY = "0x03"
"""Prefix of the PCI class of a GPU, with or without a display output."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessInfo:
    """A process of this machine."""

    pid: int
    command: str
    """The command line, words separated by blanks; the program's name in brackets if it has none."""
    container: str
    """Id of its container, 64 hexadecimal digits; empty outside a container."""
    uid: int
    """Its user."""
    started: int
    """Clock ticks from boot to its start; together with the pid it identifies a process for good."""

    def __str__(self) -> str:
        """Return a text for messages: `python train.py (pid 4711, container 0123456789ab)`."""
        command = self.command
        if len(command) > _SHOWN_OF_COMMAND:
            command = f"{command[:_SHOWN_OF_COMMAND]}..."
        container = f", container {self.container[:_SHOWN_OF_CONTAINER_ID]}" if self.container else ""
        return f"{command} (pid {self.pid}{container})"


@dataclass(frozen=True, slots=True, kw_only=True)
class CapsNode:
    """The device node that opens one GPU instance or compute instance to a container."""

    path: str
    """Path in containers and device lists: `/dev/nvidia-caps/nvidia-cap12`."""
    major: int
    minor: int


class Host:
    """One machine, seen under a root."""

    def __init__(self, root: Path = Path("/"), *, simulated: bool = False) -> None:
        """See the machine under `root`; `simulated` creates plain files for device nodes, which needs no privilege."""
        self.root = root
        self._simulated = simulated

    def boot_id(self) -> str:
        """Return the boot id, which differs after every boot. Raises OSError."""
        return (self.root / "proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()

    def has_nvidia_gpu(self) -> bool:
        """Return True if the PCI bus has an NVIDIA GPU, with or without its driver, or if this cannot be read."""
        return self.count_nvidia_gpus() != 0

    def count_nvidia_gpus(self) -> int | None:
        """Return the number of NVIDIA GPUs on the PCI bus, with or without their driver; None if it cannot be read."""
        buses = self.root / _BUSES
        if not buses.is_dir():
            return None
        try:
            devices = list((buses / "pci/devices").iterdir())
        except FileNotFoundError:
            return 0
        except OSError:
            return None
        return sum(
            _text(each / "vendor").startswith(_NVIDIA) and _text(each / "class").startswith(_DISPLAY)
            for each in devices
        )

    # Processes

    def process(self, pid: int) -> ProcessInfo | None:
        """Return the process with this pid; None if there is none (a zombie counts as none)."""
        folder = self.root / "proc" / str(pid)
        try:
            fields = (folder / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
            # Fields 3 (state) and 22 (start time) of proc_pid_stat(5); the program's name before them may hold blanks.
            state, started = fields[0], int(fields[19])
            if state in {"Z", "X"}:
                return None
            uid = folder.stat().st_uid
            words = (folder / "cmdline").read_bytes().rstrip(b"\0").split(b"\0")
            # Its owner chose these characters, and other users read them.
            command = visible(b" ".join(words).decode(errors="replace").strip())
            if not command:
                command = f"[{visible((folder / 'comm').read_text(encoding='utf-8', errors='replace').strip())}]"
        except (OSError, IndexError, ValueError):
            return None
        return ProcessInfo(pid=pid, command=command, container=self._container(folder), uid=uid, started=started)

    def describe_process(self, pid: int) -> str:
        """Return a text for messages, `pid 4711` for a process that has ended or cannot be seen."""
        process = self.process(pid)
        return f"pid {pid}" if process is None else str(process)

    @staticmethod
    def kernel_boot_id() -> str:
        """Return the boot id of the kernel that this process runs on, whatever the root; empty if it cannot be read."""
        try:
            return Host().boot_id()
        except OSError:
            return ""

    # Clients: their pids are counted as this process counts, whatever the root

    def client_started(self, pid: int) -> int | None:
        """Return when a client's process started, in clock ticks from boot; None if there is none now."""
        return processes.started(pid)

    def client_lives_since(self, pid: int, moment: float) -> bool:
        """Return True if the pid belongs to the client that existed at a moment (seconds since the epoch)."""
        return processes.lives_since(pid, moment)

    def is_clients_child(self, pid: int, client: int, uid: int) -> bool:
        """Return True if a process was started by a client's, at any depth, and belongs to the same user."""
        return processes.is_below(pid, client) and processes.uid(pid) == uid

    def watch_client(self, pid: int, started: int | None, on_end: Callable[[], None]) -> processes.ProcessWatch:
        """Call back once, on the event loop, when the client's process has ended; at once if it has already."""
        return processes.ProcessWatch(pid, started, on_end)

    @staticmethod
    def _container(folder: Path) -> str:
        try:
            found = _CONTAINER_ID.findall((folder / "cgroup").read_text(encoding="utf-8", errors="replace"))
        except OSError:
            return ""
        # The innermost: a path names the pod or the outer container first.
        return found[-1] if found else ""

    def own_device_nodes(self) -> tuple[str, ...]:
        """Return the driver's device nodes that this process itself has open, by path."""
        found = set()
        for each in Path("/proc/self/fd").iterdir():
            with contextlib.suppress(OSError):  # the listing's own descriptor
                found.add(str(each.readlink()))
        return tuple(sorted(each for each in found if each.startswith(f"{self.root / 'dev'}/nvidia")))

    def holders(self, gpu_minor: int, gpu_instance_id: int | None = None) -> tuple[ProcessInfo, ...]:
        """Return the processes that have an instance's capability open, or without an instance the GPU itself.

        They keep it in use even if the driver lists no process on it. Only processes whose open files may be read are
        found: for all of them this needs root and the host's pids.
        """
        if gpu_instance_id is None:
            wanted = {f"/dev/nvidia{gpu_minor}"}
        else:
            prefix = f"gpu{gpu_minor}/gi{gpu_instance_id}/"
            minors = {minor for name, minor in self._minors().items() if name.startswith(prefix)}
            wanted = {f"/{_CAPS_FOLDER}/nvidia-cap{minor}" for minor in minors}
        found = []
        for pid in self._pids():
            if wanted & set(self._open_files(pid)):
                process = self.process(pid)
                if process is not None:
                    found.append(process)
        return tuple(found)

    def _pids(self) -> list[int]:
        try:
            names = [entry.name for entry in os.scandir(self.root / "proc")]
        except OSError:
            return []
        return sorted(int(name) for name in names if name.isdigit())

    def _open_files(self, pid: int) -> Iterator[str]:
        try:
            entries = list(os.scandir(self.root / "proc" / str(pid) / "fd"))
        except OSError:
            return
        for entry in entries:
            try:
                target = os.readlink(entry.path)  # noqa: PTH115 -- a Path for each open file of the machine is waste
            except OSError:
                continue
            yield target

    # Capabilities

    def caps_nodes(self, gpu_minor: int, gpu_instance_id: int, compute_instance_id: int) -> tuple[CapsNode, CapsNode]:
        """Return the nodes of a GPU instance and its compute instance. Raises DriverError if the driver lists none."""
        minors = self._minors()
        prefix = f"gpu{gpu_minor}/gi{gpu_instance_id}/"
        names = (f"{prefix}access", f"{prefix}ci{compute_instance_id}/access")
        missing = [name for name in names if name not in minors]
        if missing:
            raise DriverError(
                DriverErrorKind.NOT_FOUND, "mig-minors", detail=f"no minor number for {', '.join(missing)}"
            )
        major = self.major("nvidia-caps")
        gpu_instance, compute_instance = (
            CapsNode(path=f"/{_CAPS_FOLDER}/nvidia-cap{minors[name]}", major=major, minor=minors[name])
            for name in names
        )
        return gpu_instance, compute_instance

    def make_caps_nodes(
        self, gpu_minor: int, gpu_instance_id: int, compute_instance_id: int
    ) -> tuple[CapsNode, CapsNode]:
        """Return the same nodes, after creating missing ones, which the driver does not do.

        Uses `nvidia-modprobe` if installed, otherwise mknod. Raises DriverError, of kind NO_PERMISSION without root.
        """
        nodes = self.caps_nodes(gpu_minor, gpu_instance_id, compute_instance_id)
        instance = f"gpu{gpu_minor}/mig/gi{gpu_instance_id}"
        for node, capability in zip(nodes, (instance, f"{instance}/ci{compute_instance_id}"), strict=True):
            if not self._exists(node):
                with FAILPOINTS.around("device-node"):
                    self._make_node(node, f"/proc/driver/nvidia/capabilities/{capability}/access")
        return nodes

    def _minors(self) -> dict[str, int]:
        """Return minor numbers by capability: `gpu0/gi1/ci0/access`.

        Read, never computed: the kernel module chooses them.
        """
        path = self.root / "proc/driver/nvidia-caps/mig-minors"
        minors = {}
        try:
            for line in path.read_text(encoding="ascii").splitlines():
                name, _, minor = line.partition(" ")
                if minor.strip().isdigit():
                    minors[name] = int(minor)
        except FileNotFoundError:
            return {}
        return minors

    def major(self, driver: str) -> int:
        """Return the major number of a driver such as `nvidia-caps`. Raises DriverError if it is not loaded."""
        devices = (self.root / "proc/devices").read_text(encoding="ascii", errors="replace")
        for line in devices.splitlines():
            number, _, name = line.strip().partition(" ")
            if name == driver:
                return int(number)
        raise DriverError(DriverErrorKind.NOT_FOUND, "/proc/devices", detail=f"no major number for {driver}")

    def _exists(self, node: CapsNode) -> bool:
        try:
            found = (self.root / node.path[1:]).stat()
        except FileNotFoundError:
            return False
        return self._simulated or found.st_rdev == os.makedev(node.major, node.minor)

    def _make_node(self, node: CapsNode, capability: str) -> None:
        path = self.root / node.path[1:]
        try:
            path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
            if self._simulated:
                path.touch(mode=_NODE_MODE)
                return
            path.unlink(missing_ok=True)  # it has another device's number
            if not (self._run_modprobe(capability) and self._exists(node)):
                os.mknod(path, _NODE_MODE | stat.S_IFCHR, os.makedev(node.major, node.minor))
                path.chmod(_NODE_MODE)  # restore what the umask removed
        except FileExistsError:
            return  # another process was faster
        except OSError as error:
            denied = isinstance(error, PermissionError)
            kind = DriverErrorKind.NO_PERMISSION if denied else DriverErrorKind.UNKNOWN
            raise DriverError(kind, f"mknod {node.path}", detail=error.strerror or str(error)) from error

    def _run_modprobe(self, capability: str) -> bool:
        # It knows only the machine that it runs on, not one mounted elsewhere.
        program = shutil.which(_MODPROBE) if self.root == Path("/") else None
        if program is None:
            return False
        try:
            done = subprocess.run(  # noqa: S603 -- a fixed program and a path of our own making
                [program, "-f", capability], check=False, capture_output=True, timeout=_MODPROBE_SECONDS
            )
        except (OSError, subprocess.TimeoutExpired):
            return False
        return done.returncode == 0


def _text(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""

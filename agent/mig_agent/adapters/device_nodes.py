"""The device nodes that a container needs for one GPU or MIG device, with their numbers.

The numbers are written out for the container runtime, which then creates the nodes itself and needs none on the host.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass

from mig_agent.adapters.host import CapsNode, Host
from mig_agent.core.errors import DriverError, DriverErrorKind

_OPEN_TO_ALL = 0o666
"""Mode that the driver gives its nodes; access to the container is up to the runtime."""
_CAPS_MODE = 0o444
_CONTROL_MINOR = 255
_MODESET_MINOR = 254
"""Both in the kernel's list of devices, under 195 (Documentation/admin-guide/devices.txt)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceNode:
    """A character device that a container may read and write."""

    path: str
    """Path in the container: `/dev/nvidia0`."""
    major: int
    minor: int
    mode: int = _OPEN_TO_ALL

    def as_cdi(self) -> dict[str, str | int]:
        """Return the `deviceNodes` entry of CDI 0.5.0, complete: no runtime searches the host for the node."""
        return {
            "path": self.path,
            "type": "c",
            "major": self.major,
            "minor": self.minor,
            "fileMode": self.mode,
            "permissions": "rw",
        }


def nodes_of(
    host: Host,
    gpu_minor: int,
    gpu_instance_id: int | None = None,
    compute_instance_id: int | None = None,
    *,
    simulated: bool = False,
) -> tuple[DeviceNode, ...]:
    """Return the nodes of the GPU, of the instance if one is named, and of the driver itself, in a fixed order.

    Raises DriverError of kind NOT_FOUND that names a missing node which CUDA requires, and what `Host.make_caps_nodes`
    raises.
    """
    return (
        _needed(host, f"/dev/nvidia{gpu_minor}", "nvidia", gpu_minor, simulated=simulated),
        *_capabilities(host, gpu_minor, gpu_instance_id, compute_instance_id),
        _needed(host, "/dev/nvidiactl", "nvidia", _CONTROL_MINOR, simulated=simulated),
        _needed(host, "/dev/nvidia-uvm", "nvidia-uvm", 0, simulated=simulated),
        *_if_present(host, "/dev/nvidia-uvm-tools", "nvidia-uvm", 1, simulated=simulated),
        *_if_present(host, "/dev/nvidia-modeset", "nvidia", _MODESET_MINOR, simulated=simulated),
    )


def _capabilities(
    host: Host, gpu_minor: int, gpu_instance_id: int | None, compute_instance_id: int | None
) -> Iterator[DeviceNode]:
    if gpu_instance_id is None or compute_instance_id is None:
        return
    made: tuple[CapsNode, ...] = host.make_caps_nodes(gpu_minor, gpu_instance_id, compute_instance_id)
    for node in made:
        yield DeviceNode(path=node.path, major=node.major, minor=node.minor, mode=_CAPS_MODE)


def _needed(host: Host, path: str, driver: str, minor: int, *, simulated: bool) -> DeviceNode:
    for node in _if_present(host, path, driver, minor, simulated=simulated):
        return node
    hint = "; load the module: nvidia-modprobe -u -c=0" if driver == "nvidia-uvm" else ""
    raise DriverError(DriverErrorKind.NOT_FOUND, f"stat {path}", detail=f"there is no such device{hint}")


def _if_present(host: Host, path: str, driver: str, minor: int, *, simulated: bool) -> Iterator[DeviceNode]:
    """Yield the device node at `path` if it exists; a simulated one is a file that gets the driver's major number."""
    try:
        found = (host.root / path[1:]).stat()
    except OSError:
        return
    if simulated:
        yield DeviceNode(path=path, major=host.major(driver), minor=minor)
    elif stat.S_ISCHR(found.st_mode):
        yield DeviceNode(path=path, major=os.major(found.st_rdev), minor=os.minor(found.st_rdev))

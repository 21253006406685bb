"""Where the kubelet keeps what a device plugin needs (`pkg/kubelet/config/defaults.go`), and telling files apart."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from mig_agent.core.errors import MigAgentError


class KubeletError(MigAgentError):
    """The kubelet does not answer, or not as expected; the message says what could not be done and why."""


class Identity(NamedTuple):
    """Tells a file from another that has taken its place: inode numbers are used again, the moment of change is not."""

    device: int
    inode: int
    changed_ns: int

    @classmethod
    def of(cls, path: Path) -> Identity | None:
        """That of the file at a path now; None where there is none."""
        try:
            there = path.stat(follow_symlinks=False)
        except OSError:
            return None
        return cls(there.st_dev, there.st_ino, there.st_ctime_ns)


@dataclass(frozen=True, slots=True)
class KubeletPaths:
    """Places below the kubelet's folder, `/var/lib/kubelet`."""

    folder: Path

    @property
    def plugins(self) -> Path:
        """The folder of the sockets of device plugins; the kubelet empties it when it starts."""
        return self.folder / "device-plugins"

    @property
    def registration(self) -> Path:
        """Where the kubelet takes registrations; made anew whenever it starts."""
        return self.plugins / "kubelet.sock"

    @property
    def checkpoint(self) -> Path:
        """The kubelet's record of the devices of its pods."""
        return self.plugins / "kubelet_internal_checkpoint"

    @property
    def pod_resources(self) -> Path:
        """Where the kubelet tells about its pods."""
        return self.folder / "pod-resources" / "kubelet.sock"

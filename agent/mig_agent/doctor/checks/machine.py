"""Checks of the machine: cgroups, clock, disk, and the versions of what the client runs on."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Final

from mig_agent.doctor.findings import Finding, failed, ok, unknown, warning
from mig_agent.doctor.subject import Subject

_MIB: Final = 1 << 20
_FULL_MIB: Final = 50
_NEARLY_FULL_MIB: Final = 500
_TOLERANCE_SECONDS: Final = 120.0
_PACKAGES: Final = ("grpcio", "protobuf", "nvidia-ml-py")


def cgroups(subject: Subject) -> Iterator[Finding]:
    """Check that the unified cgroup hierarchy is mounted: systemd's limits of jobs and current kubelets need it."""
    name = "machine.cgroups"
    if subject.probe.exists("/sys/fs/cgroup/cgroup.controllers"):
        yield ok(name, "cgroup v2 is mounted")
    elif subject.probe.exists("/sys/fs/cgroup"):
        yield warning(
            name,
            "cgroup v1 is mounted: limits of jobs, the driver's memory limits of GPU shares and current kubelets need "
            "version 2",
            "boot with systemd.unified_cgroup_hierarchy=1 on the kernel's command line",
        )
    else:
        yield unknown(name, "cgroups cannot be seen from here")


def clock(subject: Subject) -> Iterator[Finding]:
    """Check that the clock is synchronised and was not set back: deadlines of leases count by it."""
    name, node = "machine.clock", subject.node
    latest = 0.0 if node is None else max([node.started_at, *(each.created_at for each in node.leases)], default=0.0)
    if subject.address.path is not None and latest > subject.now + _TOLERANCE_SECONDS:
        yield failed(
            name,
            f"the clock was set back by {latest - subject.now:.0f} s or more: leases with a --ttl last longer by that",
            "sudo timedatectl set-ntp true",
        )
        return
    if subject.probe.exists("/run/systemd/timesync/synchronized"):
        yield ok(name, "the clock is synchronised")
        return
    answer = subject.probe.run(("timedatectl", "show", "--property=NTPSynchronized", "--value"))
    match (answer or "").strip():
        case "yes":
            yield ok(name, "the clock is synchronised")
        case "no":
            yield warning(name, "the clock is not synchronised: deadlines count by it", "sudo timedatectl set-ntp true")
        case _:
            yield unknown(name, "whether the clock is synchronised is not known: timedatectl does not tell")


def disk(subject: Subject) -> Iterator[Finding]:
    """Check that the file system of the ledger has space and can be written."""
    name, folder = "machine.disk", subject.state_dir
    if folder is None:
        yield unknown(
            name, "the disk was not checked: the settings do not say where the ledger is", subject.settings_hint
        )
        return
    there = next((each for each in (folder, *folder.parents) if _is_there(each)), Path("/"))
    found = os.statvfs(there)
    free = found.f_bavail * found.f_frsize // _MIB
    show = f"sudo du -xh --max-depth=2 {_mount_of(there)} | sort -h | tail"
    if found.f_flag & os.ST_RDONLY:
        yield failed(name, f"{there} is mounted read-only", f"sudo mount -o remount,rw {_mount_of(there)}")
    elif free < _FULL_MIB:
        yield failed(name, f"{there} has {free} MiB left: soon no lease can be written", show)
    elif found.f_files and found.f_favail < _NEARLY_FULL_MIB:
        yield warning(name, f"{there} has {found.f_favail} inodes left", show)
    elif free < _NEARLY_FULL_MIB:
        yield warning(name, f"{there} has {free} MiB left", show)
    else:
        yield ok(name, f"{there} has {free / 1024:.0f} GiB left" if free >= 1024 else f"{there} has {free} MiB left")  # noqa: PLR2004 -- MiB in a GiB


def _is_there(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:
        return False


def _mount_of(path: Path) -> Path:
    return next((each for each in (path, *path.parents) if os.path.ismount(each)), path)


def software(_subject: Subject) -> Iterator[Finding]:
    """State the versions of Python and of the libraries."""
    found = []
    for name in _PACKAGES:
        try:
            found.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            found.append(f"no {name}")
    system = f"{platform.system()} {platform.release()}"
    yield ok("machine.software", f"Python {platform.python_version()}, {', '.join(found)}, {system}")

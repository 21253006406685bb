"""Reports how many modules of the agent are entered by an Acquire that creates, by an Allocate and by a restart.

Few modules on a path make it easy to read. Each path is run for real over simulated GPUs with a profiler that notes the
file of every function called, in every thread: from the wire to the driver's library and back. The simulator, generated
code and the tests' own helpers do not count.

Usage: PYTHONPATH=agent:tests python hack/modules_entered.py [--check] [--list]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from mig_agent.core.owner import KubeletDevice
from mig_agent.frontends.kubernetes.device_plugin.allocate import Allocated
from mig_agent.frontends.kubernetes.device_plugin.service import ResourceService
from mig_agent.frontends.kubernetes.resources import Naming, resources_of
from mig_agent.pb.kubelet.deviceplugin.v1beta1 import deviceplugin_pb2 as kubelet_pb
from support.engine import engine
from support.plugged import SECONDS, SMALL, Plugged, plugged
from support.service import service

LIMITS = {"acquire": 41, "allocate": 7, "restart": 42}
"""The most modules that each path may enter."""
_PACKAGE = "/mig_agent/"
_NOT_COUNTED = ("pb/", "simulator/")
_NO_CONTEXT: Any = None
"""Where nothing is refused, no context is used."""


class _Entered:
    """Collects the modules whose functions are called while `on` is set."""

    def __init__(self) -> None:
        self.modules: set[str] = set()
        self.on = False

    def profile(self, frame: FrameType, event: str, _argument: object) -> None:
        """Note the module of a function that begins or resumes; set with `sys.setprofile` in every thread."""
        if not self.on or event != "call":
            return
        _, package, module = frame.f_code.co_filename.rpartition(_PACKAGE)
        # Building a class or a module is no call of a function in it.
        if package and not module.startswith(_NOT_COUNTED) and frame.f_code.co_name != "<module>":
            self.modules.add(module)

    @contextlib.contextmanager
    def during(self) -> Iterator[set[str]]:
        """Collect while the block runs; the set is complete at its end."""
        self.modules, self.on = set(), True
        try:
            yield self.modules
        finally:
            self.on = False


@dataclass(frozen=True, slots=True)
class _Decisions:
    """The plugin's decisions, made by the parts that the tests put together."""

    plugged: Plugged

    async def allocate(self, containers: Sequence[Sequence[KubeletDevice]]) -> Sequence[Allocated]:
        return await self.plugged.allocating.allocate(containers)

    async def start_container(self, devices: Sequence[KubeletDevice], seconds: float) -> None:
        await self.plugged.starting.start(devices, seconds)


async def _acquire(entered: _Entered, folder: Path) -> set[str]:
    async with service(folder, "h100-80gb:1", check_threads=False) as served:
        with entered.during() as modules:
            await served.acquire(memory="4G")
    return modules


async def _restart(entered: _Entered, folder: Path) -> set[str]:
    async with service(folder, "h100-80gb:1", check_threads=False) as served:
        await served.acquire(memory="4G")
    with entered.during() as modules:
        async with engine(folder, check_threads=False):
            entered.on = False
    return modules


async def _allocate(entered: _Entered, folder: Path) -> set[str]:
    async with plugged(folder, check_threads=False) as node:
        resource = next(each for each in resources_of(node.node.manager.view, Naming()) if each.name == SMALL)
        plugin = ResourceService(resource, _Decisions(node), SECONDS)
        request = kubelet_pb.AllocateRequest(
            container_requests=[kubelet_pb.ContainerAllocateRequest(devices_ids=["mig-agent-0"])]
        )
        with entered.during() as modules:
            await plugin.allocate(request, _NO_CONTEXT)
    return modules


async def _measure() -> dict[str, set[str]]:
    entered = _Entered()
    threading.setprofile(entered.profile)
    sys.setprofile(entered.profile)
    paths = {"acquire": _acquire, "allocate": _allocate, "restart": _restart}
    found = {}
    for name, run in paths.items():
        with tempfile.TemporaryDirectory() as folder:
            found[name] = await run(entered, Path(folder))
    return found


def main() -> int:
    """Print a line for each path; return 1 with --check if one is above its limit."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="fail where a path enters more modules than its limit")
    parser.add_argument("--list", action="store_true", help="name the modules")
    options = parser.parse_args()
    found = asyncio.run(_measure())
    for name, modules in found.items():
        print(f"{name}: {len(modules)} modules (limit {LIMITS[name]})")
        if options.list:
            print("".join(f"  {each}\n" for each in sorted(modules)), end="")
    return int(options.check and any(len(modules) > LIMITS[name] for name, modules in found.items()))


if __name__ == "__main__":
    sys.exit(main())

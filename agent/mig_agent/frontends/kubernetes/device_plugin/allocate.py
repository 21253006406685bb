"""While a pod is admitted: the kubelet has chosen ids, and is told at once what they will be called."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mig_agent.core.owner import KubeletDevice
from mig_agent.engine.manager import Manager
from mig_agent.frontends.kubernetes.device_plugin.allocations import AllocationTable, lease_by_device


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocated:
    """What one container is to be started with."""

    cdi_names: tuple[str, ...] = ()
    """Fully qualified; their files are written before the container starts."""


class Allocator:
    """Names the devices, whatever comes; belongs to the event loop."""

    def __init__(
        self,
        manager: Manager,
        book: AllocationTable,
        qualified: Callable[[KubeletDevice], str],
        changed: Callable[[], None],
    ) -> None:
        """`changed` hears that the book has changed."""
        self._manager = manager
        self._book = book
        self._qualified = qualified
        self._changed = changed

    async def allocate(self, containers: Sequence[Sequence[KubeletDevice]]) -> Sequence[Allocated]:
        """Answers at once: the kubelet admits no other pod meanwhile."""
        now = asyncio.get_running_loop().time()
        standing = lease_by_device(self._manager.view)
        for device in (device for devices in containers for device in devices):
            self._book.on_way[device] = now
            self._book.hopeless -= {device}
            former = standing.get(device)
            if former is not None:
                self._book.given_again[device] = former.id
            waiting = self._book.acquisitions.get(device)
            if waiting is not None:
                self._book.forget(waiting)
                waiting.task.cancel()
        self._changed()
        return [Allocated(cdi_names=tuple(self._qualified(device) for device in devices)) for devices in containers]

"""Allocate: names the devices of containers while the kubelet admits their pod."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mig_agent.core.owner import KubeletDevice
from mig_agent.engine.manager import Manager
from mig_agent.frontends.kubernetes.device_plugin.allocations import AllocationTable, lease_by_device


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocated:
    """Holds what one container is to be started with."""

    cdi_names: tuple[str, ...] = ()
    """Fully qualified names; their CDI files are written before the container starts."""


class Allocator:
    """Answers calls of Allocate. Not thread-safe; use from the event loop."""

    def __init__(
        self,
        manager: Manager,
        table: AllocationTable,
        qualified: Callable[[KubeletDevice], str],
        changed: Callable[[], None],
    ) -> None:
        """Name devices by `qualified`, and call `changed` after each change of the table."""
        self._manager = manager
        self._table = table
        self._qualified = qualified
        self._changed = changed

    async def allocate(self, containers: Sequence[Sequence[KubeletDevice]]) -> Sequence[Allocated]:
        """Return the CDI names of each container's devices, at once: the kubelet admits no other pod meanwhile.

        A device that has a lease is noted as reassigned, and an unfinished request for it is cancelled.
        """
        now = asyncio.get_running_loop().time()
        leases = lease_by_device(self._manager.view)
        for device in (device for devices in containers for device in devices):
            self._table.pending[device] = now
            self._table.unsatisfiable -= {device}
            former = leases.get(device)
            if former is not None:
                self._table.reassigned[device] = former.id
            waiting = self._table.acquisitions.get(device)
            if waiting is not None:
                self._table.remove(waiting)
                waiting.task.cancel()
        self._changed()
        return [Allocated(cdi_names=tuple(self._qualified(device) for device in devices)) for devices in containers]

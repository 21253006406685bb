"""Devices by NVIDIA_VISIBLE_DEVICES, for container runtimes that do not know CDI.

The variable has to be in the answer of Allocate, so the instances are made there, while the kubelet admits no other
pod; and it names MIG UUIDs, which do not outlive a reboot. Which pod asks is not told in Allocate: the lease is known
by its devices alone.
"""

from __future__ import annotations

import asyncio
import math
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from mig_agent.core.errors import Reason, Refusal, refuse
from mig_agent.core.model import Holder, KubeletDevice, Pod, Request, RequestId
from mig_agent.engine.manager import Manager
from mig_agent.engine.results import Granted
from mig_agent.frontends.kubernetes.device_plugin import messages
from mig_agent.frontends.kubernetes.device_plugin.allocate import Allocated
from mig_agent.frontends.kubernetes.device_plugin.allocations import AllocationTable, lease_by_device
from mig_agent.frontends.kubernetes.device_plugin.prestart import KUBELET
from mig_agent.frontends.kubernetes.resources import Resource

MOST_SECONDS: Final = 10.0
"""For all that one Allocate makes: longer than creating takes, and as long as a node may stand still."""
_MOST_ABANDONED: Final = 1000
"""Requests that took too long and may still come to a lease, within moments."""
NOBODY_KNOWN: Final = Pod(namespace="", name="not known")
"""Whose the leases are: the kubelet does not say."""


class EnvironmentAllocating:
    """Gives devices by environment variables while a pod is admitted. Not thread-safe; use from the event loop."""

    def __init__(
        self, manager: Manager, book: AllocationTable, resources: Mapping[str, Resource], changed: Callable[[], None]
    ) -> None:
        self._manager = manager
        self._book = book
        self._resources = resources
        self._changed = changed

    async def allocate(self, containers: Sequence[Sequence[KubeletDevice]]) -> Sequence[Allocated]:
        """Makes the devices. Raises RefusedError where that cannot be done in time; the pod fails then."""
        loop = asyncio.get_running_loop()
        until = loop.time() + MOST_SECONDS
        return [await self._container(devices, until) for devices in containers]

    async def _container(self, devices: Sequence[KubeletDevice], until: float) -> Allocated:
        loop = asyncio.get_running_loop()
        standing = lease_by_device(self._manager.view)
        for lease in dict.fromkeys(standing[each].id for each in devices if each in standing):
            await self._manager.end_for_pod(lease, "the kubelet gave its devices to another pod")
        for device in devices:
            self._book.on_way[device] = loop.time()
        request = Request(
            wants=tuple(self._resources[each.resource].want for each in devices),
            request_id=RequestId(uuid.uuid4().hex),
            holder=Holder(name=f"a pod with {messages.wanted(devices)}", pod=NOBODY_KNOWN),
            wait_seconds=math.inf,
            kubelet_devices=tuple(devices),
            asker=KUBELET.asker,
        )
        self._book.requests[request.key] = request.kubelet_devices
        self._changed()
        try:
            granted = await asyncio.wait_for(self._manager.acquire(request, KUBELET), until - loop.time())
        except TimeoutError:
            if len(self._book.abandoned) >= _MOST_ABANDONED:
                self._book.abandoned.clear()  # those of long ago have led to nothing
            self._book.abandoned.add(request.key)
            (outcome,) = self._manager.plan((request,))
            why = f": {outcome.message}" if isinstance(outcome, Refusal) else ""
            raise refuse(
                Reason.WAITED_TOO_LONG,
                f"cannot give {messages.wanted(devices)} within {MOST_SECONDS:g} s{why}",
                "with device_injection `cdi` pods wait for their devices instead of failing",
            ) from None
        finally:
            del self._book.requests[request.key]
            self._changed()
        return Allocated(variables=variables(granted))


class EnvironmentStarting:
    """Before each start of a container: whether what its variable names is still there."""

    def __init__(self, manager: Manager) -> None:
        self._manager = manager

    def close(self) -> None:
        """Nobody waits here."""

    async def start(self, asked: Sequence[KubeletDevice], _seconds: float) -> None:
        """Raises RefusedError where an instance is gone."""
        standing = lease_by_device(self._manager.view)
        gone = [each for each in asked if each not in standing]
        if gone:
            raise refuse(
                Reason.LEASE_ENDED,
                f"cannot start with {messages.wanted(gone)}: its MIG devices are gone, as after a reboot",
                "delete the pod, so that it is made anew",
            )


def variables(granted: Granted) -> Mapping[str, str]:
    """What NVIDIA's container runtime reads."""
    return {"NVIDIA_VISIBLE_DEVICES": granted.environment["NVIDIA_VISIBLE_DEVICES"]}

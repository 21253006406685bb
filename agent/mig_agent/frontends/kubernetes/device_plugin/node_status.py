"""Node status: corrects the numbers of devices in the node object, which the scheduler uses, as soon as they are wrong.

A smaller number is written at once. A larger one is written when the kubelet has taken in the longer list: it does so
in its own time, a file written to disk for each resource, and a pod that is bound earlier fails for good.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Final, Protocol

import structlog

from mig_agent.adapters.kubeapi import KubeApiError
from mig_agent.adapters.kubelet import KubeletError
from mig_agent.core.owner import KubeletDevice
from mig_agent.frontends.kubernetes.device_plugin.api import DevicePluginApi

PAUSE_SECONDS: Final = 0.1
"""Pause between two writes of the node's status, so that a burst of changes is one write."""
RETRY_SECONDS: Final = 5.0
"""Pause after a write that failed."""
POLL_SECONDS: Final = 0.05
"""Time between two reads of the devices that the kubelet knows; it answers a hundred calls a second at most."""
SILENT_SECONDS: Final = 1.0
"""How long to wait, if the kubelet does not answer, before a larger number is written."""

_LOG = structlog.get_logger(__name__)


class DeviceLister(Protocol):
    """The part of the kubelet that lists the devices of all plugins on the node."""

    async def allocatable(self) -> Iterable[KubeletDevice]:
        """Return all healthy devices that the kubelet knows. Raises KubeletError."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Mismatch:
    """A wrong number in the node object, and the right one."""

    shown: int
    right: int
    capacity: int
    """How many devices of the resource the kubelet has ever been given."""


class NodeStatusPatcher:
    """Corrects the device counts in the node object. Not thread-safe; use from the event loop."""

    def __init__(
        self,
        *,
        api: DevicePluginApi,
        kubelet: DeviceLister,
        wrong: Callable[[], Mapping[str, Mismatch]],
        changed: Callable[[], None],
    ) -> None:
        """Correct the numbers that `wrong` returns, by resource; call `changed` when writing works again."""
        self._api = api
        self._kubelet = kubelet
        self._wrong = wrong
        self._changed = changed
        self._wake = asyncio.Event()
        self.can_write = True
        self.is_answered = True
        """False if the last failed write got no final answer: the API server was not reached, or failed itself."""

    def compare_soon(self) -> None:
        """Compare the numbers again soon, since something has changed."""
        self._wake.set()

    async def run(self) -> None:
        """Correct the numbers until cancelled."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            taken = await self._known()
            wrong = {
                name: each for name, each in self._wrong().items() if each.right <= max(each.shown, taken.get(name, 0))
            }
            if not wrong:
                continue
            try:
                await self._api.patch_resources(
                    {name: each.right for name, each in wrong.items()},
                    {name: each.capacity for name, each in wrong.items()},
                )
            except KubeApiError as error:
                self.is_answered = not error.retryable
                if self.can_write:
                    _LOG.warning("the node's status cannot be written", error=error.words)
                self.can_write = False
                await asyncio.sleep(RETRY_SECONDS)
                self._wake.set()
                continue
            if not self.can_write:
                self.can_write = True
                self._changed()
            await asyncio.sleep(PAUSE_SECONDS)

    async def _known(self) -> Mapping[str, int]:
        """Return how many devices the kubelet knows of each resource that grows; check again soon if one lags."""
        growing = {name: each.right for name, each in self._wrong().items() if each.right > each.shown}
        if not growing:
            return {}
        try:
            known = Counter(device.resource for device in await self._kubelet.allocatable())
        except KubeletError:
            await asyncio.sleep(SILENT_SECONDS)
            return growing
        if any(known[name] < right for name, right in growing.items()):
            asyncio.get_running_loop().call_later(POLL_SECONDS, self.compare_soon)
        return known

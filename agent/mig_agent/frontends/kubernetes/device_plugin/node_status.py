"""The node object's side of the numbers: what the scheduler sees is corrected as soon as it is wrong.

What falls is written at once. What grows is written when the kubelet has taken the longer list: it does so in its own
time, a file written to disk for each resource, and a pod that comes earlier fails for good.
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
"""Between two writes of the node's status, so that a burst of changes is one of them."""
AGAIN_SECONDS: Final = 5.0
"""After one that failed."""
LOOK_SECONDS: Final = 0.05
"""Between two looks at what the kubelet has taken; it answers a hundred calls a second at most."""
SILENT_SECONDS: Final = 1.0
"""For a kubelet that does not tell what it has taken."""

_LOG = structlog.get_logger(__name__)


class KubeletCaches(Protocol):
    """What is asked of the kubelet."""

    async def allocatable(self) -> Iterable[KubeletDevice]:
        """All healthy devices that it knows. Raises KubeletError."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Mismatch:
    """A number that the node object shows and should not."""

    shown: int
    right: int
    capacity: int
    """How many of the resource the kubelet has ever been told of."""


class NodeStatusPatcher:
    """Corrects the device counts in the node object. Not thread-safe; use from the event loop."""

    def __init__(
        self,
        *,
        api: DevicePluginApi,
        kubelet: KubeletCaches,
        wrong: Callable[[], Mapping[str, Mismatch]],
        changed: Callable[[], None],
    ) -> None:
        """`wrong` tells the numbers to correct, by resource; `changed` hears when they can be written again."""
        self._api = api
        self._kubelet = kubelet
        self._wrong = wrong
        self._changed = changed
        self._wanted = asyncio.Event()
        self.can_write = True
        self.is_answered = True
        """Whether the API server, when it took no number, at least said why."""

    def look(self) -> None:
        """Something has changed: the numbers are compared again."""
        self._wanted.set()

    async def run(self) -> None:
        """Until it is cancelled."""
        while True:
            await self._wanted.wait()
            self._wanted.clear()
            taken = await self._taken()
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
                await asyncio.sleep(AGAIN_SECONDS)
                self._wanted.set()
                continue
            if not self.can_write:
                self.can_write = True
                self._changed()
            await asyncio.sleep(PAUSE_SECONDS)

    async def _taken(self) -> Mapping[str, int]:
        """How many the kubelet has by now of the resources that grow; those that lag behind are looked at again."""
        growing = {name: each.right for name, each in self._wrong().items() if each.right > each.shown}
        if not growing:
            return {}
        try:
            known = Counter(device.resource for device in await self._kubelet.allocatable())
        except KubeletError:
            await asyncio.sleep(SILENT_SECONDS)
            return growing
        if any(known[name] < right for name, right in growing.items()):
            asyncio.get_running_loop().call_later(LOOK_SECONDS, self.look)
        return known

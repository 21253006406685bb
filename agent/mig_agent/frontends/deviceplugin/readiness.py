"""Whether the kubelet knows all that it is offered, so that it would take a pod that is bound to the node now.

Between the start of an agent, or of a kubelet, and that moment a pod that asks for one of the resources is rejected for
good. What another plugin serves is not waited for, nor does it matter how many there are to be had: an agent that is
paused, or full, is in order.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

import structlog

from mig_agent.adapters.kubelet import KubeletError
from mig_agent.frontends.deviceplugin.registering import Offer, Registering

CONFIRM_SECONDS: Final = 10.0
"""For a kubelet that listens to show the devices that it was told of; that it listens has to do then."""

_LOG = structlog.get_logger(__name__)


class Readiness:
    """Belongs to the event loop."""

    def __init__(self, registering: Registering, tell: Callable[[bool], Awaitable[None]]) -> None:
        """`tell` hears whenever it is another than before, and at the first look."""
        self._registering = registering
        self._tell = tell
        self._is_ready: bool | None = None
        self._confirmed: dict[str, int] = {}
        """By the resource's name, the number of the registration whose devices the kubelet has been seen to have."""
        self._asked_since: float | None = None

    async def look(self) -> None:
        """Once after each look of the registrations."""
        ready = await self._ready()
        if ready is not self._is_ready:
            self._is_ready = ready
            _LOG.info("the kubelet knows all resources" if ready else "the kubelet does not know all resources yet")
            await self._tell(ready)

    async def _ready(self) -> bool:
        offers = [each for each in self._registering.offers.values() if not each.taken]
        if not all(each.is_listened_to for each in offers):
            self._asked_since = None
            return False
        if unconfirmed := self._unconfirmed(offers):
            await self._confirm(unconfirmed)
        if self._unconfirmed(offers):
            return False
        self._asked_since = None
        return True

    def _unconfirmed(self, offers: Sequence[Offer]) -> list[Offer]:
        return [each for each in offers if self._confirmed.get(each.service.resource.name) != each.registrations]

    async def _confirm(self, offers: Sequence[Offer]) -> None:
        now = asyncio.get_running_loop().time()
        self._asked_since = now if self._asked_since is None else self._asked_since
        # As they are before the kubelet is asked: what changes meanwhile it may not have heard of.
        wanted = {each.service.resource.name: (each.registrations, len(each.service.ids)) for each in offers}
        try:
            known = Counter(device.resource for device in await self._registering.kubelet.allocatable())
        except KubeletError:
            known = Counter()
        is_over = now - self._asked_since > CONFIRM_SECONDS
        for name, (registration, count) in wanted.items():
            if is_over or known[name] >= count:
                self._confirmed[name] = registration

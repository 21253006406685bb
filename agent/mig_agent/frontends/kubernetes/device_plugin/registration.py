"""Registration with the kubelet, whenever it starts, and readiness: whether it knows all that it is offered."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

import structlog

from mig_agent.adapters.kubelet import Identity, KubeletError, KubeletPaths, PluginSocket, register
from mig_agent.core.backoff import Backoff
from mig_agent.core.owner import KubeletDevice
from mig_agent.frontends.kubernetes.device_plugin.service import ResourceService
from mig_agent.frontends.kubernetes.resources import is_agent_id

LOOK_SECONDS: Final = 0.2
"""Between two looks whether the kubelet has started anew; it removes the sockets of plugins then."""
QUICK_SECONDS: Final = 0.05
"""The same while the kubelet that listened has just gone: one that is back admits pods that wait on the node anew, and
fails those whose devices it does not know by then."""
QUICKLY_FOR_SECONDS: Final = 60.0
LISTEN_SECONDS: Final = 5.0
"""For the kubelet to ask for the list after it has taken a registration, or after a list has ended."""
AGAIN_SECONDS: Final = (0.2, 15.0)
"""The first and the longest pause after a registration that failed."""
CHECK_SECONDS: Final = 5.0
"""Between two looks whether another plugin has taken over a resource."""
TAKEN_SECONDS: Final = 30.0
"""Until it is looked again whether another plugin still serves a resource."""

_LOG = structlog.get_logger(__name__)


@dataclass(slots=True, eq=False)
class Offer:
    """One resource on its way to the kubelet."""

    service: ResourceService
    socket: PluginSocket | None = None
    kubelet: Identity | None = None
    """The run of the kubelet that it is registered with."""
    heard: float = 0.0
    """When the kubelet last listened, or was registered with."""
    again: float = 0.0
    """Not before this moment it is tried again."""
    failures: int = 0
    words: str = ""
    """Why it is not registered, as last told."""
    taken: bool = False
    """Whether another plugin serves it."""
    registrations: int = 0

    @property
    def is_listened_to(self) -> bool:
        """Whether the kubelet reads its list now, and counts by it."""
        return self.service.streams > 0 and not self.taken


class Neighbours(Protocol):
    """What is asked of the kubelet."""

    async def allocatable(self) -> tuple[KubeletDevice, ...]:
        """The devices of all plugins on the node. Raises KubeletError."""
        ...


@dataclass(slots=True, kw_only=True)
class Registration:
    """Registers the resources with the kubelet, again after it restarts. Not thread-safe; use from the event loop."""

    paths: KubeletPaths
    kubelet: Neighbours
    on_lost: Callable[[ResourceService], None]
    """Hears that the kubelet has forgotten a resource."""
    on_taken: Callable[[str], None]
    """Hears, in words, that another plugin serves a resource."""
    on_looked: Callable[[], None] = lambda: None
    """Called after each look, when it is known who listens."""
    offers: dict[str, Offer] = field(default_factory=dict)
    """By the resource's name."""
    _followups: list[Callable[[], Awaitable[None]]] = field(default_factory=list)
    _waits: bool = False
    _tried: Identity | None = None
    """The run of the kubelet that was tried last."""
    _checked: float = 0.0
    """When it was last looked whether others serve a resource of ours."""

    def add(self, service: ResourceService) -> None:
        """A resource to be offered from now on."""
        self.offers[service.resource.name] = Offer(service)

    def follow_up(self, action: Callable[[], Awaitable[None]]) -> None:
        """Run an action after each check from now on."""
        self._followups.append(action)

    async def run(self) -> None:
        """Looks again and again, until it is cancelled."""
        while True:
            try:
                await self.look()
                self.on_looked()
                for each in self._followups:
                    await each()
            except Exception:  # noqa: BLE001 -- whatever it was, the kubelet may start anew at any time
                _LOG.exception("cannot look after the registrations now")
            await asyncio.sleep(self.pause(asyncio.get_running_loop().time()))

    def pause(self, now: float) -> float:
        """Until the next look, in seconds."""
        registered = [each for each in self.offers.values() if each.registrations and not each.taken]
        gone = bool(registered) and not any(each.service.streams for each in registered)
        lately = any(now - each.heard < QUICKLY_FOR_SECONDS for each in registered)
        return QUICK_SECONDS if gone and lately else LOOK_SECONDS

    async def look(self) -> None:
        """Registers what is not registered with the kubelet that is there now."""
        now = asyncio.get_running_loop().time()
        kubelet = Identity.of(self.paths.registration)
        due = [each for each in self.offers.values() if self._is_due(each, kubelet, now)]
        if kubelet is None:
            if due and not self._waits:
                self._waits = True
                _LOG.info("waiting for the kubelet", socket=str(self.paths.registration))
            return
        self._waits = False
        if kubelet != self._tried:
            self._tried = kubelet
            for offer in due:
                offer.again = offer.again if offer.taken else 0.0  # a kubelet that is new has refused nothing yet
        due = [each for each in due if now >= each.again]
        # A kubelet that has started admits pods again at once, and those whose devices it does not know by then fail.
        back = [each for each in due if each.registrations and each.kubelet is None and not each.taken]
        self._tell(await asyncio.gather(*(self._register(each, kubelet, now) for each in back)))
        new = [each for each in due if each not in back]
        if new or now >= self._checked + CHECK_SECONDS:
            await self._look_for_others(new, kubelet, now)
        registered = [offer.service.resource.name for offer in due if offer.kubelet == kubelet]
        if registered:
            _LOG.info("registered with the kubelet", resources=", ".join(sorted(registered)))

    async def _look_for_others(self, new: Sequence[Offer], kubelet: Identity, now: float) -> None:
        """Registers what no other plugin serves, and gives way where one has registered after this agent.

        The kubelet takes whoever comes last, and does not tell the one before.
        """
        self._checked = now
        try:
            others = Counter(each.resource for each in await self.kubelet.allocatable() if not is_agent_id(each.id))
        except KubeletError as error:
            self._tell([self._failed(offer, str(error), now) for offer in new])
            return
        told = []
        for name, offer in self.offers.items():
            if others[name] and (offer in new or offer.kubelet is not None):
                told.append(self._give_way(offer, others[name], now))
            elif offer in new:
                told.append(await self._register(offer, kubelet, now))
        self._tell(told)

    async def close(self, seconds: float) -> None:
        """Serves no more; calls that are open get so long."""
        await asyncio.gather(*(each.socket.stop(seconds) for each in self.offers.values() if each.socket is not None))

    def _is_due(self, offer: Offer, kubelet: Identity | None, now: float) -> bool:
        if offer.is_listened_to:
            offer.heard = now
        if offer.kubelet is not None and (
            offer.kubelet != kubelet or offer.socket is None or not offer.socket.is_there
        ):
            offer.kubelet = None
            self.on_lost(offer.service)
        return offer.kubelet is None or now - offer.heard > LISTEN_SECONDS

    async def _register(self, offer: Offer, kubelet: Identity, now: float) -> str:
        """Offers one resource; what is new about why it could not be, in words."""
        try:
            if offer.taken or offer.socket is None or not offer.socket.is_there:
                await self._withdraw(offer)
                offer.taken = False
                offer.socket = PluginSocket(self.paths, offer.service.resource.label)
                await offer.socket.start(offer.service.methods())
            name = offer.service.resource.name
            await register(self.paths, resource=name, socket_name=offer.socket.name, pre_start=True)
        except KubeletError as error:
            return self._failed(offer, str(error), now)
        offer.kubelet, offer.heard, offer.failures, offer.words = kubelet, asyncio.get_running_loop().time(), 0, ""
        offer.registrations += 1
        return ""

    def _give_way(self, offer: Offer, taken: int, now: float) -> str:
        """Leaves a resource to another plugin, which offers so many of it; what is new about it, in words."""
        # The socket stays: when it ends the kubelet takes the devices of the other plugin for broken, too.
        offer.taken, offer.kubelet = True, None
        self.on_lost(offer.service)
        offer.again = now + TAKEN_SECONDS
        words = (
            f"cannot serve {offer.service.resource.name}: another device plugin on this node offers {taken} of it; "
            "remove it there, or give this agent's resources other names"
        )
        if offer.words == words:
            return ""
        offer.words = words
        self.on_taken(words)
        return words

    async def _withdraw(self, offer: Offer) -> None:
        socket, offer.socket = offer.socket, None
        offer.kubelet = None
        if socket is not None:
            await socket.stop()

    def _failed(self, offer: Offer, words: str, now: float) -> str:
        """It is tried again later; the words where they are new."""
        offer.failures += 1
        offer.again = now + Backoff(*AGAIN_SECONDS).pause(offer.failures)
        if offer.words == words:
            return ""
        offer.words = words
        return words

    def _tell(self, told: Iterable[str]) -> None:
        for words in sorted(set(told) - {""}):
            _LOG.warning(words, hint="it is tried again by itself")


CONFIRM_SECONDS: Final = 10.0
"""For a kubelet that listens to show the devices that it was told of; that it listens has to do then."""


class Readiness:
    """Finds out whether the kubelet knows all offered resources. Not thread-safe; use from the event loop."""

    def __init__(self, registering: Registration, tell: Callable[[bool], Awaitable[None]]) -> None:
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

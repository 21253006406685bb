"""Registration with the kubelet, each time that it starts, and readiness: whether it knows all offered resources."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

import structlog

from mig_agent.adapters.kubelet import Identity, KubeletError, KubeletPaths, PluginSocket, register
from mig_agent.core.backoff import Backoff
from mig_agent.frontends.kubernetes.device_plugin.node_status import DeviceLister
from mig_agent.frontends.kubernetes.device_plugin.service import ResourceService
from mig_agent.frontends.kubernetes.resources import is_agent_id

POLL_SECONDS: Final = 0.2
"""Time between two checks whether the kubelet has restarted; it removes the sockets of plugins then."""
FAST_POLL_SECONDS: Final = 0.05
"""The same just after the kubelet has ended: at its restart it admits the pods of the node again, and fails those whose
devices it does not know by then."""
FAST_POLL_FOR_SECONDS: Final = 60.0
"""How long that goes on."""
LISTEN_SECONDS: Final = 5.0
"""How long the kubelet may take to read the list after a registration, or after its stream has ended."""
RETRY_SECONDS: Final = (0.2, 15.0)
"""The first and the longest pause after a registration that failed."""
OTHERS_SECONDS: Final = 5.0
"""Time between two checks whether another plugin has taken over a resource."""
TAKEN_OVER_SECONDS: Final = 30.0
"""Time until a resource that another plugin serves is tried again."""

_LOG = structlog.get_logger(__name__)


@dataclass(slots=True, eq=False)
class Offer:
    """One resource, and the state of its registration with the kubelet."""

    service: ResourceService
    socket: PluginSocket | None = None
    kubelet: Identity | None = None
    """The run of the kubelet that it is registered with; None: with none."""
    listened_at: float = 0.0
    """Loop time at which the kubelet last read the list, or was registered with."""
    retry_at: float = 0.0
    """Loop time before which registration is not tried again."""
    failures: int = 0
    message: str = ""
    """Why it is not registered, as last logged."""
    taken: bool = False
    """Whether another plugin serves it."""
    registrations: int = 0

    @property
    def is_listened_to(self) -> bool:
        """True if the kubelet reads its list now, and counts by it."""
        return self.service.streams > 0 and not self.taken


@dataclass(slots=True, kw_only=True)
class Registration:
    """Registers the resources with the kubelet, again after it restarts. Not thread-safe; use from the event loop."""

    paths: KubeletPaths
    kubelet: DeviceLister
    on_lost: Callable[[ResourceService], None]
    """Called with each resource that the kubelet has forgotten."""
    on_taken: Callable[[str], None]
    """Called with a message when another plugin serves a resource."""
    on_checked: Callable[[], None] = lambda: None
    """Called after each check, when it is known which lists the kubelet reads."""
    offers: dict[str, Offer] = field(default_factory=dict)
    """By name of the resource."""
    _followups: list[Callable[[], Awaitable[None]]] = field(default_factory=list)
    _is_waiting: bool = False
    _tried: Identity | None = None
    """The run of the kubelet with which registration was last tried."""
    _checked: float = 0.0
    """Loop time of the last check for resources that other plugins serve."""

    def add(self, service: ResourceService) -> None:
        """Offer a resource from now on."""
        self.offers[service.resource.name] = Offer(service)

    def follow_up(self, action: Callable[[], Awaitable[None]]) -> None:
        """Run an action after each check from now on."""
        self._followups.append(action)

    async def run(self) -> None:
        """Check the registrations until cancelled."""
        while True:
            try:
                await self.check()
                self.on_checked()
                for each in self._followups:
                    await each()
            except Exception:  # noqa: BLE001 -- whatever the error, the kubelet may restart at any time
                _LOG.exception("cannot look after the registrations now")
            await asyncio.sleep(self.pause(asyncio.get_running_loop().time()))

    def pause(self, now: float) -> float:
        """Return the seconds until the next check."""
        registered = [each for each in self.offers.values() if each.registrations and not each.taken]
        unread = bool(registered) and not any(each.service.streams for each in registered)
        lately = any(now - each.listened_at < FAST_POLL_FOR_SECONDS for each in registered)
        return FAST_POLL_SECONDS if unread and lately else POLL_SECONDS

    async def check(self) -> None:
        """Register all resources that are not registered with the current run of the kubelet."""
        now = asyncio.get_running_loop().time()
        kubelet = Identity.of(self.paths.registration)
        due = [each for each in self.offers.values() if self._is_due(each, kubelet, now)]
        if kubelet is None:
            if due and not self._is_waiting:
                self._is_waiting = True
                _LOG.info("waiting for the kubelet", socket=str(self.paths.registration))
            return
        self._is_waiting = False
        if kubelet != self._tried:
            self._tried = kubelet
            for offer in due:
                if not offer.taken:
                    offer.retry_at = 0.0  # this run of the kubelet has refused nothing yet
        due = [each for each in due if now >= each.retry_at]
        # A kubelet that has started admits pods again at once, and those whose devices it does not know by then fail.
        back = [each for each in due if each.registrations and each.kubelet is None and not each.taken]
        self._log(await asyncio.gather(*(self._register(each, kubelet, now) for each in back)))
        new = [each for each in due if each not in back]
        if new or now >= self._checked + OTHERS_SECONDS:
            await self._check_other_plugins(new, kubelet, now)
        registered = [offer.service.resource.name for offer in due if offer.kubelet == kubelet]
        if registered:
            _LOG.info("registered with the kubelet", resources=", ".join(sorted(registered)))

    async def _check_other_plugins(self, new: Sequence[Offer], kubelet: Identity, now: float) -> None:
        """Register what no other plugin serves, and stop serving what one has registered after this agent.

        The kubelet uses the plugin that registered last, and does not notify the former one.
        """
        self._checked = now
        try:
            others = Counter(each.resource for each in await self.kubelet.allocatable() if not is_agent_id(each.id))
        except KubeletError as error:
            self._log([self._failed(offer, str(error), now) for offer in new])
            return
        messages = []
        for name, offer in self.offers.items():
            if others[name] and (offer in new or offer.kubelet is not None):
                messages.append(self._give_way(offer, others[name], now))
            elif offer in new:
                messages.append(await self._register(offer, kubelet, now))
        self._log(messages)

    async def close(self, seconds: float) -> None:
        """Stop serving; open calls may take this many seconds."""
        await asyncio.gather(*(each.socket.stop(seconds) for each in self.offers.values() if each.socket is not None))

    def _is_due(self, offer: Offer, kubelet: Identity | None, now: float) -> bool:
        if offer.is_listened_to:
            offer.listened_at = now
        if offer.kubelet is not None and (
            offer.kubelet != kubelet or offer.socket is None or not offer.socket.is_there
        ):
            offer.kubelet = None
            self.on_lost(offer.service)
        return offer.kubelet is None or now - offer.listened_at > LISTEN_SECONDS

    async def _register(self, offer: Offer, kubelet: Identity, now: float) -> str:
        """Register one resource; return the error message if it is new, else an empty one."""
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
        offer.kubelet, offer.listened_at = kubelet, asyncio.get_running_loop().time()
        offer.failures, offer.message = 0, ""
        offer.registrations += 1
        return ""

    def _give_way(self, offer: Offer, taken: int, now: float) -> str:
        """Leave a resource to another plugin, which offers `taken` of it; return the message if it is new, or `""`."""
        # The socket stays: when it is closed the kubelet marks the devices of the other plugin unhealthy, too.
        offer.taken, offer.kubelet = True, None
        self.on_lost(offer.service)
        offer.retry_at = now + TAKEN_OVER_SECONDS
        message = (
            f"cannot serve {offer.service.resource.name}: another device plugin on this node offers {taken} of it; "
            "remove it there, or give this agent's resources other names"
        )
        if offer.message == message:
            return ""
        offer.message = message
        self.on_taken(message)
        return message

    async def _withdraw(self, offer: Offer) -> None:
        socket, offer.socket = offer.socket, None
        offer.kubelet = None
        if socket is not None:
            await socket.stop()

    def _failed(self, offer: Offer, message: str, now: float) -> str:
        """Note a failure, to be tried again later; return its message if it is new, else an empty one."""
        offer.failures += 1
        offer.retry_at = now + Backoff(*RETRY_SECONDS).pause(offer.failures)
        if offer.message == message:
            return ""
        offer.message = message
        return message

    def _log(self, messages: Iterable[str]) -> None:
        for message in sorted(set(messages) - {""}):
            _LOG.warning(message, hint="it is tried again by itself")


CONFIRM_SECONDS: Final = 10.0
"""How long a kubelet that reads the lists may take to show their devices; after that, reading them counts."""


class Readiness:
    """Finds out whether the kubelet knows all offered resources. Not thread-safe; use from the event loop."""

    def __init__(self, registration: Registration, report: Callable[[bool], Awaitable[None]]) -> None:
        """Call `report` with the readiness at the first check, and whenever it changes."""
        self._registration = registration
        self._report = report
        self._is_ready: bool | None = None
        self._confirmed: dict[str, int] = {}
        """By name of the resource, the number of the registration whose devices the kubelet has been seen to have."""
        self._asked_since: float | None = None

    async def check(self) -> None:
        """Determine the readiness; called after each check of the registrations."""
        ready = await self._ready()
        if ready is not self._is_ready:
            self._is_ready = ready
            _LOG.info("the kubelet knows all resources" if ready else "the kubelet does not know all resources yet")
            await self._report(ready)

    async def _ready(self) -> bool:
        offers = [each for each in self._registration.offers.values() if not each.taken]
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
        # Read before the kubelet is asked: it may not have received what changes meanwhile.
        wanted = {each.service.resource.name: (each.registrations, len(each.service.ids)) for each in offers}
        try:
            known = Counter(device.resource for device in await self._registration.kubelet.allocatable())
        except KubeletError:
            known = Counter()
        is_over = now - self._asked_since > CONFIRM_SECONDS
        for name, (registration, count) in wanted.items():
            if is_over or known[name] >= count:
                self._confirmed[name] = registration

"""The device plugin put together: what the manager, the kubelet and the node show becomes lists and numbers."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import structlog

from mig_agent.adapters.cdi import CdiFolder
from mig_agent.adapters.kubeapi import NodeFacts
from mig_agent.adapters.kubelet import DeviceCheckpoint, KubeletPaths, PodResources, remove_stale_sockets
from mig_agent.core.model import NodeView
from mig_agent.core.owner import KubeletDevice
from mig_agent.core.planning.capacity import servable
from mig_agent.engine.manager import Manager
from mig_agent.engine.tasks import Tasks
from mig_agent.frontends.kubernetes import resources
from mig_agent.frontends.kubernetes.device_plugin.allocate import Allocated, Allocator
from mig_agent.frontends.kubernetes.device_plugin.allocations import (
    AllocationTable,
    lease_by_device,
    leased_kubelet_devices,
    unserved,
)
from mig_agent.frontends.kubernetes.device_plugin.api import DevicePluginApi
from mig_agent.frontends.kubernetes.device_plugin.cdi_injection import CdiInjector
from mig_agent.frontends.kubernetes.device_plugin.device_list import DeviceList
from mig_agent.frontends.kubernetes.device_plugin.kubelet_pods import KubeletPods
from mig_agent.frontends.kubernetes.device_plugin.node_status import Mismatch, NodeStatusPatcher
from mig_agent.frontends.kubernetes.device_plugin.prestart import PreStart
from mig_agent.frontends.kubernetes.device_plugin.registration import Registration
from mig_agent.frontends.kubernetes.device_plugin.service import ResourceService
from mig_agent.frontends.kubernetes.metrics import Devices
from mig_agent.frontends.kubernetes.reservations import (
    Asked,
    Counted,
    count_reserved,
    count_unreserved,
    in_progress,
    requests_unknown,
    reserved_slots,
)
from mig_agent.frontends.kubernetes.resources import Naming, Resource, resources_of

FIRST_LOOK_SECONDS: Final = 5.0
"""For the kubelet to tell of its pods before anything is offered to it."""
ALLOCATED_SECONDS: Final = 0.3
"""After an Allocate, until the kubelet has surely taken note of it."""
DRAIN_SECONDS: Final = 6.0
DRAIN_LOOK_SECONDS: Final = 0.1
CLOSING_SECONDS: Final = 2.0
ANSWERS_SECONDS: Final = 0.5
"""For calls that are open when it closes: their refusals still reach the kubelet."""

_LOG = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class PluginSettings:
    """What is configured of it."""

    node: str
    """The node's name."""
    naming: Naming = field(default_factory=Naming)
    start_deadline: float = 25.0
    """Seconds that a container that starts waits in one call."""


@dataclass(slots=True, eq=False)
class Served:
    """One resource that is served."""

    resource: Resource
    service: ResourceService
    advertisement: DeviceList = field(default_factory=DeviceList)
    target: int = 0
    """How many the node object is to show."""
    allocated: int = 0
    """How many of them the kubelet has given away."""
    promised: int = 0
    """For how many more something is kept, whose pods have not come yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownResource:
    """One resource as metrics show it."""

    listed: int
    """Devices that the kubelet is shown."""
    is_listened_to: bool
    registrations: int
    devices: Devices


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownPlugin:
    """What other threads may read of the plugin: built on the event loop, finished, and replaced as a whole."""

    pods_waiting: int = 0
    resources: Mapping[str, ShownResource] = field(default_factory=dict)


class Plugin:
    """Belongs to the event loop. `start` begins, `close` ends it; `refresh` may be called at any time between."""

    def __init__(
        self,
        *,
        manager: Manager,
        paths: KubeletPaths,
        cdi: CdiFolder,
        api: DevicePluginApi | None,
        settings: PluginSettings,
        asked: Asked = requests_unknown,
    ) -> None:
        """`asked` tells what pods with leases ask for, as the scheduler counts it."""
        self._manager = manager
        self._paths = paths
        self._api = api
        self._settings = settings
        self.served: dict[str, Served] = {}
        """By the resource's name; what was served once stays, maybe with nothing to give."""
        self._resources: dict[str, Resource] = {}
        self.book = AllocationTable()
        self.asked = asked
        self._tasks = Tasks()
        self._loops: list[asyncio.Task[None]] = []
        self._kubelet = PodResources(paths)
        recorded = DeviceCheckpoint(paths).read
        self._injector = CdiInjector(cdi, self._resources, lambda: manager.view, manager.access)
        self._allocating = Allocator(manager, self.book, self._injector.qualified, self._allocated)
        self._starting = PreStart(
            manager=manager,
            book=self.book,
            tasks=self._tasks,
            kubelet=self._kubelet,
            recorded=recorded,
            api=api,
            injector=self._injector,
            resources=self._resources,
            changed=self.refresh,
        )
        self._following = KubeletPods(
            manager=manager,
            book=self.book,
            kubelet=self._kubelet,
            recorded=recorded,
            api=api,
            node=settings.node,
            changed=self.refresh,
        )
        self.registering = Registration(
            paths=paths,
            kubelet=self._kubelet,
            on_lost=self._lost_by_kubelet,
            on_taken=self._taken,
            on_looked=self._show,
        )
        self._node: NodeFacts | None = None
        self._numbers = (
            None
            if api is None
            else NodeStatusPatcher(api=api, kubelet=self._kubelet, wrong=self._wrong_on_node, changed=self.refresh)
        )
        self._due: asyncio.TimerHandle | None = None
        self._soon = False
        self._draining = False
        self._closed = False
        self._standing: frozenset[KubeletDevice] = frozenset()
        self.shown = ShownPlugin()
        """For metrics, on any thread. Replaced as a whole, never changed."""

    async def start(self) -> None:
        """Serves from now on; a kubelet that is not there yet is waited for in the background."""
        await asyncio.to_thread(remove_stale_sockets, self._paths)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._following.look(), FIRST_LOOK_SECONDS)
        self._update()
        await self.remove_files()
        self._manager.on_view.append(self.refresh)
        self._loops = [
            self._tasks.spawn("register with the kubelet", self.registering.run()),
            self._tasks.spawn("follow pods", self._following.run()),
        ]
        if self._numbers is not None:
            self._loops.append(self._tasks.keep("show numbers on the node", self._numbers.run))

    async def drain(self) -> None:
        """Offers nothing more, and returns when no pod can be bound any more on what was offered before.

        Takes a few seconds where the node object can be written, and no time where it cannot.
        """
        self._draining = True
        self._update()
        loop = asyncio.get_running_loop()
        until = loop.time() + DRAIN_SECONDS
        while self._too_long() and loop.time() < until:  # noqa: ASYNC110 -- what it waits for has many causes
            await asyncio.sleep(DRAIN_LOOK_SECONDS)

    def _too_long(self) -> bool:
        """Whether somebody may still believe that there is something to be had."""
        now = asyncio.get_running_loop().time()
        return self._shown_is_known() and any(
            each.service.streams and each.advertisement.believed(now) for each in self.served.values()
        )

    async def close(self) -> None:
        """Serves no more; leases stay, and so do the files of running containers."""
        self._closed = True
        if self.refresh in self._manager.on_view:
            self._manager.on_view.remove(self.refresh)
        for loop in self._loops:
            loop.cancel()
        if self._due is not None:
            self._due.cancel()
        self._starting.close()
        await self.registering.close(ANSWERS_SECONDS)
        await self._tasks.end(CLOSING_SECONDS)
        await self._kubelet.close()

    async def remove_files(self) -> None:
        """Removes all CDI files but those of devices that pods have."""
        await self._injector.tidy(self._kept)

    # What is told

    def node_showed(self, facts: NodeFacts) -> None:
        """The node object has changed."""
        if self._node is not None and facts.heartbeat != self._node.heartbeat:
            now = asyncio.get_running_loop().time()
            for served in self.served.values():
                served.advertisement.kubelet_wrote(now)
        self._node = facts
        self.refresh()

    def node_unknown(self, _words: str = "") -> None:
        """The API server is out of touch."""
        self._node = None
        self.refresh()

    def refresh(self) -> None:
        """Something has changed: all numbers are worked out anew, once for all that changes at one moment."""
        if not self._soon:
            self._soon = True
            asyncio.get_running_loop().call_soon(self._update)

    # What the kubelet asks

    async def allocate(self, containers: Sequence[Sequence[KubeletDevice]]) -> Sequence[Allocated]:
        """As `service.Decisions`."""
        self.book.giving += 1
        try:
            return await self._allocating.allocate(containers)
        finally:
            self.book.giving -= 1

    async def start_container(self, devices: Sequence[KubeletDevice], seconds: float) -> None:
        """As `service.Decisions`."""
        await self._starting.start(devices, seconds)

    # Numbers

    def _update(self) -> None:
        self._soon = False
        if self._closed:
            return
        manager, book = self._manager, self.book
        view = manager.view
        self._serve(view)
        leased, standing = leased_kubelet_devices(view), lease_by_device(view)
        placed = {
            device for request, devices in book.requests.items() if manager.has_slots(request) for device in devices
        }
        promises = self._promises(view, unserved(book, standing, placed, self._resources))
        before = tuple(self._resources[device.resource].want for device in promises.unserved)
        now = asyncio.get_running_loop().time()
        due: list[float] = []
        in_touch = self._numbers is None or (self._node is not None and self._numbers.is_answered)
        for name, served in self.served.items():
            allocated = book.allocated(leased, name)
            served.allocated = len(allocated)
            served.promised = promises.promised.get(name, 0)
            # Who has a promise may be on the way while nothing more is offered.
            more = served.promised + (0 if self._draining else manager.count_creatable(served.resource.want, before))
            # What pods have could be free again before the next agent is there to give it.
            served.target = 0 if self._draining else len(allocated) + more
            served.advertisement.showed(self._shown(name), now, in_touch=in_touch)
            length = served.advertisement.plan(len(allocated) + more, now)
            served.service.show(resources.listed(length, {each for each in allocated if resources.is_agent_id(each)}))
            moment = served.advertisement.due()
            if moment is not None:
                due.append(moment)
        self._show()
        self._again_at(min(due, default=None))
        if self._numbers is not None:
            self._numbers.look()
        if self._standing != standing.keys():
            fewer = not self._standing <= standing.keys()
            self._standing = frozenset(standing)
            if fewer and self._loops:
                self._tasks.spawn("remove CDI files", self.remove_files())

    def _show(self) -> None:
        self.shown = ShownPlugin(
            pods_waiting=len(self.book.under_way()),
            resources={
                name: ShownResource(
                    listed=len(served.service.ids),
                    is_listened_to=self.registering.offers[name].is_listened_to,
                    registrations=self.registering.offers[name].registrations,
                    devices=Devices(possible=served.target, allocated=served.allocated, promised=served.promised),
                )
                for name, served in self.served.items()
            },
        )

    def _promises(self, view: NodeView, waiting: Sequence[KubeletDevice]) -> Counted:
        """What is kept for pods on their way; `waiting` are devices that the kubelet allocated and nobody has yet."""
        keeping = (*reserved_slots(view), *in_progress(self._manager.reserving()))
        if not keeping:
            return Counted(promised={}, unserved=tuple(waiting))
        wants = {name: resource.want for name, resource in self._resources.items()}
        return count_unreserved(count_reserved(keeping, view, wants, self.asked), waiting, self.book.acquisitions)

    def _serve(self, view: NodeView) -> None:
        for resource in resources_of(view, self._settings.naming):
            if resource.name not in self.served:
                service = ResourceService(resource, _Calls(self), self._settings.start_deadline)
                service.known = frozenset(map(resources.device_id, range(servable(view, resource.want))))
                self.served[resource.name] = Served(resource, service)
                self._resources[resource.name] = resource
                self.registering.add(service)

    def _shown(self, name: str) -> int | None:
        """What the node shows of a resource, where that is known and can be changed."""
        if self._node is None or not self._shown_is_known() or not self._settings.naming.has(name):
            return None
        return _number(self._node.allocatable.get(name))

    def _shown_is_known(self) -> bool:
        return self._node is not None and self._numbers is not None and self._numbers.can_write

    def _again_at(self, moment: float | None) -> None:
        if self._due is not None:
            self._due.cancel()
        self._due = None if moment is None else asyncio.get_running_loop().call_at(moment + 0.01, self.refresh)

    def _kept(self) -> frozenset[KubeletDevice]:
        return frozenset(lease_by_device(self._manager.view))

    # The node object

    def _wrong_on_node(self) -> Mapping[str, Mismatch]:
        """Numbers that the node object should show and does not; only of what the kubelet listens to."""
        if self._node is None:
            return {}
        found = {}
        for name, served in self.served.items():
            if not self._settings.naming.has(name):
                continue  # of before other names were configured: the kubelet tells of it, some seconds later
            shown = self._node.allocatable.get(name)
            if self.registering.offers[name].is_listened_to and shown != str(served.target):
                # A resource that the node does not show at all is written even as 0.
                number = _number(shown)
                found[name] = Mismatch(shown=number, right=served.target, capacity=len(served.service.known))
        return found

    # The kubelet

    def _allocated(self) -> None:
        """The kubelet has given devices away: the numbers change at once.

        It is asked for its pods a moment later: being asked while it waits for this answer makes it forget what it has
        just given away, if a pod ends meanwhile.
        """
        try:
            self._update()
        except Exception:  # noqa: BLE001 -- a pod that is being admitted must not fail for it
            _LOG.exception("cannot work out the numbers of devices")
        asyncio.get_running_loop().call_later(ALLOCATED_SECONDS, self._following.soon)

    def _lost_by_kubelet(self, service: ResourceService) -> None:
        self.served[service.resource.name].advertisement.withdrawn()
        self.refresh()

    def _taken(self, words: str) -> None:
        if self._api is not None:
            self._tasks.spawn("event of the node", self._api.tell(None, "ResourceRefused", words, warning=True))


class _Calls:
    """The plugin as a resource's service sees it."""

    def __init__(self, plugin: Plugin) -> None:
        self._plugin = plugin

    async def allocate(self, containers: Sequence[Sequence[KubeletDevice]]) -> Sequence[Allocated]:
        return await self._plugin.allocate(containers)

    async def start(self, devices: Sequence[KubeletDevice], seconds: float) -> None:
        await self._plugin.start_container(devices, seconds)


def _number(shown: str | None) -> int:
    """Of devices, as the node object shows it; what is no number counts as none."""
    try:
        return int(shown or "0")
    except ValueError:
        return 0

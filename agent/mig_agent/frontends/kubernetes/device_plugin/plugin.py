"""The device plugin: computes device lists and numbers from the state of the manager, the kubelet and the node."""

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
from mig_agent.core.planning.capacity import servable_in_containers
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

FIRST_POLL_SECONDS: Final = 5.0
"""How long to wait for the kubelet's first list of pods before anything is offered."""
ALLOCATED_SECONDS: Final = 0.3
"""How long after an Allocate the kubelet has surely recorded it."""
DRAIN_SECONDS: Final = 6.0
DRAIN_POLL_SECONDS: Final = 0.1
CLOSING_SECONDS: Final = 2.0
REFUSALS_SECONDS: Final = 0.5
"""How long open calls may take at the end, so that their refusals still reach the kubelet."""

_LOG = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class PluginSettings:
    """Settings of the device plugin."""

    node: str
    """The node's name."""
    naming: Naming = field(default_factory=Naming)
    start_deadline: float = 25.0
    """How long one call of PreStartContainer waits at most, in seconds."""


@dataclass(slots=True, eq=False)
class Served:
    """A resource that is served, with its current numbers."""

    resource: Resource
    service: ResourceService
    device_list: DeviceList = field(default_factory=DeviceList)
    target: int = 0
    """The number that the node object is to show."""
    allocated: int = 0
    """How many devices the kubelet has allocated."""
    reserved: int = 0
    """How many more devices are reserved for pods that have not started."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownResource:
    """The numbers of one resource, for metrics."""

    listed: int
    """The number of healthy devices in the kubelet's list."""
    is_listened_to: bool
    registrations: int
    devices: Devices


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownPlugin:
    """The plugin's numbers for other threads: built on the event loop, never changed, replaced as a whole."""

    pods_waiting: int = 0
    resources: Mapping[str, ShownResource] = field(default_factory=dict)


class Plugin:
    """Offers the node's devices to the kubelet as extended resources. Not thread-safe; use from the event loop."""

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
        """Offer the devices of `manager`. `asked` returns what a pod requests, as the scheduler counts it."""
        self._manager = manager
        self._paths = paths
        self._api = api
        self._settings = settings
        self.served: dict[str, Served] = {}
        """By name of the resource. A resource is never removed, even if it has no devices left."""
        self._resources: dict[str, Resource] = {}
        self.table = AllocationTable()
        self.asked = asked
        self._tasks = Tasks()
        self._loops: list[asyncio.Task[None]] = []
        self._kubelet = PodResources(paths)
        recorded = DeviceCheckpoint(paths).read
        self._injector = CdiInjector(cdi, self._resources, lambda: manager.view, manager.access)
        self._allocator = Allocator(manager, self.table, self._injector.qualified, self._after_allocate)
        self._prestart = PreStart(
            manager=manager,
            table=self.table,
            tasks=self._tasks,
            kubelet=self._kubelet,
            recorded=recorded,
            api=api,
            injector=self._injector,
            resources=self._resources,
            changed=self.refresh,
        )
        self._kubelet_pods = KubeletPods(
            manager=manager,
            table=self.table,
            kubelet=self._kubelet,
            recorded=recorded,
            api=api,
            node=settings.node,
            changed=self.refresh,
        )
        self.registration = Registration(
            paths=paths,
            kubelet=self._kubelet,
            on_lost=self._forgotten,
            on_taken=self._taken_over,
            on_checked=self._show,
        )
        self._node: NodeFacts | None = None
        self._node_status = (
            None
            if api is None
            else NodeStatusPatcher(api=api, kubelet=self._kubelet, wrong=self._mismatches, changed=self.refresh)
        )
        self._timer: asyncio.TimerHandle | None = None
        self._is_scheduled = False
        self._draining = False
        self._closed = False
        self._leased: frozenset[KubeletDevice] = frozenset()
        self.shown = ShownPlugin()
        """For metrics, from any thread. Replaced as a whole, never changed."""

    async def start(self) -> None:
        """Start to serve; if the kubelet does not run yet, it is waited for in the background."""
        await asyncio.to_thread(remove_stale_sockets, self._paths)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._kubelet_pods.poll(), FIRST_POLL_SECONDS)
        self._update()
        await self.remove_files()
        self._manager.on_view.append(self.refresh)
        self._loops = [
            self._tasks.spawn("register with the kubelet", self.registration.run()),
            self._tasks.spawn("follow pods", self._kubelet_pods.run()),
        ]
        if self._node_status is not None:
            self._loops.append(self._tasks.keep("show numbers on the node", self._node_status.run))

    async def drain(self) -> None:
        """Offer nothing more, and wait until no pod can be bound any more by what was offered before.

        Takes 6 s at most if the node object can be written, and no time if it cannot.
        """
        self._draining = True
        self._update()
        loop = asyncio.get_running_loop()
        until = loop.time() + DRAIN_SECONDS
        while self._may_be_bound() and loop.time() < until:  # noqa: ASYNC110 -- what it waits for has many causes
            await asyncio.sleep(DRAIN_POLL_SECONDS)

    def _may_be_bound(self) -> bool:
        """Return whether a pod may still be bound by a number that the node object showed."""
        now = asyncio.get_running_loop().time()
        return self._shown_is_known() and any(
            each.service.streams and each.device_list.believed(now) for each in self.served.values()
        )

    async def close(self) -> None:
        """Stop serving; leases and the CDI files of running containers stay."""
        self._closed = True
        if self.refresh in self._manager.on_view:
            self._manager.on_view.remove(self.refresh)
        for loop in self._loops:
            loop.cancel()
        if self._timer is not None:
            self._timer.cancel()
        self._prestart.close()
        await self.registration.close(REFUSALS_SECONDS)
        await self._tasks.end(CLOSING_SECONDS)
        await self._kubelet.close()

    async def remove_files(self) -> None:
        """Remove all CDI files except those of devices with an active lease."""
        await self._injector.tidy(self._leased_devices)

    # Changes elsewhere

    def node_changed(self, facts: NodeFacts) -> None:
        """Use a changed node object."""
        if self._node is not None and facts.heartbeat != self._node.heartbeat:
            now = asyncio.get_running_loop().time()
            for served in self.served.values():
                served.device_list.kubelet_wrote(now)
        self._node = facts
        self.refresh()

    def node_unknown(self, _error: str = "") -> None:
        """Note that the API server cannot be reached."""
        self._node = None
        self.refresh()

    def refresh(self) -> None:
        """Compute all numbers again soon, once for all changes of one moment."""
        if not self._is_scheduled:
            self._is_scheduled = True
            asyncio.get_running_loop().call_soon(self._update)

    # Calls of the kubelet

    async def allocate(self, containers: Sequence[Sequence[KubeletDevice]]) -> Sequence[Allocated]:
        """Name the devices of containers, as `Decisions.allocate` describes."""
        self.table.allocating += 1
        try:
            return await self._allocator.allocate(containers)
        finally:
            self.table.allocating -= 1

    async def start_container(self, devices: Sequence[KubeletDevice], seconds: float) -> None:
        """Wait until a container may start, as `Decisions.start_container` describes. Raises RefusedError."""
        await self._prestart.start(devices, seconds)

    # Numbers

    def _update(self) -> None:
        self._is_scheduled = False
        if self._closed:
            return
        manager, table = self._manager, self.table
        view = manager.view
        self._serve(view)
        leased, leases = leased_kubelet_devices(view), lease_by_device(view)
        placed = {
            device for request, devices in table.requests.items() if manager.has_slots(request) for device in devices
        }
        reservations = self._reservations(view, unserved(table, leases, placed, self._resources))
        before = tuple(self._resources[device.resource].want for device in reservations.unserved)
        now = asyncio.get_running_loop().time()
        due: list[float] = []
        in_touch = self._node_status is None or (self._node is not None and self._node_status.is_answered)
        for name, served in self.served.items():
            allocated = table.allocated(leased, name)
            served.allocated = len(allocated)
            served.reserved = reservations.promised.get(name, 0)
            # A pod with a reservation may be about to start while nothing more is offered.
            more = served.reserved + (0 if self._draining else manager.count_creatable(served.resource.want, before))
            # Devices of pods may become free before the next agent can lease them again.
            served.target = 0 if self._draining else len(allocated) + more
            served.device_list.showed(self._shown_number(name), now, in_touch=in_touch)
            length = served.device_list.plan(len(allocated) + more, now)
            served.service.show(resources.listed(length, {each for each in allocated if resources.is_agent_id(each)}))
            moment = served.device_list.due()
            if moment is not None:
                due.append(moment)
        self._show()
        self._refresh_at(min(due, default=None))
        if self._node_status is not None:
            self._node_status.compare_soon()
        if self._leased != leases.keys():
            fewer = not self._leased <= leases.keys()
            self._leased = frozenset(leases)
            if fewer and self._loops:
                self._tasks.spawn("remove CDI files", self.remove_files())

    def _show(self) -> None:
        self.shown = ShownPlugin(
            pods_waiting=len(self.table.open_acquisitions()),
            resources={
                name: ShownResource(
                    listed=len(served.service.ids),
                    is_listened_to=self.registration.offers[name].is_listened_to,
                    registrations=self.registration.offers[name].registrations,
                    devices=Devices(possible=served.target, allocated=served.allocated, promised=served.reserved),
                )
                for name, served in self.served.items()
            },
        )

    def _reservations(self, view: NodeView, waiting: Sequence[KubeletDevice]) -> Counted:
        """Return the reservations for pods that have not started, as `count_unreserved` counts them.

        `waiting` are devices that the kubelet has allocated and that have no lease yet.
        """
        reserved = (*reserved_slots(view), *in_progress(self._manager.reserving()))
        if not reserved:
            return Counted(promised={}, unserved=tuple(waiting))
        wants = {name: resource.want for name, resource in self._resources.items()}
        return count_unreserved(count_reserved(reserved, view, wants, self.asked), waiting, self.table.acquisitions)

    def _serve(self, view: NodeView) -> None:
        for resource in resources_of(view, self._settings.naming):
            if resource.name not in self.served:
                service = ResourceService(resource, self, self._settings.start_deadline)
                service.known = frozenset(map(resources.device_id, range(servable_in_containers(view, resource.want))))
                self.served[resource.name] = Served(resource, service)
                self._resources[resource.name] = resource
                self.registration.add(service)

    def _shown_number(self, name: str) -> int | None:
        """Return the number of a resource in the node object; None if it is not known or cannot be changed."""
        if self._node is None or not self._shown_is_known() or not self._settings.naming.has(name):
            return None
        return _number(self._node.allocatable.get(name))

    def _shown_is_known(self) -> bool:
        return self._node is not None and self._node_status is not None and self._node_status.can_write

    def _refresh_at(self, moment: float | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None if moment is None else asyncio.get_running_loop().call_at(moment + 0.01, self.refresh)

    def _leased_devices(self) -> frozenset[KubeletDevice]:
        return frozenset(lease_by_device(self._manager.view))

    # The node object

    def _mismatches(self) -> Mapping[str, Mismatch]:
        """Return the wrong numbers in the node object, of resources whose list the kubelet reads."""
        if self._node is None:
            return {}
        found = {}
        for name, served in self.served.items():
            if not self._settings.naming.has(name):
                continue  # from before the configured names changed: the kubelet shows it by itself, some seconds later
            shown = self._node.allocatable.get(name)
            if self.registration.offers[name].is_listened_to and shown != str(served.target):
                # A resource that the node object lacks is written even as 0.
                number = _number(shown)
                found[name] = Mismatch(shown=number, right=served.target, capacity=len(served.service.known))
        return found

    # The kubelet

    def _after_allocate(self) -> None:
        """Update the numbers at once, since the kubelet has allocated devices.

        The kubelet is polled a moment later: if it is asked for its pods while it waits for this answer, and a pod ends
        meanwhile, it forgets what it has just allocated.
        """
        try:
            self._update()
        except Exception:  # noqa: BLE001 -- a pod that is being admitted must not fail for it
            _LOG.exception("cannot work out the numbers of devices")
        asyncio.get_running_loop().call_later(ALLOCATED_SECONDS, self._kubelet_pods.poll_soon)

    def _forgotten(self, service: ResourceService) -> None:
        self.served[service.resource.name].device_list.withdrawn()
        self.refresh()

    def _taken_over(self, message: str) -> None:
        if self._api is not None:
            self._tasks.spawn("event of the node", self._api.tell(None, "ResourceRefused", message, warning=True))


def _number(shown: str | None) -> int:
    """Return a number of the node object; 0 for what is no number."""
    try:
        return int(shown or "0")
    except ValueError:
        return 0

"""PreStartContainer: leases a pod's devices in one request, and writes CDI files, before a container starts."""

from __future__ import annotations

import asyncio
import math
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Final, Protocol

import structlog

from mig_agent.adapters.kubeapi import KubeApiError
from mig_agent.adapters.kubelet import CheckpointEntry, KubeletError, ListedPod
from mig_agent.core.errors import Reason, Refusal, RefusedError, refuse
from mig_agent.core.model import Holder, Lease, Request, RequestId
from mig_agent.core.owner import KubeletDevice, Pod, PodOwner
from mig_agent.engine.callers import Caller
from mig_agent.engine.manager import Manager
from mig_agent.engine.results import Granted
from mig_agent.engine.tasks import Tasks
from mig_agent.frontends.kubernetes.device_plugin import messages
from mig_agent.frontends.kubernetes.device_plugin.allocations import (
    Acquisition,
    AllocationTable,
    ContainerDevices,
    belongs_to,
    container_devices,
    first_shared,
    lease_by_device,
)
from mig_agent.frontends.kubernetes.device_plugin.api import DevicePluginApi, pod_in_time
from mig_agent.frontends.kubernetes.device_plugin.binding import Binder
from mig_agent.frontends.kubernetes.resources import Resource, is_agent_id

KUBELET: Final = Caller(name="kubelet", scheduler=True, inside=True)
"""The caller of requests for pods, in the audit record."""
_MOST_TRIES = 5
"""How often the devices may be lost between the grant and the start of the container."""
_POLL_SECONDS = 3.0
"""Time between two checks whether a waiting pod is being deleted."""
_MOST_QUERIES = 200
"""How many pods the API server is asked about to find the name of a pod whose UID alone is known."""

_LOG = structlog.get_logger(__name__)


class Kubelet(Protocol):
    """The part of the kubelet that this module uses."""

    async def list(self) -> tuple[ListedPod, ...]:
        """Return the pods of the node. Raises KubeletError."""
        ...


class Injector(Protocol):
    """Makes devices available to containers."""

    async def inject(self, container_devices: Sequence[KubeletDevice], leases: Mapping[KubeletDevice, Lease]) -> None:
        """Prepare what the runtime needs to give the devices to the container. Raises MigAgentError."""
        ...


class PreStart:
    """Leases the devices of a pod before its container starts. Not thread-safe; use from the event loop."""

    def __init__(
        self,
        *,
        manager: Manager,
        table: AllocationTable,
        tasks: Tasks,
        kubelet: Kubelet,
        recorded: Callable[[], tuple[CheckpointEntry, ...]],
        api: DevicePluginApi | None,
        injector: Injector,
        resources: Mapping[str, Resource],
        changed: Callable[[], None],
    ) -> None:
        """Lease devices of `resources`, by name, and call `changed` after each change of the table."""
        self._manager = manager
        self._table = table
        self._tasks = tasks
        self._kubelet = kubelet
        self._recorded = recorded
        self._api = api
        self._injector = injector
        self._resources = resources
        self._changed = changed
        self._binder = Binder(manager=manager, table=table, api=api, resources=resources, send_event=self._send_event)
        self._closing = False

    def close(self) -> None:
        """Refuse calls from now on, and cancel the open requests; the kubelet repeats its calls to the next agent."""
        self._closing = True
        for acquisition in self._table.open_acquisitions():
            acquisition.task.cancel()

    async def start(self, asked: Sequence[KubeletDevice], seconds: float) -> None:
        """Wait until the container with these devices may start, `seconds` at most. Raises RefusedError."""
        self._refuse_when_closing()
        until = asyncio.get_running_loop().time() + seconds
        container = await self._container_of(asked)
        for _ in range(_MOST_TRIES):
            leased, missing = await self._split_by_lease(container)
            while await self._binder.bind(container.pod, missing):
                leased, missing = await self._split_by_lease(container)
            if not set(asked) & set(missing):
                await self._injector.inject(container.container_devices, leased)
                if all(self._has_lease(device, container.pod) for device in asked):
                    return
                continue
            acquisition = await self._acquisition(container.pod, asked, missing)
            await self._wait(acquisition, until)
        raise refuse(
            Reason.DRIVER_FAILED,
            f"cannot start {container.pod}: what was made for it has gone again, {_MOST_TRIES} times",
            "`migctl events` tells what happened to the GPU",
        )

    # Which pod

    async def _container_of(self, asked: Sequence[KubeletDevice]) -> ContainerDevices:
        _refuse_other_plugins(asked)
        try:
            listed = await self._kubelet.list()
        except KubeletError as error:
            raise refuse(Reason.GPU_UNAVAILABLE, str(error), "the kubelet tries again by itself") from error
        recorded = await asyncio.to_thread(self._recorded)
        container = container_devices(asked, listed, recorded, self._resources)
        if container is not None and not container.pod.name:
            container = replace(container, pod=await self._named(container.pod, listed))
        if container is None or not container.pod.name:
            raise refuse(
                Reason.GPU_UNAVAILABLE,
                f"cannot tell which pod was given {', '.join(str(each) for each in asked)}: the kubelet does not "
                "list it",
                "the kubelet tries again by itself",
            )
        _refuse_shared(container, listed)
        return container

    async def _named(self, pod: Pod, listed: Sequence[ListedPod]) -> Pod:
        """Return a pod whose UID alone is known with its name, if the API server has it. Raises RefusedError."""
        for each in listed[:_MOST_QUERIES] if self._api is not None else ():
            if self._api is None or any(device.resource in self._resources for device in each.devices):
                continue
            try:
                facts = await pod_in_time(self._api, each.namespace, each.name)
            except KubeApiError as error:
                raise refuse(
                    Reason.GPU_UNAVAILABLE,
                    f"cannot tell which pod this is: {error.words}",
                    "the kubelet tries again by itself",
                ) from error
            if facts is not None and pod.uid in facts.uids:
                return Pod(namespace=each.namespace, name=each.name, uid=pod.uid)
        return pod

    async def _split_by_lease(
        self, container: ContainerDevices
    ) -> tuple[Mapping[KubeletDevice, Lease], Sequence[KubeletDevice]]:
        """Return the pod's leases by device, and its devices without one; end the leases of former pods on them."""
        table, view = self._table, self._manager.view
        leases = lease_by_device(view)
        own: dict[KubeletDevice, Lease] = {}
        for device in container.devices:
            lease = leases.get(device)
            if lease is None:
                continue
            if self._is_of(lease, container.pod):
                own[device] = lease
            else:
                await self._manager.owner_ended(lease.id, f"the kubelet gave {device} to {container.pod}")
                table.lease_ended(lease.id)
        return own, [device for device in container.devices if device not in own]

    def _has_lease(self, device: KubeletDevice, pod: Pod) -> bool:
        lease = lease_by_device(self._manager.view).get(device)
        return lease is not None and self._is_of(lease, pod)

    def _is_of(self, lease: Lease, pod: Pod) -> bool:
        return belongs_to(lease, pod, self._table.ending, self._table.reassigned.values())

    # Requests

    async def _acquisition(
        self, pod: Pod, asked: Sequence[KubeletDevice], missing: Sequence[KubeletDevice]
    ) -> Acquisition:
        """Return the pod's open request, or begin one for all devices that it still lacks."""
        found = self._find(pod, asked)
        if found is not None:
            return found
        priority = await self._priority(pod)
        # Another call, for another container's or resource's devices, may have asked meanwhile.
        return self._find(pod, asked) or self._begin(pod, missing, priority)

    def _find(self, pod: Pod, asked: Sequence[KubeletDevice]) -> Acquisition | None:
        for device in asked:
            found = self._table.acquisitions.get(device)
            if found is None:
                continue
            if found.pod == pod:
                return found
            self._cancel(found)
        return None

    def _begin(self, pod: Pod, missing: Sequence[KubeletDevice], priority: int) -> Acquisition:
        table = self._table
        # The kubelet groups events by their messages, which name the devices in this order.
        missing = sorted(missing, key=lambda device: (device.resource, device.id))
        owner = PodOwner(pod=pod, devices=tuple(missing), is_bound=True)
        request = Request(
            wants=tuple(self._resources[device.resource].want for device in missing),
            request_id=RequestId(uuid.uuid4().hex),
            holder=Holder(tenant=f"namespace {pod.namespace}", name=str(pod)),
            owner=owner,
            priority=priority,
            wait_seconds=math.inf,
            caller_id=KUBELET.caller_id,
        )
        if table.unsatisfiable.issuperset(missing):
            (outcome,) = self._manager.plan((request,))
            if isinstance(outcome, Refusal) and not outcome.retryable:
                raise RefusedError(messages.for_pod(outcome))  # as before; it is in the log already
        for device in missing:
            former = table.acquisitions.get(device)
            if former is not None:
                self._cancel(former)
        task = self._tasks.spawn(f"devices of {pod}", self._acquire(request))
        acquisition = Acquisition(owner=owner, request=request, since=asyncio.get_running_loop().time(), task=task)
        for device in missing:
            table.acquisitions[device] = acquisition
            table.pending.pop(device, None)
        table.requests[request.key] = owner.devices
        task.add_done_callback(lambda _: self._finished(acquisition))
        self._changed()
        return acquisition

    async def _acquire(self, request: Request) -> Granted | Refusal:
        try:
            granted = await self._manager.acquire(request, KUBELET)
        except RefusedError as error:
            return error.refusal
        self._manager.delivered(granted.lease.id)
        return granted

    def _finished(self, acquisition: Acquisition) -> None:
        table, task = self._table, acquisition.task
        table.remove(acquisition)
        outcome = None if task.cancelled() or task.exception() is not None else task.result()
        asked = acquisition.owner.devices
        if isinstance(outcome, Refusal) and not outcome.retryable:
            table.unsatisfiable |= set(asked)
        else:
            table.unsatisfiable -= set(asked)
        if isinstance(outcome, Granted) and acquisition.is_reported:
            self._send_event(acquisition.pod, "DevicesReady", f"got {messages.wanted(asked)}")
        self._changed()

    def _cancel(self, acquisition: Acquisition) -> None:
        """Cancel a request that is no longer wanted."""
        self._table.remove(acquisition)
        acquisition.task.cancel()

    async def _priority(self, pod: Pod) -> int:
        """Return the pod's priority; 0 if the API server does not answer."""
        if self._api is None:
            return 0
        try:
            facts = await pod_in_time(self._api, pod.namespace, pod.name)
        except KubeApiError as error:
            _LOG.warning("the priority of a pod is not known", pod=str(pod), error=error.words)
            return 0
        return 0 if facts is None else facts.priority

    async def _wait(self, acquisition: Acquisition, until: float) -> None:
        """Wait for a request until it is granted. Raises RefusedError if it is refused, or at `until` still waits."""
        loop = asyncio.get_running_loop()
        while not acquisition.task.done() and loop.time() < until:
            left = max(until - loop.time(), 0.0)
            await asyncio.wait({acquisition.task}, timeout=min(left, _POLL_SECONDS))
            if left > _POLL_SECONDS and not acquisition.task.done() and await self._is_deleted(acquisition.pod):
                self._cancel(acquisition)
                raise refuse(Reason.CANCELLED, f"cannot start {acquisition.pod}: it is being deleted")
        if not acquisition.task.done():
            refusal = self._still_waiting(acquisition, loop.time())
            if not acquisition.is_reported:
                acquisition.is_reported = True
                self._send_event(acquisition.pod, "WaitingForDevices", refusal.message)
            raise RefusedError(refusal)
        self._refuse_when_closing()
        if acquisition.task.cancelled():
            raise refuse(Reason.CANCELLED, f"cannot start {acquisition.pod}: its devices were given to another pod")
        outcome = acquisition.task.result()
        if isinstance(outcome, Refusal):
            raise RefusedError(messages.for_pod(outcome))

    async def _is_deleted(self, pod: Pod) -> bool:
        """Return whether the pod is being deleted: the kubelet ends no pod while one of its containers starts."""
        if self._api is None:
            return False
        try:
            facts = await pod_in_time(self._api, pod.namespace, pod.name)
        except KubeApiError:
            return False
        return facts is not None and facts.deleting and (not pod.uid or pod.uid in facts.uids)

    def _refuse_when_closing(self) -> None:
        if self._closing:
            raise refuse(
                Reason.SHUTTING_DOWN,
                "cannot start containers with GPUs now: the agent is shutting down",
                "the kubelet asks again, and the agent that comes next answers",
            )

    def _still_waiting(self, acquisition: Acquisition, now: float) -> Refusal:
        request = acquisition.request
        place = self._manager.position(request.key)
        (outcome,) = self._manager.plan((request,))
        return messages.still_waiting(
            acquisition.pod,
            acquisition.owner.devices,
            outcome if isinstance(outcome, Refusal) else None,
            place,
            now - acquisition.since,
        )

    def _send_event(self, pod: Pod, reason: str, message: str) -> None:
        if self._api is not None:
            self._tasks.spawn(f"event of {pod}", self._api.tell(pod, reason, message, warning=reason != "DevicesReady"))


def _refuse_other_plugins(asked: Sequence[KubeletDevice]) -> None:
    """Raise RefusedError for devices that another plugin allocated, which served the name before."""
    others = [device for device in asked if not is_agent_id(device.id)]
    if others:
        raise refuse(
            Reason.NOT_SUPPORTED,
            f"cannot start with {others[0]}: another device plugin gave it, which does not serve that name any more",
            "delete the pod, so that it is made anew",
        )


def _refuse_shared(container: ContainerDevices, listed: Sequence[ListedPod]) -> None:
    """Raise RefusedError for a device of two pods: it is unknown which one starts, and one may be running with it."""
    found = first_shared(container.devices, listed)
    if found is not None:
        device, names = found
        raise refuse(
            Reason.IN_USE,
            f"cannot start with {device}: the kubelet gave it to two pods, {' and '.join(names)}",
            "it goes on by itself when one of them has ended; delete the one that can be spared",
        )

"""Before a container starts: its pod's devices are leased, all in one request, and the CDI files are written."""

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
"""Who asks for pods, in the record of who did what."""
_MOST_TRIES = 5
"""Of finding that what was granted has gone again before the container had it."""
_LOOK_SECONDS = 3.0
"""Between two looks whether a pod that waits is being deleted."""
_NAMES_ASKED = 200
"""Pods that the API server is asked about to find the name of one whose UID alone is known."""

_LOG = structlog.get_logger(__name__)


class Kubelet(Protocol):
    """What is asked of the kubelet."""

    async def list(self) -> tuple[ListedPod, ...]:
        """Its pods. Raises KubeletError."""
        ...


class Injector(Protocol):
    """Puts devices into containers."""

    async def inject(self, container_devices: Sequence[KubeletDevice], leases: Mapping[KubeletDevice, Lease]) -> None:
        """Whatever the runtime needs to give them to the container. Raises MigAgentError."""
        ...


class PreStart:
    """Leases the devices of a pod before its container starts. Not thread-safe; use from the event loop."""

    def __init__(
        self,
        *,
        manager: Manager,
        book: AllocationTable,
        tasks: Tasks,
        kubelet: Kubelet,
        recorded: Callable[[], tuple[CheckpointEntry, ...]],
        api: DevicePluginApi | None,
        injector: Injector,
        resources: Mapping[str, Resource],
        changed: Callable[[], None],
    ) -> None:
        """`resources` are those that are served, by name; `changed` hears that the book has changed."""
        self._manager = manager
        self._book = book
        self._tasks = tasks
        self._kubelet = kubelet
        self._recorded = recorded
        self._api = api
        self._injector = injector
        self._resources = resources
        self._changed = changed
        self._handing = Binder(manager=manager, book=book, api=api, resources=resources, tell=self._tell)
        self._closing = False

    def close(self) -> None:
        """Takes no more requests; who waits is told that the agent stops, and is asked for again by the kubelet."""
        self._closing = True
        for acquisition in self._book.under_way():
            acquisition.task.cancel()

    async def start(self, asked: Sequence[KubeletDevice], seconds: float) -> None:
        """Returns when the container with these devices may start, within so many seconds. Raises RefusedError."""
        self._refuse_when_closing()
        until = asyncio.get_running_loop().time() + seconds
        claim = await self._claim(asked)
        for _ in range(_MOST_TRIES):
            leased, missing = await self._settled(claim)
            while await self._handing.hand_over(claim.pod, missing):
                leased, missing = await self._settled(claim)
            if not set(asked) & set(missing):
                await self._injector.inject(claim.container_devices, leased)
                if all(self._stands(device, claim.pod) for device in asked):
                    return
                continue
            acquisition = await self._acquisition(claim.pod, asked, missing)
            await self._wait(acquisition, until)
        raise refuse(
            Reason.DRIVER_FAILED,
            f"cannot start {claim.pod}: what was made for it has gone again, {_MOST_TRIES} times",
            "`migctl events` tells what happened to the GPU",
        )

    # Whose it is

    async def _claim(self, asked: Sequence[KubeletDevice]) -> ContainerDevices:
        _refuse_others(asked)
        try:
            listed = await self._kubelet.list()
        except KubeletError as error:
            raise refuse(Reason.GPU_UNAVAILABLE, str(error), "the kubelet tries again by itself") from error
        recorded = await asyncio.to_thread(self._recorded)
        claim = container_devices(asked, listed, recorded, self._resources)
        if claim is not None and not claim.pod.name:
            claim = replace(claim, pod=await self._named(claim.pod, listed))
        if claim is None or not claim.pod.name:
            raise refuse(
                Reason.GPU_UNAVAILABLE,
                f"cannot tell which pod was given {', '.join(str(each) for each in asked)}: the kubelet does not "
                "list it",
                "the kubelet tries again by itself",
            )
        _refuse_shared(claim, listed)
        return claim

    async def _named(self, pod: Pod, listed: Sequence[ListedPod]) -> Pod:
        """A pod that is known by its UID alone, with its name, if the API server can tell."""
        for each in listed[:_NAMES_ASKED] if self._api is not None else ():
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

    async def _settled(self, claim: ContainerDevices) -> tuple[Mapping[KubeletDevice, Lease], Sequence[KubeletDevice]]:
        """The pod's own leases by device, and devices without one; those of pods that had them before have ended."""
        book, view = self._book, self._manager.view
        standing = lease_by_device(view)
        own: dict[KubeletDevice, Lease] = {}
        for device in claim.devices:
            lease = standing.get(device)
            if lease is None:
                continue
            if self._is_of(lease, claim.pod):
                own[device] = lease
            else:
                await self._manager.owner_ended(lease.id, f"the kubelet gave {device} to {claim.pod}")
                book.ended(lease.id)
        return own, [device for device in claim.devices if device not in own]

    def _stands(self, device: KubeletDevice, pod: Pod) -> bool:
        lease = lease_by_device(self._manager.view).get(device)
        return lease is not None and self._is_of(lease, pod)

    def _is_of(self, lease: Lease, pod: Pod) -> bool:
        return belongs_to(lease, pod, self._book.ending, self._book.given_again.values())

    # RequestArgs for it

    async def _acquisition(
        self, pod: Pod, asked: Sequence[KubeletDevice], missing: Sequence[KubeletDevice]
    ) -> Acquisition:
        """The pod's request under way, or a new one for all that it still lacks."""
        found = self._under_way(pod, asked)
        if found is not None:
            return found
        priority = await self._priority(pod)
        # Another call, for another container's or resource's devices, may have asked meanwhile.
        return self._under_way(pod, asked) or self._begin(pod, missing, priority)

    def _under_way(self, pod: Pod, asked: Sequence[KubeletDevice]) -> Acquisition | None:
        for device in asked:
            found = self._book.acquisitions.get(device)
            if found is None:
                continue
            if found.pod == pod:
                return found
            self._drop(found)
        return None

    def _begin(self, pod: Pod, missing: Sequence[KubeletDevice], priority: int) -> Acquisition:
        book = self._book
        # The kubelet counts events by their words, which name the devices in this order.
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
        if book.hopeless.issuperset(missing):
            (outcome,) = self._manager.plan((request,))
            if isinstance(outcome, Refusal) and not outcome.retryable:
                raise RefusedError(messages.for_pod(outcome))  # as it was before: the log has it
        for device in missing:
            former = book.acquisitions.get(device)
            if former is not None:
                self._drop(former)
        task = self._tasks.spawn(f"devices of {pod}", self._acquire(request))
        acquisition = Acquisition(owner=owner, request=request, since=asyncio.get_running_loop().time(), task=task)
        for device in missing:
            book.acquisitions[device] = acquisition
            book.on_way.pop(device, None)
        book.requests[request.key] = owner.devices
        task.add_done_callback(lambda _: self._over(acquisition))
        self._changed()
        return acquisition

    async def _acquire(self, request: Request) -> Granted | Refusal:
        try:
            granted = await self._manager.acquire(request, KUBELET)
        except RefusedError as error:
            return error.refusal
        self._manager.delivered(granted.lease.id)
        return granted

    def _over(self, acquisition: Acquisition) -> None:
        book, task = self._book, acquisition.task
        book.forget(acquisition)
        outcome = None if task.cancelled() or task.exception() is not None else task.result()
        asked = acquisition.owner.devices
        if isinstance(outcome, Refusal) and not outcome.retryable:
            book.hopeless |= set(asked)
        else:
            book.hopeless -= set(asked)
        if isinstance(outcome, Granted) and acquisition.told:
            self._tell(acquisition.pod, "DevicesReady", f"got {messages.wanted(asked)}")
        self._changed()

    def _drop(self, acquisition: Acquisition) -> None:
        """Nobody wants it any more."""
        self._book.forget(acquisition)
        acquisition.task.cancel()

    async def _priority(self, pod: Pod) -> int:
        """The pod's; 0 where the API server does not say."""
        if self._api is None:
            return 0
        try:
            facts = await pod_in_time(self._api, pod.namespace, pod.name)
        except KubeApiError as error:
            _LOG.warning("the priority of a pod is not known", pod=str(pod), error=error.words)
            return 0
        return 0 if facts is None else facts.priority

    async def _wait(self, acquisition: Acquisition, until: float) -> None:
        """Until the request is served. Raises RefusedError with what it was refused, or with why it still waits."""
        loop = asyncio.get_running_loop()
        while not acquisition.task.done() and loop.time() < until:
            left = max(until - loop.time(), 0.0)
            await asyncio.wait({acquisition.task}, timeout=min(left, _LOOK_SECONDS))
            if left > _LOOK_SECONDS and not acquisition.task.done() and await self._is_deleted(acquisition.pod):
                self._drop(acquisition)
                raise refuse(Reason.CANCELLED, f"cannot start {acquisition.pod}: it is being deleted")
        if not acquisition.task.done():
            refusal = self._still_waiting(acquisition, loop.time())
            if not acquisition.told:
                acquisition.told = True
                self._tell(acquisition.pod, "WaitingForDevices", refusal.message)
            raise RefusedError(refusal)
        self._refuse_when_closing()
        if acquisition.task.cancelled():
            raise refuse(Reason.CANCELLED, f"cannot start {acquisition.pod}: its devices were given to another pod")
        outcome = acquisition.task.result()
        if isinstance(outcome, Refusal):
            raise RefusedError(messages.for_pod(outcome))

    async def _is_deleted(self, pod: Pod) -> bool:
        """Whether nobody waits for it any more: the kubelet ends no pod while one of its containers starts."""
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

    def _tell(self, pod: Pod, reason: str, words: str) -> None:
        if self._api is not None:
            self._tasks.spawn(f"event of {pod}", self._api.tell(pod, reason, words, warning=reason != "DevicesReady"))


def _refuse_others(asked: Sequence[KubeletDevice]) -> None:
    """A plugin that served the name before may have left pods behind."""
    others = [device for device in asked if not is_agent_id(device.id)]
    if others:
        raise refuse(
            Reason.NOT_SUPPORTED,
            f"cannot start with {others[0]}: another device plugin gave it, which does not serve that name any more",
            "delete the pod, so that it is made anew",
        )


def _refuse_shared(claim: ContainerDevices, listed: Sequence[ListedPod]) -> None:
    """Nobody can tell for which of two pods the kubelet asks; the one that runs must not lose what it has."""
    found = first_shared(claim.devices, listed)
    if found is not None:
        device, names = found
        raise refuse(
            Reason.IN_USE,
            f"cannot start with {device}: the kubelet gave it to two pods, {' and '.join(names)}",
            "it goes on by itself when one of them has ended; delete the one that can be spared",
        )

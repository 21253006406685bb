"""Publishes the node's ResourceSlices, and relists them soon after something changed."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping
from typing import Final

import structlog

from mig_agent.adapters.kubeapi import InformerSubscription, KubeApiError, PodFacts, PodName
from mig_agent.core.backoff import Backoff
from mig_agent.core.dra.names import DRIVER, pool_name
from mig_agent.core.dra.objects import NodeReference, SliceObject, dropped_counters, read_slice, slice_object
from mig_agent.core.dra.pool import slices_of
from mig_agent.core.dra.relisting import PublishedSlice, relist
from mig_agent.core.planning.search import NOTHING_RESERVED
from mig_agent.engine.manager import Manager
from mig_agent.engine.tasks import Tasks
from mig_agent.frontends.kubernetes.dra.allocations import Allocations
from mig_agent.frontends.kubernetes.dra.api import DriverApi

SETTLE_SECONDS: Final = 1.0
"""The pause after a listing: every write of a slice has the scheduler try all pods that wait for devices."""
CHECK_SECONDS: Final = 30.0
"""The longest time between two comparisons with the API server."""
WATCHFUL_SECONDS: Final = 10.0
"""Time of frequent comparisons after the kubelet has registered the driver, about when it deletes the slices."""
WATCHFUL_PAUSE_SECONDS: Final = 0.3
"""The pause between two comparisons meanwhile."""
GATE_SECONDS: Final = 300.0
"""The pause after the API server dropped counters, which it does until its feature gate is switched on."""
RETRY_SECONDS: Final = (0.5, 15.0)
_PART: Final = "DRA"
_DROPPED: Final = (
    "cannot publish devices for Dynamic Resource Allocation: the API server drops their counters, without which two "
    "pods would get the same memory slices; the feature gate DRAPartitionableDevices is off, which it is by default "
    "before Kubernetes 1.36"
)
_LOG = structlog.get_logger(__name__)


class Publisher:
    """Keeps the API server's slices as they should be. Not thread-safe; use from the event loop."""

    def __init__(
        self,
        manager: Manager,
        api: DriverApi,
        node: str,
        follow_pods: Callable[..., InformerSubscription],
        tasks: Tasks,
    ) -> None:
        self._manager = manager
        self._api = api
        self._node = node
        self._allocations = Allocations(api, pool_name(node))
        self._follow_pods = follow_pods
        self._tasks = tasks
        self._pods: Mapping[PodName, PodFacts] | None = None
        self._poke = asyncio.Event()
        self._watchful_until = 0.0
        """Loop time until which the slices are compared often."""
        self._subscription: InformerSubscription | None = None
        self._loop: asyncio.Task[None] | None = None
        self._owner: NodeReference | None = None

    def start(self) -> None:
        """Start to publish."""
        self._manager.on_view.append(self._poke.set)
        self._subscription = self._follow_pods(self._pods_changed)
        self._loop = self._tasks.keep("publish slices", self._run)

    def stop(self) -> None:
        """Stop; what is published stays."""
        with contextlib.suppress(ValueError):
            self._manager.on_view.remove(self._poke.set)
        if self._subscription is not None:
            self._subscription.close()
        if self._loop is not None:
            self._loop.cancel()

    def refresh(self) -> None:
        """Compare with the API server now and often in the next seconds: a kubelet that starts deletes the slices."""
        self._watchful_until = asyncio.get_running_loop().time() + WATCHFUL_SECONDS
        self._poke.set()

    def _pods_changed(self, pods: Mapping[PodName, PodFacts]) -> None:
        self._pods = pods
        self._poke.set()

    async def _run(self) -> None:
        failures = 0
        while True:
            self._poke.clear()
            pause = SETTLE_SECONDS
            try:
                is_published = await self._publish()
                failures = 0
                self._manager.report_problem(_PART, "" if is_published else _DROPPED)
                if not is_published:
                    pause = GATE_SECONDS
            except KubeApiError as error:
                failures += 1
                pause = Backoff(*RETRY_SECONDS).pause(failures)
                self._manager.report_problem(_PART, error.words)
                _LOG.warning(error.words, hint="it is tried again by itself")
                self._poke.set()
            if pause == SETTLE_SECONDS and asyncio.get_running_loop().time() < self._watchful_until:
                await asyncio.sleep(WATCHFUL_PAUSE_SECONDS)
                continue
            await asyncio.sleep(pause)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._poke.wait(), CHECK_SECONDS)

    async def _publish(self) -> bool:
        """Make the API server's slices the wanted ones; return False, with none published, if it drops counters."""
        if self._pods is None:
            return True  # which devices claims have is not known yet
        view = self._manager.view
        allocated = await self._allocations.find(self._pods, view)
        published = await self._read()
        closed = frozenset(gpu.uuid for gpu in view.gpus) if self._manager.paused else NOTHING_RESERVED
        wanted = slices_of(view, allocated, [each.content for each in published], reserved=closed)
        changes = relist(published, wanted)
        there = {each.object_name for each in published}
        for write in changes.writes:
            body = slice_object(write, await self._reference())
            answer = await self._api.write_slice(body, is_new=write.object_name not in there)
            if dropped_counters(write, _read(answer)):
                for name in sorted(there | {write.object_name}):
                    await self._api.delete_slice(name)
                return False
            there.add(write.object_name)
        for name in changes.deletions:
            await self._api.delete_slice(name)
        return True

    async def _read(self) -> list[PublishedSlice]:
        """Return the published slices, the newest generation last; delete those that this agent cannot have written."""
        found = []
        for each in await self._api.slices(DRIVER):
            try:
                found.append(_read(each))
            except (KeyError, ValueError, TypeError):
                await self._api.delete_slice(each["metadata"]["name"])
        return sorted(found, key=lambda each: each.generation)

    async def _reference(self) -> NodeReference:
        if self._owner is None:
            node = await self._api.node()
            self._owner = NodeReference(node.name, node.uid)
        return self._owner


def _read(found: object) -> PublishedSlice:
    body: SliceObject = found  # type: ignore[assignment]  # JSON of the API server, which read_slice checks
    return read_slice(body)

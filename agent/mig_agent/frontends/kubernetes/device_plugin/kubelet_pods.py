"""Polls the kubelet's list of pods, and ends the leases and open requests of pods that have ended.

Fail-closed: a pod has ended only if the kubelet or the API server says so, never because they do not answer.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Collection, Sequence
from typing import Protocol

import structlog

from mig_agent.adapters.kubeapi import KubeApiError
from mig_agent.adapters.kubelet import CheckpointEntry, Identity, KubeletError, ListedPod
from mig_agent.core.errors import RefusedError
from mig_agent.core.model import Lease
from mig_agent.core.owner import KubeletDevice, Pod, PodOwner
from mig_agent.engine.manager import Manager
from mig_agent.frontends.kubernetes.device_plugin.allocations import Acquisition, AllocationTable
from mig_agent.frontends.kubernetes.device_plugin.api import DevicePluginApi
from mig_agent.frontends.kubernetes.pod_leases import leases_of_pods
from mig_agent.frontends.kubernetes.pods.kubelet_evidence import (
    Listing,
    PodLiveness,
    Seen,
    liveness_from_api,
    liveness_from_kubelet,
)

BUSY_SECONDS = 1.0
"""Time between two polls while pods have devices, or request some."""
IDLE_SECONDS = 5.0
"""The same otherwise."""
_MOST_QUERIES = 5
"""How many pods the API server is asked about in one poll, since it serves other nodes, too."""
_QUERY_SECONDS = 3.0
"""How long one poll asks about pods: a slow API server must not delay the next list of the kubelet."""

_LOG = structlog.get_logger(__name__)
Held = tuple[Pod, tuple[KubeletDevice, ...]]
"""A pod, and the devices that it has or requests."""


class PodLister(Protocol):
    """The part of the kubelet that this module uses."""

    @property
    def kubelet(self) -> Identity | None:
        """The run of the kubelet that answers; None if it is not known."""
        ...

    async def list(self) -> tuple[ListedPod, ...]:
        """Return the pods of the node. Raises KubeletError."""
        ...


class KubeletPods:
    """Polls the kubelet's pods, and ends leases of ended ones. Not thread-safe; use from the event loop."""

    def __init__(
        self,
        *,
        manager: Manager,
        table: AllocationTable,
        kubelet: PodLister,
        recorded: Callable[[], tuple[CheckpointEntry, ...]],
        api: DevicePluginApi | None,
        node: str,
        changed: Callable[[], None],
    ) -> None:
        self._manager = manager
        self._table = table
        self._kubelet = kubelet
        self._recorded = recorded
        self._api = api
        self._node = node
        self._changed = changed
        self._seen = Seen()
        self._last_query: dict[Held, int] = {}
        """The number of the last query about each pod whose liveness the kubelet's list does not show; 0: none yet."""
        self._queries = 0
        self._silent = False
        self._wake = asyncio.Event()

    def poll_soon(self) -> None:
        """Poll now instead of after the interval."""
        self._wake.set()

    async def run(self) -> None:
        """Poll until cancelled."""
        while True:
            try:
                await self.poll()
            except Exception:  # noqa: BLE001 -- whatever the error, polling must go on
                _LOG.exception("cannot follow the pods of this node now")
            busy = self._table.pending or self._table.acquisitions or self._table.ending or self._pods_leases()
            self._wake.clear()
            # Not wait_for: before Python 3.12 it loses a cancellation if the event is set at the same time.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(BUSY_SECONDS if busy else IDLE_SECONDS):
                    await self._wake.wait()

    async def poll(self) -> None:
        """Read the kubelet's list once, unless an Allocate is in progress, and end what ended pods had or requested."""
        if self._table.allocating:
            return
        # The answer may not include what is granted or requested while the kubelet answers.
        leases = self._pods_leases()
        waiting = self._table.open_acquisitions()
        asked_at = asyncio.get_running_loop().time()
        before = self._kubelet.kubelet
        try:
            pods = await self._kubelet.list()
        except KubeletError as error:
            self._log_silence(str(error))
            return
        self._silent = False
        recorded = await asyncio.to_thread(self._recorded) if self._table.pending else ()
        listing = Listing.of(before if before == self._kubelet.kubelet else None, pods)
        held: list[Held] = [
            *((owner.pod, owner.devices) for _, owner in leases),
            *((each.pod, each.owner.devices) for each in waiting),
        ]
        liveness = {each: liveness_from_kubelet(*each, listing, self._seen) for each in held}
        self._seen.note(listing, held)
        self._table.update_listed(
            frozenset(listing.owners), asked_at, {device for entry in recorded for device in entry.devices}
        )
        await self._end_removed(
            {each for each, found in liveness.items() if found is PodLiveness.GONE}, leases, waiting
        )
        # Last, since the API server may be slow.
        ended = await self._query_api(
            [each for each, found in liveness.items() if found is PodLiveness.UNSURE], listing
        )
        if ended:
            await self._end_removed(ended, leases, waiting)

    async def _end_removed(
        self, ended: Collection[Held], leases: Sequence[tuple[Lease, PodOwner]], waiting: Sequence[Acquisition]
    ) -> None:
        """End the leases and cancel the requests of ended pods; pods of one name differ by their devices."""
        table = self._table
        for lease, owner in leases:
            if (owner.pod, owner.devices) in ended:
                table.ending.setdefault(lease.id, "its pod has ended")
        for acquisition in waiting:
            if (acquisition.pod, acquisition.owner.devices) in ended:
                table.remove(acquisition)
                acquisition.task.cancel()
        await self._commit_ends()
        self._changed()

    async def _query_api(self, unsure: Sequence[Held], listing: Listing) -> frozenset[Held]:
        """Return the pods of `unsure` that have ended according to the API server."""
        ended: set[Held] = set()
        self._last_query = {each: self._last_query.get(each, 0) for each in unsure}
        # The least recently queried first: pods that stay alive must not keep the others from being queried.
        next_ones = sorted(self._last_query, key=self._last_query.__getitem__)[:_MOST_QUERIES]
        until = asyncio.get_running_loop().time() + _QUERY_SECONDS
        for pod, devices in next_ones:
            if self._api is None or asyncio.get_running_loop().time() > until:
                break
            self._queries += 1
            self._last_query[pod, devices] = self._queries
            try:
                facts = await self._api.pod(pod.namespace, pod.name)
            except KubeApiError as error:
                _LOG.debug("a pod is taken to live on", pod=str(pod), why=error.words)
                break
            is_listed = (pod.namespace, pod.name) in listing.names
            if liveness_from_api(pod, facts, is_listed=is_listed, node=self._node) is PodLiveness.GONE:
                ended.add((pod, devices))
        return frozenset(ended)

    async def _commit_ends(self) -> None:
        for lease, message in tuple(self._table.ending.items()):
            try:
                await self._manager.owner_ended(lease, message)
            except RefusedError as error:
                _LOG.warning(error.refusal.message, hint=error.refusal.hint)
                return  # tried again at the next poll
            self._table.lease_ended(lease)

    def _pods_leases(self) -> tuple[tuple[Lease, PodOwner], ...]:
        return tuple(each for each in leases_of_pods(self._manager.view) if each[1].devices)

    def _log_silence(self, message: str) -> None:
        if not self._silent:
            self._silent = True
            _LOG.warning(message, hint="pods are taken to live on until the kubelet answers")
